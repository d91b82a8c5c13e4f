"""A command that runs as a part of this one: signals reach it through here, and this process ends after it.

A child process in the terminal's process group gets Ctrl-C at the same time as its parent. The parent may then be the
first to end, and the shell shows its prompt while the child is still writing. So the command leads its own session, as
ranks do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import IO

from accel_state.launching.ranks.processes import end_group, start_command
from accel_state.launching.ranks.signals import EXITED, receive_signals

__all__ = ["run_command"]

_GRACE = 5.0
_POLL = 0.1


def run_command(
    argv: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    launcher: bool = False,
    reads_input: bool = True,
    output: IO[bytes] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> int:
    """Run a command and wait until it has ended, also after Ctrl-C.

    Args:
        argv: the command line.
        environ: its complete environment.
        launcher: the command is a launcher of ours: it ends and suspends its own processes. Any other command is
            killed by a second signal, and 5 seconds after the first.
        reads_input: it inherits standard input; otherwise it gets an empty one.
        output: the file for both of its output streams; by default it inherits this process's.
        meanwhile: called about ten times a second while it runs.

    Returns:
        Its exit code, negative for a signal.

    Raises:
        OSError: it could not be executed.
        KeyboardInterrupt: Ctrl-C, after its end.
        SystemExit: another signal, after its end, with 128 + its number.
    """
    death = getattr(signal, "SIGTERM" if launcher else "SIGKILL", signal.SIGTERM)
    stopped: int | None = None
    deadline = float("inf")
    with receive_signals() as signals:
        process = start_command(
            0,
            argv,
            environ,
            capture=False,
            reads_input=reads_input,
            on_parent_death=death,
            output=output,
        )
        try:
            while (code := process.poll()) is None:
                event = signals.get(_POLL)
                if event == getattr(signal, "SIGTSTP", None):
                    _suspend(process.pid, event, launcher)
                elif event != EXITED:
                    deadline = time.monotonic() + (_GRACE if stopped is None else 0)
                    stopped = stopped or event
                    process.send(event)
                if time.monotonic() > deadline and not launcher:
                    process.kill()
                if meanwhile is not None:
                    meanwhile()
        finally:
            if process.poll() is None:
                process.kill()
    if stopped == signal.SIGINT:
        raise KeyboardInterrupt
    if stopped is not None:
        raise SystemExit(128 + stopped)
    return code


def _suspend(pid: int, event: int, launcher: bool) -> None:
    end_group(pid, event if launcher else signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    end_group(pid, signal.SIGCONT)
