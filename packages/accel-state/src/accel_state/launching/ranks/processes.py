"""A rank as an operating-system process, and a guardian process that outlives the launcher briefly.

On POSIX systems each rank leads its own session, so that it can be ended together with its child processes, and so
that Ctrl-C in the terminal reaches it once, through the launcher. On other systems processes are ended one by one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Protocol

from accel_state.constants import RUN_FOLDER

__all__ = [
    "CommandProcess",
    "Guardian",
    "RankProcess",
    "die_with_parent",
    "end_group",
    "end_strays",
    "group_is_alive",
    "start_command",
]

HAS_SESSIONS = hasattr(os, "killpg") and hasattr(os, "setsid")
_PR_SET_PDEATHSIG = 1
_ROUNDS = 50


class RankProcess(Protocol):
    """A started rank, as the supervisor sees it."""

    rank: int

    @property
    def pid(self) -> int:
        """Process id; on POSIX also its process group id."""

    @property
    def pipes(self) -> tuple[tuple[str, IO[bytes]], ...]:
        """Streams to forward: ``("stdout", pipe)``, ``("stderr", pipe)``; empty if it inherits the launcher's."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while it is running. Does not block."""

    def send(self, signum: int) -> None:
        """Send a signal to the rank itself; does nothing if it has ended."""

    def kill(self) -> None:
        """Kill it and its child processes immediately."""


class CommandProcess:
    """A rank that runs a command line."""

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
        """See ``RankProcess``. An interrupt is sent to the whole process group, as a terminal does."""
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
    keep_open: tuple[int, ...] = (),
    output: IO[bytes] | None = None,
) -> CommandProcess:
    """Start one rank.

    Args:
        rank: its rank.
        argv: its command line.
        environ: its complete environment.
        capture: connect its streams to the launcher by pipes; otherwise it inherits them.
        reads_input: inherit standard input; at most one rank does, the others get an empty input.
        on_parent_death: the signal that the kernel sends to it if the launcher dies (Linux only).
        keep_open: file descriptors that it inherits.
        output: without `capture`, the file for both streams; by default it inherits the launcher's.

    Raises:
        OSError: the command could not be executed.
    """
    stream = subprocess.PIPE if capture else output
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP
    popen = subprocess.Popen(
        argv,
        env=dict(environ),
        stdin=None if reads_input else subprocess.DEVNULL,
        stdout=stream,
        stderr=stream,
        start_new_session=HAS_SESSIONS,
        pass_fds=keep_open,
        creationflags=flags,
        preexec_fn=die_with_parent(on_parent_death),
    )
    return CommandProcess(rank, popen)


def die_with_parent(signum: int) -> Callable[[], None] | None:
    """A function to call in a new child, so that Linux sends it ``signum`` when the thread that created it ends.

    ``None`` on kernels without this feature; then only the guardian ends orphaned ranks.
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
        if os.getppid() != parent:  # the parent died before prctl
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
    """Whether a process of the group is still running.

    Zombies do not count: in a container whose first process does not reap orphans they remain forever.
    """
    if not end_group(group, 0):
        return False
    if not os.path.isdir("/proc/self"):
        return True
    for name in os.listdir("/proc"):
        if name.isdecimal():
            # The process may end during the scan.
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, _, its_group = file.read().rpartition(b")")[2].split()[:3]
                if int(its_group) == group and state not in (b"Z", b"X"):
                    return True
    return False


def end_strays(folder: str, signum: int, *, launcher: int | None = None) -> bool:
    """Send ``signum`` to every process that has inherited a launch's folder, whatever its group and session are.

    Children of a rank that lead their own session belong to no known group. Each has inherited the environment of its
    rank, unless it has cleared it. Linux only, and only processes of this user.

    Args:
        folder: the value of ``RUN_FOLDER``, which no other launch has.
        signum: the signal.
        launcher: children of this process are left alone: ranks, which it ends itself, and spare ones.

    Returns:
        whether there was such a process.
    """
    marker = f"{RUN_FOLDER}={folder}".encode()
    found = False
    if not hasattr(os, "pidfd_open") or not os.path.isdir("/proc/self"):
        return False
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            process = os.pidfd_open(int(name))  # from here on no other process is taken for this one
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    marked = marker in file.read().split(b"\0")
                if marked and (launcher is None or _parent_of(name) != launcher):
                    signal.pidfd_send_signal(process, signum)
                    found = True
            finally:
                os.close(process)
    return found


def _parent_of(name: str) -> int:
    with open(f"/proc/{name}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


class Guardian:
    """A forked process that kills the ranks' process groups if the launcher ends without having ended them.

    The kernel's parent-death signal reaches ranks only, not their children (data workers, shell pipelines). The
    guardian reads a pipe whose write end only the launcher holds; the launcher sends it the group ids. On systems
    without ``fork`` it does nothing.

    Args:
        active: ``False`` creates a guardian that does nothing.
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
        """Kill ``group`` if the launcher dies, after ``patience`` seconds to end by itself."""
        self._send(f"+{group} {patience}\n")

    def forget(self, group: int) -> None:
        """Stop watching ``group``, which has ended; its id may be reused by another process."""
        self._send(f"-{group}\n")

    def remove(self, folder: str) -> None:
        """Remove ``folder`` and its files, and end the processes that inherited it, if the launcher dies."""
        self._send(f"~{folder}\n")

    def close(self) -> None:
        """End the guardian. It kills the groups that are still watched."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)

    def _send(self, message: str) -> None:
        if self._pipe is not None:
            # The guardian may have been killed; the parent-death signal still reaches ranks.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, message.encode())


def _guard(pipe: int) -> None:
    """Main function of the guardian process; never returns."""
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
        folders: list[bytes] = []
        rest = b""
        while data := os.read(3, 4096):
            *messages, rest = (rest + data).split(b"\n")
            for message in messages:
                if message.startswith(b"~"):
                    folders.append(message[1:])
                    continue
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
        for folder in folders:
            for _ in range(_ROUNDS):  # a process may start another one between two of them
                if not end_strays(os.fsdecode(folder), signal.SIGKILL):
                    break
                time.sleep(0.02)
            with contextlib.suppress(FileNotFoundError):  # the launcher has removed it
                shutil.rmtree(folder)
    finally:
        os._exit(0)
