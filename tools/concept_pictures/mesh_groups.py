"""Eight ranks as the corners of a box, whose edges are the groups."""

from __future__ import annotations

from typing import Any

from concept_pictures.shapes import GROUPS, INK, OTHER, PAPER, SMALL, Canvas

TITLE = "A mesh of eight ranks: dp_replicate x dp_shard x tp"
COLORS = dict(zip(("tp", "dp_shard", "dp_replicate"), GROUPS, strict=True))
EFFECT = {
    "tp": "same samples, parts of each tensor",
    "dp_shard": "other samples, parts of the states",
    "dp_replicate": "other samples, the same states",
}
WIDE, HIGH = 78.0, 32.0


def draw(facts: dict[str, Any]) -> Any:
    """To the right: tp; downwards: dp_shard; to the back: dp_replicate."""
    canvas = Canvas(352)
    places = {
        facts["mesh"][replica][shard][part]: (50 + 160 * part + 110 * replica, 92 + 96 * shard - 54 * replica)
        for replica in range(2)
        for shard in range(2)
        for part in range(2)
    }
    for name in ("dp_replicate", "dp_shard", "tp"):
        for group in facts["groups"][name]:
            canvas.line([places[rank] for rank in group], color=COLORS[name], width=3.5)
    for rank, (x, y) in places.items():
        canvas.box(x - WIDE / 2, y - HIGH / 2, WIDE, HIGH, fill=PAPER, edge=INK)
        canvas.text(x, y - 6, f"rank {rank}", bold=True, at="center")
        samples = ", ".join(map(str, facts["samples"][rank]))
        canvas.text(x, y + 7, f"samples {samples}", size=SMALL, at="center")
    for row, name in enumerate(("tp", "dp_shard", "dp_replicate")):
        y = 236 + 38 * row
        canvas.box(8, y - 3, 22, 6, fill=COLORS[name])
        canvas.text(38, y, name, bold=True)
        canvas.text(122, y, EFFECT[name])
        listed = "  ".join(f"({', '.join(map(str, group))})" for group in facts["groups"][name])
        canvas.text(38, y + 15, f"groups: {listed}", size=SMALL)
    canvas.line([(8, 216), (372, 216)], color=OTHER, width=0.8)
    return canvas.figure
