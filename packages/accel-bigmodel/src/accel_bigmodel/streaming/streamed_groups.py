"""Run-time state of the streamed groups: their tensors, where these are now, and which other groups use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set

import torch
from torch import nn

from accel_bigmodel.errors import OffloadError
from accel_bigmodel.streaming.groups import Group
from accel_bigmodel.streaming.slot_layout import SlotLayout, address_of
from accel_bigmodel.streaming.types import PendingCopy, Slot
from accel_ckpt.modules.tensors import set_data
from accel_ckpt.modules.ties import parent_and_leaf

__all__ = ["Load", "StreamedGroup", "StreamedTensor", "TiedUses"]


class StreamedTensor:
    """One tensor of a group, and where its module registers it."""

    __slots__ = ("is_buffer", "leaf", "name", "owner", "table", "tensor", "tied", "versioned")

    def __init__(self, model: nn.Module, name: str) -> None:
        self.name = name
        self.owner, self.leaf = parent_and_leaf(model, name)
        self.is_buffer = self.leaf in self.owner._buffers
        self.table: dict[str, torch.Tensor | None] = (
            self.owner._buffers if self.is_buffer else self.owner._parameters  # type: ignore[assignment]
        )
        self.tied = False
        tensor = self.table[self.leaf]
        assert tensor is not None
        self.hold(tensor)

    def hold(self, tensor: torch.Tensor) -> None:
        """Replace the tensor; users may register another one between forwards."""
        self.tensor = tensor
        # Inference tensors have no version counter.
        self.versioned = not tensor.is_inference()

    def version(self) -> int:
        """A number that changes with every in-place change that is not made through ``.data``."""
        return self.tensor._version if self.versioned else 0

    def may_change_unseen(self) -> bool:
        """Whether a forward may have changed it without changing its version.

        Normalisation kernels update running statistics that way in training mode.
        """
        return self.is_buffer and (self.owner.training or not self.versioned)


class Load:
    """A group in a slot, or on its way there."""

    __slots__ = ("hosts", "nbytes", "partial", "pending", "slot", "versions", "views")

    def __init__(self, member: StreamedGroup, slot: Slot, sources: Sequence[torch.Tensor | None]) -> None:
        assert slot.last_copy is not None
        self.slot = slot
        self.pending: PendingCopy = slot.last_copy
        self.views = slot.views(member.layout)
        self.hosts = sources
        # Tied tensors that an active group has on the device already are not copied.
        self.partial = any(source is None for source in sources)
        self.versions = [item.version() for item in member.items]
        self.nbytes = sum(source.nbytes for source in sources if source is not None)


class StreamedGroup:
    """A group that is streamed.

    Args:
        model: in which the tensors' names are looked up.
        index: number of the group.
        group: the group.
    """

    def __init__(self, model: nn.Module, index: int, group: Group) -> None:
        self.index = index
        self.name = group.name
        self.items = [StreamedTensor(model, name) for name in group.tensors]
        self.active = 0  # how many calls of the module run
        self.load: Load | None = None

    def check(self) -> None:
        """Refuse tensors that cannot be packed.

        Raises:
            OffloadError: names one.
        """
        for item in self.items:
            tensor = item.tensor
            if type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided:
                raise OffloadError(
                    f"{item.name!r} is a {type(tensor.data).__name__}, so it cannot be streamed; "
                    "place its module on the device"
                )
        self.layout = SlotLayout([item.tensor for item in self.items])

    def check_values(self) -> None:
        """Refuse tensors without values.

        Raises:
            OffloadError: names one.
        """
        for item in self.items:
            if item.tensor.device.type == "meta":
                raise OffloadError(
                    f"{item.name!r} has no values (meta device), so it cannot be streamed; load it first"
                )

    def move_to_host(self) -> None:
        """Move tensors to host memory that are on a device, as the resident weights of a copied model are."""
        for item in self.items:
            if item.tensor.device.type != "cpu":
                set_data(item.tensor, item.tensor.data.cpu())

    def leave_out(self, elsewhere: Set[int]) -> bool:
        """Exclude tensors by identity; false if nothing is left to stream."""
        self.items = [item for item in self.items if id(item.tensor) not in elsewhere]
        self.layout = SlotLayout([item.tensor for item in self.items])
        return bool(self.items)

    def describe(self, sources: Sequence[torch.Tensor | None]) -> None:
        """Update the layout for tensors that have another shape, memory format or dtype now."""
        tensors = [
            item.tensor if source is None else source
            for item, source in zip(self.items, sources, strict=True)
        ]
        if not self.layout.describes(tensors):
            self.layout = SlotLayout(tensors)

    def changed(self, load: Load, tied: TiedUses) -> bool:
        """Whether a tensor was changed since its copy was requested."""
        for item, host, version in zip(self.items, load.hosts, load.versions, strict=True):
            tensor = item.tensor
            if item.table.get(item.leaf) is not tensor or (item.versioned and tensor._version != version):
                return True
            now = tied.host(item) if item.tied else tensor
            if host is not None and host.data_ptr() != now.data_ptr():
                return True
        return False

    def point(self, load: Load, tied: TiedUses) -> None:
        """Point the tensors at the slot."""
        for item, view, host in zip(self.items, load.views, load.hosts, strict=True):
            if not item.tied or tied.first(item, host):
                set_data(item.tensor, view)

    def restore(self, load: Load, tied: TiedUses) -> None:
        """Point the tensors at host memory again, including the changes that the forward made."""
        for number, item in enumerate(self.items):
            host = load.hosts[number]
            if (item.tied and not tied.last(item)) or host is None:
                continue
            tensor = item.tensor
            version = item.version()
            if version != load.versions[number] or item.may_change_unseen():
                with torch.inference_mode():  # allowed for tensors of either kind
                    host.copy_(load.views[number])
                load.versions[number] = version
            set_data(tensor, host)
            new = item.table.get(item.leaf)
            if item.is_buffer and new is not None and new is not tensor:  # the forward registered another one
                set_data(new, torch.empty_like(new.data, device="cpu").copy_(new.data))

    def reset_to_host(self) -> None:
        """Point every tensor that is still in a slot at host memory, in whatever state the group is."""
        load, self.load, self.active = self.load, None, 0
        if load is None:
            return
        for item, host in zip(self.items, load.hosts, strict=True):
            if host is not None and address_of(item.tensor) == load.slot.address:
                set_data(item.tensor, host)


class TiedUses:
    """Which groups use the tensors that several groups share, and where the values of these are in host memory.

    Args:
        members: the streamed groups.
    """

    def __init__(self, members: Iterable[StreamedGroup] = ()) -> None:
        self._members = list(members)
        self._users: Counter[int] = Counter()
        self._hosts: dict[int, torch.Tensor] = {}
        self._count()

    def _count(self) -> None:
        counts = Counter(id(item.tensor) for member in self._members for item in member.items)
        for member in self._members:
            if not member.active:
                for item in member.items:
                    item.tied = counts[id(item.tensor)] > 1

    def host(self, item: StreamedTensor) -> torch.Tensor:
        """The tensor in host memory."""
        if item.tied and id(item.tensor) in self._hosts:
            return self._hosts[id(item.tensor)]
        return item.tensor.data

    def hosts(self, member: StreamedGroup) -> list[torch.Tensor] | None:
        """The tensors of a group in host memory, as registered now; ``None`` if one was removed."""
        for item in member.items:
            tensor = item.table.get(item.leaf)
            if tensor is None:
                return None
            if tensor is not item.tensor:
                item.hold(tensor)
                self._count()
        return [self.host(item) for item in member.items]

    def sources_now(self, member: StreamedGroup) -> list[torch.Tensor | None]:
        """The tensors to copy for a group that is needed now.

        Raises:
            OffloadError: one was removed from its module.
        """
        hosts = self.hosts(member)
        if hosts is None:
            removed = [item.name for item in member.items if item.table.get(item.leaf) is None]
            raise OffloadError(
                f"{', '.join(map(repr, removed))} was removed from its module after the model was dispatched; "
                "dispatch the model again"
            )
        return [
            None if item.tied and self._users[id(item.tensor)] else host
            for item, host in zip(member.items, hosts, strict=True)
        ]

    def first(self, item: StreamedTensor, host: torch.Tensor | None) -> bool:
        """Note that a group uses a tied tensor; true if no other group does already."""
        key = id(item.tensor)
        self._users[key] += 1
        if self._users[key] > 1:
            return False
        assert host is not None
        self._hosts[key] = host
        return True

    def last(self, item: StreamedTensor) -> bool:
        """Note that a group no longer uses a tied tensor; true if no other group does either."""
        key = id(item.tensor)
        self._users[key] -= 1
        if self._users[key]:
            return False
        del self._users[key]
        self._hosts.pop(key, None)
        return True
