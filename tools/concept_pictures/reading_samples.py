"""One block for each option: ranks as rows, steps as columns, a square for each sample."""

from __future__ import annotations

from typing import Any

from concept_pictures.shapes import INK, LINE, PAPER, RANKS, SMALL, Canvas

TITLE = "Which of two ranks reads which of ten shuffled samples"
SIDE, LEFT, STEP = 26.0, 62.0, 84.0


def draw(facts: dict[str, Any]) -> Any:
    """A square has the color of the rank that reads the sample, and is in the row of the rank that gets it."""
    canvas = Canvas(30 + 98 * len(facts["options"]) + 50)
    for step in range(3):
        canvas.text(LEFT + step * STEP + SIDE, 12, f"step {step + 1}", at="center", size=SMALL)
    for number, (option, ranks) in enumerate(facts["options"].items()):
        top = 28 + 98 * number
        canvas.text(6, top + 4, option, bold=True)
        seen: set[int] = set()
        for step in range(3):
            for row, rank in enumerate(ranks):
                y = top + 15 + row * (SIDE + 6)
                canvas.text(6, y + SIDE / 2, f"rank {row}", color=RANKS[row], bold=True)
                batch = rank["batches"][step] if step < len(rank["batches"]) else []
                for at, sample in enumerate(batch):
                    reader = row if sample in rank["read"] else 0
                    x = LEFT + step * STEP + at * SIDE
                    again = sample in seen
                    seen.add(sample)
                    canvas.box(x + 1, y, SIDE - 2, SIDE, fill=None if again else RANKS[reader],
                               edge=RANKS[reader], dashed=again, line=1.5)  # fmt: skip
                    canvas.text(x + SIDE / 2, y + SIDE / 2, str(sample), bold=True, at="center",
                                color=INK if again else PAPER)  # fmt: skip
                if not batch:
                    canvas.text(LEFT + step * STEP + SIDE, y + SIDE / 2, "no batch", size=SMALL, at="center")
    top = 28 + 98 * len(facts["options"])
    canvas.line([(6, top), (374, top)], color=LINE)
    canvas.text(
        6,
        top + 14,
        "Colour: the rank that reads a sample. Row: the rank that gets it.",
        size=SMALL,
    )
    canvas.box(7, top + 24, 16, 16, edge=RANKS[1], dashed=True, line=1.5)
    canvas.text(30, top + 32, "read a second time in the epoch, to complete the last step", size=SMALL)
    return canvas.figure
