"""``python -m accel_cli.as_accelerate x.py``, or ``-m module``: run a program that finds this ``accelerate``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from accel_cli.as_accelerate import environment, install
from accel_state.environment import replace, snapshot
from accel_state.errors import AccelError

__all__ = ["main"]

_USAGE = "usage: python -m accel_cli.as_accelerate [-m] SCRIPT_OR_MODULE [its arguments]"


def main(arguments: Sequence[str]) -> int:
    """Run a script or a module in this process.

    Returns:
        The exit code: 2 if the command line is wrong; otherwise the program's own, which leaves by itself.
    """
    words = list(arguments)
    as_module = bool(words) and words[0] == "-m"
    if as_module:
        del words[0]
    if not words or words[0] in ("-h", "--help"):
        stream = sys.stdout if words else sys.stderr
        stream.write(f"{_USAGE}\n\nRun a program in which `import accelerate` is answered by accel.\n")
        return 0 if words else 2
    target = words[0]
    if target.startswith("-"):
        sys.stderr.write(f"accel: option {target} does not exist\n{_USAGE}\n")
        return 2
    if not as_module and not Path(target).exists():
        sys.stderr.write(f"accel: the script {target!r} does not exist\n")
        return 2
    try:
        install()
    except AccelError as error:
        sys.stderr.write(f"accel: {error}\n")
        return 2
    replace(environment(snapshot()))  # for what the program starts
    sys.argv = words
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
