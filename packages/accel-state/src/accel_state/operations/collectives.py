"""Collectives on nested structures of tensors, and on picklable objects.

Every function is collective: all ranks of the group call it, in the same order. In a world of one nothing is
sent. Inputs are not modified, except by ``broadcast`` and ``broadcast_object_list``, which work in place.
Results are not part of the autograd graph.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.communication.blocks import BlockPlan
from accel_state.communication.channel import Channel, CheckSettings, RankPayloads
from accel_state.communication.serialization import (
    aligned,
    as_bytes,
    bytes_of,
    int64_bytes,
    pack,
    pickled,
    unpack,
)
from accel_state.errors import CollectiveMismatchError, ConfigError, NotAvailableError
from accel_state.messages import warn
from accel_state.trees import TreeSpec, flatten, recursively_apply, tensor_leaves
from accel_state.world.process import PartialState, channel_of

__all__ = [
    "CannotPadNestedTensorWarning",
    "broadcast",
    "broadcast_object_list",
    "copy_tensor_to_devices",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "set_collective_checks",
]

REDUCTIONS = ("mean", "sum", "max", "min", "none")

_SMALL = 1 << 20
"""Bytes up to which tensors are packed into one message; packing costs less than one message each."""


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor (``torch.nested``) was passed to ``pad_across_processes``, which does not change it."""


def set_collective_checks(mode: str | None = None, report_after: float | None = None) -> None:
    """Change how later collectives are checked. Call it with the same arguments on every rank.

    Args:
        mode: "on": before every collective, ranks compare operation, structure, dtypes and shapes; "off":
            only where it is free; "auto": on for CPU tensors, off for tensors on a device. None: unchanged.
            The initial mode is ACCELERATE_COLLECTIVE_CHECKS, else "auto"; ACCELERATE_DEBUG_MODE means "on".
        report_after: seconds until a collective that not all ranks entered is reported. None: unchanged.
            Initially ACCELERATE_COLLECTIVE_TIMEOUT_REPORT, else 30.

    Raises:
        ConfigError: an unknown mode, or a negative or infinite number of seconds.
    """
    channels = PartialState().channels
    if channels is None:
        CheckSettings("auto" if mode is None else mode, 0.0 if report_after is None else report_after)
    else:
        channels.configure(mode, report_after)


def gather(tensor: Any, *, group: dist.ProcessGroup | None = None, ragged: bool = False) -> Any:
    """Concatenate every tensor of a tree over ranks, along the first dimension, in rank order.

    Args:
        tensor: a tree of tensors, of equal structure on all ranks; 0-dimensional tensors count as one
            element.
        group: the participating ranks; None: all.
        ragged: allow first dimensions that differ between ranks.

    Returns:
        a tree of the same types, with new tensors of shape (sum of first dimensions, ...), on every rank; in
        a world of one, ``tensor`` itself.

    Raises:
        TypeError: a leaf that is not a dense tensor.
        CollectiveMismatchError: structures, dtypes or shapes differ between ranks (see the guide "Collectives").
    """
    channel = channel_of(group)
    if channel is None:
        return tensor
    with channel.operation("gather"):
        tree = _Tree.of(channel, tensor)
        return tree.rebuild(_gather_ragged(channel, tree) if ragged else _gather_even(channel, tree))


