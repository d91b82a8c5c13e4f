"""``accel config``: write the configuration file that ``accel launch`` reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from accel_cli import config_edit, config_show
from accel_cli.config_files import FileOption, file_to_read, is_accelerates
from accel_cli.dialect import App
from accel_cli.render import show_text
from accel_state.config.files import default_path, load, save
from accel_state.config.launch import LaunchConfig
from accel_state.environment import snapshot
from accel_state.errors import ConfigError

__all__ = ["app"]

app = App(
    help="Write, show and change the configuration file that accel launch reads; without a subcommand, ask questions.",
)


@app.callback(invoke_without_command=True)
def ask(context: typer.Context, config_file: FileOption = None) -> None:
    """Ask the questions, then write the file."""
    if context.invoked_subcommand is not None:
        if config_file is not None:
            raise ConfigError(
                f"--config_file must come after the subcommand: accel config {context.invoked_subcommand} "
                f"--config_file {config_file}"
            )
        return
    for name, stream in (("input", sys.stdin), ("output", sys.stdout)):
        if stream is None or not stream.isatty():
            raise ConfigError(
                f"questions need a terminal, but standard {name} is not one; accel config default writes a file "
                "without questions"
            )
    from accel_cli.wizard.session import ask_and_write, asker_for

    environ = snapshot()
    path = _writable(config_file)
    try:
        written = ask_and_write(path, environ, asker_for(environ))
    except KeyboardInterrupt:
        typer.echo("\nended; nothing is written", err=True)
        raise
    if not written:
        typer.echo("nothing is written")


@app.command()
def default(
    config_file: FileOption = None,
    mixed_precision: Annotated[str, typer.Option("--mixed_precision", help="no, fp16 or bf16.")] = "no",
) -> None:
    """Write a file for the accelerators of this machine, or for its CPU, without questions."""
    from accel_state.config.default_config import write_basic_config
    from accel_state.config.schema import schema_of

    path = _writable(config_file)
    schema_of(LaunchConfig).by_path["mixed_precision"].read(mixed_precision, "--mixed_precision")
    if path.exists():
        show_text(f"{path} exists and is not changed; remove it, or give another path with --config_file")
    elif write_basic_config(mixed_precision, path, accelerators=_accelerators()):
        show_text(f"wrote {path}")


@app.command()
def update(config_file: FileOption = None) -> None:
    """Read a configuration file of any version and write it in the current format."""
    source, path = file_to_read(config_file), _writable(config_file)
    show_text(f"wrote {save(load(source), path)}")


config_edit.add_commands(app)
config_show.add_commands(app)


def _accelerators() -> tuple[str, int]:
    """The accelerators that `accel launch` finds; none if torch is built for CPUs. Does not load torch."""
    from importlib import metadata  # its import takes a quarter of the time of `accel config --help`

    from accel_state.launching.hardware import find_accelerators

    try:
        built = metadata.version("torch")
    except metadata.PackageNotFoundError:
        built = ""
    found = find_accelerators(snapshot())
    return ("none", 0) if built.endswith("+cpu") else (found.kind, found.count)


def _writable(config_file: str | None) -> Path:
    """The file to write: this library's by default, and never Accelerate's own file."""
    ours = default_path(snapshot())
    if config_file is None:
        return ours
    path = Path(config_file).expanduser()
    if is_accelerates(path):
        raise ConfigError(
            f"{path} belongs to Accelerate and is not changed; leave --config_file out to write {ours}"
        )
    return path
