"""Two ranks below each other; time goes to the right."""

from __future__ import annotations

from typing import Any

from concept_pictures.shapes import INK, OTHER, PAPER, RANKS, WIDTH, Canvas

TITLE = "One accumulation window of four micro-batches on two ranks"
LEFT, RIGHT = 8.0, WIDTH - 14
HIGH, BUCKET = 24.0, 12.0


def draw(facts: dict[str, Any]) -> Any:
    """The computation of a rank, and under it what it sends."""
    canvas = Canvas(232)
    span = max(event["end_ms"] for events in facts["ranks"] for event in events)
    every = next(step for step in (10, 20, 50, 100, 200, 500) if span / step <= 8)

    def at(milliseconds: float) -> float:
        return LEFT + milliseconds / span * (RIGHT - LEFT)

    for rank, events in enumerate(facts["ranks"]):
        top = 20 + 80 * rank
        canvas.text(LEFT, top - 9, f"rank {rank}", color=RANKS[rank], bold=True)
        buckets = 0
        for event in events:
            kind, begin, end = event["kind"], at(event["begin_ms"]), at(event["end_ms"])
            y = top
            if kind == "all-reduce":
                y += HIGH + 3 + BUCKET * buckets
                buckets += 1
            fill = {"step": INK, "all-reduce": OTHER}.get(kind, RANKS[rank])
            canvas.box(begin, y, max(end - begin, 0.4), BUCKET - 2 if kind == "all-reduce" else HIGH, fill=fill,
                       alpha=0.35 if kind == "forward" else 1)  # fmt: skip
            if kind == "backward":
                canvas.text(
                    (begin + end) / 2,
                    y + HIGH / 2,
                    str(event["micro_batch"] + 1),
                    color=PAPER,
                    bold=True,
                    at="center",
                )
    canvas.time_axis(172, LEFT, RIGHT, span, every)
    for column, (label, fill, alpha) in enumerate(
        (
            ("forward", RANKS[0], 0.35),
            ("backward", RANKS[0], 1),
            ("all-reduce", OTHER, 1),
            ("optimizer step", INK, 1),
        )
    ):
        x = LEFT + (0, 82, 172, 266)[column]
        canvas.box(x, 204, 14, 12, fill=fill, alpha=alpha)
        canvas.text(x + 19, 210, label)
    return canvas.figure
