"""Ranks spawned for a function of this process: new interpreters that receive the function by cloudpickle.

They are used where something does not survive a fork, such as an initialised CUDA device. A function that is defined in
a notebook's cell is sent by value, with the global names that it uses.
"""

from __future__ import annotations

import io
import os
import pickle
import secrets
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM
from string import Template
from types import CodeType, TracebackType
from typing import Any

from accel_state.environment import snapshot
from accel_state.errors import LaunchError
from accel_state.launching.ranks.forks import exit_code_of, world_variables
from accel_state.launching.ranks.processes import start_command
from accel_state.launching.ranks.supervisor import SupervisedProcess
from accel_state.launching.watching.output import Console, RankOutput

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
class SpawnedRanks:
    """The ranks of one launch. The context holds the file with the function.

    Attributes:
        function, args: the call that each rank makes.
        local_size: ranks on this node.
        world_size: total number of ranks.
        first_rank: global rank of this node's first rank.
        node_rank: index of this node.
        master_addr: address of rank 0.
        variables: environment variables of the ranks, in addition to those that describe the world.
        prefix: prefix of each output line.
        max_restarts: how often the ranks are restarted.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    local_size: int
    world_size: int
    first_rank: int = 0
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    variables: Mapping[str, str] = field(default_factory=dict)
    prefix: Template = field(default_factory=lambda: Template("[rank ${rank}] "))
    max_restarts: int = 0
    secret: str = field(default_factory=lambda: secrets.token_hex(32), init=False, repr=False)
    _file: Path | None = field(default=None, init=False)

    def __enter__(self) -> SpawnedRanks:
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

    def start(self, attempt: int, port: int, console: Console) -> list[SupervisedProcess]:
        """Start all ranks of this node.

        Args:
            attempt: number of restarts so far.
            port: port of rank 0.
            console: destination of the output.

        Raises:
            LaunchError: a process cannot be started.
        """
        members: list[SupervisedProcess] = []
        for local_rank in range(self.local_size):
            rank = self.first_rank + local_rank
            world = world_variables(self, local_rank, attempt, port)
            environ = {**snapshot(), "PYTHONUNBUFFERED": "1", **world}
            try:
                process = start_command(
                    rank,
                    (sys.executable, "-c", _BOOTSTRAP, str(self._file)),
                    environ,
                    capture=True,
                    reads_input=False,
                    on_parent_death=SIGTERM if sys.platform == "win32" else SIGKILL,
                )
            except OSError as error:
                for member in members:
                    member.process.kill()
                raise LaunchError(f"{sys.executable} could not be started: {error}") from error
            names = {"rank": rank, "local_rank": local_rank, "role_name": "default"}
            output = RankOutput(self.prefix.safe_substitute(names), console, rank=rank, hold=True)
            members.append(SupervisedProcess(process, output, f"rank {rank}"))
        return members


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
