"""Packed documents and models of transformers that would not keep them apart."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from accel_state.messages import warn
from accel_train.data.packing import PackingCollator
from accel_train.sequence.batches import source_nodes, takes
from accel_train.sequence.documents import is_of_transformers, restarts

__all__ = ["FirstBatches", "warn_of_packing"]

_LOOKED_AT = 8
"""Calls of a model; looking waits for its device."""


def warn_of_packing(loaders: Iterable[Any], models: Iterable[nn.Module], new: Iterable[nn.Module]) -> None:
    """Warn of models of transformers that let the documents of packed batches attend to each other.

    They make the mask of their attention from `position_ids`, but not where a cache is in use. Encoders never do.
    Kernels of FlashAttention find documents in any case. It is a warning, because a script may switch the cache off in
    each call, or give a model other batches.

    Args:
        loaders: of single datasets.
        models: those that are prepared; frozen ones are left out.
        new: those that are being prepared, whose first batches are looked at if no collate function packs.
    """
    packing = next((each for loader in loaders if (each := _packing(loader)) is not None), None)
    for module, reason in filter(None, map(_mixing, new if packing is None else models)):
        if packing is not None:
            _warn(packing, module, reason)
            break
        FirstBatches(module, reason)


def _mixing(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The outermost model of transformers in a trained model that lets documents attend to each other, and why."""
    for module in model.modules():
        if is_of_transformers(module) and (reason := _mixes(module)) is not None:
            return (module, reason) if any(p.requires_grad for p in model.parameters()) else None
    return None


class FirstBatches:
    """Looks for packed documents in the first batches that a model is called with.

    Args:
        module: a model of transformers.
        reason: why it lets documents attend to each other.
    """

    def __init__(self, module: nn.Module, reason: str) -> None:
        self._reason, self._left = reason, _LOOKED_AT
        self._hook = module.register_forward_pre_hook(self, with_kwargs=True)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn of position ids that begin again, where neither a mask nor an argument keeps documents apart."""
        given = {**dict(zip(takes(module), args, strict=False)), **kwargs}
        positions = given.get("position_ids")
        self._left -= 1
        packed = (
            isinstance(positions, Tensor)
            and given.get("attention_mask") is None
            and given.get("use_cache") is not False
            and bool(restarts(positions).any())
        )
        if packed:
            _warn("A batch whose position_ids begin again", module, self._reason)
        if packed or not self._left:
            self._hook.remove()


def _warn(packing: str, module: Any, reason: str) -> None:
    warn(
        f"{packing} puts several documents into one sequence, and {type(module).__name__} with "
        f"attn_implementation={module.config._attn_implementation!r} lets them attend to each other: {reason}",
    )


def _packing(loader: Any) -> str | None:
    """The name of the collate function, if it packs documents."""
    collate = getattr(loader, "collate_fn", None)
    packs = isinstance(collate, PackingCollator) or type(collate).__name__ == "DataCollatorWithFlattening"
    return type(collate).__name__ if packs else None


def _mixes(module: Any) -> str | None:
    """Why a model lets documents attend to each other, and what to do; None: it does not."""
    config, names = getattr(module, "config", None), takes(module)
    if getattr(config, "_attn_implementation", None) not in ("sdpa", "eager") or "position_ids" not in names:
        return None
    if any(getattr(each, "is_causal", True) is False for each in module.modules()):
        return (
            "it is an encoder, which reads boundaries of documents only with attn_implementation="
            "'flash_attention_2'. Load it with that, or give each document a sequence of its own."
        )
    # Training switches the cache off there.
    newer = hasattr(type(module), "is_activation_checkpointing")  # the older name warns
    checkpoints = getattr(module, f"is_{'activation' if newer else 'gradient'}_checkpointing", False)
    if "use_cache" in names and getattr(config, "use_cache", False) and not checkpoints:
        return (
            "it makes no mask for documents while config.use_cache is True. Set model.config.use_cache = False, or "
            "pass use_cache=False in each call; generate() has a setting of its own."
        )
    if _masks_without_positions(type(module).forward):
        return (
            "it makes its mask without position_ids. Load it with a kernel of FlashAttention, or give each document a "
            "sequence of its own."
        )
    return None


def _masks_without_positions(forward: Callable[..., Any]) -> bool:
    """Whether a forward makes causal masks with functions of transformers, and gives none of them `position_ids`.

    They are arguments, or keys of a mapping of arguments. False where there is no source code to look at.
    """
    nodes = source_nodes(forward)
    masks = [
        node
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.startswith("create_")
        and node.func.id.endswith("causal_mask")
    ]
    given = [argument for mask in masks for argument in (*mask.args, *(each.value for each in mask.keywords))]
    named = any(isinstance(node, ast.Name) and node.id == "position_ids" for node in given)
    as_key = any(isinstance(node, ast.Constant) and node.value == "position_ids" for node in nodes)
    return bool(masks) and not (named or as_key)
