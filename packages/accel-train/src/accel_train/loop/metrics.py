"""Gathering results for metrics: exactly one row per sample, whatever was padded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel_state.communication.collectives import gather, gather_object
from accel_state.trees import honor_type, is_namedtuple, recursively_apply
from accel_train.data.active_loaders import ActiveLoaders
from accel_train.data.loader import PreparedLoader
from accel_train.errors import AmbiguousLoaderError, ArgumentTypeError, MetricsShapeError

__all__ = ["gather_for_metrics"]


def gather_for_metrics(
    data: Any,
    ledger: ActiveLoaders,
    *,
    world_size: int,
    rank: int,
    loader: Any = None,
    use_gather_object: bool = False,
) -> Any:
    """See `Accelerator.gather_for_metrics`."""
    if world_size == 1:
        return data  # nothing was padded, nothing is to be gathered
    if loader is not None and not isinstance(loader, PreparedLoader):
        raise ArgumentTypeError(
            f"gather_for_metrics(dataloader=…) wants the loader that prepare() returned, got {type(loader).__name__}, "
            "which knows nothing of padding. Pass the prepared loader that yielded the batch."
        )
    source = loader if loader is not None else _source(ledger)
    valid: tuple[int, ...] | None = source.valid_rows() if source is not None else None
    rows: int | None = source.batch_rows if source is not None and source.may_pad else None
    real = _Real(rows, None if valid is None else valid[rank])
    # Rows may differ between ranks not only where padding was dropped: batch samplers choose their own sizes.
    ragged = source is not None
    if not use_gather_object and _all_tensors(data):
        return gather(recursively_apply(real.tensor, data), ragged=ragged)
    tensors: list[Tensor] = []
    objects: list[Sequence[Any]] = []
    build = _take_apart(data, real, use_gather_object, tensors, objects)
    gathered = gather(tensors, ragged=ragged) if tensors else []
    return build(gathered, gather_object([objects]) if objects else [])


def _source(ledger: ActiveLoaders) -> Any:
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


@dataclass(frozen=True, slots=True)
class _Real:
    """Leaves out the rows of this rank's batch that are padding.

    Args:
        rows: rows of the batch; None when they are not known.
        count: how many leading ones are real; None when all are.
    """

    rows: int | None
    count: int | None

    def tensor(self, leaf: Tensor) -> Tensor:
        """The real rows of a tensor; one without dimensions passes."""
        if not leaf.dim():
            return leaf
        self._check(leaf.shape[0], f"a tensor of shape {tuple(leaf.shape)}")
        return leaf if self.count is None else leaf[: self.count]

    def objects(self, items: Any) -> list[Any]:
        """The real ones of a sequence, or array, with one object per sample."""
        self._check(len(items), f"{len(items)} objects in a {type(items).__name__}")
        return list(items if self.count is None else items[: self.count])

    def _check(self, rows: int, found: str) -> None:
        if self.rows is not None and rows != self.rows:
            raise MetricsShapeError(
                f"gather_for_metrics() got {found}, but this rank's batch has {self.rows} rows. Padding can only be "
                "dropped from values with one row per sample. Gather per-sample values, or use gather() or "
                "gather_object() for everything else."
            )


_Build = Callable[[list[Tensor], list[Any]], Any]
"""From the gathered tensors, and from each rank's objects, to the gathered value."""


def _take_apart(
    node: Any, real: _Real, only_objects: bool, tensors: list[Tensor], objects: list[Sequence[Any]]
) -> _Build:
    """Collect the real rows of what is in `node`; the result puts together what was gathered."""
    if node is None:
        return lambda gathered, told: None
    if isinstance(node, Tensor) and not only_objects:
        place = len(tensors)
        tensors.append(real.tensor(node))
        return lambda gathered, told: gathered[place]
    if isinstance(node, Mapping) or is_namedtuple(node) or (not only_objects and _is_structure(node)):
        values = node.values() if isinstance(node, Mapping) else node
        parts = [_take_apart(value, real, only_objects, tensors, objects) for value in values]
        return lambda gathered, told: _like(node, [part(gathered, told) for part in parts])
    place = len(objects)
    objects.append(recursively_apply(_compact, real.objects(node) if _per_sample(node) else [node]))
    kind = tuple if type(node) is tuple else list
    return lambda gathered, told: kind(item for theirs in told for item in theirs[place])


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
