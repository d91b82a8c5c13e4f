"""Learning rates over optimizer steps, a line for each run."""

from __future__ import annotations

from typing import Any

from concept_pictures.shapes import GROUPS, INK, LINE, RANKS, SMALL, WIDTH, Canvas

TITLE = "The learning rate of each optimizer step, with one schedule on one process and on two"
COLORS = (RANKS[0], RANKS[1], GROUPS[0])
LEFT, RIGHT, TOP, FLOOR = 34.0, WIDTH - 26, 14.0, 150.0


def draw(facts: dict[str, Any]) -> Any:
    """Two processes take half as many steps."""
    canvas = Canvas(FLOOR + 96)
    for share in (0, 0.5, 1):
        y = FLOOR - share * (FLOOR - TOP)
        canvas.line([(LEFT, y), (RIGHT, y)], color=LINE, width=0.6)
        canvas.text(LEFT - 5, y, f"{share:.0%}", size=SMALL, at="right")
    for (name, rates), color in zip(facts["rates"].items(), COLORS, strict=True):
        points = [
            (LEFT + number / facts["batches"] * (RIGHT - LEFT), FLOOR - rate * (FLOOR - TOP))
            for number, rate in enumerate(rates, start=1)
        ]
        canvas.line(points, color=color, width=2, dashed="False" in name)
        x, y = points[-1]
        canvas.box(x - 3, y - 3, 6, 6, fill=color)
    canvas.time_axis(FLOOR + 4, LEFT, RIGHT, facts["batches"], 10, "steps")
    for row, ((name, rates), color) in enumerate(zip(facts["rates"].items(), COLORS, strict=True)):
        y = FLOOR + 42 + 18 * row
        canvas.box(LEFT, y - 3, 22, 6, fill=color)
        canvas.text(LEFT + 30, y, f"{name}: {len(rates)} steps, ends at {rates[-1]:.0%}", color=INK)
    return canvas.figure
