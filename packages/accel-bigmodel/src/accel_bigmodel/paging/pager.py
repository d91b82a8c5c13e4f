"""Runs models from mapped files that exceed memory: pages are read ahead of their use and evicted after it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_bigmodel.hooks.base import outside_graphs
from accel_bigmodel.paging.pages import PIECE, Extent, extents_of, keep_resident
from accel_bigmodel.paging.reading import Reader
from accel_bigmodel.streaming.schedule import StreamingSchedule
from accel_bigmodel.streaming.stats import StreamStats
from accel_ckpt.format.memory import evict, read_around

if TYPE_CHECKING:
    from accel_bigmodel.streaming.groups import Group

__all__ = ["Pager"]

# Groups that are considered for reading ahead.
_LOOK_AHEAD = 32

# Bytes of the budget reserved for the kernel's own readahead: twice its usual 8 MB on large disks.
_KERNEL_AHEAD = 1 << 24


class Pager:
    """Keeps the mapped weights of a model within a budget of memory, and reads them before they are needed.

    The weights stay views of the mapped files; only the set of their pages in memory changes. A thread reads the groups
    in the order in which the last forward used them. A group that was used is evicted, unless the budget has room to
    keep it in memory permanently. Pages of a weight that were written to are never evicted.

    Results do not depend on this: the kernel reads pages that are not in memory when they are used. Embedding tables
    are always read that way, because a forward needs only a few of their rows.

    Args:
        model: its forward uses the groups.
        groups: the parts of the model that are used one after another.
        budget: bytes of mapped weights that may be in memory. Two consecutive groups should fit; if they do not, less
            is read ahead.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Group], *, budget: int) -> None:
        self._model = weakref.ref(model)
        self._modules = [weakref.ref(group.module) for group in groups]
        tables = _tables(model)
        read = [[t for t in group.tensors.values() if id(t) not in tables] for group in groups]
        self._tables = extents_of(
            [[t for group in groups for t in group.tensors.values() if id(t) in tables]]
        )[0]
        self._paging = _Paging(extents_of(read), budget)
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Add hooks to the model and the groups. The first forward starts the thread."""
        model = self._model()
        if self._handles or model is None:
            return
        self._read_around_rows(False)
        numbers = {reference(): index for index, reference in enumerate(self._modules)}
        paging = self._paging
        for name, module in model.named_modules():
            before: list[Callable[[], None]] = []
            after: list[Callable[[bool], None]] = []
            if any(below in numbers for below in module.modules() if below is not module):
                before, after = [partial(paging.begin, name)], [paging.end]
            if module in numbers and paging.extents[numbers[module]]:
                before = [*before, partial(paging.enter, numbers[module])]
                after = [partial(paging.leave, numbers[module]), *after]
            handles = [module.register_forward_pre_hook(_Before(call)) for call in before]
            handles += [module.register_forward_hook(_After(call), always_call=True) for call in after]
            self._handles += handles

    def detach(self) -> None:
        """Remove the hooks and end the thread. Pages in memory stay there until the kernel needs the memory."""
        self._read_around_rows(True)
        while self._handles:
            self._handles.pop().remove()
        self._paging.stop()

    def _read_around_rows(self, wanted: bool) -> None:
        for table in self._tables:
            read_around(table.pages, wanted)

    def stats(self) -> StreamStats:
        """Bytes read since the pager was made, and bytes in memory; the device is host memory here."""
        return self._paging.stats()

    def __reduce__(self) -> Any:
        return _no_pager, ()


def _no_pager() -> Pager:
    """The pager of a copied model, whose weights are in memory."""
    return Pager(torch.nn.Module(), [], budget=0)


def _tables(model: nn.Module) -> set[int]:
    """Identities of the weights that are used only as embedding tables."""
    looked_up: set[int] = set()
    used: set[int] = set()
    for module in model.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        (looked_up if isinstance(module, nn.Embedding | nn.EmbeddingBag) else used).update(own)
    return looked_up - used


class _Before:
    """Runs before a forward; does nothing in copies of the model."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    @outside_graphs
    def __call__(self, module: nn.Module, args: Any) -> None:
        self._call()

    def __reduce__(self) -> Any:
        return type(self), (_do_nothing,)


