"""``accel test``: a short real run in the configured world, compared with a plain computation."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_cli.colors import colors_for
from accel_cli.commands.launch import LaunchCommand
from accel_cli.dialect import App
from accel_cli.help_pages import help_page
from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.environment import snapshot
from accel_state.errors import ConfigError

__all__ = ["app", "main"]

_OWN = {"config_file": True, "help": False, "-h": False, "json": False}
_USAGE = "accel test [flags of accel launch]"
_ABOUT = """\
Start the configured world and check it: processes and devices, collectives, that each sample is read once, that \
training has the losses and weights of one process, and that saving and resuming are exact. It takes a few seconds and \
needs no data.

  accel test
  accel test --config_file run.yaml
  accel test --cpu --num_processes 2 --use_fsdp
"""
_ROWS = [
    ("--config_file FILE", "Configuration file to read; by default the one that launch reads."),
    ("--json", "Print the results as JSON."),
    ("-h, --help", "Show this help."),
]
_MODULE = "accel_cli.sanity.world"


class TestCommand(LaunchCommand):
    """The flags of ``accel launch``, and ``--json``."""

    def invoke(self, ctx: Any) -> int:
        """Run ``main``."""
        return main(ctx.args)


app = App()


@app.command(cls=TestCommand)
def test_world() -> None:
    """Check the configured world: collectives, data, training, saving."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: flags.

    Returns:
        0 if every check passed; 1 if one failed; else the exit code of the launcher, which says what is wrong.

    Raises:
        ConfigError: there is a word that is no flag.
    """
    flags = parse_flags(arguments, _OWN)
    if not {"help", "-h"}.isdisjoint(flags.others):
        epilog = "All flags of accel launch apply: accel launch --help-all."
        sys.stdout.write(help_page(_USAGE, _ABOUT, [("flags", _ROWS)], epilog=epilog))
        return 0
    if flags.rest:
        raise ConfigError(
            f"accel test takes flags only, and {flags.rest[0]!r} is none; to start a script: accel launch "
            f"{flags.rest[0]}"
        )
    # A wrong flag or file is this command's error, and not that of the launcher below.
    resolve(flags.others.get("config_file"), snapshot(), flags)
    words = [word for word in arguments if word != "--json"]
    with tempfile.TemporaryDirectory(prefix="accel-test-") as folder:
        # A process of its own: a launch of one process takes the place of the launcher.
        command = [sys.executable, "-m", "accel_cli", "launch", *words, "-m", _MODULE, folder]
        code = subprocess.call(command)
        path = Path(folder) / "results.json"
        results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    code = code or int(any(result["problems"] for result in results))
    if "json" in flags.others:
        print(json.dumps({"passed": code == 0, "checks": results}, indent=2))
    elif results:
        _show(results, code)
    return code


def _show(results: list[dict[str, Any]], code: int) -> None:
    colors = colors_for()
    width = max(len(result["name"]) for result in results)
    for result in results:
        ok = not result["problems"]
        mark = colors("green", "ok    ") if ok else colors("red", "FAILED")
        print(f"{mark}  {result['name']:<{width}}  {result['seconds']:6.2f} s  {result['found']}".rstrip())
        for problem in result["problems"]:
            print(f"        {problem}")
    if code == 0:
        print("Everything that was checked is right; this configuration is ready for training.")
    elif any(result["problems"] for result in results):
        print(
            "A check failed: training in this world would be wrong. accel env shows what to add to a report."
        )
    else:
        print(f"The world ended with exit code {code} after these checks; the error is above.")
