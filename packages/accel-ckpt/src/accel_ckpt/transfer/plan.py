"""Planning which rank sends which block of which weight to whom, without sending."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple

import torch

from accel_ckpt.errors import CorruptCheckpointError, StateMismatchError, TransferError
from accel_ckpt.format.forms import OTHERS, check_form, natural
from accel_ckpt.geometry import Box, first_gap, flat_boxes, overlap
from accel_ckpt.modules.names import listed
from accel_ckpt.saving.part_division import Holding, check_cover
from accel_ckpt.tensor_storage import DTYPES

__all__ = [
    "SMALLEST_BUCKET",
    "RankWeights",
    "TransferPlan",
    "WeightBlock",
    "WeightMessage",
    "check_transfer",
    "held_from_plain",
    "held_to_plain",
    "plan_transfer",
]

SMALLEST_BUCKET = 1024
"""Bytes. Smaller messages would cost more than what they carry."""

_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}

_FORM = {"offers": {OTHERS: list}, "aliases": {OTHERS: str}, "wants": {OTHERS: list}, "ignored": [str]}


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Descriptions of what a rank offers and wants."""

    offers: Mapping[str, Holding]
    aliases: Mapping[str, str]
    """Tied names, to the name that is offered."""
    wants: Mapping[str, Holding]
    ignored: tuple[str, ...] = ()
    """Names, or patterns of names, that receivers do not need."""

    def to_plain(self) -> dict[str, Any]:
        """The description as JSON can hold it."""
        return {
            "offers": {name: held_to_plain(held) for name, held in self.offers.items()},
            "aliases": dict(self.aliases),
            "wants": {name: held_to_plain(held) for name, held in self.wants.items()},
            "ignored": list(self.ignored),
        }

    @classmethod
    def from_plain(cls, data: Any, rank: int) -> RankWeights:
        """Read the description that another rank sent.

        Raises:
            TransferError: it is something else than a description.
        """
        where = f"the weights that rank {rank} described"
        try:
            check_form(data, _FORM, where)
            return cls(
                {name: held_from_plain(held, where) for name, held in data["offers"].items()},
                dict(data["aliases"]),
                {name: held_from_plain(held, where) for name, held in data["wants"].items()},
                tuple(data["ignored"]),
            )
        except CorruptCheckpointError as error:
            raise TransferError(
                f"rank {rank} of the transfer sent something else than a description of its weights; let only ranks of "
                f"this transfer join the group, with the same version of accel-ckpt. {error}"
            ) from error


def held_to_plain(held: Holding) -> list[Any]:
    """Convert what a rank holds of a weight to plain data for JSON."""
    return [list(held.shape), held.dtype, [[list(box.offsets), list(box.sizes)] for box in held.boxes]]


def held_from_plain(data: Any, where: str) -> Holding:
    """Read what another rank holds of a weight.

    Raises:
        CorruptCheckpointError: it is no such description; says where.
    """
    if not isinstance(data, list) or len(data) != 3:
        raise CorruptCheckpointError(f"{where}: a weight is a shape, a dtype and boxes")
    shape, dtype, boxes = data
    check_form(shape, [natural], where)
    check_form(dtype, str, where)
    check_form(boxes, [[[natural]]], where)
    if any(len(box) != 2 for box in boxes):
        raise CorruptCheckpointError(f"{where}: a box is offsets and sizes")
    found = tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes)
    for box in found:
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            end <= size for end, size in zip(box.ends, shape, strict=True)
        )
        if not inside:
            raise CorruptCheckpointError(f"{where}: {box} is no box of a tensor of shape {shape}")
    if dtype not in _DTYPES and (found or dtype):
        raise CorruptCheckpointError(f"{where}: {dtype!r} is no dtype of weights")
    return Holding(tuple(shape), dtype, _DTYPES[dtype].itemsize if dtype else 0, found)


class WeightBlock(NamedTuple):
    """A block that goes from one rank to another, within one message."""

    name: str
    """The name under which the weight is offered."""
    box: Box
    """The place of the block in the whole weight."""
    offered: Box
    """The block of the sender that it is part of."""
    wanted: Box
    """The block of the receiver that it is part of."""
    dtype: torch.dtype
    """The dtype in which it is sent."""
    begin: int
    """The offset of its first byte in the message; a multiple of the size of an element."""
    nbytes: int


