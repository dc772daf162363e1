"""Draws how a restore goes: python docs/pictures/restore.py [FOLDER]."""

from __future__ import annotations

from drawing import DARK, LIGHT, Canvas, Palette, write

WIDTH, HEIGHT = 700, 1012
FIRST, SECOND, THIRD = 22, 252, 482  # left edges
LANE = 196
RIGHT = THIRD + LANE
AGREED_Y = 672
HERE = ("Only processes died: take it", "where it lies, no network.")
AWAY = ("Its agent pulls any k fragments", "and rebuilds what is missing.")

ABOUT = (
    "Time runs down. Rank 0 begins a new timeline at all agents, which fences older writers off; "
    "inventories come back; it plans, by the newest generation of which every shard survives, and "
    "sends each rank an order. A rank takes the home copy of its node, or its agent pulls any k "
    "fragments from holders and rebuilds the rest. Every block is verified, the shard checked "
    "against the state. Only when all ranks can, all load; else all go for an older generation. "
    "Then the agents are told what was restored, and lost fragments are made again while training "
    "goes on."
)


def lanes(canvas: Canvas) -> None:
    """The title and the heads of the three columns."""
    palette = canvas.palette
    canvas.text(16, 34, "How a restore goes", size=22, bold=True)
    canvas.text(WIDTH - 16, 34, "time runs down", size=15, fill=palette.soft, anchor="end")
    heads = {
        FIRST: ("Rank 0", "leads, for all"),
        SECOND: ("Every rank", "rank 0 as well"),
        THIRD: ("Agents", "of all nodes"),
    }
    for x, (head, below) in heads.items():
        canvas.text(x + LANE / 2, 70, head, size=17.5, bold=True, anchor="middle")
        canvas.text(x + LANE / 2, 90, below, size=15, fill=palette.soft, anchor="middle")
        canvas.line(
            x + LANE / 2, 100, x + LANE / 2, HEIGHT - 20, stroke=palette.edge, weight=2, dash="2 5"
        )


def label(canvas: Canvas, y: float, words: str) -> None:
    """Words on an arrow that crosses the middle column."""
    width = 9 * len(words) + 16
    left = SECOND + (LANE - width) / 2
    canvas.rect(left, y - 13, width, 26, fill=canvas.palette.page)
    canvas.text(SECOND + LANE / 2, y + 5, words, size=15, anchor="middle")


def choosing(canvas: Canvas) -> None:
    """From the new timeline to the orders."""
    step = canvas.step
    step(FIRST, 112, LANE, "1", "begin a timeline", "one above all that", "any node has seen")
    step(THIRD, 112, LANE, "2", "fence and answer", "older writers are", "refused from now on")
    canvas.arrow((FIRST + LANE, 130), (THIRD, 130))
    label(canvas, 130, "begin timeline 4")
    canvas.arrow((THIRD, 164), (FIRST + LANE, 164))
    label(canvas, 164, "inventories")
    step(FIRST, 204, LANE, "3", "plan", "the newest generation", "that survives whole")
    step(SECOND, 204, LANE, "4", "get an order", "the same generation", "for every rank")
    canvas.arrow((FIRST + LANE / 2, 180), (FIRST + LANE / 2, 204))
    canvas.arrow((FIRST + LANE, 238), (SECOND, 238))


def bringing(canvas: Canvas) -> None:
    """How a rank gets its shard, one way or the other."""
    palette = canvas.palette
    top = 312
    canvas.arrow((SECOND + LANE / 2, 272), (SECOND + LANE / 2, top))
    canvas.rect(FIRST, top, RIGHT - FIRST, 232, fill=palette.box, stroke=palette.box_edge)
    canvas.badge(FIRST + 1, top + 3, "5")
    canvas.text(FIRST + 22, top + 27, "bring the shard home", size=17.5, bold=True)
    inner, half = top + 42, (RIGHT - FIRST - 42) / 2
    left, right = FIRST + 14, FIRST + 28 + half
    for x, head, lines in [
        (left, "home copy is here", HERE),
        (right, "home copy is lost", AWAY),
    ]:
        canvas.rect(x, inner, half, 176, fill=palette.page, stroke=palette.line, weight=1.5)
        canvas.text(x + 12, inner + 24, head, size=16, bold=True)
        for at, words in enumerate(lines):
            canvas.text(x + 12, inner + 46 + 19 * at, words, size=15)
    blocks(canvas, left + 12, inner + 92, half - 24)
    fragments(canvas, right + 12, inner + 92, half - 24)


