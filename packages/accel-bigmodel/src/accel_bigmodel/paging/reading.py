"""A thread that reads pages of mapped files into memory according to a plan.

One thread populates 4 MB at a time, and pages that are not needed soon are evicted (``MADV_PAGEOUT``). Measured in GB/s
under control groups of 250 MB with 1 GB of files, on a disk of 1.7 to 2.1 GB/s (kernel 6.18, ext4, two cores):

- ``read`` of 4 MB by 1, 2 or 4 threads: 1.8, 1.7, 1.5; past the page cache by 4 threads: 1.4 to 2.7
- ``MADV_POPULATE_READ`` of 4 MB by 1, 2 or 4 threads: 2.0, 1.7, 1.3
- the same by 1 thread in pieces of 1, 2, 8 or 16 MB: 1.6, 2.0, 1.9, 2.1
- ``MADV_WILLNEED`` of 4 MB ahead of populating: 1.3 to 1.6, because it makes small folios, which cost five times the
  processor time
- populating by 1 thread, ``MADV_PAGEOUT`` 64 MB behind: 1.9 to 2.2, with a peak of 96 MB in the group
- populating, and the kernel alone evicts: 1.5 to 2.1, with a peak of 250 MB
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Mapping
from functools import cache

import torch

from accel_bigmodel.paging.pages import Extent
from accel_ckpt.format.memory import new_bytes, populate

__all__ = ["Reader"]


class Reader:
    """Reads the extents of a plan in order, piece by piece; the plan may change at any time.

    It does not refer to its owner, so that :meth:`stop` can be the owner's finalizer, and the thread ends when the
    model is freed.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.nbytes = 0
        """Bytes read, without repeated reads of resident extents."""
        self.seconds = 0.0
        """Seconds that this took."""
        # Reentrant, because finalizers run anywhere.
        self._changed = threading.Condition(threading.RLock())
        self._plan: Mapping[Extent, int] = {}
        self._busy: Extent | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def follow(self, plan: Mapping[Extent, int]) -> None:
        """Read this number of pieces of each extent."""
        with self._changed:
            self._plan = plan
            self._changed.notify_all()
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="accel-pager", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the interpreter is exiting and starts no more threads
                    self._stopped = True

    def shrink(self, goals: Mapping[Extent, int]) -> None:
        """Count at most these pieces of the extents as read; when this returns, none of the extents is being read."""
        with self._changed:
            self._plan = {extent: min(goal, goals.get(extent, goal)) for extent, goal in self._plan.items()}
            self._changed.wait_for(lambda: self._busy not in goals)
            for extent, goal in goals.items():
                extent.have = min(extent.have, goal)

    def wait(self, goals: Mapping[Extent, int]) -> None:
        """Wait until this number of pieces was read."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or all(extent.have >= goal for extent, goal in goals.items())
            )

    def stop(self) -> None:
        """End the thread, without waiting for it."""
        if self.pid != os.getpid():
            return  # a forked process does not have the thread, and its lock may be held forever
        with self._changed:
            self._stopped = True
            self._plan = {}
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._read()
        finally:  # forwards then read pages themselves, instead of waiting forever
            with self._changed:
                self._stopped, self._busy = True, None
                self._changed.notify_all()

    def _read(self) -> None:
        while (work := self._take()) is not None:
            extent, number = work
            piece = extent.piece(number)
            began = time.perf_counter()
            if not populate(piece) and not _can_populate():
                _touch(piece)
            with self._changed:
                if number >= extent.asked or not extent.resident:
                    self.seconds += time.perf_counter() - began
                    self.nbytes += piece.numel()
                extent.have = number + 1
                extent.asked = max(extent.asked, extent.have)
                self._busy = None
                self._changed.notify_all()

    def _take(self) -> tuple[Extent, int] | None:
        with self._changed:
            while not self._stopped:
                for extent, goal in self._plan.items():
                    if extent.have < goal:
                        self._busy = extent
                        return extent, extent.have
                self._changed.wait()
            return None


@cache
def _can_populate() -> bool:
    """Whether this kernel has the system call; if so, a failure means that the disk could not be read."""
    return populate(new_bytes(mmap.PAGESIZE))


def _touch(pages: torch.Tensor) -> None:
    """Read one byte of every page; torch releases the interpreter lock for that."""
    pages[:: mmap.PAGESIZE].sum()
