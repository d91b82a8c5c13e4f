"""The folders of each package, and which of them import which: the drawings of ``docs/architecture.md``.

A *room* is a box of a drawing: one folder, or modules beside the folders that belong together. The boxes are laid out
by hand below; the arrows are the imports that the sources have.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drawings.svg import Drawing

PACKAGES = Path(__file__).parents[2] / "packages"
WIDTH, HEIGHT, GAP = 820, 58, 40


@dataclass(frozen=True)
class Room:
    """A box: its middle, its two lines of text, and the folders and modules in it; none: the title is the folder."""

    x: int
    title: str
    text: str
    members: tuple[str, ...] = ()
    width: int = 190

    @property
    def names(self) -> tuple[str, ...]:
        """The folders and modules of the box, as they are imported."""
        return self.members or (self.title.rstrip("/"),)


# Floors from the top of a package to its bottom. A room that no row has, or an arrow that goes up, is an error.
FLOORS: dict[str, tuple[tuple[Room, ...], ...]] = {
    "accel_state": (
        (
            Room(250, "seeding, log, progress", "helpers for scripts", ("seeding", "log", "progress"), 210),
            Room(680, "launching/", "plans and starts of runs"),
        ),
        (Room(250, "operations/", "collectives on trees"),),
        (Room(250, "world/", "this process and its group"),),
        (
            Room(250, "communication/", "what collectives are made of"),
            Room(500, "monitoring/", "what a launcher learns"),
        ),
        (Room(250, "host/", "devices, memory, packages"),),
        (
            Room(120, "config/", "options and their sources"),
            Room(330, "clusters/", "who started this process"),
        ),
        (
            Room(
                450,
                "environment, errors, trees, enums, …",
                "modules that import no folder",
                (
                    *(
                        "_lazy",
                        "compat",
                        "constants",
                        "entry_points",
                        "enums",
                        "environment",
                        "errors",
                        "handlers",
                    ),
                    *("messages", "module_trees", "trees"),
                ),
                560,
            ),
        ),
    ),
    "accel_ckpt": (
        (Room(410, "convert/", "merging, exchange, export"),),
        (Room(410, "training/", "optimizers, Checkpointer"),),
        (Room(230, "loading/", "models and training states"), Room(590, "saving/", "plan, stage, write")),
        (
            Room(130, "foreign/", "files of other programs"),
            Room(
                410,
                "hub, store_coordinator",
                "weights of a hub; agreement",
                ("hub", "store_coordinator"),
                220,
            ),
            Room(690, "folders/", "commit; object storage"),
        ),
        (Room(410, "format/", "what the files hold"),),
        (Room(410, "modules/", "names, ties, versions"),),
        (
            Room(
                410,
                "parts, geometry, coordination, disk, errors, …",
                "modules that import no folder",
                ("coordination", "disk", "errors", "geometry", "locations", "parts", "tensor_storage"),
                560,
            ),
        ),
    ),
    "accel_bigmodel": (
        (
            Room(120, "quantization/", "weights quantised on loading"),
            Room(400, "load", "a checkpoint to devices", ("load",)),
        ),
        (
            Room(260, "dispatch, offload_cache", "placing a model", ("dispatch", "offload_cache"), 210),
            Room(600, "planning/", "which strategy fits"),
        ),
        (
            Room(260, "paging/", "less memory than weights"),
            Room(600, "estimates/", "how much memory"),
        ),
        (
            Room(260, "streaming/", "weights to the device in time"),
            Room(710, "pipelines/", "stages on ranks"),
        ),
        (Room(180, "hooks/", "around any forward"), Room(560, "device_maps/", "which part goes where")),
        (
            Room(
                410,
                "errors, containers, meta, offload_files, dtypes",
                "modules that import no folder",
                ("containers", "dtypes", "errors", "meta", "offload_files"),
                560,
            ),
        ),
    ),
    "accel_train": (
        (
            Room(
                410,
                "accelerator, local_sgd, averaged_weights",
                "the façade: Accelerator",
                ("accelerator", "averaged_weights", "local_sgd"),
                350,
            ),
        ),
        (
            Room(410, "checkpoints/", "saving and resuming"),
            Room(740, "tracking/", "values of a loop", width=150),
        ),
        (Room(410, "rehearsal", "what a rehearsal observes", ("rehearsal",)),),
        (Room(410, "setup/", "the resolver, and prepare"),),
        (Room(410, "loop/", "what a step does"),),
        (
            Room(120, "data/", "which rank reads what"),
            Room(350, "strategies/", "how ranks cooperate"),
            Room(570, "precision/", "which numbers"),
        ),
        (Room(250, "sequence/", "one sequence, several ranks"), Room(500, "plugins/", "options as objects")),
        (
            Room(
                410,
                "mesh, ranks, registry, errors, …",
                "modules that import no folder",
                (
                    *("errors", "list_view", "mesh", "optimizer_parameters", "ranks", "registry"),
                    "state_part",
                ),
                620,
            ),
        ),
    ),
    "accel_cli": (
        (Room(410, "as_accelerate/", "answers import accelerate"),),
        (
            Room(160, "sanity/", "what accel test runs", width=160),
            Room(410, "commands/", "one module per command"),
            Room(730, "app", "the table of commands", ("app",), 160),
        ),
        (
            Room(80, "wizard/", "accel config", width=130),
            Room(240, "doctor/", "facts and verdicts", width=150),
            Room(405, "migration/", "rewrites sources", width=140),
            Room(560, "rehearsal/", "accel rehearse", width=130),
        ),
        (
            Room(
                410,
                "dialect, help_pages, launch_help, config_show, render, …",
                "what commands share",
                (
                    *("alias_folders", "colors", "completion", "config_show", "dialect", "help_pages"),
                    *("launch_help", "launch_topics", "models", "plan_report", "render"),
                    *("sagemaker_launch", "schema_command", "tpu_launch", "yaml_edits"),
                ),
                660,
            ),
        ),
    ),
}


def imports(package: str) -> set[tuple[str, str]]:
    """Pairs of folders or modules directly below the package: the first imports the second."""
    root = PACKAGES / package.replace("_", "-") / "src" / package
    pairs = set()
    for path in root.rglob("*.py"):
        name = path.relative_to(root).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            pairs |= {(name, module.split(".")[1]) for module in modules if module.startswith(f"{package}.")}
    return {(a, b) for a, b in pairs if a != b and "__" not in (a[:2], b[:2])}


def arrows(package: str) -> dict[Room, list[Room]]:
    """The rooms that each room imports, without those that it also reaches by another arrow.

    Raises:
        ValueError: a folder or module is in no room, or a room imports one that is not below it.
    """
    room_of = {name: room for row in FLOORS[package] for room in row for name in room.names}
    floor_of = {room: floor for floor, row in enumerate(FLOORS[package]) for room in row}
    imported: dict[Room, set[Room]] = {room: set() for room in floor_of}
    for pair in imports(package):
        if missing := [name for name in pair if name not in room_of]:
            raise ValueError(f"{package}: no room of tools/drawings/rooms.py has {missing[0]}")
        above, below = (room_of[name] for name in pair)
        if above is not below:
            if floor_of[above] >= floor_of[below]:
                raise ValueError(f"{package}: {pair[0]} imports {pair[1]}, which is not below it")
            imported[above].add(below)

    def reached(room: Room) -> Iterator[Room]:
        for below in imported[room]:
            yield below
            yield from reached(below)

    return {
        room: [below for below in rooms if not any(below in reached(other) for other in rooms)]
        for room, rooms in imported.items()
    }


def draw(package: str) -> Drawing:
    """The rooms of a package, and arrows for its imports.

    Raises:
        ValueError: as `arrows` does, or an arrow would pass through a box.
    """
    floors = FLOORS[package]
    drawing = Drawing(
        WIDTH,
        len(floors) * (HEIGHT + GAP) - GAP + 24,
        f"The folders of {package}: each imports only folders below it",
    )
    top = {room: 12 + floor * (HEIGHT + GAP) for floor, row in enumerate(floors) for room in row}
    drawn = {room: sorted(below, key=lambda to: to.x) for room, below in arrows(package).items()}
    into = {to: [room for room in top if to in drawn[room]] for to in top}
    for room, below in drawn.items():
        for to in below:
            start = _port(room, below.index(to), len(below), to)
            if crossed := [
                box.title
                for box, y in top.items()
                if top[room] < y < top[to] and abs(start - box.x) <= box.width / 2
            ]:
                raise ValueError(
                    f"{package}: the arrow {room.title} → {to.title} crosses {crossed}: move a box"
                )
            end = _port(to, sorted(into[to], key=lambda other: other.x).index(room), len(into[to]), room)
            drawing.arrow(
                [(start, top[room] + HEIGHT), (start, top[to] - 24), (end, top[to] - 16), (end, top[to])]
            )
    for room, y in top.items():
        folder = room.title.endswith("/")
        drawing.labelled(
            room.x - room.width / 2,
            y,
            room.width,
            HEIGHT,
            [room.title, room.text],
            fill="ours-fill" if folder else "panel",
            stroke="ours" if folder else "line",
        )
    return drawing


def _port(room: Room, at: int, count: int, other: Room) -> float:
    """Where an arrow meets an edge of a box: straight above or below the other box if it is the only one there."""
    if count == 1:
        return min(max(other.x, room.x - room.width / 2 + 16), room.x + room.width / 2 - 16)
    return room.x - room.width / 2 + room.width * (at + 1) / (count + 1)
