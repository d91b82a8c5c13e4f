"""Four ways to divide a model, as rows; four ranks, as columns."""

from __future__ import annotations

from typing import Any

from concept_pictures.shapes import INK, LINE, RANKS, SMALL, WIDTH, Canvas

TITLE = "What each of four ranks holds of a model with four layers"
KINDS = {"parameters": "P", "gradients": "G", "exp_avg": "M", "exp_avg_sq": "V"}
SIDE, GAP, HEAD, FOOT = 17.0, 3.0, 36.0, 46.0
ROW = 4 * (SIDE + GAP) + 26


def draw(facts: dict[str, Any]) -> Any:
    """A square is the weight of one layer; what a rank holds of it is filled."""
    canvas = Canvas(HEAD + len(facts["held"]) * ROW + FOOT)
    cell = WIDTH / facts["ranks"]
    for rank in range(facts["ranks"]):
        left = rank * cell + 6
        canvas.text(left, 10, f"rank {rank}", color=RANKS[rank], bold=True)
        for at, letter in enumerate(KINDS.values()):
            canvas.text(left + at * (SIDE + GAP) + SIDE / 2, 26, letter, size=SMALL, at="center")
    for number, (strategy, ranks) in enumerate(facts["held"].items()):
        top = HEAD + number * ROW
        shares = [f"{_share(facts, rank):.0%}" for rank in ranks]
        assert len(set(shares)) == 1, "the title of a row says one number for all ranks"
        canvas.text(6, top + 9, f"{strategy}: {shares[0]} of the model on each rank", bold=True)
        for rank, held in enumerate(ranks):
            for at, kind in enumerate(KINDS):
                for layer in range(facts["layers"]):
                    x, y = rank * cell + 6 + at * (SIDE + GAP), top + 19 + layer * (SIDE + GAP)
                    for box in held[kind].get(f"layers.{layer}.weight", []):
                        _fill(canvas, x, y, box, facts["shape"], RANKS[rank])
                    canvas.box(x, y, SIDE, SIDE, edge=LINE)
    top = HEAD + len(facts["held"]) * ROW
    canvas.line([(6, top), (WIDTH - 6, top)])
    canvas.text(
        6,
        top + 12,
        "Each square is one layer's weight; filled is what the rank holds.",
        size=SMALL,
        color=INK,
    )
    canvas.text(6, top + 25, "P parameters, G gradients, M and V the two averages of AdamW.", size=SMALL)
    return canvas.figure


def _share(facts: dict[str, Any], held: dict[str, Any]) -> float:
    boxes = [box for weight in held["parameters"].values() for box in weight]
    size = sum((box["rows"][1] - box["rows"][0]) * (box["columns"][1] - box["columns"][0]) for box in boxes)
    rows, columns = facts["shape"]
    return float(size / (rows * columns * facts["layers"]))


def _fill(
    canvas: Canvas, x: float, y: float, box: dict[str, list[int]], shape: list[int], color: str
) -> None:
    down, right = SIDE / shape[0], SIDE / shape[1]
    (top, bottom), (begin, end) = box["rows"], box["columns"]
    canvas.box(x + begin * right, y + top * down, (end - begin) * right, (bottom - top) * down, fill=color)
