"""``accel runs``: the runs whose logs are in a folder, how each ended, and the last lines of its failing rank."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from accel_cli.dialect import App
from accel_cli.render import show_facts, show_table, show_text, when
from accel_state.errors import ConfigError
from accel_state.launching.run_record import RunRecord, read_record
from accel_state.messages import did_you_mean

__all__ = ["app"]

_DEPTH = 4
"""Folders below the one that is named in which runs are looked for."""
_MOST_BYTES = 1 << 18
"""Of the end of a log, that are read for its last lines."""
_HEADER = b"==== "

app = App()


@dataclass(frozen=True, slots=True)
class Run:
    """A run.

    Attributes:
        name: its folder, as a path below the one that was searched.
        folder: the folder with the records and the logs.
        records: the records of its machines, in their order.
    """

    name: str
    folder: Path
    records: tuple[RunRecord, ...]

    @property
    def decisive(self) -> RunRecord:
        """The record that decides the state of the run: of a machine that runs, else of one where a rank failed."""
        for wanted in ("running", "failed", "killed"):
            for record in self.records:
                if record.state == wanted:
                    return record
        return self.records[0]

    @property
    def state(self) -> str:
        """In a few words."""
        record = self.decisive
        return record.state if record.rank is None else f"{record.state}, rank {record.rank}"


@app.command()
def runs(
    folder: Annotated[
        Path, typer.Argument(help="Folder that contains the --log_dir of runs; by default this one.")
    ] = Path("."),
    name: Annotated[str | None, typer.Argument(help="Run of the list to show, with its logs.")] = None,
    lines: Annotated[
        int, typer.Option("--lines", min=0, help="Number of lines to show from the end of a log.")
    ] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; times are seconds since 1970.")
    ] = False,
) -> int:
    """List the runs that accel launch --log_dir has recorded in a folder, the newest last.

    For each run: its state, when it began and how long it took, its ranks, its newest complete checkpoint, and the last
    lines of the rank that failed. A run's checkpoints are looked for in its log folder, beside it, and in a folder
    checkpoints there.

      accel launch --log_dir runs/first train.py
      accel runs runs
      accel runs runs first
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name the folder that --log_dir of accel launch is in")
    found = sorted(_runs(folder), key=lambda run: run.records[0].started)
    if name is not None:
        known = {run.name: run for run in found}
        if name not in known:
            raise ConfigError(
                f"there is no run {name} in {folder}"
                + did_you_mean(
                    name, known, f"; the runs are {', '.join(known)}" if known else "; it has none"
                )
            )
        found = [known[name]]
    if as_json:
        typer.echo(json.dumps([_as_data(run, lines) for run in found], indent=2))
    elif name is not None:
        _show_one(found[0], lines)
    elif found:
        _show_list(found, lines)
    else:
        show_text(f"no runs in {folder}; accel launch --log_dir {folder}/NAME records one", sys.stderr)
    return 0


def _runs(folder: Path) -> Iterator[Run]:
    for place, folders, files in os.walk(folder):
        here = Path(place)
        deep = len(here.relative_to(folder).parts)
        folders[:] = [] if deep == _DEPTH else sorted(each for each in folders if not each.startswith("."))
        names = sorted(each for each in files if each.startswith("run_") and each.endswith(".json"))
        records = [record for each in names if (record := read_record(here / each)) is not None]
        if records:
            records.sort(key=lambda record: record.machine_rank)
            yield Run(str(here.relative_to(folder)), here, tuple(records))


def _newest_checkpoint(run: Run) -> Path | None:
    from accel_ckpt import complete_checkpoints
    from accel_cli.checkpoint_facts import PREFIXES

    places = (run.folder, run.folder / "checkpoints", run.folder.parent / "checkpoints")
    found = [
        path
        for place in places
        if place.is_dir()
        for prefix in PREFIXES
        for path in complete_checkpoints(place, prefix)
    ]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _log(run: Run, rank: int) -> Path:
    return run.folder / f"rank_{rank}.log"


def _last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, of its last run alone; none if there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
            text = file.read().splitlines()
    except OSError:
        return []
    began = max((at for at, line in enumerate(text) if line.startswith(_HEADER)), default=-1)
    shown = [line.decode(errors="replace").rstrip() for line in text[began + 1 :]]
    return [line for line in shown if line][-count:] if count else []


def _took(run: Run) -> float | None:
    """Seconds from the first start to the last end, or until now; None: its end is not known."""
    first = min(record.started for record in run.records)
    if run.decisive.state == "running":
        return time.time() - first
    ends = [record.ended for record in run.records if record.ended is not None]
    return max(ends) - first if len(ends) == len(run.records) else None


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _show_list(found: Sequence[Run], lines: int) -> None:
    rows = []
    for run in found:
        checkpoint = _newest_checkpoint(run)
        first = run.records[0]
        rows.append(
            (
                run.name,
                run.state,
                when(first.started),
                _duration(_took(run)),
                str(first.world_size),
                "-" if checkpoint is None else checkpoint.name,
            )
        )
    show_table(
        ("run", "state", "began", "took", "ranks", "checkpoint"), rows, left=3, spare=("took", "began")
    )
    for run in found:
        rank = run.decisive.rank
        if rank is not None and (last := _last_lines(_log(run, rank), lines)):
            print()
            show_text(f"{run.name}, rank {rank} ({run.decisive.how}), from {_log(run, rank)}:")
            typer.echo("\n".join(f"  {line}" for line in last))


def _show_one(run: Run, lines: int) -> None:
    record, first = run.decisive, run.records[0]
    checkpoint = _newest_checkpoint(run)
    several = f" on {first.machines} machines" if first.machines > 1 else ""
    facts = {
        "state": run.state + (f": {record.how}" if record.how else ""),
        "exit code": "-" if record.code is None else str(record.code),
        "began": when(first.started),
        "took" if record.ended is not None else "runs for": _duration(_took(run)),
        "ranks": f"{first.world_size}{several}",
        "host": ", ".join(dict.fromkeys(each.host for each in run.records)),
        "folder": first.folder,
        "command": " ".join(first.command),
        "checkpoint": "none that is complete" if checkpoint is None else str(checkpoint),
    }
    show_facts({run.name: facts})
    for path in _logs(run):
        typer.echo(f"\n{path}:")
        typer.echo("\n".join(f"  {line}" for line in _last_lines(path, lines)) or "  (empty)")
    sys.stdout.flush()


def _logs(run: Run) -> list[Path]:
    """The logs of the ranks, that of the one that failed last, where it is seen."""
    found = sorted(run.folder.glob("rank_*.log"), key=lambda path: (len(path.name), path.name))
    failed = run.decisive.rank
    last = None if failed is None else _log(run, failed)
    return sorted(found, key=lambda path: path == last)


def _as_data(run: Run, lines: int) -> dict[str, Any]:
    record, first = run.decisive, run.records[0]
    checkpoint = _newest_checkpoint(run)
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": record.state,
        "rank": record.rank,
        "how": record.how,
        "code": record.code,
        "started": first.started,
        "ended": record.ended,
        "ranks": first.world_size,
        "machines": first.machines,
        "host": first.host,
        "command": list(first.command),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "last_lines": [] if record.rank is None else _last_lines(_log(run, record.rank), lines),
    }
