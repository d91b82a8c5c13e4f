"""The tensors of models and optimizers, by kind of state, also those inside of tensor subclasses and of FSDP."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_ckpt.parts import fsdp_groups, fsdp_modules, reshard

__all__ = ["KINDS", "HoldsTensors", "Kinded", "of_kind", "tensors_in", "tensors_of_model"]

KINDS = ("parameters", "gradients", "optimizer")
"""Kinds of state. Buffers of a model count as its parameters."""

Kinded = tuple[str, Tensor]


@runtime_checkable
class HoldsTensors(Protocol):
    """A registered object that has tensors on the device, such as averages of weights."""

    def held_tensors(self) -> Iterable[Tensor]:
        """Its tensors, also divided ones; they move when the states of all models and optimizers do."""
        ...


def of_kind(kind: str, tensors: Iterable[Tensor]) -> Iterator[Kinded]:
    """The tensors, each with its kind."""
    return ((kind, tensor) for tensor in tensors)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, and the tensors that they consist of (the local part of a `DTensor`)."""
    if isinstance(tree, Tensor):
        yield tree
        if is_traceable_wrapper_subclass(cast(object, tree)):
            names, _ = cast(Any, tree).__tensor_flatten__()
            for name in names:
                yield from tensors_in(getattr(tree, name))
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)


def tensors_of_model(model: nn.Module) -> Iterator[Kinded]:
    """Parameters, buffers and gradients of a model, without wrappers; FSDP first frees whole parameters and caches."""
    _free_gathered(model)
    for parameter in model.parameters():
        yield from of_kind("parameters", tensors_in(parameter))
        yield from of_kind("gradients", tensors_in(parameter.grad))
    yield from of_kind("parameters", itertools.chain.from_iterable(map(tensors_in, model.buffers())))
    groups = itertools.chain.from_iterable(map(fsdp_groups, fsdp_modules(model)))
    for parameter in itertools.chain.from_iterable(group.fsdp_params for group in groups):
        # Whole gradients of an open window, of which only FSDP knows: in the dtype of computation or of reduction.
        whole = getattr(parameter, "_unsharded_param", None)
        kept = [parameter.unsharded_accumulated_grad, None if whole is None else whole.grad]
        # Since PyTorch 2.15 both are one tensor.
        yield from of_kind("gradients", tensors_in(kept[:1] if kept[0] is kept[1] else kept))


def _free_gathered(model: nn.Module) -> None:
    """Let FSDP free what it has gathered; after a forward without backward it keeps the last unit, in two forms."""
    reshard(model)
    for module in fsdp_modules(model):
        context = getattr(module._get_fsdp_state(), "_comm_ctx", None)
        if context is not None and getattr(context, "all_gather_state", None) is not None:
            torch.accelerator.synchronize()  # it was kept until its copy is done
            context.all_gather_state = None
