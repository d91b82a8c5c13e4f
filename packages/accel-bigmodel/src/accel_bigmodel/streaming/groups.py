"""Groups of weights that are copied together: the repeated blocks of a model, or single modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from accel_bigmodel.containers import is_container
from accel_bigmodel.device_maps.model_outline import class_names
from accel_bigmodel.errors import DeviceMapError
from accel_ckpt.modules.tensors import get_non_persistent_buffers

__all__ = ["Group", "plan_groups"]


@dataclass(frozen=True, eq=False)
class Group:
    """Weights that one module needs while it runs, and that are copied together.

    Attributes:
        name: full name of the module; ``""`` is the model.
        module: the module whose forward needs them.
        tensors: parameters, and buffers if they are streamed, by one full name each. A tied parameter
            is in every group that uses it.
    """

    name: str
    module: nn.Module
    tensors: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def plan_groups(
    model: nn.Module,
    streamed: Collection[str],
    *,
    preload_module_classes: Collection[str] | None = None,
    offload_buffers: bool = False,
) -> list[Group]:
    """Divide the offloaded weights into groups, in the order of the modules.

    A group is a whole repeated block (a child of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` that has
    siblings of its class, or no siblings), unless blocks that repeat inside it, as experts do, hold most of it:
    then those are the groups. Where nothing repeats, each module with its own tensors is one group together with its
    submodules, because such modules may use the weights of their children without calling them.

    Args:
        model: the model.
        streamed: names of modules and tensors whose weights are offloaded; ``""`` is the whole model. A parameter that
            is tied to a name outside of them is in no group, because it stays on the device.
        preload_module_classes: names of classes whose modules are one group each, including all their submodules.
        offload_buffers: persistent buffers are streamed too. Others never are.

    Raises:
        DeviceMapError: a name is neither a module's nor a tensor's, or a class is not given by its name.
    """
    tensors = _waiting(model, frozenset(streamed), offload_buffers)
    return _Planner(tensors, class_names(preload_module_classes, "preload_module_classes")).plan(model)


def _waiting(model: nn.Module, streamed: frozenset[str], offload_buffers: bool) -> set[int]:
    """Identities of the tensors whose names are all covered."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    buffers = list(model.named_buffers(remove_duplicate=False))
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    unknown = sorted(streamed - known - {name for name, _ in parameters} - {name for name, _ in buffers})
    if unknown:
        top = ", ".join(repr(name) for name, _ in model.named_children())
        raise DeviceMapError(
            f"the model has no module, parameter or buffer named {', '.join(map(repr, unknown))}; "
            f"its top-level modules are {top}"
        )
    moving: list[tuple[str, torch.Tensor]] = list(parameters)
    if offload_buffers:
        hidden = get_non_persistent_buffers(model, recurse=True, fqns=True)
        moving += [(name, buffer) for name, buffer in buffers if name not in hidden]
    outside = {id(tensor) for name, tensor in moving if not _covered(name, streamed)}
    return {id(tensor) for _, tensor in moving} - outside


def _covered(name: str, entries: frozenset[str]) -> bool:
    while name and name not in entries:
        name = name.rpartition(".")[0]
    return name in entries


def _repeated_children(container: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in container._modules.values() if child is not None]
    counts = Counter(type(child) for child in children)
    for child in children:
        several = counts[type(child)] > 1 or len(children) == 1
        if several and not is_container(child) and not isinstance(child, ParametrizationList):
            yield child


class _Planner:
    """The walk over the modules."""

    def __init__(self, waiting: set[int], preload: frozenset[str]) -> None:
        self._waiting = waiting
        self._preload = preload
        self._seen: set[nn.Module] = set()
        self._repeated: set[nn.Module] = set()

    def plan(self, model: nn.Module) -> list[Group]:
        for module in model.modules():
            if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                self._repeated.update(_repeated_children(module))
        groups = list(self._walk(model, "", inside=False))
        if is_container(model) and (own := self._own(model, "")):
            groups.insert(0, Group("", model, own))
        return groups

    def _walk(self, module: nn.Module, name: str, *, inside: bool) -> Iterator[Group]:
        """The groups of a module; ``inside``: it is in a repeated block that is split into groups."""
        if module in self._seen:
            return
        self._seen.add(module)
        tensors = self._all(module, name)
        if not tensors:
            return
        if not is_container(module):
            if self._moves_whole(module, name, tensors, inside):
                self._seen.update(module.modules())
                yield Group(name, module, tensors)
                return
            own = self._own(module, name)
            if own:
                yield Group(name, module, own)
        for leaf, child in module.named_children():
            yield from self._walk(
                child, f"{name}.{leaf}" if name else leaf, inside=inside or module in self._repeated
            )

    def _moves_whole(
        self, module: nn.Module, name: str, tensors: Mapping[str, torch.Tensor], inside: bool
    ) -> bool:
        if type(module).__name__ in self._preload:
            return True
        within = self._repeated_bytes(module)
        if module in self._repeated:
            return 2 * within <= sum(tensor.nbytes for tensor in tensors.values())
        return within == 0 and (inside or bool(self._own(module, name)))

    def _repeated_bytes(self, module: nn.Module) -> int:
        """Bytes of the repeated blocks below a module; repeated layers without submodules do not count as blocks."""
        held = {
            id(tensor): tensor.nbytes
            for below in module.modules()
            if below is not module and below in self._repeated and any(True for _ in below.children())
            for tensor in self._all(below, "").values()
        }
        return sum(held.values())

    def _all(self, module: nn.Module, name: str) -> dict[str, torch.Tensor]:
        return self._only_waiting(
            [*module.named_parameters(prefix=name), *module.named_buffers(prefix=name)],
        )

    def _own(self, module: nn.Module, name: str) -> dict[str, torch.Tensor]:
        """Tensors of a module itself, and of children that are only containers."""
        found = self._only_waiting(
            [
                *module.named_parameters(prefix=name, recurse=False),
                *module.named_buffers(prefix=name, recurse=False),
            ],
        )
        for leaf, child in module.named_children():
            if is_container(child):
                found |= self._own(child, f"{name}.{leaf}" if name else leaf)
        return found

    def _only_waiting(self, named: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in named if id(tensor) in self._waiting}
