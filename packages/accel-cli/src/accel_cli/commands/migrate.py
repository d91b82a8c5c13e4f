"""``accel migrate``: rewrite scripts for this library."""

from __future__ import annotations

import dataclasses
import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

from accel_cli.dialect import App
from accel_cli.render import difference
from accel_state.host.colors import colors_for
from accel_state.messages import folded
from accel_state.whole_files import write_whole

__all__ = ["app"]

app = App()


@app.command()
def migrate(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Files or folders: Python sources, shell scripts, configuration files."),
    ],
    write: Annotated[
        bool, typer.Option("--write", help="Write the files; without it, only the diff is shown.")
    ] = False,
) -> int:
    """Rewrite imports of accelerate, and calls of its command, for this library.

    What has no counterpart, and each line of a plain PyTorch training loop that changes, gets a note with what to write
    there. The diff goes to standard output, remarks to standard error. A file with a line that is not understood is not
    changed. Exit code 1: at least one file was refused.
    """
    from accel_cli.migration.files import find_files, migrate_file, starts_of_refused

    shown, warned = colors_for(), colors_for(sys.stderr)
    changed = refused = looked = 0
    migrations = {path: migrate_file(path) for path in find_files(paths)}
    unchanged = {path.resolve() for path, migration in migrations.items() if migration.refusals}
    for path, migration in migrations.items():
        looked += 1
        if remarks := starts_of_refused(path, migration.before, unchanged):
            migration = dataclasses.replace(migration, after=migration.before, notes=remarks)
        for remark in migration.notes:
            _remark(path, remark.line, warned("yellow", "note"), remark.text)
        for remark in migration.refusals:
            _remark(path, remark.line, warned("red", "not understood"), remark.text)
        refused += bool(migration.refusals)
        if migration.changed:
            changed += 1
            names = (f"a/{path}", f"b/{path}")
            sys.stdout.write(difference(migration.before, migration.after, names, shown))
            if write:
                _replace(path, migration.after)
    _summarize(looked, changed, refused, write)
    return int(refused > 0)


def _remark(path: Path, line: int, kind: str, text: str) -> None:
    sys.stderr.write(folded(f"{path}:{line}: {kind}: {text}\n", sys.stderr))


def _summarize(looked: int, changed: int, refused: int, write: bool) -> None:
    done = "written" if write else "would change; --write writes them"
    sys.stderr.write(
        f"{looked} {'file' if looked == 1 else 'files'} read, {changed} {done}, {refused} refused\n"
    )


def _replace(path: Path, text: str) -> None:
    """Write the whole file, or leave the old one; its mode stays, and so does a link to it."""
    target = path.resolve()
    mode = stat.S_IMODE(target.stat().st_mode)
    write_whole(target, text)
    target.chmod(mode)
