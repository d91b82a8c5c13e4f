"""Gathering results for metrics: exactly one row per sample, whatever was padded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accel_state.collectives import gather, gather_object
from accel_state.trees import recursively_apply
from accel_train.data.ledger import LoaderLedger
from accel_train.errors import AmbiguousLoaderError, MetricsShapeError

__all__ = ["gather_for_metrics"]


def gather_for_metrics(
    data: Any,
    ledger: LoaderLedger,
    *,
    world_size: int,
    rank: int,
    loader: Any = None,
    use_gather_object: bool = False,
) -> Any:
    """See `Accelerator.gather_for_metrics`."""
    if world_size == 1:
        return data  # nothing was padded, nothing is to be gathered
    source = loader if loader is not None else _source(ledger)
    valid: tuple[int, ...] | None = source.valid_rows() if source is not None else None
    rows: int | None = source.batch_rows if source is not None and source.may_pad else None
    if use_gather_object or not _all_tensors(data):
        return _gather_objects(data, valid, rows, rank)
    if rows is not None:
        recursively_apply(lambda leaf: _check_rows(leaf, rows), data)
    if valid is not None:
        mine = valid[rank]
        data = recursively_apply(lambda leaf: leaf[:mine] if leaf.dim() else leaf, data)
    # Rows may differ between ranks not only where padding was dropped: batch samplers choose their own sizes.
    return gather(data, ragged=source is not None)


def _source(ledger: LoaderLedger) -> Any:
    active = ledger.active
    if active is None:
        return None
    rivals = ledger.interleaved()
    if rivals and any(item.valid_rows() is not None for item in [active, *rivals]):
        names = ", ".join(
            sorted(f"{type(item).__name__}({type(item.dataset).__name__})" for item in [active, *rivals])
        )
        raise AmbiguousLoaderError(
            f"gather_for_metrics() cannot tell whose padding to drop: {names} are being iterated in turn. Say it: "
            "gather_for_metrics(x, dataloader=eval_loader)."
        )
    return active


def _all_tensors(data: Any) -> bool:
    if isinstance(data, Tensor):
        return True
    try:
        recursively_apply(lambda leaf: leaf, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _check_rows(leaf: Tensor, rows: int) -> Tensor:
    if leaf.dim() and leaf.shape[0] != rows:
        raise MetricsShapeError(
            f"gather_for_metrics() got a tensor of shape {tuple(leaf.shape)}, but this rank's batch has {rows} rows. "
            "Padding can only be dropped from values with one row per sample. Gather per-sample values, or use "
            "gather() for everything else."
        )
    return leaf


def _gather_objects(data: Any, valid: tuple[int, ...] | None, rows: int | None, rank: int) -> Any:
    """Objects are gathered as lists with one entry per sample, or as one entry per rank."""
    if isinstance(data, list):
        if rows is not None and len(data) != rows:
            raise MetricsShapeError(
                f"gather_for_metrics() got a list of {len(data)} objects, but this rank's batch has {rows} rows. "
                "Give one object per sample, or use gather_object()."
            )
        return gather_object(data if valid is None else data[: valid[rank]])
    return gather_object([data])
