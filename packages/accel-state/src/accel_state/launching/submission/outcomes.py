"""What the exit codes of a run's launchers mean for its job: the contract that every engine keeps.

0: done. 75: saved after a stop signal, start it again; a failure is not counted. 76: the ranks of this machine ended
because another machine failed first. 124: a hang. All others: a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from accel_state.constants import PEER_FAILED, PREEMPTED

__all__ = ["Decision", "decide"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a job whose machines have ended.

    Attributes:
        action: end it as done, end it as failed, or start it again.
        counts: starting it again uses up one of its retries.
        code: the exit code of the job if it ends.
        why: in words.
    """

    action: Literal["done", "failed", "again"]
    counts: bool
    code: int
    why: str


def decide(codes: Sequence[int | None], retries_left: int) -> Decision:
    """The end of a job, from the exit codes of its machines.

    Args:
        codes: exit code of the launcher on each machine; None: the machine was lost.
        retries_left: how often the job may still be started again after a failure.
    """
    if all(code == 0 for code in codes):
        return Decision("done", False, 0, "all machines are done")
    own = [(at, code) for at, code in enumerate(codes) if code not in (0, PREEMPTED, PEER_FAILED, None)]
    lost = [at for at, code in enumerate(codes) if code is None]
    if lost:
        return Decision("again", False, 1, f"machine {lost[0]} was lost")
    if not own and PREEMPTED in codes:
        return Decision("again", False, PREEMPTED, "it has saved its state")
    at, code = own[0] if own else (codes.index(PEER_FAILED), PEER_FAILED)
    why = f"machine {at} ended with exit code {code}"
    return Decision("again" if retries_left > 0 else "failed", True, code, why)
