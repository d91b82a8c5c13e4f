"""Gathering results for metrics: exactly one row per sample, whatever was padded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel_state.operations.collectives import gather, gather_object
from accel_state.trees import honor_type, is_namedtuple, recursively_apply
from accel_train.data.active_loaders import ActiveLoaders
from accel_train.data.combined import CombinedLoader
from accel_train.data.loader import PreparedLoader
from accel_train.errors import AmbiguousLoaderError, ArgumentTypeError, MetricsShapeError
from accel_train.ranks import Ranks

__all__ = ["gather_for_metrics"]


def gather_for_metrics(
    data: Any,
    ledger: ActiveLoaders,
    *,
    ranks: Ranks,
    loader: Any = None,
    use_gather_object: bool = False,
) -> Any:
    """See `Accelerator.gather_for_metrics`.

    Args:
        data: nested tensors or objects.
        ledger: the loaders that are being iterated.
        ranks: those that read different samples; only they are gathered from.
        loader: the loader the batch came from; None: the one that yielded last.
        use_gather_object: gather tensors as lists of their rows.

    Raises:
        ArgumentTypeError: `loader` is no prepared loader.
        MetricsShapeError: a value does not have one row per sample.
        AmbiguousLoaderError: several loaders are iterated in turn and none was named.
    """
    if loader is not None and not isinstance(loader, PreparedLoader | CombinedLoader):
        raise ArgumentTypeError(
            f"gather_for_metrics(dataloader=…) takes a loader that prepare() returned, got {type(loader).__name__}, "
            "which does not record padding. Pass the prepared loader that yielded the batch."
        )
    source, alone = (loader, True) if loader is not None else _source(ledger, ranks)
    if source is None:
        own = _OwnRows()
    else:
        full = (source.full_rows, getattr(source, "sampler_batch_size", None)) if alone else ()
        own = _OwnRows(source.batch_rows, full, source.real_rows, source.may_pad)
    if ranks.size == 1:
        return _without_repeated(data, own, use_gather_object)
    # Rows may differ between ranks not only where padding was dropped: batch samplers choose their own sizes.
    ragged = source is not None
    if not use_gather_object and _all_tensors(data):
        return gather(recursively_apply(own.tensor, data), group=ranks.group, ragged=ragged)
    tensors: list[Tensor] = []
    objects: list[Sequence[Any]] = []
    build = _take_apart(data, own, use_gather_object, tensors, objects)
    gathered = gather(tensors, group=ranks.group, ragged=ragged) if tensors else []
    return build(gathered, gather_object([objects], group=ranks.group) if objects else [])


def _source(ledger: ActiveLoaders, ranks: Ranks) -> tuple[Any, bool]:
    """The loader that yielded last, if one is being iterated; and whether it is the only one."""
    active = ledger.active
    if active is None:
        return None, False
    rivals = ledger.interleaved()
    if rivals and ranks.size > 1 and any(item.valid_rows() is not None for item in [active, *rivals]):
        names = ", ".join(
            sorted(f"{type(item).__name__}({type(item.dataset).__name__})" for item in [active, *rivals])
        )
        raise AmbiguousLoaderError(
            f"gather_for_metrics() cannot tell whose padding to drop: {names} are being iterated in turn. Name the "
            "loader: gather_for_metrics(x, dataloader=eval_loader)."
        )
    return active, not rivals


def _all_tensors(data: Any) -> bool:
    if isinstance(data, Tensor):
        return True
    try:
        recursively_apply(lambda leaf: leaf, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _OwnRows:
    """Which rows of a value belong to samples of this rank's batch.

    Args:
        rows: rows of the batch; None when they are not known.
        full: rows of a full batch of this rank, and of one that ranks divide, which the script knows; None when batches
            vary.
        real: how many leading rows of the batch are real; None when all are.
        may_pad: whether the loader pads, so that the rows of every value must be understood.
    """

    rows: int | None = None
    full: tuple[int | None, ...] = ()
    real: int | None = None
    may_pad: bool = False

    def tensor(self, leaf: Tensor) -> Tensor:
        """The real rows of a tensor; one value per rank passes."""
        if not leaf.dim():
            return leaf
        rows = leaf.shape[0]
        if rows == 1 and self.rows not in (1, None):
            return leaf
        count = self._count(rows, "a tensor of shape", tuple(leaf.shape))
        return leaf if count is None else leaf[:count]

    def objects(self, items: Any) -> list[Any]:
        """The real ones of a sequence, or array, with one object per sample."""
        count = self._count(len(items), f"a {type(items).__name__} of length", len(items))
        return list(items if count is None else items[:count])

    def is_repeated(self, rows: int) -> bool:
        """Whether a value has the rows of a full batch where fewer came, as a loss that was repeated has."""
        return self.rows is not None and rows in self.full and rows > self.rows

    def _count(self, rows: int, kind: str, size: object) -> int | None:
        """How many leading ones of `rows` rows are real; None for all."""
        if self.rows in (rows, None):
            return self.real
        if self.is_repeated(rows):
            return self.rows if self.real is None else self.real
        if not self.may_pad:
            return None
        raise MetricsShapeError(
            f"gather_for_metrics() got {kind} {size}, but this rank's batch has {self.rows} rows. Padding can only be "
            "dropped from values with one row per sample. Gather per-sample values, or use gather() or "
            "gather_object() for everything else."
        )


def _without_repeated(data: Any, own: _OwnRows, only_objects: bool) -> Any:
    """What one rank alone gathers: `data` itself, without rows that repeat a value beyond the batch that came."""
    if own.rows is None or own.rows in own.full:
        return data
    if not only_objects:
        return recursively_apply(
            lambda leaf: leaf[: own.rows] if leaf.dim() and own.is_repeated(leaf.shape[0]) else leaf, data
        )
    if _per_sample(data) and own.is_repeated(len(data)):
        return data[: own.rows]
    return data


_Build = Callable[[list[Tensor], list[Any]], Any]
"""From the gathered tensors, and from each rank's objects, to the gathered value."""


