"""The tensors of a model that a load gives values to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from accel_ckpt.errors import StateMismatchError, UninitializedTensorError
from accel_ckpt.modules.names import prefixed_modules, refuse_collisions
from accel_ckpt.modules.tensors import check_is_module, rewrap, set_data
from accel_ckpt.parts import reshard
from accel_ckpt.tensor_storage import is_lazy

__all__ = ["LoadTarget", "ModelTensors", "assign", "tensors_of"]


@dataclass(slots=True, eq=False)
class LoadTarget:
    """A tensor of the model and all its names there."""

    tensor: torch.Tensor
    names: list[str]
    owners: list[dict[str, Any]]
    """For each name, the dictionary of a module that holds it."""

    def hold(self, tensor: torch.Tensor) -> None:
        """Put a tensor into the model under all these names."""
        for name, tensors in zip(self.names, self.owners, strict=True):
            tensors[name.rpartition(".")[2]] = tensor


class ModelTensors(NamedTuple):
    """All tensors of a model, and its modules."""

    targets: dict[str, LoadTarget]
    """The tensors of the model's state dict, by canonical name; tied names share a target."""
    hidden: list[LoadTarget]
    """Buffers that a state dict leaves out."""
    extra: dict[str, nn.Module]
    """Modules that take extra state, by its name in a state dict."""
    modules: list[tuple[str, str, nn.Module]]
    """Every module under each of its prefixes, with the canonical one."""


def tensors_of(model: nn.Module) -> ModelTensors:
    """The tensors of a model.

    Raises:
        TypeError: it is no module.
        NameCollisionError: two names become one.
        UninitializedTensorError: a tensor has no shape yet.
        StateMismatchError: the elements of a tensor share memory.
    """
    check_is_module(model)
    reshard(model)
    modules = prefixed_modules(model)
    found: dict[int, LoadTarget] = {}
    targets: dict[str, LoadTarget] = {}
    own_names: dict[str, str] = {}
    for kind in ("_parameters", "_buffers"):
        for prefix, canonical, module in modules:
            tensors: dict[str, Any] = getattr(module, kind)
            if not tensors:
                continue
            left_out = module._non_persistent_buffers_set
            for leaf, tensor in tensors.items():
                if tensor is None:
                    continue
                target = found.get(id(tensor))
                if target is None:
                    target = found[id(tensor)] = LoadTarget(tensor, [prefix + leaf], [tensors])
                else:
                    target.names.append(prefix + leaf)
                    target.owners.append(tensors)
                if leaf not in left_out:
                    name, own = canonical + leaf, prefix + leaf
                    if own_names.setdefault(name, own) != own:
                        refuse_collisions([(own_names[name], name), (own, name)])
                    targets[name] = target
    saved = {id(target) for target in targets.values()}
    for target in found.values():
        if not target.tensor.is_meta and id(target) in saved:
            _refuse_unloadable(target)
    hidden = [target for target in found.values() if id(target) not in saved]
    extra = {
        f"{canonical}_extra_state": module
        for _, canonical, module in modules
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }
    return ModelTensors(targets, hidden, extra, modules)


def _refuse_unloadable(target: LoadTarget) -> None:
    name, tensor = target.names[0], target.tensor
    if is_lazy(tensor):
        raise UninitializedTensorError(
            f"{name!r} of the model is lazy and has no shape yet; run the model once before loading"
        )
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise StateMismatchError(
            f"{name!r} of the model is expanded, so that elements share memory and cannot be loaded one by one; "
            "clone() it when the model is built"
        )


def assign(target: LoadTarget, value: torch.Tensor) -> None:
    """Give a tensor of a model its value; a parameter that has values already stays the same object."""
    old = target.tensor
    if not old.is_meta:
        set_data(old, value)
        return
    target.hold(rewrap(old, value) if isinstance(old, nn.Parameter) else value)
