"""The engine: weights wait in host memory, and are on the device while the module that needs them runs."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from accel_bigmodel.errors import OffloadError
from accel_bigmodel.hooks.base import computes_weight_early, outside_graphs
from accel_bigmodel.streaming.autograd import Saving
from accel_bigmodel.streaming.block_packing import pack_into_blocks
from accel_bigmodel.streaming.forward_wrappers import ForwardWrapper, wrappers_of
from accel_bigmodel.streaming.groups import Group
from accel_bigmodel.streaming.residency import choose_resident, window_bytes
from accel_bigmodel.streaming.resident import Resident
from accel_bigmodel.streaming.schedule import Schedule
from accel_bigmodel.streaming.slot_layout import address_of
from accel_bigmodel.streaming.slots import SlotPool
from accel_bigmodel.streaming.stats import StreamStats
from accel_bigmodel.streaming.streamed_groups import Load, StreamedGroup, TiedUses
from accel_bigmodel.streaming.types import Transfer

__all__ = ["Streamer"]

P = ParamSpec("P")
R = TypeVar("R")

_attached: weakref.WeakSet[Streamer] = weakref.WeakSet()

# Whose turn it is among models that have weights in common: what one of them has in a slot is nobody's home.
_common_turn = threading.RLock()


def _outside_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """Let a part of the engine run as if no transform of ``torch.func`` were at work: what it makes outlives that."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return call


