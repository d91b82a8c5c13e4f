"""``accel to-fsdp2``: convert a configuration file from FSDP version 1 to version 2."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from accel_cli.config_files import is_accelerates
from accel_cli.dialect import App
from accel_cli.render import as_text, difference, show_text
from accel_cli.yaml_edits import rewritten
from accel_state.config.files import default_path, parse_text, read_layer, read_text, write_text
from accel_state.config.fsdp_conversion import Change, convert_fsdp_options, converted
from accel_state.environment import snapshot
from accel_state.errors import AccelError, ConfigError
from accel_state.host.colors import Colors, colors_for

__all__ = ["app"]

_SECTION = "fsdp_config"
_SAID = {
    "keep": ("kept", "dim"),
    "set": ("changed", "cyan"),
    "rename": ("renamed", "cyan"),
    "drop": ("dropped", "yellow"),
    "add": ("added", "green"),
}

app = App()


@app.command()
def to_fsdp2(
    config_file: Annotated[Path, typer.Option("--config_file", help="The file to convert; YAML or JSON.")],
    output_file: Annotated[
        Path | None,
        typer.Option("--output_file", help="The file to write: JSON if it ends in .json, else YAML."),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Change the file itself, or replace an existing --output_file."),
    ] = False,
) -> None:
    """Convert a configuration file, Accelerate's or ours, from FSDP version 1 to version 2.

    Reports for every FSDP option whether it is kept, renamed or dropped, and why, and shows the difference. Everything
    else in the file, comments included, stays.
    """
    source = config_file.expanduser()
    text = read_text(source)
    data = parse_text(text, source)
    changes = convert_fsdp_options(_old_options(data, source), str(source))
    target = (output_file or source).expanduser()
    changed = {**data, _SECTION: converted(list(changes))}
    new, notes = rewritten(text, target, _SECTION, changes, changed)
    colors = colors_for()
    typer.echo(_report(changes, notes, colors))
    typer.echo(difference(text, new, (str(source), str(target)), colors, context=1), nl=False)
    if output_file is None and not overwrite:
        given = (
            f"--output_file {default_path(snapshot())}"
            if is_accelerates(source)
            else "--output_file, or --overwrite"
        )
        show_text(f"nothing is written; pass {given} to write it", sys.stderr)
        return
    _refuse_to_replace(target, overwrite)
    write_text(target, new)
    show_text(f"wrote {target}")
    _check(target)


def _old_options(data: dict[str, Any], source: Path) -> dict[str, Any]:
    options = data.get(_SECTION)
    if not options:
        raise ConfigError(
            f"{source} has no {_SECTION}, so there is nothing to convert; distributed_type is "
            f"{data.get('distributed_type', 'not set')}. accel config makes a file that uses FSDP"
        )
    if not isinstance(options, dict):
        raise ConfigError(f"{source}: {_SECTION} is {options!r}; expected a mapping of options to values")
    version = str(options.get("fsdp_version", options.get("version", 1)))
    if version == "2":
        old = [
            name for name in options if name.removeprefix("fsdp_") in ("sharding_strategy", "use_orig_params")
        ]
        hint = f"; {', '.join(old)} are of version 1: set fsdp_version: 1 and run this again" if old else ""
        raise ConfigError(f"{source} is of FSDP version 2 already; use it as it is{hint}")
    if version not in ("1", "None"):
        raise ConfigError(
            f"{source}: {_SECTION}.fsdp_version is {version}; expected 1 (or 2, after conversion)"
        )
    return options


def _report(changes: Sequence[Change], notes: Sequence[str], colors: Colors) -> str:
    lines = []
    columns = max(60, min(120, shutil.get_terminal_size().columns))
    width = max(len(what) for what, _ in _SAID.values())
    for change in changes:
        said, color = _SAID[change.what]
        row = f"{colors(color, said.ljust(width))}  {_key_and_value(change)}"
        style = "yellow" if change.warn else "dim"
        if change.why and not sys.stdout.isatty():
            row += f" - {change.why}"
        for part in textwrap.wrap(change.why, columns - width - 4) if sys.stdout.isatty() else ():
            row += f"\n{' ' * (width + 4)}{colors(style, part)}"
        lines.append(row)
    return "\n".join([*lines, *(colors("yellow", f"note: {note}") for note in notes)])


def _key_and_value(change: Change) -> str:
    before, after = as_text(change.before), as_text(change.value)
    match change.what:
        case "add":
            return f"{change.name}: {after}"
        case "keep" | "drop":
            return f"{change.key}: {before}"
        case "set":
            return f"{change.key}: {before} -> {after}"
        case _:
            return f"{change.key}: {before} -> {change.name}: {after}"


def _refuse_to_replace(target: Path, overwrite: bool) -> None:
    if is_accelerates(target):
        raise ConfigError(
            f"nothing is written: {target} belongs to Accelerate and is not changed; pass --output_file "
            f"{default_path(snapshot())}, which accel launch reads first"
        )
    if target.exists() and not overwrite:
        raise ConfigError(
            f"nothing is written: {target} exists; name another --output_file, or pass --overwrite to replace it"
        )


def _check(target: Path) -> None:
    """Print a note if `accel launch` would refuse the file, which need not be caused by the conversion."""
    try:
        read_layer(target)
    except AccelError as error:
        show_text(f"note: accel launch would refuse the file: {error}", sys.stderr)
