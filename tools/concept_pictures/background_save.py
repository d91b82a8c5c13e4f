"""Training above, the files below; time goes to the right."""

from __future__ import annotations

from typing import Any

from concept_pictures.shapes import GROUPS, INK, OTHER, OWN, PAPER, RANKS, SMALL, WIDTH, Canvas

TITLE = "An asynchronous save: one copy in memory, then training goes on"
LEFT, RIGHT = 8.0, WIDTH - 18


def draw(facts: dict[str, Any]) -> Any:
    """Steps, the call, the bytes on the disk, and the moment in which the folder has its name."""
    canvas = Canvas(250)
    span = facts["steps_ms"][-1][1]
    every = next(step for step in (50, 100, 200, 500, 1000) if span / step <= 7)

    def at(milliseconds: float) -> float:
        return LEFT + milliseconds / span * (RIGHT - LEFT)

    canvas.text(LEFT, 10, "the training loop", bold=True)
    for number, (begin, end) in enumerate(facts["steps_ms"]):
        canvas.box(at(begin) + 0.4, 20, at(end) - at(begin) - 0.8, 26, fill=RANKS[0])
        canvas.text(at((begin + end) / 2), 33, str(number + 1), color=PAPER, bold=True, at="center")
    begin, end = facts["save_state_ms"]
    canvas.box(at(begin), 20, at(end) - at(begin), 26, fill=GROUPS[0])
    canvas.line([(at(begin), 46), (at(begin), 60)], color=GROUPS[0], width=1.5)
    canvas.text(
        at(begin) - 4, 62, f"save_state: {end - begin:.0f} ms", color=GROUPS[0], bold=True, at="right"
    )
    canvas.text(at(begin) - 4, 75, "copies to memory", size=SMALL, at="right")
    canvas.text(LEFT, 100, "in the background", bold=True)
    floor, top = 192.0, 92.0
    points = [
        (at(when), floor - size / facts["checkpoint_mb"] * (floor - top))
        for when, size in facts["written_mb"]
    ]
    named = at(facts["named_ms"])
    canvas.area([*points, (named, points[-1][1])], floor, color=OTHER, alpha=0.8)
    canvas.line([(named, 60), (named, floor)], color=OWN, width=2)
    canvas.text(named + 5, 66, "complete: the folder", color=OWN, bold=True)
    canvas.text(named + 5, 79, "has its name", color=OWN, bold=True)
    canvas.text(named + 5, 104, f"{facts['checkpoint_mb']:.0f} MB", size=SMALL)
    canvas.text(named + 5, 117, "on the disk", size=SMALL)
    canvas.time_axis(floor + 6, LEFT, RIGHT, span, every)
    canvas.box(LEFT, 228, 14, 12, fill=RANKS[0])
    canvas.text(LEFT + 19, 234, "training step")
    canvas.box(LEFT + 105, 228, 14, 12, fill=OTHER, alpha=0.8)
    canvas.text(LEFT + 124, 234, "bytes of the files that are written", color=INK)
    return canvas.figure
