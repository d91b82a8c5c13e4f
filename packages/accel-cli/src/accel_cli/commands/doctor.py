"""``accel doctor``: find what on this machine, or between ranks, would stop or slow a training run."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from accel_cli.dialect import App
from accel_cli.progress import ProgressLine, progress
from accel_cli.render import show_text
from accel_cli.schema_command import SchemaCommand
from accel_state.environment import snapshot
from accel_state.errors import ConfigError
from accel_state.host.colors import colors_for
from accel_state.messages import folded

if TYPE_CHECKING:
    from accel_cli.doctor.checks import Finding

__all__ = ["app"]

_TIMEOUT = 60.0
"""Seconds: ranks on a busy machine import torch in 20."""
app = App()


class DoctorCommand(SchemaCommand):
    """The command of ``accel doctor``."""

    own = {
        "--checkpoint_dir DIR": "Folder for checkpoints; the speed of its disk is measured. Default: this folder.",
        "--timeout SECONDS": f"How long ranks wait for each other. Default: {_TIMEOUT:g}.",
        "--config_file FILE": "Configuration file to check.",
        "--json": "Print JSON.",
    }
    shared = {
        "--num_processes N": "Ranks of the world to check, over all machines.",
        "--num_machines N": "Machines; run the command on each, with its --machine_rank.",
    }


@app.command(cls=DoctorCommand, epilog="Flags of accel launch apply: accel launch --help-all.")
def doctor(context: typer.Context) -> int:
    """Find what would stop or slow a training run.

    It looks at this machine: versions, devices and drivers, CPUs and memory, system limits, clock, network, the disk
    for checkpoints, environment variables and the configuration file.

    With several processes, from flags, the configuration file or a scheduler, it also starts them as a small world:
    every collective is checked and timed, every link between ranks (of more than 16 ranks: neighbours at distances
    1, 2, 4, …) is measured, clocks and versions of machines are compared, and the rank, host or link at fault is named.
    Exit code 1: there is a problem.

      accel doctor --checkpoint_dir /data/checkpoints
      accel doctor --num_processes 2 --cpu
      accel doctor --num_machines 2 --num_processes 16 --machine_rank 0 --main_process_ip 10.0.0.1
    """
    flags = DoctorCommand.read(context.args)
    if flags.rest:
        raise ConfigError(f"accel doctor takes flags only, and {flags.rest[0]!r} is not a flag")
    timeout = _seconds(flags.others.get("timeout"))
    config_file = flags.others.get("config_file")
    if config_file is not None and not Path(config_file).expanduser().exists():
        raise ConfigError(f"--config_file {config_file} does not exist; `accel config` creates one")
    folder = Path(flags.others.get("checkpoint_dir") or ".")
    if not folder.is_dir():
        raise ConfigError(f"--checkpoint_dir {folder} is not a folder; make it, or name another")
    configuration = _configuration(config_file)
    with progress("loading torch") as shown:
        from accel_cli.doctor.place import find_place

        found = find_place(flags, snapshot()) if configuration.status == "ok" else None
        report = _Report("json" in flags.others, of_world=found is not None)
        if found is None or found.tells:
            for finding in _this_machine(folder, shown):
                report.add(finding, shown)
            report.add(configuration, shown)
    measured: dict[str, Any] = {}
    if found is not None:
        from accel_cli.doctor.world import examine_world

        for finding in found.names:
            report.add(finding)
        if not found.names:
            # Without the progress line: the output of ranks would be mixed with it.
            more, measured = examine_world(found.config, found.place, snapshot(), timeout, report.tell)
            for finding in more:
                report.add(finding)
    findings = report.findings
    if "json" in flags.others:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"findings": rows, "world": measured} if found is not None else rows, indent=2))
    else:
        report.end()
    return int(any(finding.status == "problem" for finding in findings))


def _this_machine(folder: Path, shown: ProgressLine) -> Iterator[Finding]:
    from accel_cli.doctor.checks import examine_here

    try:
        yield from examine_here(folder, snapshot(), shown.now)
    except OSError as error:
        raise ConfigError(
            f"--checkpoint_dir {folder} cannot be written ({error.strerror}); name another"
        ) from error


def _seconds(text: str | None) -> float:
    try:
        seconds = _TIMEOUT if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86400:
        raise ConfigError(f"--timeout {text}: expected seconds, from 1 to 86400")
    return seconds


class _Report:
    """Prints each finding as soon as it is known.

    Args:
        silent: collect them alone, for JSON.
        of_world: the findings are also those of a world of ranks.
    """

    def __init__(self, silent: bool, *, of_world: bool) -> None:
        self.findings: list[Finding] = []
        self.silent = silent
        self.of_world = of_world
        self.width = len("speed of ranks" if of_world else "configuration")

    def add(self, finding: Finding, shown: ProgressLine | None = None) -> None:
        """Report a finding; ``shown`` is the progress that its line replaces."""
        self.findings.append(finding)
        if self.silent:
            return
        with (shown or ProgressLine()).paused():
            self._print(finding)

    def tell(self, text: str) -> None:
        """Show the progress of the world, on a terminal only."""
        if sys.stderr.isatty():
            sys.stdout.flush()
            show_text(f"accel doctor: {text}", sys.stderr)

    def end(self) -> None:
        """Print the last line."""
        problems = sum(finding.status == "problem" for finding in self.findings)
        warnings = sum(finding.status == "warning" for finding in self.findings)
        more = (
            "accel test checks training" if self.of_world else "--num_processes N checks a world of processes"
        )
        show_text(f"problems: {problems}, warnings: {warnings}; {more}")

    def _print(self, finding: Finding) -> None:
        colors = colors_for()
        marks = {
            "ok": colors("green", "ok     "),
            "warning": colors("yellow", "warning"),
            "problem": colors("red", "PROBLEM"),
        }
        indent = " " * (self.width + 11)
        lines = folded(finding.found, sys.stdout, indent)
        print(f"{marks[finding.status]}  {finding.topic:<{self.width}}  {lines.lstrip()}", flush=True)
        if finding.advice:
            print(folded(finding.advice, sys.stdout, indent), flush=True)


def _configuration(config_file: str | None) -> Finding:
    from accel_cli.doctor.checks import Finding
    from accel_state.config.merge import resolve

    try:
        resolved = resolve(config_file)
    except ConfigError as error:
        advice = "accel config validate shows every mistake with its line"
        return Finding("configuration", "problem", str(error), advice)
    return Finding(
        "configuration", "ok", str(resolved.file) if resolved.file else "no file; flags and variables decide"
    )
