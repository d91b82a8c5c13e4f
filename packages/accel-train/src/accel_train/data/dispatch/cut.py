"""Cutting a round of batches into one part per rank, on the rank that read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel_state.trees import TreeSpec, flatten, ignorant_find_batch_size, unflatten
from accel_train.data.sampling.index_streams import ALL_ROWS
from accel_train.data.sampling.layout import clip_rows
from accel_train.errors import DataError, DispatchError

__all__ = ["Round", "cut_round", "pieces_of"]

SliceFunction = Callable[..., Any]


@dataclass(slots=True)
class Round:
    """One batch per rank.

    Args:
        parts: the batches, in rank order.
        rows: rows of each; None where they cannot be counted.
        real: real rows over all ranks; None when rows cannot be counted.
        valid: per rank, how many leading rows are real; None when all are.
    """

    parts: list[Any]
    rows: Sequence[int | None]
    real: int | None
    valid: tuple[int, ...] | None = None


def cut_round(
    batches: Sequence[Any],
    first: Callable[[], Any],
    ranks: int,
    *,
    split: bool,
    last: bool,
    slice_fn: SliceFunction | None = None,
) -> Round:
    """Give every rank its part.

    A full round hands one whole batch to each rank, so batches may be ragged. The tail of an epoch is
    shared out evenly, and completed with the first samples to a multiple of the number of ranks; if its
    batches cannot be cut and joined, because their shapes differ or they hold more than one row per sample,
    they are not cut, and ranks without one repeat the first batch as padding.

    Args:
        batches: what was read, at most one batch per rank (exactly one batch when `split`).
        first: gives the first batch of the epoch; called when something must be completed.
        ranks: number of ranks.
        split: each batch is cut into one part per rank.
        last: whether nothing follows.
        slice_fn: the user's way of cutting a joined batch.

    Raises:
        DispatchError: a batch that must be cut holds a tensor without one row per sample.
        DataError: a batch without rows would have to be cut.
    """
    counts = [_rows(batch) for batch in batches]
    if slice_fn is not None:
        return _by_user(batches, counts, first, ranks, slice_fn)
    if not split and len(batches) == ranks and (not last or len(set(counts)) == 1):
        return _whole(batches, counts, first, ranks)
    if None in counts:
        return _whole(batches, counts, first, ranks)
    rows = [count for count in counts if count is not None]
    try:
        return _by_rows(batches, rows, first, ranks)
    except _RaggedError as error:
        if split:
            raise DispatchError(
                f"split_batches=True cannot cut this batch: {error}. Use split_batches=False, or pass "
                "slice_fn_for_dispatch."
            ) from None
        return _whole(batches, counts, first, ranks)


class _RaggedError(Exception):
    """Batches cannot be cut and joined by rows; the message gives the reason."""


def pieces_of(rows: Sequence[int], ranks: int, first_rows: int) -> list[list[tuple[int, int, int]]]:
    """For each rank the row ranges ``(batch, start, stop)`` that make up its part; batch -1 is the first one.

    All rows are shared out evenly in order, completed with the first rows to a multiple of `ranks`.
    """
    total = sum(rows)
    each = -(-total // ranks)
    spans: list[tuple[int, int, int]] = []  # (batch, start, stop) in order, as long as ranks * each
    for index, count in enumerate(rows):
        spans.append((index, 0, count))
    missing = each * ranks - total
    while missing > 0:
        spans.append((-1, 0, min(first_rows, missing)))
        missing -= min(first_rows, missing)
    parts: list[list[tuple[int, int, int]]] = []
    at = 0
    for _ in range(ranks):
        part: list[tuple[int, int, int]] = []
        room = each
        while room:
            batch, start, stop = spans[at]
            take = min(room, stop - start)
            if take:
                part.append((batch, start, start + take))
            room -= take
            if start + take == stop:
                at += 1
            else:
                spans[at] = (batch, start + take, stop)
        parts.append(part)
    return parts


def _by_rows(batches: Sequence[Any], rows: list[int], first: Callable[[], Any], ranks: int) -> Round:
    total = sum(rows)
    flat = {index: flatten(batch) for index, batch in enumerate(batches)}
    sizes = dict(enumerate(rows))
    if total % ranks:
        completing = first()
        flat[-1], sizes[-1] = flatten(completing), _rows(completing) or 0
    if total == 0 or sizes.get(-1) == 0:
        raise DataError(_EMPTY)
    parts = []
    for spans in pieces_of(rows, ranks, sizes.get(-1, 0)):
        pieces = [_cut(*flat[batch], sizes[batch], start, stop) for batch, start, stop in spans]
        parts.append(_join(pieces, sum(batch >= 0 for batch, _, _ in spans)))
    each = -(-total // ranks)
    valid = None if total % ranks == 0 else clip_rows(total, each, ranks)
    return Round(parts, [each] * ranks, total, valid)


def _whole(
    batches: Sequence[Any], counts: Sequence[int | None], first: Callable[[], Any], ranks: int
) -> Round:
    missing = ranks - len(batches)
    real = None if None in counts else sum(count for count in counts if count is not None)
    if not missing:
        return Round(list(batches), counts, real)
    repeated = first()
    valid = tuple(ALL_ROWS if count is None else count for count in counts) + (0,) * missing
    return Round([*batches, *[repeated] * missing], [*counts, *[_rows(repeated)] * missing], real, valid)


def _by_user(
    batches: Sequence[Any],
    counts: list[int | None],
    first: Callable[[], Any],
    ranks: int,
    slice_fn: SliceFunction,
) -> Round:
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        raise DispatchError(
            "slice_fn_for_dispatch needs batches that hold a tensor with one row per sample, to say how "
            "many rows a rank gets. Put a tensor into the batch, or use dispatch_batches=False."
        )
    total = sum(known)
    each = -(-total // ranks)
    batch = (
        batches[0] if len(batches) == 1 and total % ranks == 0 else _completed(batches, known, first, ranks)
    )
    parts = [
        slice_fn(batch, slice(rank * each, (rank + 1) * each), process_index=rank, num_processes=ranks)
        for rank in range(ranks)
    ]
    valid = None if total % ranks == 0 else clip_rows(total, each, ranks)
    return Round(parts, [_rows(part) for part in parts], total, valid)


def _completed(batches: Sequence[Any], rows: Sequence[int], first: Callable[[], Any], ranks: int) -> Any:
    """The joined batches, completed with the first rows to a multiple of `ranks`."""
    pieces = [_Piece(*flatten(batch), count) for batch, count in zip(batches, rows, strict=True)]
    missing = -sum(rows) % ranks
    repeated = first() if missing else None
    available = _rows(repeated) or 0
    if missing and not available:
        raise DataError(_EMPTY)
    try:
        while missing > 0:
            taken = min(missing, available)
            pieces.append(_cut(*flatten(repeated), available, 0, taken))
            missing -= taken
        return _join(pieces, len(batches))
    except _RaggedError as error:
        raise DispatchError(
            f"slice_fn_for_dispatch cuts the joined batches of a step, and these cannot be joined: {error}. Pad them "
            "to one shape, or omit slice_fn_for_dispatch."
        ) from None


_EMPTY = "Rank 0 read an empty batch; there are no rows to share out. Drop empty batches."


# Rows of a batch


def _rows(batch: Any) -> int | None:
    """Rows of a batch: of its first tensor, or else of its first list of plain values."""
    rows = ignorant_find_batch_size(batch)
    if rows is not None:
        return rows
    return _list_rows(flatten(batch)[1])


def _list_rows(spec: TreeSpec) -> int | None:
    if _is_row_list(spec):
        return len(spec.children)
    return next((rows for child in spec.children if (rows := _list_rows(child)) is not None), None)


def _is_row_list(spec: TreeSpec) -> bool:
    """A list of values that are no tensors, one per sample, as default collation makes of strings."""
    return spec.kind in (list, tuple) and bool(spec.children) and all(c.kind is ... for c in spec.children)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive rows of a batch, taken apart."""

    leaves: list[Tensor]
    spec: TreeSpec
    rows: int