def blocks(canvas: Canvas, x: float, y: float, width: float) -> None:
    """A whole home copy."""
    palette = canvas.palette
    canvas.rect(x, y + 46, width, 28, fill=palette.go_edge, radius=4)
    canvas.text(
        x + width / 2, y + 66, "shard", size=16, fill=palette.page, bold=True, anchor="middle"
    )


def fragments(canvas: Canvas, x: float, y: float, width: float) -> None:
    """Five fragments, two of them lost, and the shard that the others make."""
    palette = canvas.palette
    each = (width - 4 * 8) / 5
    names, gone = ["0", "1", "2", "p", "p"], {0, 3}
    for at, name in enumerate(names):
        left, middle = x + at * (each + 8), x + at * (each + 8) + each / 2
        if at in gone:
            canvas.rect(left, y - 14, each, 26, stroke=palette.bad, dash="4 3", weight=1.5)
            canvas.text(middle, y + 5, "lost", size=15, fill=palette.bad, anchor="middle")
            continue
        canvas.rect(left, y - 14, each, 26, fill=palette.go_edge, radius=4)
        canvas.text(middle, y + 5, name, size=16, fill=palette.page, bold=True, anchor="middle")
        canvas.arrow((middle, y + 14), (middle, y + 44))
    blocks(canvas, x, y, width)


def agreeing(canvas: Canvas) -> None:
    """Nothing is changed before all ranks can."""
    palette, step = canvas.palette, canvas.step
    step(SECOND, 566, LANE, "6", "verify, check", "each block's CRC32C,", "shard against state")
    canvas.arrow((SECOND + LANE / 2, 544), (SECOND + LANE / 2, 566))
    step(FIRST, 566, LANE, "7", "judge", "Can all ranks?", "Then: go")
    canvas.arrow((SECOND, 600), (FIRST + LANE, 600))
    canvas.rect(THIRD - 4, 566, LANE + 8, 68, fill=palette.page)
    for y, words in [
        (584, "If not, back to 3: once"),
        (604, "more, then the next older"),
        (624, "generation, on all ranks."),
    ]:
        canvas.text(THIRD, y, words, size=15, fill=palette.soft)
    end = SECOND + LANE - 12
    canvas.line(8, AGREED_Y, end, AGREED_Y, stroke=palette.wait_edge, weight=2.5, dash="9 5")
    canvas.rect(end + 4, AGREED_Y - 14, RIGHT - end, 28, fill=palette.page)
    canvas.text(
        RIGHT, AGREED_Y + 5, "no state is changed above", size=15, fill=palette.wait_text,
        bold=True, anchor="end",
    )  # fmt: skip


def after(canvas: Canvas) -> None:
    """Load, fence, re-protect."""
    palette, step = canvas.palette, canvas.step
    top = 698
    step(SECOND, top, LANE, "8", "load", "all ranks, the same", "generation", kind="go")
    canvas.arrow((FIRST + LANE / 2, 634), (FIRST + LANE / 2, top + 34), (SECOND, top + 34))
    step(
        FIRST, top + 92, LANE, "9", "tell the agents", "what was restored,", "what was left behind"
    )
    canvas.arrow((FIRST + LANE, top + 126), (THIRD, top + 126))
    label(canvas, top + 126, "fence")
    step(THIRD, top + 92, LANE, "", "note it", "it stays until a newer", "one is committed")
    canvas.rect(8, top + 176, WIDTH - 16, 124, fill=palette.go, radius=8)
    canvas.text(
        FIRST + 2, top + 202, "the training goes on", size=17.5, fill=palette.go_text, bold=True
    )
    step(SECOND, top + 212, LANE, "10", "protect again", "only the fragments", "that were lost")
    step(THIRD, top + 212, LANE, "", "encode, hold", "new holders pull and", "verify, as in a save")
    canvas.arrow((SECOND + LANE, top + 246), (THIRD, top + 246))


def draw(palette: Palette) -> str:
    """The picture in one variant."""
    canvas = Canvas(WIDTH, HEIGHT, palette, title="How a restore goes", about=ABOUT)
    for part in (lanes, choosing, bringing, agreeing, after):
        part(canvas)
    return canvas.svg()


if __name__ == "__main__":
    write({f"restore{palette.suffix}.svg": draw(palette) for palette in (LIGHT, DARK)})
