"""Packed documents and models of transformers that would not keep them apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from accel_state.messages import warn
from accel_train.data.packing import PackingCollator
from accel_train.sequence.batches import takes
from accel_train.sequence.documents import is_of_transformers

__all__ = ["warn_of_packing"]


def warn_of_packing(loaders: Iterable[Any], models: Iterable[nn.Module]) -> None:
    """Warn of models of transformers that let the documents of packed batches attend to each other.

    They make the mask of their attention from `position_ids`, but not where a cache is in use. Encoders never do.
    Kernels of FlashAttention find documents in any case. It is a warning, because a script may switch the cache off in
    each call, or give a model other batches.

    Args:
        loaders: of single datasets.
        models: those that were prepared with them; frozen ones are left out.
    """
    packing = next((each for loader in loaders if (each := _packing(loader)) is not None), None)
    if packing is None:
        return
    for model in models:
        if any(parameter.requires_grad for parameter in model.parameters()):
            for module in filter(is_of_transformers, model.modules()):
                reason = _mixes(module)
                if reason is not None:
                    warn(
                        f"{packing} puts several documents into one sequence, and {type(module).__name__} with "
                        f"attn_implementation={module.config._attn_implementation!r} lets them attend to each other: "  # type: ignore[union-attr]
                        f"{reason}",
                    )
                    return


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
    checkpoints = getattr(module, "is_gradient_checkpointing", False)
    if "use_cache" in names and getattr(config, "use_cache", False) and not checkpoints:
        return (
            "it makes no mask for documents while config.use_cache is True. Set model.config.use_cache = False, or "
            "pass use_cache=False in each call; generate() has a setting of its own."
        )
    return None
