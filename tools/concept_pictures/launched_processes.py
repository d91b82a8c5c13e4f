"""Processes as boxes; an arrow goes from the one that starts to the one that is started."""

from __future__ import annotations

from typing import Any

from concept_pictures.shapes import INK, LINE, OWN, PAPER, RANKS, SMALL, WIDTH, Canvas

TITLE = "Which process starts which, and who listens on which port"
NAMES = {"accel_cli": "accel launch", "accel_state.launching.machines.agent": "agent"}
MAIN = "main_process_port"


def draw(facts: dict[str, Any]) -> Any:
    """One machine above, two below."""
    canvas = Canvas(408)
    _world(canvas, 8, "One machine", facts["one machine"]["machines"])
    _world(canvas, 156, "Two machines", facts["two machines"]["machines"])
    canvas.line([(8, 364), (372, 364)])
    canvas.box(10, 373, 22, 12, edge=OWN, line=2)
    canvas.text(38, 379, "main: --main_process_port, where all ranks meet", size=SMALL)
    canvas.text(10, 397, "+2 free: ports that gloo chooses, for data between ranks", size=SMALL)
    return canvas.figure


def _world(canvas: Canvas, top: float, title: str, machines: list[dict[str, Any]]) -> None:
    canvas.text(8, top + 2, title, bold=True)
    width = (WIDTH - 16 - 8 * (len(machines) - 1)) / 2 if len(machines) > 1 else WIDTH - 16
    for number, machine in enumerate(machines):
        left = 8 + number * (width + 8)
        levels = len(machine["above"]) + 1
        canvas.box(left, top + 14, width, 64 + 50 * (levels - 1), edge=LINE, dashed=True)
        canvas.text(left + 8, top + 25, f"machine {number}", size=SMALL)
        middle = left + width / 2
        for level, process in enumerate(machine["above"]):
            y = top + 36 + 50 * level
            _process(canvas, middle, y, NAMES[process["command"]], process["listens"], INK)
            if level:
                canvas.arrow((middle, y - 18), (middle, y))
        for at, rank in enumerate(machine["ranks"]):
            y = top + 36 + 50 * (levels - 1)
            x = middle + (at - (len(machine["ranks"]) - 1) / 2) * 88
            canvas.arrow((middle, y - 18), (x, y))
            _process(canvas, x, y, f"rank {rank['rank']}", rank["listens"], RANKS[rank["rank"]])


def _process(canvas: Canvas, x: float, y: float, name: str, listens: list[str], color: str) -> None:
    free = len([port for port in listens if port != MAIN])
    canvas.box(x - 40, y, 80, 32, fill=color, edge=None)
    if MAIN in listens:
        canvas.box(x - 42.5, y - 2.5, 85, 37, edge=OWN, line=2)
    said = ["main"] * (MAIN in listens) + [f"+{free} free"] * bool(free)
    canvas.text(x, y + (11 if said else 16), name, color=PAPER, bold=True, at="center")
    canvas.text(x, y + 23, " ".join(said), size=SMALL - 0.5, color=PAPER, at="center")
