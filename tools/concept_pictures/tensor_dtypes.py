"""Tensors of a step as rows, in the order in which they come; precisions as columns."""

from __future__ import annotations

from typing import Any

from concept_pictures.shapes import GROUPS, INK, OTHER, PAPER, SMALL, Canvas

TITLE = "Which tensors of a training step have which dtype"
ROWS = {
    "between steps": ("weight, between steps", "optimizer state"),
    "forward": ("input", "weight, given to the layer", "output of first", "output of norm", "output of last",
                "output of the model", "loss"),
    "backward": ("gradient of last's output", "gradient of norm's output", "gradient of first's output",
                 "gradient, reduced", "gradient of the weight"),
}  # fmt: skip
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
COLORS = {"float32": OTHER, "bfloat16": GROUPS[2], "float16": GROUPS[0]}
LABELS = {
    "output of first": "output of Linear 1",
    "output of norm": "output of LayerNorm",
    "output of last": "output of Linear 2",
    "gradient of last's output": "gradient of Linear 2's output",
    "gradient of norm's output": "gradient of LayerNorm's output",
    "gradient of first's output": "gradient of Linear 1's output",
}
LEFT, CELL, ROW = 172.0, 51.0, 18.0


def draw(facts: dict[str, Any]) -> Any:
    """A cell is the dtype."""
    height = 34 + sum(16 + ROW * len(names) + 4 for names in ROWS.values())
    canvas = Canvas(height)
    for column, run in enumerate(facts):
        first, _, second = run.partition(", ")
        x = LEFT + column * CELL + CELL / 2
        canvas.text(x, 9, first, bold=True, at="center")
        canvas.text(x, 22, second, bold=True, at="center")
    y = 32.0
    for part, names in ROWS.items():
        canvas.text(6, y + 8, part, bold=True)
        y += 16
        for name in names:
            canvas.text(6, y + ROW / 2, LABELS.get(name, name), size=SMALL)
            for column, dtypes in enumerate(facts.values()):
                dtype = dtypes[name]
                canvas.box(LEFT + column * CELL + 1, y + 1, CELL - 2, ROW - 2, fill=COLORS[dtype])
                color = INK if dtype == "float32" else PAPER
                canvas.text(
                    LEFT + column * CELL + CELL / 2,
                    y + ROW / 2,
                    SHORT[dtype],
                    size=SMALL,
                    color=color,
                    at="center",
                )
            y += ROW
        y += 4
    return canvas.figure
