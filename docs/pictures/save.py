"""Draws how a save goes: python docs/pictures/save.py [FOLDER]."""

from __future__ import annotations

from drawing import DARK, LIGHT, Canvas, Palette, write

WIDTH, HEIGHT = 700, 916
BAR, FIRST, SECOND, THIRD = 14, 58, 274, 490  # left edges
LANE = 192
RIGHT = THIRD + LANE
RETURN_Y = 342

ABOUT = (
    "Time runs down. The caller waits for three steps only: plan the shard, take the slot that was "
    "reserved ahead, copy the state into it; then save() returns. Behind the training the node's "
    "agent encodes parity and CRC32C while peers pull ahead, seals the home copy, and asks peers "
    "to hold fragments; they pull, verify and answer. Each rank counts in torch's store; when all "
    "have, the generation is committed at all agents, written to disk where there is one, and a "
    "slot for the next save is reserved."
)


def lanes(canvas: Canvas) -> None:
    """The title and the heads of the three columns."""
    palette = canvas.palette
    canvas.text(16, 34, "How a save goes", size=22, bold=True)
    canvas.text(WIDTH - 16, 34, "time runs down", size=15, fill=palette.soft, anchor="end")
    heads = {
        FIRST: ("Training process", "one per rank"),
        SECOND: ("Its node's agent", "outlives the process"),
        THIRD: ("Peers' agents", "the k + m holders"),
    }
    for x, (head, below) in heads.items():
        canvas.text(x + LANE / 2, 70, head, size=17.5, bold=True, anchor="middle")
        canvas.text(x + LANE / 2, 90, below, size=15, fill=palette.soft, anchor="middle")


def stall(canvas: Canvas) -> None:
    """What the caller waits for."""
    palette = canvas.palette
    canvas.rect(8, 102, WIDTH - 16, RETURN_Y - 102, fill=palette.wait, radius=8)
    canvas.rect(BAR, 108, 28, RETURN_Y - 114, fill=palette.wait_edge, radius=5)
    middle = (102 + RETURN_Y) / 2
    canvas.text(
        BAR + 19, middle, "the caller waits", size=16, fill=palette.page, bold=True,
        anchor="middle", turned=True,
    )  # fmt: skip
    canvas.text(THIRD, 136, "the stall", size=17.5, fill=palette.wait_text, bold=True)
    for y, words in [
        (160, "No peer is asked: no"),
        (179, "network, no collective."),
        (212, "If the slot, or the save"),
        (231, "before, is not ready in"),
        (250, "50 ms (patience_s), all"),
        (269, "ranks skip this save."),
    ]:
        canvas.text(THIRD, y, words, size=15)

    canvas.step(FIRST, 118, LANE, "1", "plan the shard", "from tensors to bytes", kind="wait")
    canvas.step(FIRST, 188, LANE, "2", "take a slot", "that is there already", kind="wait")
    canvas.step(FIRST, 258, LANE, "3", "copy the state", "into the slot", kind="wait")
    canvas.rect(
        SECOND, 118, LANE, 190, fill=palette.page, stroke=palette.box_edge, dash="6 4", weight=1.5
    )
    canvas.text(SECOND + 18, 142, "slot", size=16.5, bold=True)
    for at, words in enumerate(["a file in memory,", "mapped by both,", "reserved ahead (12)"]):
        canvas.text(SECOND + 18, 163 + 18 * at, words, size=15)
    canvas.rect(SECOND + 14, 260, LANE - 28, 36, fill=palette.line, radius=4)
    canvas.text(
        SECOND + LANE / 2, 283, "shard", size=16, fill=palette.page, bold=True, anchor="middle"
    )
    canvas.arrow((FIRST + LANE, 213), (SECOND, 213), dash="5 4")
    tip = SECOND + 12
    canvas.line(FIRST + LANE, 278, tip - 4, 278, stroke=palette.line, weight=6)
    canvas.shape((tip - 14, 267), (tip, 278), (tip - 14, 289), fill=palette.line)
    canvas.text(FIRST, 332, "save() returns", size=16.5, fill=palette.wait_text, bold=True)
    canvas.line(8, RETURN_Y, WIDTH - 8, RETURN_Y, stroke=palette.wait_edge, weight=2.5, dash="9 5")


