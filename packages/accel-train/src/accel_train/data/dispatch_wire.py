"""How a rank's part of a round travels: a short header, then one flat message.

The header says how long the message is. The message holds the description of the batch (its structure,
dtypes and shapes), only when that has changed since the last round, and the bytes of all tensors. Messages
go from rank 0 to each rank separately, so nobody receives what belongs to another.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.trees import TreeSpec, flatten, unflatten
from accel_train.errors import DispatchError

__all__ = ["Envelope", "Kind", "Link", "Receiver", "Sender", "WorldLink"]

_ALIGNMENT = 16  # bytes; a view needs its offset to be a multiple of the item size
_TAG = 7431  # our messages are not mixed up with a user's on the same group


class Kind(IntEnum):
    """What a message is."""

    BATCH = 0
    STOP = 1
    ERROR = 2


@dataclass(slots=True)
class Envelope:
    """What arrives at a rank.

    Args:
        kind: what it is.
        batch: the rank's part (`Kind.BATCH`), or the exception (`Kind.ERROR`).
        last: nothing follows.
        real: real rows over all ranks; None when not counted.
        valid: per rank, how many leading rows are real; None when all are.
        rows: rows of this part; None when not counted.
    """

    kind: Kind
    batch: Any = None
    last: bool = False
    real: int | None = None
    valid: tuple[int, ...] | None = None
    rows: int | None = None


class Link(Protocol):
    """Point-to-point messages of bytes."""

    device: torch.device

    def send(self, message: Tensor, to: int) -> Any:
        """Begin to send; the result has `wait`."""

    def receive(self, message: Tensor) -> None:
        """Fill `message` from rank 0."""


class WorldLink:
    """Messages on the world group.

    Args:
        device: where messages must be for the group's backend.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, message: Tensor, to: int) -> Any:
        """Begin to send `message` to rank `to`."""
        return dist.isend(message, to, tag=_TAG)

    def receive(self, message: Tensor) -> None:
        """Fill `message` from rank 0."""
        dist.recv(message, 0, tag=_TAG)


# The header: kind and flags, real rows, rows of the part, bytes of the description, bytes of the tensors.
_HEADER = 5
_LAST = 4


_Leaves = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
_Shape = tuple[_Leaves, tuple[int, ...] | None]
"""Dtype and shape of each tensor, and the valid rows per rank."""


def _offsets(leaves: _Leaves) -> tuple[list[tuple[int, int]], int]:
    spans: list[tuple[int, int]] = []
    end = 0
    for dtype, shape in leaves:
        size = dtype.itemsize
        for length in shape:
            size *= length
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + size
        spans.append((start, end))
    return spans, end


