"""Layers as rows; time goes to the right."""

from __future__ import annotations

from typing import Any

from concept_pictures.shapes import INK, LINE, OTHER, RANKS, SMALL, WIDTH, Canvas

TITLE = "A forward through ten layers on disk, of which memory holds some"
LEFT, RIGHT, ROW = 58.0, WIDTH - 22, 19.0


def draw(facts: dict[str, Any]) -> Any:
    """Gray: how much of a layer is in memory; in color: it computes."""
    layers = len(facts["computing_ms"])
    floor = 22 + ROW * layers
    canvas = Canvas(floor + 62)
    span = max(facts["computing_ms"][-1][1], facts["in_memory"][-1][0])
    every = next(step for step in (20, 50, 100, 200, 500) if span / step <= 7)

    def at(milliseconds: float) -> float:
        return LEFT + max(milliseconds, 0) / span * (RIGHT - LEFT)

    times = [when for when, _ in facts["in_memory"]]
    canvas.text(
        LEFT,
        9,
        f"{layers * facts['layer_mb']:.0f} MB of weights, a limit of {facts['limit_mb']:.0f} MB",
        bold=True,
    )
    for layer in range(layers):
        bottom = 20 + ROW * (layer + 1)
        canvas.text(6, bottom - ROW / 2, f"layer {layer + 1}", size=SMALL)
        for (when, shares), until in zip(facts["in_memory"], [*times[1:], span], strict=True):
            if until > 0 and shares[layer] > 0:
                height = (ROW - 4) * shares[layer]
                canvas.box(
                    at(when), bottom - 2 - height, at(until) - at(when) + 0.3, height, fill=OTHER, alpha=0.8
                )
        begin, end = facts["computing_ms"][layer]
        canvas.box(at(begin), bottom - ROW + 4, at(end) - at(begin), ROW - 8, fill=RANKS[0])
        canvas.line([(LEFT, bottom), (RIGHT, bottom)], color=LINE, width=0.6)
    canvas.time_axis(floor + 4, LEFT, RIGHT, span, every)
    canvas.box(LEFT, floor + 38, 14, 12, fill=RANKS[0])
    canvas.text(LEFT + 19, floor + 44, "computes")
    canvas.box(LEFT + 92, floor + 38, 14, 12, fill=OTHER, alpha=0.8)
    canvas.text(LEFT + 111, floor + 44, "in memory (height: how much)", color=INK)
    return canvas.figure