def _cut(leaves: list[Tensor], spec: TreeSpec, rows: int, start: int, stop: int) -> _Piece:
    if (start, stop) == (0, rows):
        return _Piece(leaves, spec, rows)
    cut = [_by_row(leaf, rows)[start:stop] if leaf.dim() else leaf for leaf in leaves]
    return _Piece(cut, _cut_spec(spec, rows, start, stop), stop - start)


def _by_row(leaf: Tensor, rows: int) -> Tensor:
    if leaf.shape[0] != rows:
        raise _RaggedError(
            f"a batch of {rows} rows holds a tensor of shape {tuple(leaf.shape)}, and rank 0 cannot tell which "
            "part of it belongs to which rank"
        )
    return leaf


def _cut_spec(spec: TreeSpec, rows: int, start: int, stop: int) -> TreeSpec:
    if _is_row_list(spec) and len(spec.children) == rows:
        children = spec.children[start:stop]
        return TreeSpec(spec.kind, len(children), children)
    if spec.kind is ...:
        shape = getattr(spec.outline, "shape", None)
        if shape and shape[0] == rows:  # an array of another library
            return TreeSpec(..., spec.outline[start:stop])
        return spec
    return TreeSpec(spec.kind, spec.outline, tuple(_cut_spec(c, rows, start, stop) for c in spec.children))


