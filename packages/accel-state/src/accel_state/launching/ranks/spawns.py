"""Ranks spawned for a function of this process: new interpreters that receive the function by cloudpickle.

They are used where something does not survive a fork, such as an initialised CUDA device. A function that is defined in
a notebook's cell is sent by value, with the global names that it uses.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM
from types import CodeType, TracebackType
from typing import Any, Self

from accel_state.environment import snapshot
from accel_state.errors import LaunchError
from accel_state.launching.ranks.forks import FunctionRanks, exit_code_of
from accel_state.launching.ranks.processes import RankProcess, start_command

__all__ = ["SpawnedRanks", "main", "packed", "pickled"]

# The path comes first: the notebook may have added to it what the ranks need to find this package.
_BOOTSTRAP = """\
import pickle, sys
with open(sys.argv[1], "rb") as file:
    payload = pickle.load(file)
sys.path[:] = payload["path"]
from accel_state.launching.ranks.spawns import main
sys.exit(main(payload["call"]))
"""


def packed(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A call as bytes that ``main`` unpacks.

    Args:
        function: the function to call; if it is not importable, it is packed by value.
        args: its arguments.

    Raises:
        LaunchError: cloudpickle is not installed, or the function uses something that cannot be sent.
    """
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        raise LaunchError(
            "sending the function to new processes needs cloudpickle: pip install cloudpickle; or put the function "
            "into a script and start it with accel launch"
        ) from None
    name = getattr(function, "__qualname__", repr(function))
    try:
        call = pickled((function, args))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise LaunchError(
            f"{name} or its arguments cannot be sent to new processes ({error}); create what it needs inside the "
            "function"
        ) from error
    return call


def pickled(value: Any) -> bytes:
    """A value as bytes for ``pickle.loads``; objects without an import are packed by value, with their file names.

    cloudpickle 3.1.3 replaces the file name of a function, so that a traceback shows neither file nor source line.

    Raises:
        ImportError: cloudpickle is not installed.
    """
    import cloudpickle

    def reduced(code: CodeType) -> tuple[Any, ...]:
        maker, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
        return _code_of_file, (maker, parts, code.co_filename)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        dispatch_table = ChainMap({CodeType: reduced}, cloudpickle.Pickler.dispatch_table)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _code_of_file(maker: Callable[..., CodeType], parts: tuple[Any, ...], filename: str) -> CodeType:
    return maker(*parts).replace(co_filename=filename)


@dataclass
class SpawnedRanks(FunctionRanks):
    """Ranks that are new interpreters. The context holds the file with the function."""

    _file: Path | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        payload = pickle.dumps({"path": sys.path, "call": packed(self.function, self.args)})
        descriptor, name = tempfile.mkstemp(prefix="accel-call-")  # readable by this user only
        self._file = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.write(payload)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def start_rank(self, rank: int, environ: Mapping[str, str]) -> RankProcess:
        """Start an interpreter that calls the function."""
        return start_command(
            rank,
            (sys.executable, "-c", _BOOTSTRAP, str(self._file)),
            {**snapshot(), "PYTHONUNBUFFERED": "1", **environ},
            capture=True,
            reads_input=False,
            on_parent_death=SIGTERM if sys.platform == "win32" else SIGKILL,
        )


def main(call: bytes) -> int:
    """Make a call in a new process; returns the exit code.

    Args:
        call: the result of ``packed`` in the process that started this one.
    """
    try:
        function, args = pickle.loads(call)
    except Exception as error:  # whatever an import in the new process raises
        sys.stderr.write(
            f"the function cannot be loaded in a new process ({type(error).__name__}: {error}); what it uses must be "
            "importable there, or created inside the function\n"
        )
        return 1
    return exit_code_of(function, args)
