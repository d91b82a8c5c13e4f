"""Packed documents and models of transformers that would not keep them apart."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from accel_state.messages import warn
from accel_train.data.packing import PackingCollator
from accel_train.sequence.batches import source_nodes, takes
from accel_train.sequence.documents import is_of_transformers

__all__ = ["warn_of_packing"]


def warn_of_packing(loaders: Iterable[Any], models: Iterable[nn.Module]) -> None:
    """Warn of models of transformers that let the documents of packed batches attend to each other.

    They make the mask of their attention from `position_ids`, but not where a cache is in use. Encoders never do.
    Kernels of FlashAttention find documents in any case. It is a warning, because a script may switch the cache off in
    each call, or give a model other batches.

    Args:
        loaders: of single datasets.
        models: those that are prepared; frozen ones are left out.
    """
    packing = next((each for loader in loaders if (each := _packing(loader)) is not None), None)
    found = None if packing is None else next(filter(None, map(_mixing, models)), None)
    if found is not None:
        module, reason = found
        warn(
            f"{packing} puts several documents into one sequence, and {type(module).__name__} with "
            f"attn_implementation={module.config._attn_implementation!r} lets them attend to each other: {reason}",
        )


def _mixing(model: nn.Module) -> tuple[Any, str] | None:
    """The outermost model of transformers in a trained model that lets documents attend to each other, and why."""
    for module in model.modules():
        if is_of_transformers(module) and (reason := _mixes(module)) is not None:
            return (module, reason) if any(p.requires_grad for p in model.parameters()) else None
    return None


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
