"""Transfers of weights: ranks agree on a plan once, and carry it out in every update."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from accel_ckpt.coordination.ranks import SingleProcess, run_together
from accel_ckpt.errors import CheckpointError, TransferError
from accel_ckpt.geometry import Box
from accel_ckpt.parts import Leaf, Part, parts_of, shape_of
from accel_ckpt.saving.part_division import Holding, describe_parts
from accel_ckpt.tensor_storage import copy_values
from accel_ckpt.transfer.offers import OfferedWeights, check_plain
from accel_ckpt.transfer.plan import (
    RankWeights,
    TransferPlan,
    WeightBlock,
    WeightMessage,
    check_transfer,
    plan_transfer,
)

__all__ = ["BUCKET_BYTES", "LocalTransport", "Targets", "Transport", "WeightTransfer", "Work", "carry_out"]

BUCKET_BYTES = 64 << 20
"""Bytes of a bucket, if the caller gives none."""


class Work(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Wait until the bucket may be used: it was sent, or it was received."""
        ...


class Transport(Protocol):
    """How the ranks of a transfer reach each other. It is a `Coordinator` too.

    Attributes:
        rank: of this process in the transfer.
        world_size: number of ranks, trainers and receivers together.
        local_rank: the same as `rank`.
    """

    rank: int
    world_size: int
    local_rank: int

    def exchange(self, value: Any) -> list[Any]:
        """Send plain data to all ranks; returns the data of all ranks, in rank order. Collective."""
        ...

    def open(self, bucket_bytes: int) -> None:
        """Make the two buckets of this rank, of the size of its largest message. Collective."""
        ...

    def bucket(self, slot: int) -> torch.Tensor:
        """The memory of one of the two buckets, as bytes."""
        ...

    def send(self, slot: int, message: WeightMessage) -> Work:
        """Begin to send the first bytes of a bucket."""
        ...

    def receive(self, slot: int, message: WeightMessage) -> Work:
        """Begin to receive a message into a bucket."""
        ...


class LocalTransport(SingleProcess):
    """A transfer within one process: it gives weights to itself."""

    def open(self, bucket_bytes: int) -> None:
        """Make nothing: nothing is sent."""

    def bucket(self, slot: int) -> torch.Tensor:
        """Raise: a transfer within one process has no buckets."""
        raise TransferError("a transfer within one process has no buckets")

    def send(self, slot: int, message: WeightMessage) -> Work:
        """Raise: a transfer within one process sends nothing."""
        raise TransferError("a transfer within one process sends nothing")

    def receive(self, slot: int, message: WeightMessage) -> Work:
        """Raise: a transfer within one process receives nothing."""
        raise TransferError("a transfer within one process receives nothing")


Sources = Mapping[tuple[str, Box], torch.Tensor]


class Targets:
    """The memory that a receiver fills.

    Args:
        wants: by name, what this rank wants of a weight, and where to: a tensor for all of it, a `Part` or `DTensor`
            for a block, or a list of parts. Tensors may be views, such as rows of a fused tensor.

    Raises:
        UnsupportedValueError: a tensor is not plain values in memory.
    """

    def __init__(self, wants: Mapping[str, Leaf]) -> None:
        self._parts: dict[str, list[Part]] = {}
        for name, leaf in wants.items():
            parts = parts_of(leaf)
            check_plain(name, parts)
            self._parts[name] = parts or [Part.nothing(shape_of(leaf))]

    def describe(self) -> dict[str, Holding]:
        """Describe what is wanted, for the other ranks."""
        return describe_parts({"": self._parts})[""]

    def by_box(self, aliases: Mapping[str, str]) -> dict[tuple[str, Box], list[torch.Tensor]]:
        """The tensors that a block fills, by the name under which it is offered; tied names may be several."""
        found: dict[tuple[str, Box], list[torch.Tensor]] = {}
        for name, parts in self._parts.items():
            for part in parts:
                if not part.is_empty:
                    found.setdefault((aliases.get(name, name), part.box), []).append(part.tensor.detach())
        return found


