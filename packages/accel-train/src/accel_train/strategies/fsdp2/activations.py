"""Activation checkpointing: recomputing the activations of blocks in backward instead of storing them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from accel_train.errors import PrepareError
from accel_train.strategies.blocks import repeated_blocks

__all__ = ["CheckpointedForward", "Policy", "checkpoint_blocks", "keep_products", "policy_of"]

Policy = Callable[..., CheckpointPolicy]
"""Says for each operation whether its results are kept, as `create_selective_checkpoint_contexts` of torch takes it."""

# Arguments of blocks of older transformers, whose caches are tuples.
_CACHES = ("past_key_values", "past_key_value", "layer_past")

# Where the time of a forward goes; there is one kernel of attention for each kind of device.
_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)


def policy_of(chosen: bool | str | Policy) -> Policy | None:
    """The policy that a plugin's `activation_checkpointing` chooses; None: keep nothing."""
    if callable(chosen):
        return chosen
    return keep_products if chosen == "selective" else None


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy "selective": keep outputs of products, convolutions and attention; others are cheap to recompute."""
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class CheckpointedForward:
    """A block's forward with activation checkpointing: only its inputs are kept, the rest is recomputed in backward.

    A KV cache, which models of transformers create also in training, is left out: the block would append to it once
    more when it is recomputed.

    It replaces `forward` instead of wrapping the module, so names do not change, and hooks of the module, which gather
    its parameters, run once and not again while it is recomputed.

    Args:
        forward: the block's own forward.
        offload: keep the inputs in host memory.
        policy: chooses the operations whose outputs are kept as well; None: none.
    """

    def __init__(self, forward: Callable[..., Any], offload: bool, policy: Policy | None = None) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.offload = offload
        self.policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's outputs.

        Raises:
            PrepareError: the cache already holds keys and values, as for prefix tuning.
        """
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        args, kwargs = _without_cache(args, kwargs)
        where: AbstractContextManager[Any] = contextlib.nullcontext()
        if self.offload:
            where = save_on_cpu(pin_memory=torch.accelerator.is_available())
        selective: dict[str, Any] = {}
        if self.policy is not None:
            make = functools.partial(create_selective_checkpoint_contexts, self.policy)
            selective["context_fn"] = make
        with where:
            return checkpoint(self.forward, *args, use_reentrant=False, **selective, **kwargs)


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a block of transformers by which it caches nothing; some models pass the cache by position."""
    at = [place for place, value in enumerate(args) if _is_cache(value)]
    names = [
        name for name, value in kwargs.items() if _is_cache(value) or (name in _CACHES and value is not None)
    ]
    found = [(f"argument {place + 1}", args[place]) for place in at] + [
        (name, kwargs[name]) for name in names
    ]
    if not found:
        return args, kwargs
    for name, cache in found:
        length = cache.get_seq_length() if _is_cache(cache) else None
        if length != 0:
            held = "keys and values" if length is None else f"the keys and values of {length} positions"
            raise PrepareError(
                f"{name} holds {held}, and a block that is recomputed in backward would append to them again. If they "
                "are of a prefix (prefix tuning), set activation_checkpointing=False; if of other blocks of this "
                "forward, which are not recomputed, set model.config.use_cache = False."
            )
    kwargs = {**kwargs, **dict.fromkeys(names), **({"use_cache": False} if "use_cache" in kwargs else {})}
    return tuple(None if place in at else value for place, value in enumerate(args)), kwargs


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def checkpoint_blocks(
    model: nn.Module, units: Iterable[nn.Module], offload: bool, policy: Policy | None = None
) -> None:
    """Checkpoint the innermost units of a model, or its repeated blocks if it is one unit.

    Args:
        model: changed in place.
        units: the modules that are gathered as units.
        offload: keep the inputs of blocks in host memory.
        policy: chooses the operations whose outputs are kept; None: none.

    Raises:
        PrepareError: the model has neither: recomputing the whole model at once would save nothing.
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
            block.forward = CheckpointedForward(block.forward, offload, policy)
