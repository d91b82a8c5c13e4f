"""Which rank of this machine failed first, and whether its failure is the consequence of another machine's."""

from __future__ import annotations

import contextlib
import enum
import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_state.constants import PREEMPTED
from accel_state.launching.watching.tracebacks import timed_out, waited_for_another

__all__ = ["Failure", "FailureCause", "first_failure", "read_errors"]

_MISMATCH = re.compile(r"\bCollectiveMismatchError\b(?!.*\b(?:gone|ended|exited|died)\b)", re.DOTALL)
"""Ranks that call different collectives: an error of the program, and not of a rank that is gone."""
_LOST = re.compile(r"\bis gone\b|store of this world|recvValue failed")
"""What ranks report beside torch's collectives when a machine is gone, most often that with the store."""


class FailureCause(enum.IntEnum):
    """What the failure of a rank says about its cause."""

    OWN = 0
    """The rank failed by itself."""
    UNKNOWN = 1
    """Either: a time-out, an abort by a library, a program of which only the exit code is known."""
    PEER = 2
    """Another rank was gone."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank.

    Attributes:
        rank: its number in the world.
        code: exit code for the shell; 128 + n for signal n.
        cause: what it says about its cause.
        error: the first line of its error; empty: it left none.
    """

    rank: int
    code: int
    cause: FailureCause
    error: str = ""


def read_errors(files: Mapping[int, str]) -> dict[int, tuple[int, str]]:
    """The time, in nanoseconds, and the text of the error that each rank left.

    Args:
        files: the path of each rank's error file, as torch writes it.
    """
    found = {}
    for rank, name in files.items():
        path = Path(name)
        # It left none, or none of this form: its exit code remains.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            told = json.loads(path.read_text(encoding="utf-8", errors="replace"))["message"]
            about: Any = told if isinstance(told, str) else told["extraInfo"].get("origin") or told["message"]
            found[rank] = (path.stat().st_mtime_ns, str(about))
    return found


def first_failure(
    codes: Mapping[int, int], errors: Mapping[int, tuple[int, str]], *, program: bool = False
) -> Failure | None:
    """The failure that caused the others of this machine.

    Args:
        codes: exit code of each rank that has ended by itself, negative for a signal.
        errors: the time and the text of the error of each rank that left one; it may not have ended yet.
        program: ranks are programs that leave no errors, so that an exit code says little.

    Returns:
        None if no rank has failed.
    """
    found = []
    for rank in sorted({*(rank for rank, code in codes.items() if code), *errors}):
        code = codes.get(rank) or 1
        when, error = errors.get(rank, (0, ""))
        cause = _cause(code, error, program)
        line = next((line.strip() for line in error.splitlines() if line.strip()), "")
        # A crash leaves no time; it precedes the errors of those that waited for the rank.
        found.append(((cause, when, rank), Failure(rank, 128 - code if code < 0 else code, cause, line)))
    return min(found)[1] if found else None


def _cause(code: int, error: str, program: bool) -> FailureCause:
    if code == PREEMPTED:
        return FailureCause.OWN
    if not error:
        aborted = code == -getattr(signal, "SIGABRT", 6)  # NCCL's watchdog ends a rank so, among others
        return FailureCause.UNKNOWN if aborted or (program and code > 0) else FailureCause.OWN
    if _MISMATCH.search(error):
        return FailureCause.OWN
    if timed_out(error):
        return FailureCause.UNKNOWN
    return FailureCause.PEER if waited_for_another(error) or _LOST.search(error) else FailureCause.OWN