def _take_apart(
    node: Any, own: _OwnRows, only_objects: bool, tensors: list[Tensor], objects: list[Sequence[Any]]
) -> _Build:
    """Collect the real rows of what is in `node`; the result puts together what was gathered."""
    if node is None:
        return lambda gathered, others: None
    if isinstance(node, Tensor) and not only_objects:
        place = len(tensors)
        tensors.append(own.tensor(node))
        return lambda gathered, others: gathered[place]
    if isinstance(node, Mapping) or is_namedtuple(node) or (not only_objects and _is_structure(node)):
        values = node.values() if isinstance(node, Mapping) else node
        parts = [_take_apart(value, own, only_objects, tensors, objects) for value in values]
        return lambda gathered, others: _like(node, [part(gathered, others) for part in parts])
    place = len(objects)
    objects.append(recursively_apply(_compact, own.objects(node) if _per_sample(node) else [node]))
    kind = tuple if type(node) is tuple else list
    return lambda gathered, others: kind(item for theirs in others for item in theirs[place])


def _compact(leaf: Tensor) -> Tensor:
    """A tensor that owns its memory: pickled, a row of a batch would take all of the batch along."""
    return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf


def _is_structure(node: Any) -> bool:
    """A list or tuple of values for all samples, as opposed to one of an object per sample."""
    if not isinstance(node, list | tuple):
        return False
    parts = (Tensor, Mapping, list) if isinstance(node, tuple) else Tensor
    return any(isinstance(item, parts) for item in node)


def _per_sample(node: Any) -> bool:
    """Whether `node` holds one object per sample: a list or tuple, or an array or tensor with dimensions."""
    return isinstance(node, list | tuple) or bool(getattr(node, "shape", ()))


def _like(node: Any, values: list[Any]) -> Any:
    if isinstance(node, Mapping):
        return dict(zip(node, values, strict=True))
    return honor_type(node, values)
