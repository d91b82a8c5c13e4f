"""``accel doctor``: find what on this machine would stop or slow a training run."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from accel_cli.colors import colors_for
from accel_cli.dialect import App
from accel_cli.help_pages import page_width
from accel_state.environment import snapshot
from accel_state.errors import ConfigError

__all__ = ["app"]

app = App()


@app.command()
def doctor(
    checkpoint_dir: Annotated[
        str, typer.Option("--checkpoint_dir", help="Where checkpoints go; the speed of its disk is measured.")
    ] = ".",
    config_file: Annotated[
        str | None, typer.Option("--config_file", help="Configuration file to check.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Find what on this machine would stop or slow a training run.

    It looks at versions, devices and drivers, CPUs and memory, limits of the system, the network, the disk for
    checkpoints, environment variables and the configuration file. Exit code 1: there is a problem. accel test checks a
    world of processes.
    """
    from accel_cli.doctor.checks import Finding, examine
    from accel_cli.doctor.machine import gather_machine

    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise ConfigError(f"--checkpoint_dir {checkpoint_dir} is not a folder; make it, or name another")
    environ = snapshot()
    try:
        machine = gather_machine(folder, environ)
    except OSError as error:
        raise ConfigError(
            f"--checkpoint_dir {checkpoint_dir} cannot be written ({error.strerror}); name another"
        ) from error
    findings = [*examine(machine), Finding("configuration", *_configuration(config_file))]
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        colors = colors_for()
        marks = {
            "ok": colors("green", "ok     "),
            "warning": colors("yellow", "warning"),
            "problem": colors("red", "PROBLEM"),
        }
        width = max(len(finding.topic) for finding in findings)
        indent = " " * (width + 11)
        for finding in findings:
            typer.echo(f"{marks[finding.status]}  {finding.topic:<{width}}  {finding.found}")
            if finding.advice:
                typer.echo(
                    textwrap.fill(
                        finding.advice, page_width(), initial_indent=indent, subsequent_indent=indent
                    )
                )
        problems = sum(finding.status == "problem" for finding in findings)
        warnings = sum(finding.status == "warning" for finding in findings)
        typer.echo(f"problems: {problems}, warnings: {warnings}; accel test checks a world of processes")
    return int(any(finding.status == "problem" for finding in findings))


def _configuration(config_file: str | None) -> tuple[str, str, str]:
    from accel_state.config.merge import resolve

    try:
        resolved = resolve(config_file)
    except ConfigError as error:
        return "problem", str(error), "accel config validate shows every mistake with its line"
    return "ok", str(resolved.file) if resolved.file else "no file; flags and variables decide", ""
