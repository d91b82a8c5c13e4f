"""Messages from rank 0 to each rank at a step: its part of the round, the end, or an error."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from accel_state.operations.scatter import Scatterer
from accel_train.errors import DispatchError

__all__ = ["Envelope", "Kind", "receive", "send", "send_error", "send_stop"]


class Kind(IntEnum):
    """The kinds of messages."""

    BATCH = 0
    STOP = 1
    ERROR = 2


@dataclass(slots=True)
class Envelope:
    """A message from rank 0 to a rank.

    Args:
        kind: what it is.
        batch: the rank's part (`Kind.BATCH`), or the exception (`Kind.ERROR`).
        last: nothing follows.
        real: real rows over all ranks; None when not counted.
        valid: per rank, how many leading rows are real; None when all are.
        rows: rows of this part; None when not counted.
        steps: steps of the whole iteration; None when not known.
    """

    kind: Kind
    batch: Any = None
    last: bool = False
    real: int | None = None
    valid: tuple[int, ...] | None = None
    rows: int | None = None
    steps: int | None = None


def send(scatterer: Scatterer, envelopes: list[Envelope]) -> None:
    """Send every rank its part; `envelopes` are in rank order, rank 0's own included.

    Raises:
        TypeError: a part cannot be sent. The other ranks raise as well.
    """
    scatterer([_message(envelope) for envelope in envelopes])


def send_stop(scatterer: Scatterer, ranks: int) -> None:
    """Tell every rank that the epoch is over."""
    scatterer([_message(Envelope(Kind.STOP))] * ranks)


def send_error(scatterer: Scatterer, ranks: int, error: Exception) -> None:
    """Tell every rank that rank 0 failed, and how."""
    scatterer([_message(Envelope(Kind.ERROR, pack_error(error)))] * ranks)


def receive(scatterer: Scatterer) -> Envelope:
    """The next message of rank 0."""
    kind, last, real, valid, rows, steps, batch = scatterer(None)
    if kind == Kind.ERROR:
        batch = unpack_error(batch)
    return Envelope(Kind(kind), batch, last, real, valid, rows, steps)


def _message(envelope: Envelope) -> tuple[Any, ...]:
    # Plain values: they belong to the description of the batch, which travels only when it changes.
    return (
        int(envelope.kind),
        envelope.last,
        envelope.real,
        envelope.valid,
        envelope.rows,
        envelope.steps,
        envelope.batch,
    )


def pack_error(error: Exception) -> bytes:
    """An exception as bytes: itself when it survives pickling, and its traceback as text."""
    text = "".join(traceback.format_exception(error))
    message = f"{type(error).__name__}: {error}"
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # whatever an exception's own pickling raises
        return pickle.dumps((None, message, text))
    return pickle.dumps((packed, message, text))


def unpack_error(packed: bytes) -> Exception:
    """The exception of `pack_error`, with rank 0's traceback as a note."""
    original, message, text = pickle.loads(packed)
    error: Exception = DispatchError(f"rank 0 could not read a batch: {message}")
    if original is not None:
        # A class that exists only on rank 0 can only be described in text.
        with contextlib.suppress(ImportError, AttributeError):
            error = pickle.loads(original)
    error.add_note(f"Raised on rank 0:\n{text}")
    return error
