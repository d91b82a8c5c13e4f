"""The streamer: weights are in host memory, and on the device only while the module that needs them runs."""

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
from accel_bigmodel.streaming.schedule import StreamingSchedule
from accel_bigmodel.streaming.slot_layout import address_of
from accel_bigmodel.streaming.slots import SlotPool
from accel_bigmodel.streaming.stats import StreamStats
from accel_bigmodel.streaming.streamed_groups import Load, StreamedGroup, TiedUses
from accel_bigmodel.streaming.types import Transfer

__all__ = ["Streamer"]

P = ParamSpec("P")
R = TypeVar("R")

_attached: weakref.WeakSet[Streamer] = weakref.WeakSet()

# Held in turn by models that share weights: while one of them has a shared weight in a slot, no other may read it.
_common_turn = threading.RLock()


def _outside_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """Run a part of the streamer outside transforms of ``torch.func``, because what it makes outlives them."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return call


class Streamer:
    """Streams a model's offloaded weights to the device, group by group, ahead of their use.

    Parameters stay the same objects. While a group's module runs, the ``data`` of its parameters are views of a slot on
    the device; otherwise they are tensors in host memory, which are authoritative: every forward copies them again, and
    in-place changes made by a forward are written back to them. Changes of weights through ``.data`` inside a forward
    are not detected. Only the weights of resident groups are always on the device.

    Copies are requested ahead within one call of the outermost module that contains groups, in the order of the
    previous call. One thread at a time runs the model, or another model that shares weights with it; others wait, so a
    forward must not wait for another thread that runs a part of the model. ``copy.deepcopy`` and pickling of an
    attached model give a model with its own streamer.

    Args:
        model: contains the groups.
        groups: the groups that ``plan_groups`` returned for the model.
        transfer: copies to the device; not shared with another streamer.
        budget: bytes on the device for slots and resident groups. ``None``: room for the prefetched groups; the only
            resident groups are then those that are too small to be worth copying, that are in use while others are, or
            whose weights are needed before their forward.
        prefetch: number of groups that are copied ahead of their use.
        in_memory: names of groups whose weights stay in host memory permanently. Attaching packs them into host blocks
            of the transfer, where they stay after detaching.

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
            raise ValueError(f"prefetch={prefetch} must be 0 or more: the number of groups to copy ahead")
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
        self._schedule = StreamingSchedule()
        self._members: dict[int, StreamedGroup] = {}
        self._loaded: dict[int, StreamedGroup] = {}  # those with a load, oldest request first
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
        # The wrappers of the copied modules call this object. It prepares the weights at the first call, because the
        # modules are only half copied at this point.
        self.__dict__.update(state)
        self._begin()

    @property
    def device(self) -> torch.device:
        """The device that weights are copied to."""
        return self._transfer.device

    # Attaching

    def attach(self) -> None:
        """Begin streaming: wrap the forwards of the groups' modules and of the modules that contain them.

        Raises:
            DeviceMapError: the budget does not hold the largest group; names it and the bytes needed.
            OffloadError: the weights are streamed already, or a tensor cannot be streamed.
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
            self.detach()  # once the lock is free: its holder is in a forward
            raise

    def _take_turns(self) -> None:
        """Make forwards of models that share weights run one after another."""
        mine = self._identities()
        for other in list(_attached):
            if not mine.isdisjoint(other._identities()):
                self.turn = other.turn = _common_turn

    def _identities(self) -> set[int]:
        return {id(tensor) for group in self._groups for tensor in group.tensors.values()}

    def check(self, replacing: Streamer | None = None) -> None:
        """Make the checks of ``attach``, except for weights without values. Nothing is changed.

        Args:
            replacing: a streamer that will be detached before.
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
                        f"{group.name!r} was compiled by torch.jit, which calls its submodules without their "
                        "wrappers, so its weights cannot be streamed; place it on the device, or offload the module "
                        "that it was compiled from"
                    )
                if any(
                    wrapper.is_active() and not wrapper.belongs_to(replacing)
                    for wrapper in wrappers_of(module)
                ):
                    raise OffloadError(
                        f"the weights of {group.name!r} are streamed already; detach the streamer that does this first"
                    )

    def detach(self) -> None:
        """End streaming: weights are in host memory with their current values, and the modules as they were before."""
        if self.is_running():
            raise OffloadError("the streamer cannot be detached while a forward of its model runs")
        with self.turn, self.lock:
            _attached.discard(self)
            if self._interrupted:
                self._recover()
            for wrapper in reversed(self._wrappers or self._copied_wrappers()):
                wrapper.remove()
            self._wrappers = []
            self._release_residents()
            self._saving.forget()
            self._schedule = StreamingSchedule()
            self._pool.clear()
            self._transfer.close()
            self._ready = False

    def homes(self) -> dict[int, torch.Tensor]:
        """The tensors in host memory of the resident weights, by the identity of the weights."""
        return {key: host for resident in self._resident for key, host in resident.homes()}

    def _copied_wrappers(self) -> list[ForwardWrapper]:
        """The wrappers that came with a copied model."""
        wrappers = [wrapper for module in self._model.modules() for wrapper in wrappers_of(module)]
        return [wrapper for wrapper in wrappers if wrapper.belongs_to(self)]

    def is_copied(self, memo: dict[int, Any]) -> bool:
        """Whether ``copy.deepcopy``, whose memo this is, copies the whole model."""
        return id(self._model) in memo

    def _places(self) -> Iterator[tuple[nn.Module, int | None, list[int]]]:
        """The modules to wrap, outer ones first, with the number of their group and those of the groups within."""
        numbers = {self._groups[number].module: number for number in self._members}
        for module in self._model.modules():
            within = [numbers[below] for below in module.modules() if below in numbers]
            if within:
                yield module, numbers.get(module), within

    def _prepare(self) -> None:
        """Choose the resident groups, copy them to the device, and make slots for the rest."""
        members = self._new_members()
        for member in members:
            member.check()
            member.check_values()
        for member in members:
            member.move_to_host()
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
            self._release_residents()
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

    def _release_residents(self) -> None:
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

    # Called by the forward wrappers

    @outside_graphs
    def is_running(self) -> bool:
        """Whether this thread is in a forward of the model."""
        # Not a counter: a keyboard interrupt could come between a call and its counting.
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    @outside_graphs
    @_outside_transforms
    def open(self, key: Hashable, order: Sequence[int], outermost: bool) -> None:
        """A module that is a group's or contains groups begins its forward."""
        if not outermost:
            return
        if self._interrupted:
            self._recover()
        self._interrupted = True  # until the forward has ended in order
        if not self._ready:
            self._prepare()
        self._schedule.assume(key, order)
        self._schedule.begin(key)
        self._ahead()

    @outside_graphs
    @_outside_transforms
    def close(self, outermost: bool, orderly: bool, complete: bool) -> None:
        """End the forward. After the outermost forward all copies are dropped, because users may change weights.

        Args:
            outermost: it is not inside another module's forward.
            orderly: it returned or raised an error; not an interrupt, which may come anywhere.
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
        """Point all weights at host memory and start with new slots: an interrupt may have left any state half done."""
        self._transfer.close()
        for member in self._members.values():
            member.reset_to_host()
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
        self._schedule.record(group)
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
            # Otherwise the casts of all weights that passed through the slots would accumulate on the device.
            torch.clear_autocast_cache()
        load.slot.used_until = self._transfer.mark(load.slot.used_until)
        if load.partial or group not in self._schedule.upcoming(self._prefetch):
            self._drop(member)

    @outside_graphs
    def saving(self) -> AbstractContextManager[Any]:
        """Context for forwards that autograd records: what it saves of slots is read from host memory again."""
        return self._saving.around()

    @outside_graphs
    def owned(self, group: int, result: Any) -> Any:
        """The result of a group's module; views of its slot are cloned, because the slot is reused."""
        load = self._members[group].load
        assert load is not None
        return _without(load.slot.address, result)

    # Copies

    def _ahead(self) -> None:
        """Request the groups that are expected next, as far as there is room."""
        for group in self._schedule.upcoming(self._prefetch):
            member = self._members[group]
            if member.load is None:
                sources = self._tied.hosts(member)
                if sources is None or not self._load(member, sources):
                    return

    def _load_now(self, member: StreamedGroup) -> Load:
        """Request a group that is needed now; prefetched groups make room, the latest first."""
        expected = self._schedule.upcoming(self._prefetch)
        for other in [other for other in self._loaded.values() if not other.active]:
            if other.index not in expected:  # so that its queued copy does not delay this one
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
                f"the weights of {member.name!r} take {member.layout.nbytes:,} bytes on {self._transfer.device} "
                f"beside those of {active}, whose forward calls it; the budget of {self._budget:,} bytes has no room "
                "for both"
            )
        return load

    def _load(
        self, member: StreamedGroup, sources: Sequence[torch.Tensor | None], *, must: bool = False
    ) -> Load | None:
        """Request the copy of a group to a slot; ``None`` if there is no room.

        Args:
            member: the group.
            sources: its tensors in host memory.
            must: without a budget, take more than was planned; raise if the device has no more.
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
        """Bytes copied since the streamer was made, and bytes on the device."""
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
    """A module's result, with clones in place of tensors in the slot at an address."""
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
