"""The process that becomes a rank, for launches that watch their ranks from the first moment or keep spares warm.

It runs the script as ``python script.py`` does: as ``__main__``, with its folder first on the path, and without frames
of its own in tracebacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from accel_state import environment
from accel_state.monitoring.answers import attach
from accel_state.whole_files import write_whole

__all__ = ["become", "main", "script_frames", "wait_for_work", "write_error"]

SPARE = "--spare"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_OWN = (__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")


def main(words: Sequence[str]) -> None:
    """Run a target, now or when it is given.

    Args:
        words: kind, name and arguments of the target; or ``--spare`` and the descriptor of the launcher's socket.
    """
    if words[0] == SPARE:
        words = wait_for_work(int(words[1]), cpu=words[2] == "cpu")
    environ = environment.snapshot()
    attach(environ)
    try:
        become(words[0], words[1], words[2:])
    except Exception as error:
        if environ.get(_ERROR_FILE):
            write_error(Path(environ[_ERROR_FILE]), error)
        raise


def write_error(path: Path, error: BaseException) -> None:
    """Write an error to the file of this rank that torch's agent reads, as torch's ``record`` does.

    ``origin`` is ours: the first of a chain of exceptions, which names the cause. An error that another rank's end
    causes may have followed one of the script, or may have led to one.
    """
    chain: list[BaseException] = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    origin = chain[-1]
    about = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time())),
        "origin": f"{type(origin).__name__}: {origin}",
    }
    text = json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": about}})
    with contextlib.suppress(OSError):  # the agent has removed its folder: nobody reads the error any more
        write_whole(path, text)


def wait_for_work(descriptor: int, *, cpu: bool) -> list[str]:
    """Load torch, check this machine, and wait until the launcher needs this process; exits if it never does.

    Args:
        descriptor: a connected socket.
        cpu: ranks compute on the CPU.

    Returns:
        kind, name and arguments of the target.
    """
    from accel_state.launching.machines.health import find_device_faults, find_faults

    with socket.socket(fileno=descriptor) as launcher:
        # The device is known, and may be used, only once a rank is replaced.
        fault = next(find_faults(1, cpu=True), "")
        if not fault:
            import_module("accel_state.world.process")  # what ranks load first
        launcher.sendall(_answer(fault))
        work = launcher.makefile("rb").readline()
        if not work:  # the launcher has ended
            sys.exit(0)
        task = json.loads(work)
        environment.replace(task["environment"])
        if task["cpus"] and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, task["cpus"])
        fault = "" if cpu else next(find_device_faults(int(task["environment"].get("LOCAL_RANK", "0"))), "")
        launcher.sendall(_answer(fault))
        if fault:
            sys.exit(1)
    if not task["reads_input"]:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    words: list[str] = task["target"]
    return words


def _answer(fault: str) -> bytes:
    return json.dumps({"fault": fault}).encode() + b"\n"


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


def script_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the script on, without the frames of `become`."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN:
        trace = trace.tb_next
    return trace


def _show_without_own_frames(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> Any:
    sys.__excepthook__(kind, error.with_traceback(script_frames(trace)), error.__traceback__)


if __name__ == "__main__":
    main(sys.argv[1:])
