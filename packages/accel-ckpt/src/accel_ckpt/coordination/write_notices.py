"""One rank writes, and the others wait until it has, without a collective: ranks that do not call block no other rank.

The writer posts a *notice* of every write to the store of the world: when it begins, and when it has ended or failed. A
rank that waits must find the notice of the call that is the same as its own. Numbers of calls do not tell, because the
writer may have written before while no other rank called (``if is_main_process: …``). What all ranks have in common is
the program, so a notice fits a call if

- it names the same folder;
- it comes after all notices that earlier calls of this rank have found;
- the writer had taken part in as many collectives as this rank, or more: a write before the last collective is over;
- it was made at the same place of the program, the lines of the script in the call stack. That tells a write of the
  writer alone from the one of all ranks that comes next, if no collective is between them.

A rank can call on another line than the writer (``if … else``). So a notice that fits but for the line is accepted when
none has fitted better for `_GRACE` seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel_ckpt.coordination.ranks import default_coordinator
from accel_ckpt.errors import CheckpointSaveError
from accel_ckpt.locations import RemotePath, location
from accel_state.errors import UntrustedMessageError
from accel_state.host.process_identity import has_ended, process_identity
from accel_state.messages import module_of
from accel_state.world.process import PartialState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["WriteNotices", "completed_by_writer"]

_PATIENCE = (
    30 * 60.0
)  # seconds until the writer has begun, as in torch's collectives; then until it has ended
_GRACE = 60.0  # seconds that a notice of the same line is preferred
_LOOK = 1.0  # seconds between two looks at whether the writer is still there
_LIBRARIES = (
    "accel_state",
    "accel_ckpt",
    "accel_bigmodel",
    "accel_train",
    "torch",
    "contextlib",
    "functools",
)


def completed_by_writer(
    directory: str | os.PathLike[str], write: Callable[[], Sequence[str]], *, writer: int = 0
) -> tuple[str, ...]:
    """Write on one rank; every rank that calls returns when the write is complete. Not collective.

    The writer does not wait, so a call on the writer alone returns, too. The other ranks wait for the writer's call on
    the same line of the script.

    Args:
        directory: the folder that is written to; the same on all ranks.
        write: called on the writer; returns the names of the files written.
        writer: the rank that writes.

    Returns:
        What ``write`` returned on the writer.

    Raises:
        CheckpointSaveError: on a waiting rank: the writer failed, has ended, does not make the call or does not finish,
            or writes to another folder.
        Exception: on the writer, the exception of ``write``.
    """
    ranks = default_coordinator()
    if ranks.world_size == 1:
        return tuple(write())
    store = PartialState().connect(f"accel/written/{writer}")
    if store is None:
        raise CheckpointSaveError(
            "ranks cannot tell each other that a write is complete, because this process group has no store; call on "
            "the rank that writes, and wait_for_everyone() on all"
        )
    notices = WriteNotices(store, writer, ranks.rank)
    place = location(directory)
    named = str(place) if isinstance(place, RemotePath) else os.path.abspath(place)
    call = WriteCall(named, collectives_so_far(), calling_lines())
    return notices.write(call, write) if ranks.rank == writer else notices.wait(call)


@dataclass(frozen=True, slots=True)
class WriteCall:
    """Properties by which calls of several ranks are matched."""

    directory: str
    position: int
    """Collectives that the rank has taken part in."""
    lines: str
    """Lines of the script in the call stack."""


def collectives_so_far() -> int:
    """Number of collectives of all ranks that this rank has begun; the same on all ranks at a line."""
    from accel_state.communication.torch_collectives import counters

    channel = PartialState().channel()
    assert channel is not None, "a world of one has no channel, and no rank to wait for"
    backends = {
        id(counter): counter for group in (channel.group, channel.wire) for counter in counters(group)
    }
    return sum(backend._get_sequence_number_for_group() for backend in backends.values())


def calling_lines() -> str:
    """Files and lines of the call stack that belong to the script, not to this library or torch."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if module_of(frame).partition(".")[0] not in _LIBRARIES:
            found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


