"""Recomputing the activations of blocks in backward instead of storing them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from accel_train.errors import PrepareError
from accel_train.strategies.blocks import repeated_blocks

__all__ = ["CheckpointedForward", "checkpoint_blocks"]


class CheckpointedForward:
    """A block's forward whose activations are computed again in backward; only its inputs are kept.

    It replaces `forward` instead of wrapping the module, so names do not change, and hooks of the module, which gather
    its parameters, run once and not again while it is recomputed.

    Args:
        forward: the block's own.
        offload: keep the inputs in host memory.
    """

    def __init__(self, forward: Callable[..., Any], offload: bool) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's outputs."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        where: AbstractContextManager[Any] = contextlib.nullcontext()
        if self.offload:
            where = save_on_cpu(pin_memory=torch.accelerator.is_available())
        with where:
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def checkpoint_blocks(model: nn.Module, units: Iterable[nn.Module], offload: bool) -> None:
    """Checkpoint the innermost units of a model, or its repeated blocks if it is one unit.

    Raises:
        PrepareError: there are neither: recomputing the whole model at once would save nothing.
    """
    blocks = list(units) or repeated_blocks(model)
    if not blocks:
        raise PrepareError(
            f"activation_checkpointing=True recomputes the blocks of a model one after the other, and "
            f"{type(model).__name__} has no repeated blocks. Name their classes: "
            "FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=[…])."
        )
    known = set(map(id, blocks))
    for block in blocks:
        inside = any(id(module) in known for module in block.modules() if module is not block)
        if not inside and not isinstance(block.forward, CheckpointedForward):
            block.forward = CheckpointedForward(block.forward, offload)
