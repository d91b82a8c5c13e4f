"""Packed documents and models of transformers that would not keep them apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from accel_train.data.packing import PackingCollator
from accel_train.errors import PrepareError
from accel_train.sequence.batches import takes
from accel_train.sequence.documents import is_of_transformers

__all__ = ["check_packing"]


def check_packing(loaders: Iterable[Any], models: Iterable[nn.Module]) -> None:
    """Check that models of transformers keep the documents of packed batches apart.

    They make the mask of their attention from `position_ids`, but not where a cache is in use. Encoders never do.
    Only kernels of FlashAttention find documents in any case.

    Args:
        loaders: of single datasets.
        models: those that are trained together with them.

    Raises:
        PrepareError: documents would attend to each other, and nothing would say so.
    """
    packing = next((each for loader in loaders if (each := _packing(loader)) is not None), None)
    for given in models if packing is not None else ():
        model = next((module for module in given.modules() if is_of_transformers(module)), None)
        config = getattr(model, "config", None)
        kind = getattr(config, "_attn_implementation", None)
        if model is None or kind not in ("sdpa", "eager"):
            continue
        names = takes(model)
        told = (
            f"{packing} puts several documents into one sequence, and {type(model).__name__} with "
            f"attn_implementation={kind!r} lets them attend to each other"
        )
        if "use_cache" not in names and "position_ids" in names:
            raise PrepareError(
                f"{told}: it reads boundaries of documents only with attn_implementation='flash_attention_2'. Load "
                "it with that, or give each document a sequence of its own."
            )
        if "use_cache" in names and getattr(config, "use_cache", False):
            raise PrepareError(
                f"{told}, because it makes no mask for documents while config.use_cache is True. Set "
                "model.config.use_cache = False before prepare(); generate() has a setting of its own."
            )


def _packing(loader: Any) -> str | None:
    """The name of the collate function, if it packs documents."""
    collate = getattr(loader, "collate_fn", None)
    packs = isinstance(collate, PackingCollator) or type(collate).__name__ == "DataCollatorWithFlattening"
    return type(collate).__name__ if packs else None
