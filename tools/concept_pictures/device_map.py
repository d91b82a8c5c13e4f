"""Modules of a model on the left, the places of their weights on the right."""

from __future__ import annotations

from typing import Any

from concept_pictures.shapes import PAPER, RANKS, SMALL, Canvas

TITLE = "A device map: where the weights of a model are between forwards"
COLORS = dict(zip(("0", "cpu", "disk"), RANKS, strict=False))
PLACES = {
    "0": ("accelerator 0", "they stay there"),
    "cpu": ("host memory (cpu)", "brought block by block"),
    "disk": ("the checkpoint's files (disk)", "mapped, brought block by block"),
}
ROW, LEFT, WIDE, RIGHT = 24, 8, 132, 200


def draw(facts: dict[str, Any]) -> Any:
    """A row for each module, and a line to its place."""
    modules = [name for name in facts["map"] if not name.endswith("rotary_emb")]
    height = 40 + ROW * len(modules)
    canvas = Canvas(height)
    canvas.text(LEFT, 14, "module", bold=True)
    canvas.text(RIGHT, 14, "place of its weights", bold=True)
    step = (height - 40) / len(PLACES)
    middle = {place: 34 + step * number + (step - 12) / 2 for number, place in enumerate(PLACES)}
    for row, name in enumerate(modules):
        y, place = 34 + ROW * row, facts["map"][name]
        canvas.line([(LEFT + WIDE, y + 9), (RIGHT, middle[place])], color=COLORS[place])
        canvas.box(LEFT, y, WIDE, 18, fill=COLORS[place])
        tied = "" if facts["bytes"][name] else " (tied)"
        canvas.text(LEFT + 7, y + 9.5, name.removeprefix("model.") + tied, color=PAPER)
    for number, (place, (title, what)) in enumerate(PLACES.items()):
        y = 34 + step * number
        canvas.box(RIGHT, y, 172, step - 12, fill=PAPER, edge=COLORS[place])
        held = sum(facts["bytes"][name] for name in modules if facts["map"][name] == place)
        budget = facts["budget"].get(place)
        of = f" of {budget / 1e6:.0f} MB" if budget else ""
        canvas.text(RIGHT + 9, middle[place] - 15, title, bold=True, color=COLORS[place])
        canvas.text(RIGHT + 9, middle[place] + 1, f"{held / 1e6:.1f} MB{of}")
        canvas.text(RIGHT + 9, middle[place] + 16, what, size=SMALL)
    return canvas.figure