class Sender:
    """Rank 0's side, for one iteration.

    Args:
        link: carries the messages.
        ranks: number of ranks.
    """

    def __init__(self, link: Link, ranks: int) -> None:
        self._link = link
        self._ranks = ranks
        self._told: list[tuple[bytes, _Shape] | None] = [None] * ranks
        self._on_the_way: list[tuple[Any, Tensor]] = []

    def batches(self, envelopes: list[Envelope]) -> None:
        """Send every other rank its part; `envelopes` are in rank order, rank 0's own included."""
        # Nothing leaves before everything is packed: a part that cannot be sent must not leave some ranks
        # served.
        packed = [self._pack(rank, envelopes[rank]) for rank in range(1, self._ranks)]
        for rank, (described, message) in enumerate(packed, start=1):
            self._post(rank, envelopes[rank], described, message)

    def _pack(self, to: int, envelope: Envelope) -> tuple[int, Tensor]:
        leaves, spec = flatten(envelope.batch)
        for leaf in leaves:
            if leaf.layout is not torch.strided:
                raise DispatchError(
                    f"A batch holds a tensor of layout {leaf.layout}, which cannot be sent. Make it dense "
                    "in the collate function, or use dispatch_batches=False."
                )
        shapes: _Leaves = tuple((leaf.dtype, tuple(leaf.shape)) for leaf in leaves)
        news = self._news(to, pickle.dumps(spec, pickle.HIGHEST_PROTOCOL), (shapes, envelope.valid))
        spans, size = _offsets(shapes)
        start = -(-len(news) // _ALIGNMENT) * _ALIGNMENT
        message = torch.empty(start + size, dtype=torch.uint8, device=self._link.device)
        if news:
            message[: len(news)] = torch.frombuffer(bytearray(news), dtype=torch.uint8)
        for leaf, (low, high) in zip(leaves, spans, strict=True):
            if high > low:
                message[start + low : start + high].view(leaf.dtype).view(leaf.shape).copy_(leaf)
        return len(news), message

    def stop(self) -> None:
        """Tell every rank that the epoch is over."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self._link.device)
        for rank in range(1, self._ranks):
            self._post(rank, Envelope(Kind.STOP), 0, nothing)

    def error(self, error: Exception) -> None:
        """Tell every rank that rank 0 failed, and how."""
        text = pack_error(error)
        message = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._link.device)
        for rank in range(1, self._ranks):
            self._post(rank, Envelope(Kind.ERROR), len(text), message)

    def wait(self) -> None:
        """Return when everything sent so far has left."""
        sent, self._on_the_way = self._on_the_way, []
        for work, _ in sent:
            work.wait()

    def _news(self, to: int, spec: bytes, shape: _Shape) -> bytes:
        """What rank `to` does not know yet about the batch it will get."""
        told, self._told[to] = self._told[to], (spec, shape)
        if told is None or told[0] != spec:
            return pickle.dumps((spec, shape), pickle.HIGHEST_PROTOCOL)
        return b"" if told[1] == shape else pickle.dumps((None, shape), pickle.HIGHEST_PROTOCOL)

    def _post(self, to: int, envelope: Envelope, described: int, message: Tensor) -> None:
        flags = envelope.kind | (_LAST if envelope.last else 0)
        header = torch.tensor(
            [
                flags,
                -1 if envelope.real is None else envelope.real,
                -1 if envelope.rows is None else envelope.rows,
                described,
                message.numel(),
            ],
            dtype=torch.int64,
            device=self._link.device,
        )
        self._on_the_way.append((self._link.send(header, to), header))
        if message.numel():
            self._on_the_way.append((self._link.send(message, to), message))


class Receiver:
    """Another rank's side, for one iteration.

    Args:
        link: carries the messages.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._spec: TreeSpec | None = None
        self._shape: _Shape = ((), None)

    def __call__(self) -> Envelope:
        """The next message."""
        header = torch.empty(_HEADER, dtype=torch.int64, device=self._link.device)
        self._link.receive(header)
        flags, real, rows, described, size = header.tolist()
        message = torch.empty(size, dtype=torch.uint8, device=self._link.device)
        if size:
            self._link.receive(message)
        kind = Kind(flags & 3)
        if kind is Kind.STOP:
            return Envelope(kind)
        news = bytes(message[:described].tolist())
        if kind is Kind.ERROR:
            return Envelope(kind, unpack_error(news))
        if news:
            spec, self._shape = pickle.loads(news)
            if spec is not None:
                self._spec = pickle.loads(spec)
        assert self._spec is not None, "the first batch comes with its description"
        shapes, valid = self._shape
        start = -(-described // _ALIGNMENT) * _ALIGNMENT
        spans, _ = _offsets(shapes)
        leaves = [
            message[start + low : start + high].view(dtype).view(shape)
            if high > low
            else torch.empty(shape, dtype=dtype, device=self._link.device)
            for (low, high), (dtype, shape) in zip(spans, shapes, strict=True)
        ]
        return Envelope(
            kind,
            unflatten(self._spec, leaves),
            last=bool(flags & _LAST),
            real=None if real < 0 else real,
            valid=valid,
            rows=None if rows < 0 else rows,
        )


def pack_error(error: Exception) -> bytes:
    """An exception as bytes: itself when it survives pickling, and its traceback as text."""
    text = "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # whatever an exception's own pickling raises
        return pickle.dumps((None, f"{type(error).__name__}: {error}", text))
    return pickle.dumps((packed, str(error), text))


def unpack_error(packed: bytes) -> Exception:
    """The exception of `pack_error`, with rank 0's traceback as a note."""
    original, message, text = pickle.loads(packed)
    error: Exception
    if original is None:
        error = DispatchError(f"rank 0 could not read a batch: {message}")
    else:
        try:
            error = pickle.loads(original)
        except Exception:  # a class that exists on rank 0 only
            error = DispatchError(f"rank 0 could not read a batch: {message}")
    error.add_note(f"Raised on rank 0:\n{text}")
    return error
