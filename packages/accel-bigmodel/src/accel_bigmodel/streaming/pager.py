"""Weights that are views of mapped files, in less memory than the files take: read ahead, and dropped behind."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from accel_bigmodel.streaming.pages import PIECE, Extent, extents_of, keep_resident
from accel_bigmodel.streaming.reading import Reader
from accel_ckpt.memory import evict

if TYPE_CHECKING:
    from torch import nn

    from accel_bigmodel.streaming.groups import Group

__all__ = ["Pager"]

# Groups that are looked at for what to read next.
_LOOK_AHEAD = 32

# Bytes of the budget for what the kernel reads ahead of what it was asked for: twice its usual 8 MB on large disks.
_KERNEL_AHEAD = 1 << 24


class Pager:
    """Keeps the mapped weights of a model within a budget of memory, and reads them before they are needed.

    The weights stay what they are, views of the mapped files; only which of their pages are in memory changes.
    A thread reads the groups in the order in which the last forward used them. A group that was used is
    dropped, unless it is one of those for which the budget has room all the time. What was written to a weight
    is never dropped.

    Results do not depend on any of this: what is not in memory when it is used, the kernel reads then.

    Args:
        model: its forward uses the groups.
        groups: the parts of the model that are used one after the other.
        budget: bytes of mapped weights that may be in memory. Two groups that follow each other should fit; if they do
            not, less is read ahead.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Group], *, budget: int) -> None:
        self._model = weakref.ref(model)
        self._modules = [weakref.ref(group.module) for group in groups]
        self._paging = _Paging(extents_of([group.tensors.values() for group in groups]), budget)
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Put hooks on the model and on the groups. The first forward starts the thread."""
        model = self._model()
        if self._handles or model is None:
            return
        paging = self._paging
        self._handles.append(model.register_forward_pre_hook(_Hook(paging.order.begin)))
        for index, reference in enumerate(self._modules):
            module = reference()
            if module is not None and paging.extents[index]:
                entering = _Hook(partial(paging.enter, index))
                leaving = _Hook(partial(paging.leave, index))
                self._handles.append(module.register_forward_pre_hook(entering))
                self._handles.append(module.register_forward_hook(leaving, always_call=True))

    def detach(self) -> None:
        """Take the hooks away and end the thread. What is in memory stays there until the kernel needs the room."""
        while self._handles:
            self._handles.pop().remove()
        self._paging.stop()


class _Hook:
    """A hook that copies of the model do not have: their weights are in memory."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: Any) -> None:
        self._call()

    def __reduce__(self) -> Any:
        return _Hook, (_do_nothing,)


def _do_nothing() -> None:
    pass


class _Order:
    """In which order groups are entered: as in the last forward, and in the first one, as they are listed."""

    def __init__(self, count: int) -> None:
        self._known = list(range(count))
        self._now: list[int] = []
        self._at = -1

    def begin(self) -> None:
        """A forward of the model begins."""
        if self._now:
            self._known, self._now, self._at = self._now, [], -1

    def enter(self, index: int) -> None:
        """A group's forward begins."""
        self._now.append(index)
        following = self.upcoming()
        if index in following:
            self._at = (self._at + 1 + following.index(index)) % len(self._known)

    def upcoming(self) -> list[int]:
        """The groups that will come, the next forward's included."""
        return self._known[self._at + 1 :] + self._known[: self._at + 1]


class _Paging:
    """Decides which extents are in memory; the hooks call it."""

    def __init__(self, extents: list[list[Extent]], budget: int) -> None:
        self.extents = extents
        self.order = _Order(len(extents))
        self.waited = 0.0
        budget = max(0, budget - _KERNEL_AHEAD)
        self._room = budget - keep_resident(extents, budget)
        self._active: Counter[int] = Counter()
        self._plan: dict[Extent, int] = {}  # to the number of pieces that may be in memory
        self._start()

    def _start(self) -> None:
        self._turn = threading.RLock()
        self.reader = Reader()
        self._finalizer = weakref.finalize(self, self.reader.stop)
        self._finalizer.atexit = False  # the thread is no obstacle to the interpreter's end

    def stop(self) -> None:
        """End the thread; a later forward starts another one."""
        with self._turn:
            self._finalizer()
            self._forget()

    def _forget(self) -> None:
        for extent in self._plan:
            extent.have = 0
        self._plan = {}
        self._start()

    def enter(self, index: int) -> None:
        """Return when the group is in memory, as far as there is room for it."""
        if self.reader.pid != os.getpid():
            # A fork has only the thread that forked, and locks as they were at that moment.
            self._finalizer.detach()
            self._forget()
        with self._turn:
            self.order.enter(index)
            self._active[index] += 1
            self._follow(self._next_plan(), {})
            goals = {extent: self._plan[extent] for extent in self.extents[index]}
        began = time.perf_counter()
        self.reader.wait(goals)
        self.waited += time.perf_counter() - began

    def leave(self, index: int) -> None:
        """Drop the group, or what of it is not to be used next, and read on in its place."""
        with self._turn:
            if self._active[index]:  # it is not if another hook raised before the group was entered
                self._active[index] -= 1
                self._follow(self._next_plan(), dict.fromkeys(self.extents[index]))

    def _next_plan(self) -> dict[Extent, int]:
        """What to have in memory, in the order in which to read it."""
        plan: dict[Extent, int] = {}
        room, full = self._room, False
        active = list(+self._active)
        for number, index in enumerate([*active, *islice(self.order.upcoming(), _LOOK_AHEAD)]):
            if full and number >= len(active):
                break
            for extent in self.extents[index]:
                if extent not in plan:
                    plan[extent] = extent.count if extent.resident else extent.pieces_in(room)
                    room -= 0 if extent.resident else min(extent.nbytes, plan[extent] * PIECE)
                    full = full or plan[extent] < extent.count
        return plan

    def _follow(self, plan: dict[Extent, int], left: Mapping[Extent, None]) -> None:
        """Drop what the plan has no room for any more, and then read what it adds."""
        surplus = {
            extent: plan.get(extent, 0)
            for extent, goal in self._plan.items()
            if not extent.resident and plan.get(extent, 0) < (extent.count if extent in left else goal)
        }
        # What stays is asked for again before it is used again: the kernel may have taken it.
        again = {extent: 0 for extent in left if extent.resident}
        if surplus or again:
            self.reader.shrink(surplus | again)
        for extent, kept in surplus.items():
            evict(extent.pages[kept * PIECE :])
        self._plan = plan
        self.reader.follow(plan)