class WeightTransfer:
    """Sends weights from the ranks that offer them to the ranks that want them, as often as asked.

    The constructor is collective: all ranks describe what they offer and want, check it, and plan. `update` then moves
    the current values by that plan. A rank may offer, want, or both: what it gives to itself is copied.

    Every element goes to every rank that wants it once, in messages of bounded size; a rank uses memory for two of them
    besides its weights.

    Args:
        transport: how the ranks reach each other, such as a `GroupTransport`.
        offers: the weights of the training; on ranks of the training.
        wants: what this rank wants; see `Targets`. On receivers.
        ignored: names of weights that this receiver's engine does not have, or patterns such as ``"*.rotary_emb.*"``.
        bucket_bytes: the most bytes of a message. The same on all ranks.

    Attributes:
        plan: what this rank sends and receives in an update.

    Raises:
        StateMismatchError: offered and wanted weights differ in names, shapes or dtypes, or a part of a weight goes to
            no receiver. On all ranks, before anything is sent.
        TransferError: another rank failed, or gives another `bucket_bytes`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        offers: OfferedWeights | None = None,
        wants: Mapping[str, Leaf] | None = None,
        ignored: Collection[str] = (),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._transport = transport
        self._offers = offers
        targets: list[Targets] = []

        def describe() -> RankWeights:
            targets.append(Targets(wants or {}))
            aliases = {} if offers is None else offers.aliases
            return RankWeights(describe_offers(offers), aliases, targets[0].describe(), tuple(ignored))

        ranks = described(describe, transport, bucket_bytes)
        self.plan: TransferPlan = plan_transfer(ranks, transport.rank, bucket_bytes)
        aliases = {alias: name for rank in ranks for alias, name in rank.aliases.items()}
        self._targets = targets[0].by_box(aliases)
        self._updates = 0
        transport.open(self.plan.bucket_bytes)

    def update(self) -> None:
        """Move the weights' current values to the receivers. Collective: all ranks of the transfer call it.

        Returns when every receiver has all values.

        Raises:
            StateMismatchError: the model no longer holds what was offered. On the others `TransferError`; nothing was
                sent.
            TransferError: another rank failed. Receivers may then hold values of two updates.
        """
        sources: dict[tuple[str, Box], torch.Tensor] = {}

        def begin() -> int:
            sources.update(sources_of(self._offers))
            return self._updates

        counts = run_together(
            begin, self._transport, doing="beginning an update of weights", error=TransferError
        )
        if len(set(counts)) > 1:
            raise TransferError(
                f"ranks are in different updates: {counts}. Call update() on all ranks equally often"
            )
        move_together(lambda: carry_out(self.plan, self._transport, sources, self._targets), self._transport)
        self._updates += 1


def move_together(move: Callable[[], None], transport: Transport) -> None:
    """Move weights; raise on all ranks if one fails, on this one its own error.

    Raises:
        TransferError: another rank failed, or is gone.
    """
    failures: list[Exception] = []

    def moved() -> None:
        try:
            move()
        except Exception as error:
            failures.append(error)
            raise

    try:
        run_together(moved, transport, doing="an update of weights", error=TransferError)
    except CheckpointError as error:
        if failures and error is not failures[0]:  # the others could not be told: a rank is gone
            raise failures[0] from error
        raise


def describe_offers(offers: OfferedWeights | None) -> dict[str, Holding]:
    """Describe what this rank offers, for the other ranks."""
    found: dict[str, list[Box]] = {}
    for weight in offers or ():
        found.setdefault(weight.name, []).append(weight.box)
    about = {} if offers is None else offers.about
    return {
        name: Holding(about[name].shape, str(about[name].dtype), about[name].dtype.itemsize, tuple(boxes))
        for name, boxes in found.items()
    }


def described(
    describe: Callable[[], RankWeights], transport: Transport, bucket_bytes: int
) -> list[RankWeights]:
    """Exchange what each rank offers and wants, and check that it fits. Collective.

    Args:
        describe: returns what this rank offers and wants.
        transport: the ranks.
        bucket_bytes: the most bytes of a message, which must be the same on all ranks.

    Raises:
        StateMismatchError: see `check_transfer`.
        TransferError: a rank failed, sent something else, or uses buckets of another size.
    """
    answers = run_together(
        lambda: {"bucket_bytes": bucket_bytes, "weights": describe().to_plain()},
        transport,
        doing="describing weights",
        error=TransferError,
    )
    for rank, answer in enumerate(answers):
        if not isinstance(answer, dict) or answer.get("bucket_bytes") != bucket_bytes:
            given = answer.get("bucket_bytes") if isinstance(answer, dict) else None
            raise TransferError(
                f"rank {rank} has bucket_bytes={given!r}, and this rank {bucket_bytes}; give all ranks the same"
            )
    ranks = [RankWeights.from_plain(answer.get("weights"), rank) for rank, answer in enumerate(answers)]
    check_transfer(ranks)
    return ranks


def sources_of(offers: OfferedWeights | None) -> dict[tuple[str, Box], torch.Tensor]:
    """This rank's current values by block."""
    return {(weight.name, weight.box): weight.tensor for weight in offers or ()}


