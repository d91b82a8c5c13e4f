"""Whole weights that FSDP leaves in a model after a forward, in place of this rank's parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_ckpt.parts import fsdp_groups, fsdp_modules

__all__ = ["GatheredUnits"]

_OTHERS = ("_unsharded_param", "_sharded_post_forward_param")
"""What FSDP puts in the place of a part: the whole tensor, or a larger part (`reshard_after_forward=2`)."""


class GatheredUnits:
    """The units that FSDP gathers, of all prepared models.

    FSDP leaves the outermost unit gathered after a forward, and with ``reshard_after_forward=False`` all units: it
    counts on the backward, which frees them. Where none follows, whole values would stay as they are when something
    changes the parts, such as a step or averaged weights, and the next forward would compute with old ones. And
    `model.parameters()` would be whole tensors, whose gradients are elsewhere.
    """

    def __init__(self) -> None:
        self._groups: list[Any] = []

    def add(self, prepared: nn.Module, plain: Callable[[nn.Module], nn.Module]) -> None:
        """Take up the units of a model, and free them after each forward that no backward seems to follow.

        That is a forward without gradients, or in evaluation mode.

        Args:
            prepared: what the script calls.
            plain: returns a prepared model without wrappers, which the script may call, too.
        """
        known = set(map(id, self._groups))
        found = [group for unit in fsdp_modules(prepared) for group in fsdp_groups(unit)]
        added = [group for group in found if id(group) not in known]
        if not added:
            return
        self._groups += added

        def free(module: nn.Module, inputs: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and not (torch.is_grad_enabled() and module.training):
                _free(added)

        for each in {id(each): each for each in (plain(prepared), prepared)}.values():
            each.register_forward_hook(free)

    def clear(self) -> None:
        """Forget all units."""
        self._groups.clear()

    def free(self) -> None:
        """Give up whole values; the next forward or backward gathers them again."""
        _free(self._groups)

    def parts_of(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """This rank's parts, which have the gradients, in place of what a model had while it was gathered."""
        if not self._groups or all(p.grad is not None or not p.requires_grad for p in parameters):
            return parameters
        parts = {
            id(other): held.sharded_param
            for group in self._groups
            for held in group.fsdp_params
            for other in (getattr(held, name, None) for name in _OTHERS)
        }
        return [parts.get(id(parameter), parameter) for parameter in parameters]


def _free(groups: Sequence[Any]) -> None:
    for group in groups:
        if not group.is_sharded:
            group.reshard()
