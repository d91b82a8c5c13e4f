"""One rank as an operating-system process, and the guardian that outlives the launcher by a moment.

On POSIX systems each rank leads a session of its own, so that it can be ended with everything it started, and
so that a Ctrl-C in the terminal reaches it once, through the launcher. Elsewhere processes are ended one by
one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Protocol

__all__ = [
    "CommandProcess",
    "Guardian",
    "RankProcess",
    "die_with_parent",
    "end_group",
    "group_is_alive",
    "start_command",
]

HAS_SESSIONS = hasattr(os, "killpg") and hasattr(os, "setsid")
_PR_SET_PDEATHSIG = 1


class RankProcess(Protocol):
    """A started rank, as the supervisor sees it."""

    rank: int

    @property
    def pid(self) -> int:
        """Process id; on POSIX also the id of its process group."""

    @property
    def pipes(self) -> tuple[tuple[str, IO[bytes]], ...]:
        """The streams to forward: ``("stdout", pipe)``, ``("stderr", pipe)``; empty if it writes to ours."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while it runs. Does not block."""

    def send(self, signum: int) -> None:
        """Send a signal to the rank itself; nothing happens if it has ended."""

    def kill(self) -> None:
        """End it and all that it started, now."""


class CommandProcess:
    """A rank that is a command line."""

    def __init__(self, rank: int, popen: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self._popen = popen

    @property
    def pid(self) -> int:
        """See ``RankProcess``."""
        return self._popen.pid

    @property
    def pipes(self) -> tuple[tuple[str, IO[bytes]], ...]:
        """See ``RankProcess``."""
        streams = (("stdout", self._popen.stdout), ("stderr", self._popen.stderr))
        return tuple((name, pipe) for name, pipe in streams if pipe is not None)

    def poll(self) -> int | None:
        """See ``RankProcess``."""
        return self._popen.poll()

    def send(self, signum: int) -> None:
        """See ``RankProcess``. An interrupt goes to the whole group, as from a terminal."""
        if signum == signal.SIGINT and HAS_SESSIONS:
            end_group(self.pid, signum)
        elif signum == signal.SIGINT and sys.platform == "win32":
            self._popen.send_signal(signal.CTRL_BREAK_EVENT)
        else:
            self._popen.send_signal(signum)

    def kill(self) -> None:
        """See ``RankProcess``."""
        if HAS_SESSIONS:
            end_group(self.pid, signal.SIGKILL)
        elif sys.platform == "win32":
            subprocess.run(["taskkill", "/T", "/F", "/PID", str(self.pid)], capture_output=True, check=False)
        else:
            self._popen.kill()


def start_command(
    rank: int,
    argv: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    capture: bool,
    reads_input: bool,
    on_parent_death: int,
) -> CommandProcess:
    """Start one rank.

    Args:
        rank: its number.
        argv: its command.
        environ: its whole environment.
        capture: its streams come to us through pipes, else it shares ours.
        reads_input: it reads our standard input; one reader at most, the others get an empty one.
        on_parent_death: the signal that the kernel sends it should the launcher vanish (Linux only).

    Raises:
        OSError: the command could not be executed.
    """
    pipe = subprocess.PIPE if capture else None
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP
    popen = subprocess.Popen(
        argv,
        env=dict(environ),
        stdin=None if reads_input else subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        start_new_session=HAS_SESSIONS,
        creationflags=flags,
        preexec_fn=die_with_parent(on_parent_death),
    )
    return CommandProcess(rank, popen)


def die_with_parent(signum: int) -> Callable[[], None] | None:
    """A function for a fresh child that asks Linux to send it ``signum`` when the thread that made it ends.

    ``None`` where the kernel has no such service; the guardian then works alone.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    parent = os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signum)

    return arrange


def end_group(group: int, signum: int) -> bool:
    """Send ``signum`` to a process group.

    Returns:
        whether the group still had a member.
    """
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):  # macOS answers the second for a group of zombies
        return False
    return True


def group_is_alive(group: int) -> bool:
    """Whether a process of the group still runs.

    Zombies do not count: in a container whose first process does not ask for orphans they stay for ever.
    """
    if not end_group(group, 0):
        return False
    if not os.path.isdir("/proc/self"):
        return True
    for name in os.listdir("/proc"):
        if name.isdecimal():
            # It may end while we look.
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, _, its_group = file.read().rpartition(b")")[2].split()[:3]
                if int(its_group) == group and state not in (b"Z", b"X"):
                    return True
    return False


class Guardian:
    """A forked process that kills the ranks' groups if the launcher ends without having ended them.

    The kernel's parent-death signal reaches ranks only; what ranks started (data workers, shell pipelines)
    needs this. It holds the reading end of a pipe whose other end only the launcher has, and learns the
    groups through it. On systems without ``fork`` it does nothing.

    Args:
        active: ``False`` makes one that does nothing.
    """

    def __init__(self, active: bool = True) -> None:
        self._pipe: int | None = None
        self._pid = 0
        if not active or not hasattr(os, "fork"):
            return
        reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _guard(reading)
        os.close(reading)
        self._pipe = writing

    def watch(self, group: int, patience: float = 0.0) -> None:
        """Kill ``group`` if the launcher vanishes, after giving it ``patience`` seconds to end by itself."""
        self._tell(f"+{group} {patience}\n")

    def forget(self, group: int) -> None:
        """``group`` has ended; its number may be given to strangers."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Send the guardian home. Groups that are still watched are killed."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)

    def _tell(self, message: str) -> None:
        if self._pipe is not None:
            # Somebody may have killed the guardian; ranks still have the parent-death signal.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, message.encode())


def _guard(pipe: int) -> None:
    """The guardian's life; never returns."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        os.dup2(pipe, 3)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.closerange(4, 1 << 16)
        groups: dict[int, float] = {}
        rest = b""
        while data := os.read(3, 4096):
            *messages, rest = (rest + data).split(b"\n")
            for message in messages:
                group_text, _, patience_text = message[1:].partition(b" ")
                if message.startswith(b"+"):
                    groups[int(group_text)] = float(patience_text)
                else:
                    groups.pop(int(group_text), None)
        started = time.monotonic()
        for group, patience in groups.items():
            while time.monotonic() - started < patience and group_is_alive(group):
                time.sleep(0.05)
            end_group(group, signal.SIGKILL)
    finally:
        os._exit(0)
