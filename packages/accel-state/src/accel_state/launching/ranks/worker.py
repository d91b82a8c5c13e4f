"""The process that becomes a rank, for launches that watch their ranks from the first moment.

It runs the script as ``python script.py`` does: as ``__main__``, with its folder first on the path, and without frames
of its own in tracebacks.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

from accel_state import environment
from accel_state.monitoring.answers import attach

__all__ = ["become", "main"]

_OWN = (__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")


def main(words: Sequence[str]) -> None:
    """Run a target.

    Args:
        words: its kind, name and arguments.
    """
    attach(environment.snapshot())
    become(words[0], words[1], words[2:])


def become(kind: str, name: str, args: Sequence[str]) -> None:
    """Run a script or module as the main program of this process.

    Args:
        kind: ``script`` or ``module``.
        name: its path, or its dotted name.
        args: its arguments.
    """
    sys.argv = [name, *args]
    path = os.path.abspath(name)  # as the interpreter names it in tracebacks
    sys.excepthook = _show_without_own_frames
    if kind == "module":
        sys.path[0] = os.getcwd()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif os.path.isdir(name):  # with a __main__.py
        del sys.path[0]
        runpy.run_path(path, run_name="__main__")
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(name))
        program = ModuleType("__main__")
        program.__file__ = path
        program.__loader__ = SourceFileLoader("__main__", path)
        program.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = program
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, program.__dict__)


def _show_without_own_frames(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> Any:
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main(sys.argv[1:])