def _join(pieces: list[_Piece], real: int) -> Any:
    """One part from pieces; those after the first `real` ones are padding, whose shared values do not matter."""
    spec = pieces[0].spec
    if len(pieces) == 1:
        return unflatten(spec, pieces[0].leaves)
    spec = _join_specs([piece.spec for piece in pieces], [piece.rows for piece in pieces], real)
    columns = zip(*(piece.leaves for piece in pieces), strict=True)
    return unflatten(spec, [_join_leaves(column, pieces, real) for column in columns])


def _join_leaves(column: Sequence[Tensor], pieces: list[_Piece], real: int) -> Tensor:
    first = column[0]
    if any(leaf.shape[1:] != first.shape[1:] or leaf.dtype != first.dtype for leaf in column):
        raise _RaggedError("tensors of different shapes or dtypes would have to be joined")
    if any(leaf.dim() == 0 for leaf in column):
        if not all(leaf.dim() == 0 and torch.equal(leaf, first) for leaf in column[:real]):
            raise _RaggedError("a value that a whole batch shares differs between batches")
        return first
    return torch.cat([_by_row(leaf, piece.rows) for leaf, piece in zip(column, pieces, strict=True)])


def _join_specs(specs: Sequence[TreeSpec], rows: Sequence[int], real: int) -> TreeSpec:
    first = specs[0]
    by_rows = [
        spec.kind is first.kind and _is_row_list(spec) and len(spec.children) == count
        for spec, count in zip(specs, rows, strict=True)
    ]
    if all(by_rows):
        children = tuple(child for spec in specs for child in spec.children)
        return TreeSpec(first.kind, len(children), children)
    if any(spec.kind is not first.kind for spec in specs):
        raise _RaggedError("the batches differ in structure")
    if first.kind is ...:
        if getattr(first.outline, "shape", None):
            raise _RaggedError("arrays that are no tensors would have to be joined")
        if any(spec.outline is not first.outline and spec.outline != first.outline for spec in specs[:real]):
            raise _RaggedError("a value that a whole batch shares differs between batches")
        return first
    if any(spec.outline != first.outline or len(spec.children) != len(first.children) for spec in specs):
        raise _RaggedError("the batches differ in structure")
    columns = zip(*(spec.children for spec in specs), strict=True)
    return TreeSpec(first.kind, first.outline, tuple(_join_specs(column, rows, real) for column in columns))