def behind(canvas: Canvas) -> None:
    """What goes on behind the training, up to the count."""
    palette = canvas.palette
    canvas.rect(BAR, RETURN_Y + 8, 28, HEIGHT - RETURN_Y - 22, fill=palette.go_edge, radius=5)
    canvas.text(
        BAR + 19, (RETURN_Y + HEIGHT) / 2, "the training goes on", size=16, fill=palette.page,
        bold=True, anchor="middle", turned=True,
    )  # fmt: skip
    step = canvas.step
    step(FIRST, 362, LANE, "4", "hand over", "a thread sees the", "save through")
    step(SECOND, 362, LANE, "5", "encode", "m parity fragments,", "CRC32C of all blocks")
    step(THIRD, 362, LANE, "", "meanwhile", "pull large data", "fragments ahead")
    step(SECOND, 448, LANE, "6", "seal", "home copy complete")
    step(SECOND, 516, LANE, "7", "ask to hold", "fragment i of k + m")
    step(THIRD, 516, LANE, "8", "pull and verify", "each block's CRC32C,", "then answer: held")
    step(SECOND, 602, LANE, "9", "protected", "enough are held")
    step(FIRST, 602, LANE, "10", "count", "+1 in torch's store;", "the last completes it")
    canvas.arrow((FIRST + LANE, 392), (SECOND, 392))
    canvas.arrow((SECOND + LANE, 404), (THIRD, 404), dash="5 4", both=True)
    canvas.arrow((SECOND + LANE / 2, 430), (SECOND + LANE / 2, 448))
    canvas.arrow((SECOND + LANE / 2, 498), (SECOND + LANE / 2, 516))
    canvas.arrow((SECOND + LANE, 538), (THIRD, 538))
    canvas.arrow((THIRD + LANE / 2, 584), (THIRD + LANE / 2, 632), (SECOND + LANE, 632))
    canvas.arrow((SECOND, 632), (FIRST + LANE, 632))


def commit(canvas: Canvas) -> None:
    """The commit, and what follows it."""
    step = canvas.step
    top = 702
    canvas.rect(
        FIRST - 4, top - 2, RIGHT - FIRST + 8, 72, fill=canvas.palette.go,
        stroke=canvas.palette.go_edge, weight=2,
    )  # fmt: skip
    canvas.badge(FIRST - 1, top + 2, "11")
    canvas.text(
        FIRST + 22, top + 26, "committed: all ranks have counted", size=18,
        fill=canvas.palette.go_text, bold=True,
    )  # fmt: skip
    canvas.text(
        FIRST + 22, top + 50, "Every rank tells its own agent; older generations may go.", size=15
    )
    canvas.arrow((FIRST + LANE / 2, 670), (FIRST + LANE / 2, top - 2))
    below = 796
    step(FIRST, below, LANE, "12", "reserve a slot", "for the next save")
    step(SECOND, below, LANE, "13", "write to disk", "if there is one;", "only close() waits")
    step(THIRD, below, LANE, "13", "write to disk", "their fragments,", "likewise")
    for x in (FIRST, SECOND, THIRD):
        canvas.arrow((x + LANE / 2, top + 70), (x + LANE / 2, below))
    canvas.text(
        FIRST, 888, "A holder that fails costs margin, not the save.", size=15,
        fill=canvas.palette.soft,
    )  # fmt: skip


def draw(palette: Palette) -> str:
    """The picture in one variant."""
    canvas = Canvas(WIDTH, HEIGHT, palette, title="How a save goes", about=ABOUT)
    for part in (lanes, stall, behind, commit):
        part(canvas)
    return canvas.svg()


if __name__ == "__main__":
    write({f"save{palette.suffix}.svg": draw(palette) for palette in (LIGHT, DARK)})
