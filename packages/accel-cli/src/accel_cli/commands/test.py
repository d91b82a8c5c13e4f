"""``accel test``: a short real run in the configured world, compared with a plain computation."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from accel_cli.dialect import App
from accel_cli.render import show_text
from accel_cli.schema_command import SchemaCommand
from accel_state.config.merge import resolve
from accel_state.environment import snapshot
from accel_state.errors import ConfigError
from accel_state.host.colors import colors_for
from accel_state.launching.ranks.command import run_command
from accel_state.messages import folded

__all__ = ["app", "main"]

_MODULE = "accel_cli.sanity.world"
_WIDTH = len("processes and devices")
"""Of the longest name of a check."""


app = App()


class TestCommand(SchemaCommand):
    """The command of ``accel test``."""

    own = {
        "--config_file FILE": "Configuration file to read; by default the one that launch reads.",
        "--json": "Print the results as JSON.",
    }


@app.command(cls=TestCommand, epilog="All flags of accel launch apply: accel launch --help-all.")
def test_world(context: typer.Context) -> int:
    """Start the configured world and check it.

    Checked are processes and devices, collectives, that each sample is read once, that training has the losses and
    weights of one process, and that saving and resuming are exact. It takes a few seconds and needs no data.

      accel test
      accel test --config_file run.yaml
      accel test --cpu --num_processes 2 --use_fsdp
    """
    return main(context.args)


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: flags.

    Returns:
        0 if every check passed; 1 if one failed; else the exit code of the launcher, which has reported the error.

    Raises:
        ConfigError: a word is not a flag.
    """
    flags = TestCommand.read(arguments)
    if flags.rest:
        raise ConfigError(
            f"accel test takes flags only, and {flags.rest[0]!r} is not a flag; to start a script: accel launch "
            f"{flags.rest[0]}"
        )
    # A wrong flag or file is this command's error, and not that of the launcher below.
    resolve(flags.others.get("config_file"), snapshot(), flags)
    words = [word for word in arguments if word != "--json"]
    silent = "json" in flags.others
    if not silent and sys.stderr.isatty():
        show_text("accel test: starting the world; its ranks load torch first", sys.stderr)
    with tempfile.TemporaryDirectory(prefix="accel-test-") as folder:
        # In a separate process, because a launch of one process replaces the launcher.
        command = (sys.executable, "-m", "accel_cli", "launch", *words, "-m", _MODULE, folder)
        path = Path(folder) / "results.json"
        results: list[dict[str, Any]] = []

        def show_new() -> None:
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
            new, results[:] = found[len(results) :], found
            for result in [] if silent else new:
                _show(result)

        code = run_command(command, snapshot(), launcher=True, reads_input=False, meanwhile=show_new)
        show_new()
    code = 128 - code if code < 0 else code or int(any(result["problems"] for result in results))
    if silent:
        print(json.dumps({"passed": code == 0, "checks": results}, indent=2))
    elif results:
        show_text(_verdict(results, code))
    return code


def _show(result: dict[str, Any]) -> None:
    colors = colors_for()
    mark = colors("red", "FAILED") if result["problems"] else colors("green", "ok    ")
    found = folded(result["found"], sys.stdout, " " * (_WIDTH + 21)).lstrip()
    print(f"{mark}  {result['name']:<{_WIDTH}}  {result['seconds']:6.2f} s  {found}".rstrip(), flush=True)
    for problem in result["problems"]:
        print(folded(problem, sys.stdout, " " * 8), flush=True)


def _verdict(results: list[dict[str, Any]], code: int) -> str:
    if code == 0:
        return "Everything that was checked is right; this configuration is ready for training."
    if any(result["problems"] for result in results):
        return (
            "A check failed: training in this world would be wrong. accel env shows what to add to a report."
        )
    return f"The world ended with exit code {code} after these checks; the error is above."
