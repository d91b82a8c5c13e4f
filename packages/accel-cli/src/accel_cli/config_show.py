"""``accel config show`` and ``validate``: the values in effect, where they come from, and the mistakes in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from accel_cli.config_files import file_to_read
from accel_cli.dialect import App
from accel_cli.help_pages import show_error
from accel_cli.render import as_text, show_text
from accel_cli.schema_command import SchemaCommand
from accel_state.config.checks import find_contradictions
from accel_state.config.files import FileLayer, default_path, find_mistakes
from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import Resolved, resolve
from accel_state.config.schema import BoundOption, flatten, schema_of, value_of
from accel_state.config.sources import Origin, Source
from accel_state.environment import snapshot
from accel_state.errors import AccelError
from accel_state.host.colors import Colors, colors_for
from accel_state.messages import HIDDEN, folded, without_secrets

__all__ = ["add_commands", "effective_options", "mistakes_of"]


class ShowCommand(SchemaCommand):
    """The command of ``accel config show``."""

    own = {
        "--config_file FILE": "Configuration file to read; by default the one that accel launch reads.",
        "--origin": "Show where each value comes from: a line of the file, a variable, a flag, or the default.",
        "--json": "Print JSON.",
    }


class EffectiveOption(NamedTuple):
    """An option with the value that it has.

    Attributes:
        bound: the option.
        name: its key in a file, or its path if files cannot have it.
        value: its value as data; secrets are hidden.
        source: where the value comes from.
    """

    bound: BoundOption
    name: str
    value: Any
    source: Source


def add_commands(app: App) -> None:
    """Add ``show`` and ``validate`` to ``accel config``."""
    app.command("show", cls=ShowCommand, epilog="accel launch --help-all lists the flags.")(show)
    app.command("validate")(validate)


def show(context: typer.Context) -> int:
    """Show the configuration that accel launch would use with the same flags.

    That is the defaults, then the file, then the environment, then the flags. A script after the flags is ignored, so
    launch can be replaced by config show.
    """
    flags = ShowCommand.read(context.args)
    environ = snapshot()
    resolved = resolve(flags.others.get("config_file"), environ, flags)
    origins = "origin" in flags.others
    if "json" in flags.others:
        print(json.dumps(_as_data(resolved, origins), indent=2))
        return 0
    for note in resolved.notes:
        show_text(f"accel: {note}", sys.stderr)
    sys.stdout.write(_as_text(resolved, origins, str(default_path(environ)), colors_for()))
    return 0


def validate(
    file: Annotated[
        str | None, typer.Argument(help="The file; by default the one that accel launch reads.")
    ] = None,
    config_file: Annotated[str | None, typer.Option("--config_file", help="The same as FILE.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check a configuration file, and report all mistakes in it."""
    named = file or config_file
    path = file_to_read(named)
    layer, errors = mistakes_of(path)
    notes = list(layer.notes) if layer is not None else []
    if layer is not None and not errors:
        notes += _on_this_machine(path)
    if as_json:
        facts = {"file": str(path), "valid": not errors, "errors": errors, "notes": notes}
        print(json.dumps(facts, indent=2))
        return 2 if errors else 0
    if errors:
        for message in errors:
            show_error("accel config validate", message)
        count = f"{len(errors)} errors" if len(errors) > 1 else "1 error"
        show_text(f"{path}: {count}", sys.stderr)
        return 2
    assert layer is not None
    kind = "a local run" if issubclass(layer.root, LaunchConfig) else "a SageMaker job"
    show_text(f"{path} is valid: {kind}, {len(layer.values)} options set")
    for note in notes:
        show_text(f"note: {note}")
    return 0


def effective_options(resolved: Resolved) -> Iterator[EffectiveOption]:
    """The options that have a value, and those that were unset by a flag.

    Defaults of a section are left out unless the run uses the section.
    """
    config = resolved.config
    for bound in schema_of(type(config)).options:
        value, source = value_of(config, bound), resolved.sources.of(bound.path)
        quiet = source.origin is Origin.DEFAULT
        if quiet and (value is None or (bound.section and not config.is_active(bound.section))):
            continue
        data: Any = None if value is None else bound.option_type.dump(value)
        if bound.about.secret and data is not None:
            data = HIDDEN
        yield EffectiveOption(
            bound, bound.file_path if bound.keys else bound.path, without_secrets(data), source
        )


def mistakes_of(path: Path) -> tuple[FileLayer | None, list[str]]:
    """Read a configuration file; returns its contents and a message for each mistake."""
    layer, problems = find_mistakes(path)
    errors = [str(problem) for problem in problems]
    if layer is None or not issubclass(layer.root, LaunchConfig):
        return layer, errors
    values = flatten(layer.root()) | layer.values
    sources = {
        option: Source(Origin.FILE, place.key, str(path), place.line)
        for option, place in layer.places.items()
    }
    errors += [str(problem) for problem in find_contradictions(values, sources, layer.root)]
    if not errors:
        from accel_state.launching.deepspeed_file import check_deepspeed_file
        from accel_state.launching.engines import check_available

        try:
            resolved = resolve(path, {})
            check_available(resolved)
            check_deepspeed_file(resolved)
        except AccelError as error:
            errors.append(str(error))
    return layer, errors


def _on_this_machine(path: Path) -> list[str]:
    """Problems with the file on this machine, which may not be the machine that it is for."""
    from accel_state.launching.hardware import find_accelerators
    from accel_state.launching.plan import plan_world

    resolved = resolve(path, {})
    if not isinstance(resolved.config, LaunchConfig) or resolved.config.use_cpu:
        return []
    try:
        plan_world(resolved.config, find_accelerators(snapshot()), resolved.sources)
    except AccelError as error:
        return [f"this machine cannot run it: {error}"]
    return []


def _as_data(resolved: Resolved, origins: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in effective_options(resolved):
        values[option.name] = option.value
        if origins:
            source = option.source
            where = {"file": source.file or None, "line": source.line, "name": source.name or None}
            values[option.name] = {
                "value": option.value,
                "origin": source.origin.name.lower(),
                **{name: fact for name, fact in where.items() if fact is not None},
            }
    return {
        "file": None if resolved.file is None else str(resolved.file),
        "compute_environment": resolved.config.compute_environment,
        "values": values,
        "notes": list(resolved.notes),
    }


def _as_text(resolved: Resolved, origins: bool, default: str, colors: Colors) -> str:
    rows = list(effective_options(resolved))
    texts = ["(unset)" if row.value is None else as_text(row.value) for row in rows]
    wide, wider = max(len(row.name) for row in rows), min(40, max(map(len, texts)))
    file = f"# {resolved.file}" if resolved.file is not None else f"# no configuration file ({default})"
    lines = [colors("dim", folded(file, sys.stdout).replace("\n", "\n# "))]
    for row, text in zip(rows, texts, strict=True):
        name = colors("cyan", row.name) + " " * (wide - len(row.name))
        if not origins:
            lines.append(f"{name}  {text}")
            continue
        unset = row.source.origin is Origin.DEFAULT
        where = colors("dim", str(row.source)) if unset else str(row.source)
        lines.append(f"{name}  {text:<{wider}}  {where}")
    return "\n".join(lines) + "\n"
