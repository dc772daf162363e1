"""Draws what ecckpt survives: python docs/pictures/survives.py [FOLDER]."""

from __future__ import annotations

from drawing import DARK, LIGHT, Canvas, Palette, write

WIDTH, HEIGHT = 640, 670
NODES, DATA, CODED = 6, 3, 5
LOST = frozenset({0, 1, 2})
CARD, GAP, LEFT = 96, 8, 12
CARD_HEIGHT = 122
# One for each shard; white figures are readable on all of them.
HUES = ("#0b66a8", "#b34a00", "#0a7a5a", "#9c3a78", "#5a57b8", "#7a6400")
PALE_HUES = ("#4aa3e6", "#ff9050", "#3cc79b", "#e07bbd", "#9a97f2", "#cdb038")  # on dark

ABOUT = (
    "Six nodes with code RS(3, 2). Each has its own shard whole and five fragments, three of data "
    "and two of parity, one of each other node's shard. Three nodes are lost with their memory. "
    "Three whole shards and three fragments of each lost shard are left, from which these are "
    "rebuilt, bit for bit."
)


def owner(node: int, index: int) -> int:
    """Whose fragment `index` this node holds: holders follow their home in a ring."""
    return (node - 1 - index) % NODES


def tile(
    canvas: Canvas,
    x: float,
    y: float,
    words: str,
    *,
    shard: int,
    width: float = 26,
    parity: bool = False,
) -> None:
    """A shard (its name in it) or a fragment (its number); parity in outline."""
    if parity:
        ink = (HUES if canvas.palette is LIGHT else PALE_HUES)[shard]
        canvas.rect(x + 1, y + 1, width - 2, 24, fill=canvas.palette.page, stroke=ink, weight=2.5)
    else:
        canvas.rect(x, y, width, 26, fill=HUES[shard], radius=5)
        ink = "#ffffff"
    canvas.text(x + width / 2, y + 19, words, size=16.5, fill=ink, bold=True, anchor="middle")


def card(canvas: Canvas, at: int, y: float, name: str, *, only: frozenset[int] | None) -> None:
    """A node with what it holds; with `only`, its fragments of those shards alone."""
    palette = canvas.palette
    x = LEFT + at * (CARD + GAP)
    canvas.rect(x, y, CARD, CARD_HEIGHT, fill=palette.box, stroke=palette.box_edge, weight=1.5)
    canvas.text(x + CARD / 2, y + 21, name, size=16, anchor="middle")
    tile(canvas, x + 6, y + 30, f"shard {at}", shard=at, width=CARD - 12)
    for index in range(CODED):
        whose = owner(at, index)
        parity = index >= DATA
        left = x + 6 + (index - DATA if parity else index) * 29
        top = y + (90 if parity else 60)
        if only is None or whose in only:
            tile(canvas, left, top, str(whose), shard=whose, parity=parity)


def lost(canvas: Canvas, at: int, y: float) -> None:
    """A node that is gone."""
    palette = canvas.palette
    x = LEFT + at * (CARD + GAP)
    canvas.rect(x, y, CARD, CARD_HEIGHT, stroke=palette.bad, dash="6 5", weight=2)
    canvas.text(x + CARD / 2, y + 21, f"node {at}", size=16, fill=palette.bad, anchor="middle")
    for x1, x2 in ((x + 28, x + CARD - 28), (x + CARD - 28, x + 28)):
        canvas.line(x1, y + 44, x2, y + 84, stroke=palette.bad, weight=5)
    canvas.text(
        x + CARD / 2, y + 110, "lost", size=17, fill=palette.bad, bold=True, anchor="middle"
    )


def caption(canvas: Canvas, y: float, label: str, words: str) -> None:
    """What a row shows."""
    canvas.badge(LEFT + 13, y - 6, label)
    canvas.text(LEFT + 34, y, words, size=17, bold=True)


def saved(canvas: Canvas) -> None:
    """The first row: all nodes hold all they should."""
    caption(canvas, 92, "1", "Saved: whole at home, and 5 fragments on other nodes")
    for at in range(NODES):
        card(canvas, at, 106, f"node {at}", only=None)
    y = 250
    canvas.rect(LEFT, y - 15, 20, 20, fill=canvas.palette.soft, radius=4)
    canvas.text(LEFT + 28, y + 1, "data fragment", size=15, fill=canvas.palette.soft)
    canvas.rect(LEFT + 149, y - 14, 18, 18, stroke=canvas.palette.soft, weight=2.5, radius=4)
    canvas.text(LEFT + 176, y + 1, "parity fragment", size=15, fill=canvas.palette.soft)
    canvas.text(
        WIDTH - LEFT, y + 1, "extra memory: 1.67 x, not 3 x", size=15, fill=canvas.palette.soft,
        anchor="end",
    )  # fmt: skip


def left_over(canvas: Canvas) -> None:
    """The second row: what is left after the loss."""
    caption(canvas, 294, "2", "Any 3 nodes lost: 3 fragments of each lost shard are left")
    for at in range(NODES):
        if at in LOST:
            lost(canvas, at, 308)
        else:
            card(canvas, at, 308, f"node {at}", only=LOST)


def rebuilt(canvas: Canvas) -> None:
    """The third row: each lost shard from three fragments, on a new node."""
    caption(canvas, 470, "3", "Rebuilt on new nodes, from any 3 fragments")
    palette = canvas.palette
    width = (WIDTH - 2 * LEFT - 2 * 14) / 3
    for shard in sorted(LOST):
        x = LEFT + shard * (width + 14)
        canvas.rect(x, 484, width, 136, fill=palette.box, stroke=palette.box_edge, weight=1.5)
        holders = [
            (node, index)
            for index in range(CODED)
            if (node := (shard + 1 + index) % NODES) not in LOST
        ]
        each = (width - 24) / 3
        for at, (node, index) in enumerate(holders):
            middle = x + 12 + (at + 0.5) * each
            canvas.text(middle, 503, f"node {node}", size=15, fill=palette.soft, anchor="middle")
            tile(canvas, middle - 13, 510, str(shard), shard=shard, parity=index >= DATA)
            canvas.arrow((middle, 538), (middle, 558), weight=2.5)
        tile(canvas, x + 12, 560, f"shard {shard}", shard=shard, width=width - 24)
        canvas.text(x + width / 2, 609, f"on a new node {shard}", size=15.5, anchor="middle")
    canvas.text(
        WIDTH / 2, 650, "Every rank goes on from the same step, restored bit for bit.",
        size=15.5, fill=palette.go_text, bold=True, anchor="middle",
    )  # fmt: skip


def draw(palette: Palette) -> str:
    """The picture in one variant."""
    canvas = Canvas(
        WIDTH, HEIGHT, palette, title="Any 3 of 6 nodes may be lost at once", about=ABOUT
    )
    canvas.text(LEFT + 2, 34, "Any 3 of 6 nodes may be lost at once", size=22, bold=True)
    canvas.text(
        LEFT + 2, 58, "The code is RS(3, 2): 3 fragments of data, 2 of parity", size=16,
        fill=palette.soft,
    )  # fmt: skip
    for part in (saved, left_over, rebuilt):
        part(canvas)
    return canvas.svg()


if __name__ == "__main__":
    write({f"survives{palette.suffix}.svg": draw(palette) for palette in (LIGHT, DARK)})
