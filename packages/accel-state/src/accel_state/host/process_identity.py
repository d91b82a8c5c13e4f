"""Whether a process that another one named is still the same, and still running."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["has_ended", "machine_id", "process_identity", "start_time_of"]


def process_identity() -> dict[str, Any]:
    """What tells this process from all others; plain data, for ``has_ended`` in another process."""
    return {"machine": machine_id(), "pid": os.getpid(), "born": start_time_of(os.getpid())}


def has_ended(process: Mapping[str, Any]) -> bool:
    """Whether a process has certainly ended; False for one of another machine.

    Args:
        process: its ``process_identity()``.
    """
    here = process["machine"] is not None and process["machine"] == machine_id()
    return here and start_time_of(process["pid"]) != process["born"]


def machine_id() -> str | None:
    """What two processes that can see each other's ids have in common; None where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def start_time_of(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None when it has ended, reaped or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