class WeightMessage(NamedTuple):
    """A message of one rank to another: blocks without gaps between them."""

    sender: int
    receiver: int
    number: int
    """The position among the messages of this sender to this receiver."""
    pieces: tuple[WeightBlock, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The messages that one rank sends and receives, in an order that all ranks keep.

    Every rank starts its messages in this order and has at most two under way. The first unfinished message of all
    ranks is then always started on both sides, so no rank waits for ever.
    """

    messages: tuple[WeightMessage, ...]
    copies: tuple[WeightBlock, ...]
    """Blocks that this rank gives to itself."""

    @property
    def bucket_bytes(self) -> int:
        """The size of the largest message."""
        return max((message.nbytes for message in self.messages), default=0)

    def sent_bytes(self, rank: int) -> int:
        """Bytes that a rank sends in an update."""
        return sum(message.nbytes for message in self.messages if message.sender == rank)

    def received_bytes(self, rank: int) -> int:
        """Bytes that a rank receives in an update."""
        return sum(message.nbytes for message in self.messages if message.receiver == rank)


def check_transfer(ranks: Sequence[RankWeights]) -> None:
    """Check that receivers want what the training offers. The same on all ranks.

    Raises:
        StateMismatchError: names differ, or shapes, or dtypes, or a part of a weight goes to no receiver.
        UnsupportedValueError: ranks do not offer every value once.
    """
    aliases = _aliases(ranks)
    offers = _by_name((position, rank.offers) for position, rank in enumerate(ranks))
    for name, holders in offers.items():
        check_cover(name, holders)
    wants: dict[str, list[tuple[int, str, Holding]]] = {}
    for position, rank in enumerate(ranks):
        for name, held in rank.wants.items():
            wants.setdefault(aliases.get(name, name), []).append((position, name, held))
    known = {name: (_offered(offers[name]), holders) for name, holders in wants.items() if name in offers}
    problems = [*_unknown(offers, wants), *_other_dtypes(known)]
    problems += [problem for held, holders in known.values() for problem in _misfits(held, holders)]
    ignored = [pattern for rank in ranks for pattern in rank.ignored]
    problems += _not_covered(offers, wants, aliases, ignored)
    if not offers:
        problems = ["no rank offers weights"]
    elif not wants:
        problems = ["no rank wants weights"]
    if problems:
        raise StateMismatchError(
            f"the weights that are offered are not those that are wanted: {listed(problems, 8)}. Nothing was sent"
        )


def _aliases(ranks: Iterable[RankWeights]) -> dict[str, str]:
    return {alias: name for rank in ranks for alias, name in rank.aliases.items()}


def _by_name(ranks: Iterable[tuple[int, Mapping[str, Holding]]]) -> dict[str, list[tuple[int, Holding]]]:
    found: dict[str, list[tuple[int, Holding]]] = {}
    for position, named in ranks:
        for name, held in named.items():
            found.setdefault(name, []).append((position, held))
    return found


def _offered(holders: Sequence[tuple[int, Holding]]) -> Holding:
    """A weight as ranks offer it: of one shape and dtype, as was checked."""
    return next((held for _, held in holders if held.dtype), holders[0][1])


def _unknown(offers: Mapping[str, Any], wants: Mapping[str, Sequence[tuple[int, str, Holding]]]) -> list[str]:
    unknown = {
        wanted: position for name in wants.keys() - offers.keys() for position, wanted, _ in wants[name]
    }
    if not unknown:
        return []
    first = min(unknown)
    return [
        f"{len(unknown)} names are wanted and not offered ({listed(sorted(unknown), 4)}; the first by rank "
        f"{unknown[first]})"
    ]


def _other_dtypes(wants: Mapping[str, tuple[Holding, Sequence[tuple[int, str, Holding]]]]) -> Iterator[str]:
    """Weights that are wanted in another dtype than they are sent in, by the two dtypes."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for offered, holders in wants.values():
        for position, name, held in holders:
            if held.boxes and held.dtype != offered.dtype:
                found.setdefault((held.dtype, offered.dtype), {}).setdefault(name, position)
    for (wanted, sent), names in found.items():
        yield (
            f"{len(names)} weights are wanted as {wanted} and sent as {sent} ({listed(list(names), 4)}; the first by "
            f"rank {next(iter(names.values()))}; offer weights in the receivers' dtype)"
        )


def _misfits(offered: Holding, holders: Sequence[tuple[int, str, Holding]]) -> Iterator[str]:
    """Problems of the blocks in which receivers want one weight."""
    boxes: dict[int, set[Box]] = {}
    for position, name, held in holders:
        if held.shape != offered.shape:
            yield (
                f"rank {position} wants {name!r} of shape {list(held.shape)}, and its shape is {list(offered.shape)}"
            )
            return
        boxes.setdefault(position, set()).update(held.boxes)
    for position, own in boxes.items():
        if overlap(own):
            yield f"rank {position} wants parts of {holders[0][1]!r} that overlap without being equal (want each once)"


def _not_covered(
    offers: Mapping[str, Sequence[tuple[int, Holding]]],
    wants: Mapping[str, Sequence[tuple[int, str, Holding]]],
    aliases: Mapping[str, str],
    ignored: Collection[str],
) -> Iterator[str] | list[str]:
    """Weights that keep old values in the receivers."""
    names: dict[str, list[str]] = {name: [name] for name in offers}
    for alias, name in aliases.items():
        names.setdefault(name, []).append(alias)
    unwanted, problems = [], []
    for name, holders in offers.items():
        if any(fnmatch.fnmatchcase(own, pattern) for own in names[name] for pattern in ignored):
            continue
        if name not in wants:
            unwanted.append(name)
            continue
        shape = _offered(holders).shape
        taken = {box for _, _, held in wants[name] if held.shape == shape for box in held.boxes}
        gap = first_gap(shape, taken)
        if gap is not None:
            problems.append(
                f"no receiver takes {[f'{low}:{high}' for low, high in zip(gap.offsets, gap.ends, strict=True)]} of "
                f"{name!r} of shape {list(shape)}"
            )
    if unwanted:
        problems.insert(
            0,
            f"{len(unwanted)} weights are offered and no receiver wants them ({listed(unwanted, 4)}; name those that "
            "receivers do not have in `ignored`)",
        )
    return problems


def plan_transfer(
    ranks: Sequence[RankWeights], rank: int, bucket_bytes: int, names: Collection[str] | None = None
) -> TransferPlan:
    """Plan what one rank sends and receives; the plans of all ranks fit together.

    Args:
        ranks: what each rank offers and wants, as `check_transfer` has accepted it.
        rank: whose plan.
        bucket_bytes: the most bytes of a message.
        names: only these weights, by the names under which they are offered.

    Raises:
        ValueError: `bucket_bytes` is below 1024.
    """
    if bucket_bytes < SMALLEST_BUCKET:
        raise ValueError(
            f"bucket_bytes is {bucket_bytes}; a bucket has at least {SMALLEST_BUCKET} bytes, and usually some megabytes"
        )
    aliases = _aliases(ranks)
    order = {
        name: place
        for place, name in enumerate(_by_name((0, r.offers) for r in ranks))
        if names is None or name in names
    }
    wanted = [_wanted_boxes(r.wants, aliases) for r in ranks]

    def between(sender: int, receiver: int) -> Iterator[WeightBlock]:
        offers = ranks[sender].offers
        for name in sorted(offers.keys() & wanted[receiver].keys() & order.keys(), key=order.__getitem__):
            for box in offers[name].boxes:
                for target in wanted[receiver][name]:
                    common = box.meet(target)
                    if common is not None:
                        dtype = _DTYPES[offers[name].dtype]
                        yield WeightBlock(name, common, box, target, dtype, 0, common.volume * dtype.itemsize)

    messages: list[WeightMessage] = []
    for other in range(len(ranks)):
        if other != rank:
            messages += _messages(rank, other, between(rank, other), bucket_bytes)
            messages += _messages(other, rank, between(other, rank), bucket_bytes)
    # In one round of the order senders send to different receivers, as far as there are enough.
    senders = [position for position, r in enumerate(ranks) if r.offers]
    receivers = [position for position, r in enumerate(ranks) if r.wants]
    turn = {
        (sender, receiver): (place - start) % len(receivers)
        for start, sender in enumerate(senders)
        for place, receiver in enumerate(receivers)
    }
    messages.sort(key=lambda m: (m.number, turn[m.sender, m.receiver], m.sender))
    return TransferPlan(tuple(messages), tuple(between(rank, rank)))


def _wanted_boxes(wants: Mapping[str, Holding], aliases: Mapping[str, str]) -> dict[str, list[Box]]:
    """The blocks that a rank wants, by the name under which they are offered; of tied names once."""
    found: dict[str, dict[Box, None]] = {}
    for name, held in wants.items():
        found.setdefault(aliases.get(name, name), {}).update(dict.fromkeys(held.boxes))
    return {name: list(boxes) for name, boxes in found.items()}


def _messages(
    sender: int, receiver: int, blocks: Iterable[WeightBlock], limit: int
) -> Iterator[WeightMessage]:
    """Messages of one rank to another, filled up to the limit.

    Wide elements come first, so that every block begins at a multiple of its element's size without padding.
    """
    number, used = 0, 0
    pieces: list[WeightBlock] = []
    for block in sorted(blocks, key=lambda block: -block.dtype.itemsize):
        done = 0
        while done < block.box.volume:
            room = (limit - used) // block.dtype.itemsize
            if not room:
                yield WeightMessage(sender, receiver, number, tuple(pieces), used)
                number, used, pieces = number + 1, 0, []
                continue
            end = min(block.box.volume, done + room)
            for run in flat_boxes(done, end, block.box.sizes):
                box = Box(tuple(map(add, run.offsets, block.box.offsets)), run.sizes)
                nbytes = box.volume * block.dtype.itemsize
                pieces.append(block._replace(box=box, begin=used, nbytes=nbytes))
                used += nbytes
            done = end
    if pieces:
        yield WeightMessage(sender, receiver, number, tuple(pieces), used)
