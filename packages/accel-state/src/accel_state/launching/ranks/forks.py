"""Ranks forked from this process: how they start, what they do not inherit, and how they exit."""

from __future__ import annotations

import atexit
import io
import os
import secrets
import signal
import sys
import threading
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from string import Template
from types import TracebackType
from typing import IO, Any, NoReturn, Self

from accel_state.constants import RANK_PREFIXED, STORE_SECRET
from accel_state.environment import patch_environment
from accel_state.errors import LaunchError
from accel_state.launching.ranks.processes import RankProcess, end_group
from accel_state.launching.ranks.supervisor import SupervisedProcess
from accel_state.launching.watching.output import Console, RankOutput

__all__ = ["ForkedProcess", "ForkedRanks", "FunctionRanks", "exit_code_of"]


class ForkedProcess:
    """A rank that is a fork of this process; see ``RankProcess`` for its methods."""

    def __init__(self, rank: int, pid: int, pipes: tuple[tuple[str, IO[bytes]], ...]) -> None:
        self.rank = rank
        self.pid = pid
        self.pipes = pipes
        self._code: int | None = None

    def poll(self) -> int | None:
        """See ``RankProcess``."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send(self, signum: int) -> None:
        """See ``RankProcess``."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """See ``RankProcess``."""
        if self.poll() is None and not end_group(self.pid, signal.SIGKILL):
            os.kill(self.pid, signal.SIGKILL)  # it has not created its process group yet


@dataclass
class FunctionRanks(ABC):
    """The ranks of one launch of a function, on this node. It is a context, which holds what ranks need to start.

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

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def start_rank(self, rank: int, environ: Mapping[str, str]) -> RankProcess:
        """Start one rank with these variables."""

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
            try:
                process = self.start_rank(rank, self.world_variables(local_rank, attempt, port))
            except OSError as error:
                for member in members:
                    member.process.kill()
                raise LaunchError(f"rank {rank} could not be started: {error}") from error
            names = {"rank": rank, "local_rank": local_rank, "role_name": "default"}
            output = RankOutput(self.prefix.safe_substitute(names), console, rank=rank, hold=True)
            members.append(SupervisedProcess(process, output, f"rank {rank}"))
        return members

    def world_variables(self, local_rank: int, attempt: int, port: int) -> dict[str, str]:
        """The environment variables that describe its world to a rank.

        Args:
            local_rank: index of the rank on this node.
            attempt: number of restarts so far.
            port: port of rank 0.
        """
        return {
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "NODE_RANK": str(self.node_rank),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.world_size // self.local_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            # This process may itself be a rank of torchrun; these ranks use a separate store.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            RANK_PREFIXED: "1" if "rank}" in self.prefix.template else "",
            **({STORE_SECRET: self.secret} if self.world_size == self.local_size else {}),
            **self.variables,
        }


@dataclass
class ForkedRanks(FunctionRanks):
    """Ranks that are forks. The context holds a pipe by which they detect that this process has ended."""

    _parent_pipe: tuple[int, int] = field(default=(-1, -1), init=False)

    def __enter__(self) -> Self:
        self._parent_pipe = os.pipe()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self._parent_pipe:
            os.close(end)

    def call(self) -> None:
        """Call the function in a process that torch's elastic agent forked and gave its rank."""
        with patch_environment(**self.variables):
            _prepare_fork()
            self.function(*self.args)

    def start_rank(self, rank: int, environ: Mapping[str, str]) -> ForkedProcess:
        """Fork this process."""
        out_reader, out_writer = os.pipe()
        err_reader, err_writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Notebooks have threads; ranks do not use what those threads hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._run_rank(out_writer, err_writer, environ)
        os.close(out_writer)
        os.close(err_writer)
        pipes = (("stdout", os.fdopen(out_reader, "rb", 0)), ("stderr", os.fdopen(err_reader, "rb", 0)))
        return ForkedProcess(rank, pid, pipes)

    def _run_rank(self, out: int, err: int, environ: Mapping[str, str]) -> NoReturn:
        """Run one rank; at exit it calls the handlers that it registered itself, not those of this process."""
        code = 1
        atexit._clear()
        try:
            os.setsid()
            _reset_signals()
            os.dup2(out, 1)
            os.dup2(err, 2)
            sys.stdin = open(os.devnull)  # noqa: SIM115 - stays open as long as the rank lives
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), write_through=True, errors="backslashreplace")
            sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), write_through=True, errors="backslashreplace")
            reading, writing = self._parent_pipe
            os.close(writing)
            threading.Thread(target=_exit_with_parent, args=(reading,), daemon=True).start()
            with patch_environment(**environ):
                _prepare_fork()
                code = exit_code_of(self.function, self.args)
                # Exit handlers coordinate with other ranks: rank 0 keeps the store that they still read.
                atexit._run_exitfuncs()
        finally:
            os._exit(code)


def exit_code_of(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Call a function as a rank does: its exception is printed as a traceback.

    Args:
        function: the function to call.
        args: its arguments.

    Returns:
        0, or the code of its ``SystemExit``, or 1. A KeyboardInterrupt ends the process by SIGINT.
    """
    try:
        function(*args)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        frames = error.__traceback__
        shown = frames.tb_next if frames is not None else None  # without this function's own frame
        traceback.print_exception(error.with_traceback(shown))
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _reset_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGTSTP", "SIGCHLD"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def _exit_with_parent(parent_pipe: int) -> None:
    """Kill this rank and its child processes when the process that forked it has ended.

    The kernel's parent-death signal would kill only the rank, before this could run.
    """
    os.read(parent_pipe, 1)
    os.killpg(0, signal.SIGKILL)


def _prepare_fork() -> None:
    """Drop what a fork inherits and cannot use: the parent's process state, and torch's thread pool.

    OpenMP's threads do not exist in a fork, and a computation that waits for them never ends; with one thread
    there is nothing to wait for. (If torch is first imported in the rank, OMP_NUM_THREADS applies.)
    """
    process = sys.modules.get("accel_state.world.process")
    if process is not None:
        process.discard_inherited_state()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
