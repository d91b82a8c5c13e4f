"""Identity of a process across process-id reuse: whether a recorded process still runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["has_ended", "machine_id", "process_identity", "ranks_here", "start_time_of"]


def process_identity() -> dict[str, Any]:
    """Machine, process id and start time of this process: plain data for ``has_ended`` in another process."""
    return {"machine": machine_id(), "pid": os.getpid(), "born": start_time_of(os.getpid())}


def has_ended(process: Mapping[str, Any]) -> bool:
    """Whether a process has certainly ended; False for a process on another machine.

    Args:
        process: its ``process_identity()``.
    """
    here = process["machine"] is not None and process["machine"] == machine_id()
    return here and start_time_of(process["pid"]) != process["born"]


def ranks_here(
    rank: int, size: int, process_of: Callable[[int], Mapping[str, Any] | None]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The other ranks of this machine and their processes; ranks of a machine follow each other.

    A rank can see the end of processes of its own machine only. So where all wait for one, each looks at these few.

    Args:
        rank: this rank.
        size: ranks in the world.
        process_of: rank → its ``process_identity()``; None if it has not begun.
    """
    here = machine_id()
    for step in (1, -1):
        other = rank + step
        while 0 <= other < size and (process := process_of(other)) is not None and process["machine"] == here:
            yield other, process
            other += step


def machine_id() -> str | None:
    """Boot id and PID namespace: equal for processes that see the same process ids; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def start_time_of(pid: int) -> str | None:
    """Start time of a process in kernel clock ticks; None if it has ended, reaped or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