class _Flight(NamedTuple):
    work: Work
    slot: int
    message: WeightMessage


@torch.no_grad()
def carry_out(
    plan: TransferPlan,
    transport: Transport,
    sources: Sources,
    targets: Mapping[tuple[str, Box], Iterable[torch.Tensor]],
) -> None:
    """Send and receive what a plan says.

    Args:
        plan: of this rank.
        transport: opened for messages of this size.
        sources: what this rank offers.
        targets: what this rank fills.
    """
    for piece in plan.copies:
        for target in targets[piece.name, piece.wanted]:
            copy_values(_within(target, piece, piece.wanted), _source(sources, piece))
    flights: deque[_Flight] = deque()
    for place, message in enumerate(plan.messages):
        slot = place % 2
        if len(flights) == 2:
            _land(flights.popleft(), transport, targets)
        if message.sender == transport.rank:
            for piece, values in _values(transport.bucket(slot), message):
                values.copy_(_source(sources, piece))
            work = transport.send(slot, message)
        else:
            work = transport.receive(slot, message)
        flights.append(_Flight(work, slot, message))
    while flights:
        _land(flights.popleft(), transport, targets)


def _land(
    flight: _Flight, transport: Transport, targets: Mapping[tuple[str, Box], Iterable[torch.Tensor]]
) -> None:
    """Wait for a message, and put what was received where it belongs."""
    try:
        flight.work.wait()
    except CheckpointError:
        raise
    except RuntimeError as error:
        raise TransferError(
            f"the message of rank {flight.message.sender} to rank {flight.message.receiver} did not arrive: {error}"
        ) from error
    if flight.message.receiver != transport.rank:
        return
    for piece, values in _values(transport.bucket(flight.slot), flight.message):
        for target in targets[piece.name, piece.wanted]:
            _within(target, piece, piece.wanted).copy_(values)


def _values(bucket: torch.Tensor, message: WeightMessage) -> Iterable[tuple[WeightBlock, torch.Tensor]]:
    """The blocks of a message in its bucket."""
    for piece in message.pieces:
        yield (
            piece,
            bucket[piece.begin : piece.begin + piece.nbytes].view(piece.dtype).view(piece.box.sizes),
        )


def _source(sources: Sources, piece: WeightBlock) -> torch.Tensor:
    return _within(sources[piece.name, piece.offered], piece, piece.offered)


def _within(tensor: torch.Tensor, piece: WeightBlock, block: Box) -> torch.Tensor:
    """The piece of a block that a tensor holds."""
    return tensor if piece.box == block else tensor[piece.box.within(block.offsets).slices]