class Streamer:
    """Streams the weights of a model's groups to the device of a transfer.

    Parameters stay the objects that they are. While a group's module runs, the ``data`` of its parameters are views
    of a slot on the device; otherwise they are tensors in host memory, and these hold the truth: the engine reads
    them anew for every forward, and what a forward changes in place is written back to them. Changes of weights
    through ``.data`` inside a forward are not seen. Only the weights of resident groups are on the device all the
    time.

    Copies are asked for ahead within one call of the outermost module that contains groups, in the order of the call
    before. One thread at a time runs the model, or one that has weights in common with it; others wait, so a forward
    must not wait for another thread that runs a part of the model. ``copy.deepcopy`` and pickling of an attached model
    give a model with an engine of its own.

    Args:
        model: contains the groups.
        groups: what ``plan_groups`` returned for the model.
        transfer: to the device; not shared with another streamer.
        budget: bytes on the device for slots and resident groups; ``None``: room for the groups that are moved
            ahead, and nothing resident but what is too small to be worth moving, or needed around others, or before its
            forward.
        prefetch: how many groups are moved ahead.
        in_memory: names of groups whose weights are to wait in host memory for good. They are gathered in host blocks
            of the transfer when the engine takes hold of them, and stay there when it lets go.

    Raises:
        ValueError: ``prefetch`` is negative.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        transfer: Transfer,
        *,
        budget: int | None = None,
        prefetch: int = 2,
        in_memory: Collection[str] = (),
    ) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch} must be 0 or more: the number of groups to move ahead")
        self._arguments = (model, list(groups), transfer, budget, prefetch, frozenset(in_memory))
        self._begin()

    def _begin(self) -> None:
        self._model, self._groups, self._transfer, self._budget, self._prefetch, self._in_memory = (
            self._arguments
        )
        self.turn = threading.RLock()  # taken before the lock; other engines may wait for the same
        self.lock = threading.RLock()
        self._wrappers: list[ForwardWrapper] = []
        self._ready = False
        self._interrupted = False
        self._schedule = Schedule()
        self._members: dict[int, StreamedGroup] = {}
        self._loaded: dict[int, StreamedGroup] = {}  # those with a load, the first asked for first
        self._tied = TiedUses()
        self._resident: list[Resident] = []
        self._pool = SlotPool(self._transfer, 0)
        self._saving = Saving(self._transfer.device)
        self._moved = self._hits = self._misses = self._packed = 0
        self._waited = 0.0

    def __getstate__(self) -> dict[str, Any]:
        if self.is_running():
            raise OffloadError("a model cannot be copied or pickled while its forward runs; do it afterwards")
        return {"_arguments": self._arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The gates of the copied modules call this object; it takes hold of the weights when they first do, for
        # now the modules are only half copied.
        self.__dict__.update(state)
        self._begin()

    @property
    def device(self) -> torch.device:
        """Where the weights go."""
        return self._transfer.device

    # Attaching

    def attach(self) -> None:
        """Begin: surround the forwards of the groups' modules and of those that contain them.

        Raises:
            DeviceMapError: the budget does not hold the largest group, which is named with what is needed.
            OffloadError: the engine is attached, or a tensor cannot be streamed.
        """
        self._check_modules(None)
        self._take_turns()
        try:
            with self.turn, self.lock:
                self._prepare()
                for module, group, below in self._places():
                    self._wrappers.append(ForwardWrapper(self, module, group, below))
                _attached.add(self)
        except BaseException:
            self.detach()  # when the lock is free: who holds it is in a forward
            raise

    def _take_turns(self) -> None:
        """Let forwards of models that have weights in common run one after the other."""
        mine = self._identities()
        for other in list(_attached):
            if not mine.isdisjoint(other._identities()):
                self.turn = other.turn = _common_turn

    def _identities(self) -> set[int]:
        return {id(tensor) for group in self._groups for tensor in group.tensors.values()}

    def check(self, replacing: Streamer | None = None) -> None:
        """Refuse what ``attach`` refuses, but for weights that have no values yet. Nothing is changed.

        Args:
            replacing: an engine that will have been detached by then.
        """
        self._check_modules(replacing)
        members = self._new_members()
        for member in members:
            member.check()
        self._choose(members)

    def _check_modules(self, replacing: Streamer | None) -> None:
        for group in self._groups:
            for module in group.module.modules():
                if isinstance(module, torch.jit.ScriptModule):
                    raise OffloadError(
                        f"{group.name!r} was compiled by torch.jit, which runs its parts without telling anybody, so "
                        "its weights cannot be streamed; place it on the device, or offload what it was compiled from"
                    )
                if any(
                    wrapper.is_active() and not wrapper.belongs_to(replacing)
                    for wrapper in wrappers_of(module)
                ):
                    raise OffloadError(
                        f"the weights of {group.name!r} are streamed already; detach the engine that does it first"
                    )

    def detach(self) -> None:
        """End: weights are in host memory, with the values they have now, and the modules as they were before."""
        if self.is_running():
            raise OffloadError("the engine cannot be detached while a forward of its model runs")
        with self.turn, self.lock:
            _attached.discard(self)
            if self._interrupted:
                self._recover()
            for wrapper in reversed(self._wrappers or self._copied_wrappers()):
                wrapper.remove()
            self._wrappers = []
            self._let_residents_go()
            self._saving.forget()
            self._schedule = Schedule()
            self._pool.clear()
            self._transfer.close()
            self._ready = False

    def homes(self) -> dict[int, torch.Tensor]:
        """The tensors in host memory behind those that stay on the device, by the identity of the latter."""
        return {key: host for resident in self._resident for key, host in resident.homes()}

    def _copied_wrappers(self) -> list[ForwardWrapper]:
        """Those that came with a copied model."""
        wrappers = [wrapper for module in self._model.modules() for wrapper in wrappers_of(module)]
        return [wrapper for wrapper in wrappers if wrapper.belongs_to(self)]

    def is_copied(self, memo: dict[int, Any]) -> bool:
        """Whether ``copy.deepcopy`` is at work on the whole model; ``memo`` is its memory."""
        return id(self._model) in memo

    def _places(self) -> Iterator[tuple[nn.Module, int | None, list[int]]]:
        """The modules to surround, outer ones first, with the numbers of their groups and of those within."""
        numbers = {self._groups[number].module: number for number in self._members}
        for module in self._model.modules():
            within = [numbers[below] for below in module.modules() if below in numbers]
            if within:
                yield module, numbers.get(module), within

    def _prepare(self) -> None:
        """Decide what stays on the device, move that there, and make the slots for the rest."""
        members = self._new_members()
        for member in members:
            member.check()
            member.check_values()
        for member in members:
            member.take_home()
        stay = self._choose(members)
        here: set[int] = set()
        try:
            for member in members:
                if member.index in stay and member.leave_out(here):
                    self._resident.append(Resident(member, self._transfer))
                    here.update(id(item.tensor) for item in member.items)
            moving = [member for member in members if member.index not in stay and member.leave_out(here)]
            waiting = [member for member in moving if member.name in self._in_memory]
            self._packed = pack_into_blocks(self._model, waiting, self._transfer) if waiting else 0
        except BaseException:
            self._let_residents_go()
            raise
        self._members = {member.index: member for member in moving}
        self._tied = TiedUses(moving)
        used = sum(resident.nbytes for resident in self._resident)
        window = window_bytes([member.layout.nbytes for member in moving], self._prefetch)
        self._pool = SlotPool(self._transfer, window if self._budget is None else self._budget - used, used)
        self._ready = True

    def _new_members(self) -> list[StreamedGroup]:
        return [StreamedGroup(self._model, number, group) for number, group in enumerate(self._groups)]

    def _choose(self, members: Sequence[StreamedGroup]) -> set[int]:
        sizes = [member.layout.nbytes for member in members]
        names = [member.name for member in members]
        return choose_resident(names, sizes, self._around() | self._early(), self._budget, self._prefetch)

    def _let_residents_go(self) -> None:
        while self._resident:
            self._resident.pop().restore()

    def _around(self) -> set[int]:
        """Numbers of the groups whose modules contain those of others."""
        modules = {group.module for group in self._groups}
        return {
            number
            for number, group in enumerate(self._groups)
            if any(below in modules for below in group.module.modules() if below is not group.module)
        }

    def _early(self) -> set[int]:
        """Numbers of the groups whose weights are needed before their forwards begin."""
        return {
            number
            for number, group in enumerate(self._groups)
            if any(computes_weight_early(module) for module in group.module.modules())
        }

    # Called by the gates

    @outside_graphs
    def is_running(self) -> bool:
        """Whether this thread is in a forward of the model."""
        # Not a count of our own: an interrupt from the keyboard could come between a call and its being counted.
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    @outside_graphs
    @_outside_transforms
    def open(self, key: Hashable, order: Sequence[int], outermost: bool) -> None:
        """A module that is a group's or contains groups begins its forward."""
        if not outermost:
            return
        if self._interrupted:
            self._recover()
        self._interrupted = True  # until the contrary is known
        if not self._ready:
            self._prepare()
        self._schedule.assume(key, order)
        self._schedule.begin(key)
        self._ahead()

    @outside_graphs
    @_outside_transforms
    def close(self, outermost: bool, orderly: bool, complete: bool) -> None:
        """It ended; after the outermost one nothing that was copied counts any more, for users may change weights.

        Args:
            outermost: no other module's forward is around it.
            orderly: it ended by itself or by an error, and not by an interrupt, which may come anywhere.
            complete: it ended without an error.
        """
        if not outermost:
            return
        if not orderly:
            self._recover()
        for member in list(self._loaded.values()):
            self._drop(member)
        self._schedule.end(complete)
        self._interrupted = False

    def _recover(self) -> None:
        """Bring all weights home, and begin with new slots: an interrupt may have left any bookkeeping half done."""
        self._transfer.close()
        for member in self._members.values():
            member.rescue()
        self._loaded.clear()
        self._saving.slots.clear()
        self._tied = TiedUses(self._members.values())
        self._pool = self._pool.fresh()
        self._interrupted = False

    @outside_graphs
    @_outside_transforms
    def enter(self, group: int) -> None:
        """A group's module needs its weights now.

        Raises:
            OffloadError: they could not be copied.
        """
        member = self._members[group]
        if member.active:
            member.active += 1
            return
        self._schedule.saw(group)
        load = member.load
        if load is not None and member.changed(load, self._tied):
            self._drop(member)
            load = None
        if load is None:
            self._misses += 1
            load = self._load_now(member)
        else:
            self._hits += 1
        self._ahead()
        self._wait(member, load)
        member.active = 1
        self._saving.slots[load.slot.address] = member
        member.point(load, self._tied)
        if torch.is_grad_enabled():
            self._saving.refuse_gradients(member)

    @outside_graphs
    @_outside_transforms
    def leave(self, group: int) -> None:
        """A group's module has run."""
        member = self._members[group]
        if member.active != 1:  # 0: it never had them
            member.active = max(0, member.active - 1)
            return
        member.active = 0
        load = member.load
        assert load is not None
        del self._saving.slots[load.slot.address]
        member.restore(load, self._tied)
        if torch.is_autocast_enabled(self._transfer.device.type):
            # Else the casts of all weights that passed through the slots would pile up on the device.
            torch.clear_autocast_cache()
        load.slot.used_until = self._transfer.mark(load.slot.used_until)
        if load.partial or group not in self._schedule.upcoming(self._prefetch):
            self._drop(member)

    @outside_graphs
    def saving(self) -> AbstractContextManager[Any]:
        """Surrounds forwards that autograd records: what it saves of slots is read from host memory again."""
        return self._saving.around()

    @outside_graphs
    def owned(self, group: int, result: Any) -> Any:
        """The result of a group's module, where it is weights themselves as a copy: the slot will hold others."""
        load = self._members[group].load
        assert load is not None
        return _without(load.slot.address, result)

    # Copies

    def _ahead(self) -> None:
        """Ask for the groups that are expected next, as far as there is room."""
        for group in self._schedule.upcoming(self._prefetch):
            member = self._members[group]
            if member.load is None:
                sources = self._tied.hosts(member)
                if sources is None or not self._load(member, sources):
                    return

    def _load_now(self, member: StreamedGroup) -> Load:
        """Ask for a group that is needed; groups that were moved ahead make room, the latest first."""
        expected = self._schedule.upcoming(self._prefetch)
        for other in [other for other in self._loaded.values() if not other.active]:
            if other.index not in expected:  # nor does what waits in the queue hold this one up
                self._drop(other)
        sources = self._tied.sources_now(member)
        for other in reversed([other for other in self._loaded.values() if not other.active]):
            if load := self._load(member, sources):
                return load
            self._drop(other)
        load = self._load(member, sources) or self._load(member, sources, must=True)
        if load is None:
            active = ", ".join(repr(other.name) for other in self._loaded.values())
            raise OffloadError(
                f"the weights of {member.name!r} take {member.layout.nbytes:,} bytes on {self._transfer.device} beside "
                f"those of {active}, which runs around it; the budget of {self._budget:,} bytes has no room for both"
            )
        return load

    def _load(
        self, member: StreamedGroup, sources: Sequence[torch.Tensor | None], *, must: bool = False
    ) -> Load | None:
        """Ask for the copy of a group to a slot; ``None`` if there is no room.

        Args:
            member: the group.
            sources: its tensors in host memory.
            must: without a budget take more than was planned; raise if the device has no more.
        """
        member.describe(sources)
        try:
            slot = self._pool.take(member.layout.nbytes, beyond=must and self._budget is None)
        except torch.OutOfMemoryError:
            if must:
                raise
            return None
        if slot is None:
            return None
        slot.last_copy = self._transfer.copy(member.name, sources, member.layout, slot)
        member.load = load = Load(member, slot, sources)
        self._loaded[member.index] = member
        self._moved += load.nbytes
        return load

    def _wait(self, member: StreamedGroup, load: Load) -> None:
        begin = None if load.pending.ready() else time.perf_counter()
        try:
            load.pending.wait()
        except Exception as error:
            self._drop(member)
            raise OffloadError(
                f"the weights of {member.name!r} could not be copied to {self._transfer.device}: {error}"
            ) from error
        except BaseException:
            self._drop(member)
            raise
        if begin is not None:
            self._waited += time.perf_counter() - begin

    def _drop(self, member: StreamedGroup) -> None:
        load = self._loaded.pop(member.index).load
        assert load is not None
        member.load = None
        load.pending.cancel()
        self._pool.give_back(load.slot)

    def stats(self) -> StreamStats:
        """What was moved since the engine was made, and what is on the device."""
        return StreamStats(
            bytes_moved=self._moved,
            seconds_moving=self._transfer.seconds(),
            seconds_waited=self._waited,
            hits=self._hits,
            misses=self._misses,
            slot_bytes=self._pool.nbytes,
            resident_bytes=sum(resident.nbytes for resident in self._resident),
            peak_bytes=self._pool.peak,
            page_locked_bytes=self._packed,
        )


def _without(address: int | None, result: Any) -> Any:
    """A module's result with clones in place of what lies in the slot at an address."""
    if isinstance(result, torch.Tensor):
        return result.clone() if address is not None and address_of(result) == address else result
    if isinstance(result, tuple):
        items = [_without(address, item) for item in result]
        if all(new is old for new, old in zip(items, result, strict=True)):
            return result
        return type(result)(*items) if hasattr(result, "_fields") else tuple(items)
    if isinstance(result, list | dict):
        for key, item in enumerate(result) if isinstance(result, list) else list(result.items()):
            new = _without(address, item)
            if new is not item:
                result[key] = new
    return result