class _After:
    """Runs after a forward, also one that raised and so has no result; does nothing in copies of the model."""

    def __init__(self, call: Callable[[bool], None]) -> None:
        self._call = call

    @outside_graphs
    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        self._call(result is not None)

    def __reduce__(self) -> Any:
        return type(self), (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass


def _is_below(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


class _Paging:
    """Decides which extents are in memory; called by the hooks."""

    def __init__(self, extents: list[list[Extent]], budget: int) -> None:
        self.extents = extents
        self._schedule = StreamingSchedule(range(len(extents)))
        self._open: dict[
            int, list[str]
        ] = {}  # by thread: running modules that contain groups, outermost first
        self._waited = 0.0
        self._hits = self._misses = self._peak = 0
        self._read = (0, 0.0)  # bytes and seconds of threads that ended
        budget = max(0, budget - _KERNEL_AHEAD)
        self._kept = keep_resident(extents, budget)
        self._room = budget - self._kept
        self._active: Counter[int] = Counter()
        self._plan: dict[Extent, int] = {}  # extent → number of its pieces that may be in memory
        self._start()

    def _start(self) -> None:
        self._turn = threading.RLock()
        self.reader = Reader()
        self._finalizer = weakref.finalize(self, self.reader.stop)
        self._finalizer.atexit = False  # the thread does not keep the interpreter from exiting

    def stop(self) -> None:
        """End the thread; a later forward starts another one."""
        with self._turn:
            self._finalizer()
            self._forget()

    def _forget(self) -> None:
        self._read = self._read_until_now()
        for extent in self._plan:
            extent.have = 0
        self._plan = {}
        self._start()

    def _alone(self) -> threading.RLock:
        """The lock that lets one thread at a time decide."""
        if self.reader.pid != os.getpid():
            # A forked process has only the thread that forked, and locks in their state at that moment.
            self._finalizer.detach()
            self._forget()
        return self._turn

    def begin(self, name: str) -> None:
        """A module that contains groups begins its forward; the order is learnt per outermost module."""
        with self._alone():
            running = self._open.setdefault(threading.get_ident(), [])
            if running and not _is_below(name, running[-1]):
                # PyTorch calls no hooks after KeyboardInterrupt, so the end of the last forward was not seen here.
                running.clear()
                self._active.clear()
            if not running:
                self._schedule.begin(name)
            running.append(name)

    def end(self, complete: bool) -> None:
        """A module that contains groups has ended its forward."""
        with self._alone():
            running = self._open.get(threading.get_ident(), [])
            if running:
                running.pop()
                if not running:
                    del self._open[threading.get_ident()]
                    self._schedule.end(complete)

    def enter(self, index: int) -> None:
        """Wait until the group is in memory, as far as there is room for it."""
        with self._alone():
            if threading.get_ident() not in self._open:  # called on its own
                self._schedule.begin(None)
            self._schedule.record(index)
            self._active[index] += 1
            self._follow(self._next_plan(), {})
            goals = {extent: self._plan[extent] for extent in self.extents[index]}
            if all(extent.have >= goal for extent, goal in goals.items()):
                self._hits += 1
                return
            self._misses += 1
        began = time.perf_counter()
        self.reader.wait(goals)
        self._waited += time.perf_counter() - began

    def leave(self, index: int, complete: bool) -> None:
        """Evict the parts of the group that are not used next, and continue reading ahead."""
        with self._alone():
            if self._active[index]:  # not if another hook raised before the group was entered
                self._active[index] -= 1
                self._follow(self._next_plan(), dict.fromkeys(self.extents[index]))

    def _next_plan(self) -> dict[Extent, int]:
        """The extents to have in memory, in the order in which to read them."""
        plan: dict[Extent, int] = {}
        room, full = self._room, False
        active = list(+self._active)
        for number, index in enumerate([*active, *self._schedule.upcoming(_LOOK_AHEAD, again=True)]):
            if full and number >= len(active):
                break
            for extent in self.extents[index]:
                if extent not in plan:
                    plan[extent] = extent.count if extent.resident else extent.pieces_in(room)
                    room -= 0 if extent.resident else min(extent.nbytes, plan[extent] * PIECE)
                    full = full or plan[extent] < extent.count
        return plan

    def _follow(self, plan: dict[Extent, int], left: Mapping[Extent, None]) -> None:
        """Evict the extents that are not in the new plan, then read those it adds."""
        self._peak = max(self._peak, self._kept + self._streamed())
        surplus = {
            extent: plan.get(extent, 0)
            for extent, goal in self._plan.items()
            if not extent.resident and plan.get(extent, 0) < (extent.count if extent in left else goal)
        }
        # Resident extents are read again before their next use, because the kernel may have evicted them.
        again = {extent: 0 for extent in left if extent.resident}
        if surplus or again:
            self.reader.shrink(surplus | again)
        for extent, kept in surplus.items():
            evict(extent.pages[kept * PIECE :])
        self._plan = plan
        self.reader.follow(plan)

    def _streamed(self) -> int:
        """Bytes in memory of extents that are not resident."""
        return sum(min(extent.nbytes, extent.have * PIECE) for extent in self._plan if not extent.resident)

    def _read_until_now(self) -> tuple[int, float]:
        return self._read[0] + self.reader.nbytes, self._read[1] + self.reader.seconds

    def stats(self) -> StreamStats:
        """Bytes read, and bytes in memory."""
        with self._alone():
            moved, seconds = self._read_until_now()
            return StreamStats(
                bytes_moved=moved,
                seconds_moving=seconds,
                seconds_waited=self._waited,
                hits=self._hits,
                misses=self._misses,
                slot_bytes=self._streamed(),
                resident_bytes=self._kept,
                peak_bytes=self._peak,
            )