def gather_object(object: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """Concatenate lists of picklable objects over ranks, in rank order.

    Args:
        object: this rank's list (or tuple).
        group: the participating ranks; None: all.

    Returns:
        one list with the items of all ranks; in a world of one, ``object`` itself.

    Raises:
        TypeError: not a list, or an item cannot be pickled; on other ranks a CollectiveMismatchError.
    """
    channel = channel_of(group)
    if channel is None:
        return object
    with channel.operation("gather_object"):
        if isinstance(object, list | tuple):
            payload, local_error = pickled(list(object))
        else:
            payload, local_error = None, _wrong_type("gather_object", object)
        rows = channel.exchange("gather_object", lambda: "objects", payload, local_error=local_error)
        return [item for rank in range(channel.size) for item in pickle.loads(rows.raw(rank))]


def all_agree(value: bytes) -> bool:
    """Whether all ranks of the world give equal bytes, of which hashes are compared; flat in the number of ranks.

    Raises:
        CollectiveMismatchError: not all ranks call it.
    """
    channel = channel_of(None)
    if channel is None:
        return True
    with channel.operation("all_agree"):
        return channel.agree("all_agree", value)


def gather_to_first(object: Any) -> list[Any] | None:
    """Bring a picklable object of each rank of the world to the first, which gets them in rank order; others get None.

    Raises:
        TypeError: the object cannot be pickled.
        CollectiveMismatchError: not all ranks call it.
    """
    channel = channel_of(None)
    if channel is None:
        return [object]
    with channel.operation("gather_to_first"):
        payload, local_error = pickled(object)
        if payload is None:
            channel.exchange(None, str, local_error=local_error)
        assert payload is not None, "else all ranks have raised"
        rows = channel.gather_to_first("gather_to_first", payload)
        return None if rows is None else [pickle.loads(row.numpy().tobytes()) for row in rows]


def reduce(
    tensor: Any, reduction: str = "mean", scale: float = 1.0, *, group: dist.ProcessGroup | None = None
) -> Any:
    """Combine every tensor of a tree over ranks, element by element.

    Args:
        tensor: a tree of tensors, equal in structure, dtypes and shapes on all ranks.
        reduction: "mean", "sum", "max", "min", or "none" (this rank's values).
        scale: factor on the result; only for floating and complex dtypes.
        group: the participating ranks; None: all.

    Returns:
        a tree of the same types with new tensors of the same dtypes; also in a world of one. float16,
        bfloat16 and smaller floats are summed in float32 and rounded once.

    Raises:
        ConfigError: an unknown reduction, or one that is undefined for a dtype: the mean of integers or
            booleans, the sum of booleans, the maximum of complex numbers, a scale for non-floating dtypes.
        CollectiveMismatchError: structures, dtypes or shapes differ between ranks (see the guide "Collectives").
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(f"unknown reduction {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    channel = channel_of(group)
    if channel is None or reduction == "none":

        def alone(leaf: Tensor) -> Tensor:
            _require_defined(leaf.dtype, reduction, scale)
            return _finish(_work(leaf).clone(), leaf, scale)

        flatten(tensor, only_tensors=True)
        return recursively_apply(alone, tensor)
    with channel.operation("reduce"):
        tree = _Tree.of(channel, tensor)
        reduced = _reduce_all(channel, tree, reduction, scale)
        return tree.rebuild(
            [_finish(value, leaf, scale) for value, leaf in zip(reduced, tree.leaves, strict=True)]
        )


def broadcast(tensor: Any, from_process: int = 0, *, group: dist.ProcessGroup | None = None) -> Any:
    """Copy the values of one rank's tensors into the tensors of all other ranks, in place.

    Args:
        tensor: a tree of tensors, equal in structure, dtypes and shapes on all ranks; modified on all ranks but
            the source.
        from_process: the source, a rank of the world.
        group: the participating ranks; None: all.

    Returns:
        ``tensor``.

    Raises:
        ConfigError: ``from_process`` is not in the group.
        TypeError: a leaf that is not a dense tensor, or whose elements share memory (``expand``).
        CollectiveMismatchError: structures, dtypes or shapes differ between ranks (see the guide "Collectives").
    """
    channel = channel_of(group)
    if channel is None:
        return tensor
    source = _index_of(channel, from_process)
    with channel.operation("broadcast"):
        tree = _Tree.of(channel, tensor)
        _require_writable(channel, tree.leaves)
        mine = channel.rank == source or channel.rehearsed
        plan = tree.plan(channel, ("broadcast", source))
        if plan is None or not plan.fits:
            _broadcast_separately(channel, tree, from_process, plan, mine)
            return tensor
        if mine:
            _put(plan, tree.leaves)
        channel.meet(plan, tree.describe)
        if not mine:
            for leaf, got in zip(tree.leaves, plan.got, strict=True):
                leaf.detach().copy_(got[source])
        return tensor


def broadcast_object_list(
    object_list: Any, from_process: int = 0, *, group: dist.ProcessGroup | None = None
) -> Any:
    """Replace the items of a list with the items of one rank's list, in place.

    Args:
        object_list: a list of the same length on all ranks; on the source, picklable objects.
        from_process: the source, a rank of the world.
        group: the participating ranks; None: all.

    Returns:
        ``object_list``.

    Raises:
        ConfigError: ``from_process`` is not in the group.
        TypeError: not a list, or an item cannot be pickled; on other ranks a CollectiveMismatchError.
        CollectiveMismatchError: lengths differ.
    """
    channel = channel_of(group)
    if channel is None:
        return object_list
    source = _index_of(channel, from_process)
    with channel.operation("broadcast_object_list"):
        payload: Tensor | None = None
        local_error: Exception | None = None
        if not isinstance(object_list, list):
            local_error = _wrong_type("broadcast_object_list", object_list)
        elif channel.rank == source or channel.rehearsed:
            payload, local_error = pickled(object_list)
        length = len(object_list) if local_error is None else 0
        key = ("broadcast_object_list", source, length)
        rows = channel.exchange(
            key,
            lambda: f"{length} objects from rank {from_process}",
            payload,
            source=source,
            local_error=local_error,
        )
        if channel.rank != source:
            object_list[:] = pickle.loads(rows.raw(source))
        return object_list


def pad_across_processes(
    tensor: Any,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Pad every tensor of a tree along one dimension to the largest size of all ranks.

    Args:
        tensor: a tree of tensors, equal in structure, dtypes and numbers of dimensions on all ranks.
        dim: the dimension; negative values count from the last. Tensors without this dimension are not changed.
        pad_index: the padding value.
        pad_first: pad at the beginning instead of the end.
        group: the participating ranks; None: all.

    Returns:
        a tree of the same types; tensors that need no padding are returned as they were passed. Nested tensors
        (``torch.nested``) are not padded; a CannotPadNestedTensorWarning is issued.

    Raises:
        TypeError: a leaf that is not a tensor.
        CollectiveMismatchError: structures, dtypes or numbers of dimensions differ between ranks.
    """
    channel = channel_of(group)
    if channel is None:
        for leaf in tensor_leaves(tensor):  # raise here what several ranks would raise, and warn
            _padded_size(leaf, dim)
        return tensor
    with channel.operation("pad_across_processes"):
        tree = _Tree.of(channel, tensor, dense=False)
        sizes = [_padded_size(leaf, dim) for leaf in tree.leaves]
        key = ("pad_across_processes", dim, pad_first, tree.spec,
               tuple((leaf.dtype, leaf.dim(), leaf.device.type) for leaf in tree.leaves))  # fmt: skip
        rows = channel.exchange(key, tree.describe, int64_bytes(sizes))
        largest = _int64_rows(rows, channel.size, len(sizes)).amax(dim=0).tolist()
        results = iter(
            [
                leaf if size in (-1, target) else _padded(leaf, dim, target - size, pad_index, pad_first)
                for leaf, size, target in zip(tree.leaves, sizes, largest, strict=True)
            ]
        )
        return recursively_apply(lambda _: next(results), tensor)


def copy_tensor_to_devices(tensor: Tensor | None = None, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Give all ranks a copy of a tensor that exactly one rank has.

    Args:
        tensor: the tensor on the rank that has it, None on all other ranks, which need not know its shape or
            dtype.
        group: the participating ranks; None: all.

    Returns:
        the tensor on this process's device.

    Raises:
        CollectiveMismatchError: no rank, or more than one, passed a tensor.
        ConfigError: no tensor in a world of one.
    """
    state = PartialState()
    channel = state.channel(group)
    if channel is None:
        if tensor is None:
            raise ConfigError(
                "copy_tensor_to_devices needs a tensor on one rank, and this is the only rank: pass one"
            )
        return tensor.to(state.device)
    with channel.operation("copy_tensor_to_devices"):
        payload = None if tensor is None else as_bytes(pickle.dumps((tensor.dtype, tuple(tensor.shape))))
        rows = channel.exchange("copy_tensor_to_devices", lambda: "", payload)
        owners = [index for index, size in enumerate(rows.sizes) if size]
        if channel.rehearsed:
            owners = _rehearsed_owner(channel, tensor)
        if len(owners) != 1:
            raise CollectiveMismatchError(
                "copy_tensor_to_devices needs a tensor on exactly one rank; "
                f"{[channel.ranks[index] for index in owners] or 'none'} passed one"
            )
        dtype, shape = pickle.loads(rows.raw(owners[0]))
        copy = torch.empty(shape, dtype=dtype, device=state.device)
        if tensor is not None:
            copy.copy_(tensor.detach())
        if copy.numel():
            _broadcast_large(channel, copy, channel.ranks[owners[0]])
        return copy


def _rehearsed_owner(channel: Channel, tensor: Tensor | None) -> list[int]:
    if tensor is None:
        raise NotAvailableError(
            "copy_tensor_to_devices gets a tensor from another rank here, and a rehearsal has no other rank to tell "
            "its shape; rehearse the rank that has the tensor"
        )
    return [channel.rank]


# --- trees of tensors ---


_WorkDtype = Callable[[torch.dtype], torch.dtype]


class _Tree(NamedTuple):
    """This rank's input to a collective."""

    leaves: list[Tensor]
    spec: TreeSpec
    whole: Any

    @classmethod
    def of(cls, channel: Channel, whole: Any, dense: bool = True) -> _Tree:
        try:
            leaves, spec = flatten(whole, only_tensors=True)
            if dense:
                _require_dense(leaves)
        except TypeError as error:
            raise _refused(channel, error) from None
        return cls(leaves, spec, whole)

    def device(self, channel: Channel) -> torch.device:
        """Where the tensors are."""
        return self.leaves[0].device if self.leaves else channel.device

    def key(self, first: int = 0) -> Hashable:
        """The part that must be equal on all ranks; sizes of dimensions before ``first`` may differ."""
        return (
            self.spec,
            tuple(
                [
                    (leaf.dtype, leaf.shape[first:] if first else leaf.shape, leaf.device.type)
                    for leaf in self.leaves
                ]
            ),
        )

    def plan(
        self, channel: Channel, call: tuple[Hashable, ...], work: _WorkDtype | None = None
    ) -> BlockPlan | None:
        """How the tensors travel in the blocks; None if the call is not checked.

        Args:
            channel: the group.
            call: operation and arguments.
            work: the dtype in which tensors of a dtype travel; None: their own.
        """
        key = (call, self.key())
        found = channel.plans.get(key)
        if found is not None or not channel.checked(self.device(channel)):
            return found
        dtypes = [leaf.dtype if work is None else work(leaf.dtype) for leaf in self.leaves]
        tensors = [(dtype, leaf.shape) for dtype, leaf in zip(dtypes, self.leaves, strict=True)]
        on_host = all(leaf.device.type == "cpu" for leaf in self.leaves)
        return channel.plan(key, tensors if on_host else None)

    def rebuild(self, leaves: list[Tensor]) -> Any:
        """The tree with other tensors."""
        if self.spec.kind is None:
            return leaves[0]
        results = iter(leaves)
        return recursively_apply(lambda _: next(results), self.whole)

    def describe(self) -> str:
        return str(recursively_apply(_Words.of, self.whole))


class _Words(str):
    """Text whose repr has no quotes, for printing inside containers."""

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def of(cls, leaf: Tensor) -> _Words:
        where = "" if leaf.device.type == "cpu" else f" on {leaf.device.type}"
        shape = "nested" if leaf.is_nested else list(leaf.shape)
        return cls(f"{str(leaf.dtype).removeprefix('torch.')}{shape}{where}")


def _require_dense(leaves: Iterable[Tensor]) -> None:
    for leaf in leaves:
        if leaf.layout is not torch.strided or leaf.is_nested:
            raise TypeError(
                f"only dense tensors can be sent, found one with layout {leaf.layout}; call to_dense()"
            )


def _require_writable(channel: Channel, leaves: Iterable[Tensor]) -> None:
    for leaf in leaves:
        if any(size > 1 and stride == 0 for size, stride in zip(leaf.shape, leaf.stride(), strict=True)):
            raise _refused(
                channel,
                TypeError(
                    f"broadcast writes into its tensors, and elements of one of shape {list(leaf.shape)} share memory "
                    f"(strides {list(leaf.stride())}, as after expand()); pass tensor.contiguous()"
                ),
            )


def _refused(channel: Channel, error: Exception) -> Exception:
    """Make the other ranks raise too, if checks are on, because this rank does not take part."""
    if channel.check_cpu:
        channel.exchange(None, str, local_error=error)
    return error


def _wrong_type(name: str, found: Any) -> TypeError:
    return TypeError(f"{name} takes a list of objects from every rank, got {type(found).__name__}")


def _index_of(channel: Channel, rank: int) -> int:
    if rank not in channel.ranks:
        raise ConfigError(f"from_process is {rank}; the ranks of this group are {channel.ranks}")
    return channel.ranks.index(rank)


def _put(plan: BlockPlan, leaves: Iterable[Tensor]) -> None:
    """Copy tensors to their places in this rank's block."""
    for place, leaf in zip(plan.given, leaves, strict=True):
        place.copy_(leaf.detach() if leaf.requires_grad else leaf)


# --- gather ---

_GATHER = ("gather",)


def _gather_even(channel: Channel, tree: _Tree) -> list[Tensor]:
    plan = tree.plan(channel, _GATHER)
    if plan is not None:
        if plan.fits:
            _put(plan, tree.leaves)
            channel.meet(plan, tree.describe)
            # Copies, because no place in the blocks is contiguous over ranks.
            return [
                got.contiguous().view(channel.size * shape[0], *shape[1:])
                if (shape := leaf.shape)
                else got.contiguous()
                for got, leaf in zip(plan.got, tree.leaves, strict=True)
            ]
        channel.meet(plan, tree.describe)
    leaves = [leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach() for leaf in tree.leaves]
    results: list[Tensor | None] = [None] * len(leaves)
    for bucket in _buckets(leaves):
        members = [leaves[index] for index in bucket]
        row = pack(members, channel.carrier(members[0].device))
        table = torch.empty((channel.size, row.numel()), dtype=torch.uint8, device=row.device)
        if row.numel():
            channel.all_gather_into(table, row)
        for index, value in zip(bucket, _rows_to_leaves(table, members), strict=True):
            results[index] = value.to(leaves[index].device)
    return [value for value in results if value is not None]


def _rows_to_leaves(table: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Split a table with one packed row per rank into tensors that are concatenated over ranks."""
    ranks = table.shape[0]
    results = []
    offset = 0
    for leaf in leaves:
        size = leaf.nbytes
        column = table[:, offset : offset + size].contiguous().view(-1).view(leaf.dtype)
        results.append(column.view(ranks * leaf.shape[0], *leaf.shape[1:]))
        offset += aligned(size)
    return results


def _buckets(leaves: Sequence[Tensor]) -> list[list[int]]:
    """Indices of tensors per message: small tensors together by device, large ones alone."""
    small: dict[torch.device, list[int]] = {}
    large: list[list[int]] = []
    for index, leaf in enumerate(leaves):
        if leaf.nbytes <= _SMALL:
            small.setdefault(leaf.device, []).append(index)
        else:
            large.append([index])
    return [*small.values(), *large]


def _gather_ragged(channel: Channel, tree: _Tree) -> list[Tensor]:
    leaves = [leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach() for leaf in tree.leaves]
    ahead = aligned(8 * len(leaves))
    message = pack(leaves, channel.device, ahead)
    if leaves:
        message[: 8 * len(leaves)] = int64_bytes([leaf.shape[0] for leaf in leaves])
    rows = channel.exchange(
        ("gather", "ragged", tree._replace(leaves=leaves).key(first=1)), tree.describe, message
    )
    counts = _int64_rows(rows, channel.size, len(leaves)).tolist()
    pieces: list[list[Tensor]] = [[] for _ in leaves]
    for rank in range(channel.size):
        like = [leaf.new_empty((count, *leaf.shape[1:]), device="meta")
                for leaf, count in zip(leaves, counts[rank], strict=True)]  # fmt: skip
        for piece, values in zip(pieces, unpack(rows[rank][ahead:], like), strict=True):
            piece.append(values)
    return [torch.cat(piece).to(leaf.device) for piece, leaf in zip(pieces, leaves, strict=True)]


# --- reduce ---

_OPERATIONS: dict[str, Any] = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_LOCALLY: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda table: table.sum(dim=0),
    "sum": lambda table: table.sum(dim=0, dtype=table.dtype),
    "max": lambda table: table.amax(dim=0),
    "min": lambda table: table.amin(dim=0),
}


def _require_defined(dtype: torch.dtype, reduction: str, scale: float) -> None:
    """Raise if a reduction has no meaning for a dtype."""
    if dtype.is_floating_point:
        return
    if dtype.is_complex:
        if reduction in ("max", "min"):
            raise ConfigError(f"{_name(dtype)} tensors have no order; {reduction!r} is undefined for them")
        return
    if reduction == "mean":
        raise ConfigError(
            f"the mean of {_name(dtype)} tensors does not have that dtype; use 'sum', or convert to float first"
        )
    if reduction == "sum" and dtype is torch.bool:
        raise ConfigError(
            "the sum of bool tensors does not have that dtype; use 'max' or 'min', or convert to int first"
        )
    if scale != 1:
        raise ConfigError(
            f"scale={scale} cannot be applied to a {_name(dtype)} tensor; convert it to float first"
        )


def _work(leaf: Tensor) -> Tensor:
    """``leaf`` in a dtype that can be reduced, complex numbers as pairs; may share its memory."""
    if leaf.dtype.is_complex:
        return torch.view_as_real(leaf.detach().resolve_conj().resolve_neg())
    return leaf.detach().to(_work_dtype(leaf.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else dtype
    if dtype is torch.bool:
        return torch.uint8
    return torch.int32 if dtype is torch.int16 else dtype  # gloo has no int16


def _reduce_all(channel: Channel, tree: _Tree, reduction: str, scale: float) -> list[Tensor]:
    try:
        for leaf in tree.leaves:
            _require_defined(leaf.dtype, reduction, scale)
    except ConfigError as error:
        raise _refused(channel, error) from None
    plan = tree.plan(channel, ("reduce", reduction, scale), _work_dtype)
    if plan is not None:
        if plan.fits:
            _put(plan, tree.leaves)
            channel.meet(plan, tree.describe)
            locally = _LOCALLY[reduction]
            values = [locally(torch.view_as_real(got) if got.is_complex() else got) for got in plan.got]
            if reduction == "mean":
                for value in values:
                    value.div_(channel.count)
            return values
        channel.meet(plan, tree.describe)
    return _reduce_work(channel, [_work(leaf) for leaf in tree.leaves], reduction)


def _reduce_work(channel: Channel, work: list[Tensor], reduction: str) -> list[Tensor]:
    results = list(work)
    groups: dict[Any, list[int]] = {}
    for bucket in _buckets(work):
        for index in bucket:
            alone = index if work[index].nbytes > _SMALL else None
            groups.setdefault((work[index].dtype, work[index].device, alone), []).append(index)
    for (_, device, _), members in groups.items():
        flat = torch.cat([work[index].reshape(-1) for index in members]).to(channel.carrier(device))
        if flat.numel():
            channel.wait(
                dist.all_reduce(flat, _OPERATIONS[reduction], group=channel.wire, async_op=True), flat
            )
        if reduction == "mean":
            flat.div_(channel.size)
        parts = torch.split(flat.to(device), [work[index].numel() for index in members])
        for index, part in zip(members, parts, strict=True):
            results[index] = part.view(work[index].shape)
    return results


def _finish(value: Tensor, leaf: Tensor, scale: float) -> Tensor:
    """The result for ``leaf`` from its reduced values in the dtype of ``_work``."""
    dtype = leaf.dtype
    if value.dtype is dtype and scale == 1:
        return value
    if dtype.is_complex:
        value = torch.view_as_complex(value.contiguous())
    if scale != 1:
        value = value * scale
    return value.to(dtype)


# --- broadcast and padding ---


def _int64_rows(rows: RankPayloads, ranks: int, count: int) -> Tensor:
    return rows.table[:ranks, : count * 8].cpu().contiguous().view(torch.int64).view(ranks, count)


def _broadcast_separately(
    channel: Channel, tree: _Tree, source: int, plan: BlockPlan | None, mine: bool
) -> None:
    """Broadcast each tensor in a separate message, after the check if there is a ``plan``."""
    if plan is not None:
        channel.meet(plan, tree.describe)
    small = [leaf for leaf in tree.leaves if leaf.nbytes <= _SMALL]
    if small:
        packed = pack(small, channel.carrier(tree.device(channel)))
        channel.wait(dist.broadcast(packed, source, group=channel.wire, async_op=True), packed)
        if not mine:
            for leaf, values in zip(small, unpack(packed, small), strict=True):
                leaf.detach().copy_(values)
    for leaf in tree.leaves:
        if leaf.nbytes > _SMALL:
            _broadcast_large(channel, leaf, source)


def _broadcast_large(channel: Channel, leaf: Tensor, source: int) -> None:
    message = bytes_of(leaf).to(channel.carrier(leaf.device))
    channel.wait(dist.broadcast(message, source, group=channel.wire, async_op=True), message)
    if message.data_ptr() != leaf.data_ptr():
        leaf.detach().copy_(message.view(leaf.dtype).view(leaf.shape))


def _padded_size(leaf: Tensor, dim: int) -> int:
    """Size along ``dim``, or -1 if the tensor is not padded."""
    if leaf.is_nested:
        warn(
            "nested tensors are not padded; convert them first with torch.nested.to_padded_tensor",
            CannotPadNestedTensorWarning,
        )
        return -1
    return int(leaf.shape[dim]) if -leaf.dim() <= dim < leaf.dim() else -1


def _padded(leaf: Tensor, dim: int, missing: int, value: float, first: bool) -> Tensor:
    shape = list(leaf.shape)
    shape[dim] = missing
    padding = leaf.new_full(shape, value)
    return torch.cat([padding, leaf] if first else [leaf, padding], dim=dim)
