"""``accel checkpoint``: list, show, verify, compare and prune checkpoints, local or in object storage."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel_cli.dialect import App
from accel_cli.render import show_facts, show_table, show_text, when
from accel_state.errors import ConfigError
from accel_state.messages import readable_size

if TYPE_CHECKING:
    from accel_cli.checkpoint_facts import LeafDifference

__all__ = ["app"]

app = App(
    help="List, show, verify, compare and remove checkpoints, in folders or in object storage (s3://…)."
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON; times are seconds since 1970, sizes bytes.")]
FolderOfCheckpoints = Annotated[str, typer.Argument(help="Folder or URI that holds checkpoints.")]
Checkpoint = Annotated[str, typer.Argument(help="Folder or URI of a checkpoint.")]


@contextlib.contextmanager
def _unusable() -> Iterator[None]:
    """Context in which a checkpoint that cannot be read is a mistake in the command line."""
    from accel_ckpt import CheckpointError

    try:
        yield
    except (CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from error


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


def _difference(one: LeafDifference) -> str:
    if one.largest is not None:
        return f"{one.first}, by up to {one.largest:.3g}"
    return f"{_cell(one.first):.25} → {_cell(one.second):.25}"


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, default=str))


@app.command("ls")
def list_checkpoints(folder: FolderOfCheckpoints = ".", as_json: Json = False) -> None:
    """List the checkpoints in and below a folder.

    They may be up to two folders below it. Numbered ones are ordered by their numbers, others by time, the newest
    last. What interrupted saves left, and what running saves write, is listed by the name that it has in the
    folder.
    """
    from accel_cli.checkpoint_facts import checkpoints_below, folder_of

    with _unusable():
        place = folder_of(folder)
        found = checkpoints_below(place)
    if not found:
        raise ConfigError(
            f"there is no checkpoint in {place.path}, nor up to two folders below it; give the folder that "
            "save_state() or Checkpointer saves to, or show a checkpoint itself: accel checkpoint show"
        )
    if as_json:
        _print_json([one._asdict() for one in found])
        return
    columns = ("checkpoint", "step", "ranks", "strategy", "size", "saved", "state")
    rows = []
    for one in found:
        size = None if one.size is None else readable_size(one.size)
        saved = None if one.saved is None else when(one.saved)
        cells = (one.name, one.step, one.ranks, one.strategy, size, saved, one.state)
        rows.append([*map(_cell, cells)])
    show_table(columns, rows, spare=("strategy", "saved", "ranks"))


@app.command()
def show(
    checkpoint: Checkpoint,
    tensors: Annotated[bool, typer.Option("--tensors", help="List all tensors.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds. Only its descriptions and headers are read."""
    from accel_cli.checkpoint_facts import facts, opened, tensors_of

    with _unusable():
        state = opened(checkpoint)
        known = facts(state)
        shown = {"tensors": tensors_of(state)} if tensors else {}
    if as_json:
        _print_json(known | shown)
        return
    known["size"] = readable_size(known["size"])
    known["saved"] = None if known["saved"] is None else when(known["saved"])
    files = {name: readable_size(size) for name, size in known.pop("files").items()}
    lines = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in known.items()
        if value not in (None, [])
    }
    show_facts({str(state.directory): lines, "files": files, **shown})


@app.command()
def verify(
    checkpoints: Annotated[list[str], typer.Argument(help="Folders or URIs of checkpoints.")],
    as_json: Json = False,
) -> int:
    """Read every file of checkpoints and compare its checksum. Exit code 1: a checkpoint is damaged."""
    from accel_ckpt import CorruptCheckpointError, UnsafeCheckpointError
    from accel_cli.checkpoint_facts import opened

    damage: dict[str, str | None] = {}
    for place in checkpoints:
        damage[place] = None
        try:
            opened(place).verify()
        except (CorruptCheckpointError, UnsafeCheckpointError) as error:
            damage[place] = str(error)
        if not as_json:
            show_text(f"{place}: {damage[place] or 'not damaged'}")
    if as_json:
        _print_json(damage)
    return int(any(damage.values()))


@app.command()
def diff(first: Checkpoint, second: Checkpoint, as_json: Json = False) -> int:
    """Compare the values and tensors of two checkpoints.

    A line tells how a tensor differs: in shape or dtype, or the largest difference of an element. How the content
    is divided into files is not compared. Exit code 0: they are equal; 1: they differ; 2: one of them cannot be
    read.
    """
    from accel_cli.checkpoint_facts import differences, opened

    with _unusable():
        found = [*differences(opened(first), opened(second))]
    if as_json:
        _print_json([one._asdict() for one in found])
    elif found:
        show_table(("difference", "name"), [(_difference(one), one.name) for one in found], left=2)
    else:
        show_text(f"{first} and {second} are equal")
    return int(bool(found))


@app.command()
def prune(
    folder: FolderOfCheckpoints,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Number of the newest checkpoints to keep.")],
    prefix: Annotated[
        list[str] | None,
        typer.Option("--prefix", help="Name before the number; by default checkpoint_ and step_."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, the names are shown.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry_run", help="Remove nothing, even with --yes.")] = False,
    as_json: Json = False,
) -> int:
    """Remove the oldest complete checkpoints of a folder.

    The number in the name tells the age, and the newest of each prefix stay. Nothing but complete checkpoints with
    numbered names is removed: not what a running or an interrupted save wrote, and no folder that no save wrote.
    Exit code 1: a checkpoint could not be removed.
    """
    import accel_ckpt
    from accel_cli.checkpoint_facts import PREFIXES, folder_of

    with _unusable():
        path = folder_of(folder).path
        complete = {each: accel_ckpt.complete_checkpoints(path, each) for each in prefix or PREFIXES}
    total = sum(map(len, complete.values()))
    if not total:
        raise ConfigError(
            f"there is no complete checkpoint {' or '.join(f'{each}<number>' for each in complete)} in {path}; accel "
            "checkpoint ls lists what there is"
        )
    doomed = [place for places in complete.values() for place in places[:-keep]]
    removes = yes and not dry_run
    removed = [
        place for each in complete if removes for place in accel_ckpt.prune_checkpoints(path, keep, each)
    ]
    if as_json:
        _print_json({"to_remove": doomed, "removed": removed})
        return int(removes and removed != doomed)
    typer.echo("".join(f"{place}\n" for place in (removed if removes else doomed)), nl=False)
    done = "removed" if removes else "would be removed; --yes removes them"
    typer.echo(f"{len(removed if removes else doomed)} of {total} complete checkpoints {done}", err=True)
    return int(removes and removed != doomed)