class WriteNotices:
    """The notices of one writer.

    Args:
        store: a connection that nothing else uses, for the keys of this writer alone.
        writer: its rank.
        rank: this rank.
    """

    def __init__(self, store: Store, writer: int, rank: int) -> None:
        self._store = store
        self._writer = writer
        self._rank = rank
        store.set_timeout(timedelta(seconds=10))  # no key is asked for that is not there

    def write(self, call: WriteCall, write: Callable[[], Sequence[str]]) -> tuple[str, ...]:
        """Write, and post when it begins and how it ends."""
        notice = {
            "directory": call.directory,
            "position": call.position,
            "lines": call.lines,
            "who": process_identity(),
        }
        number = self._count() + 1
        self._post(number, notice)
        self._store.set("count", str(number))
        try:
            written = tuple(write())
        except BaseException as error:  # also when the user interrupts: no rank should wait any longer
            self._post(number, {**notice, "error": f"{type(error).__name__}: {error}"})
            raise
        self._post(number, {**notice, "written": written})
        return written

    def wait(self, call: WriteCall) -> tuple[str, ...]:
        """Wait for the end of the write that fits a call."""
        began = looked = time.monotonic()
        pause = 0.001
        last = int(self._read(f"seen/{self._rank}") or 0)
        try:
            while True:
                number, notice = self._fitting(call, last, time.monotonic() - began)
                if notice is not None and ("written" in notice or "error" in notice):
                    self._store.set(f"seen/{self._rank}", str(number))
                    if "error" in notice:
                        raise CheckpointSaveError(
                            f"rank {self._writer}, which writes {call.directory}, failed: {notice['error']}"
                        )
                    return tuple(notice["written"])
                if time.monotonic() - looked >= _LOOK:
                    looked = time.monotonic()
                    self._look_around(call, last, looked - began)
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
        except (CheckpointSaveError, UntrustedMessageError):
            raise
        except RuntimeError as error:
            raise CheckpointSaveError(
                f"rank {self._writer} did not complete {call.directory}: the store of this world is gone, and with it "
                f"the rank that keeps it: {error}"
            ) from error

    def _fitting(self, call: WriteCall, last: int, waited: float) -> tuple[int, dict[str, Any] | None]:
        """The first notice of the same line; after a while, the newest of another line."""
        newest: tuple[int, dict[str, Any] | None] = (0, None)
        for number, notice in self._later(call, last):
            if notice["directory"] == call.directory:
                if notice["lines"] == call.lines:
                    return number, notice
                newest = number, notice
        return newest if waited > _GRACE else (0, None)

    def _later(self, call: WriteCall, last: int) -> list[tuple[int, dict[str, Any]]]:
        """Notices that this rank has not found before, and that are not of before the last collective."""
        found = []
        for number in range(last + 1, self._count() + 1):
            notice: dict[str, Any] = json.loads(self._store.get(str(number)))
            if notice["position"] >= call.position:
                found.append((number, notice))
        return found

    def _look_around(self, call: WriteCall, last: int, waited: float) -> None:
        """Raise if there is nothing to wait for any more."""
        later = self._later(call, last)
        for _, notice in later:
            ended = "written" in notice or "error" in notice
            if not ended and has_ended(notice["who"]):
                raise CheckpointSaveError(
                    f"rank {self._writer} (process {notice['who']['pid']}) has ended while it wrote "
                    f"{notice['directory']}"
                )
            if (
                waited > _GRACE
                and ended
                and notice["lines"] == call.lines
                and notice["directory"] != call.directory
            ):
                raise CheckpointSaveError(
                    f"rank {self._writer} writes to {notice['directory']} here, and rank {self._rank} waits for "
                    f"{call.directory}; give the same folder on all ranks"
                )
        if waited > _PATIENCE:
            begun = any(notice["directory"] == call.directory for _, notice in later)
            what = "has not completed" if begun else "has not begun to write"
            raise CheckpointSaveError(
                f"rank {self._writer} {what} {call.directory} within {_PATIENCE:g} s, for which rank {self._rank} "
                f"waits at {call.lines.partition(' < ')[0]}; call on rank {self._writer} alone, or on all ranks"
            )

    def _count(self) -> int:
        return int(self._read("count") or 0)

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _post(self, number: int, notice: dict[str, Any]) -> None:
        self._store.set(str(number), json.dumps(notice))
