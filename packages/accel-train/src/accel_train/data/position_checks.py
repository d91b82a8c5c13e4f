"""Whether a loader can continue at a saved position, and how many of its batches lead there.

A position counts samples where the order is drawn at once, batches of the sampler where one is iterated or rank 0 reads
for all, and batches of each rank where a stream is read. The last two mean something else for a loader with another
batch size or another number of worker processes.
"""

from __future__ import annotations

from typing import Any, Protocol

from accel_state.errors import NotAvailableError
from accel_train.data.saved_position import Restored
from accel_train.errors import DataError
from accel_train.ranks import Ranks

__all__ = ["batches_of_stream", "check_fits", "check_lengths", "check_workers", "refuse_short", "steps_to"]

_ADVICE = (
    "Use the same value, or load without use_stateful_dataloader and start the epoch from its beginning."
)


class _Loader(Protocol):
    """The part of a prepared loader's interface that this module uses."""

    drop_last: bool
    indexes: Any
    num_workers: int
    asks_dataset: bool
    ranks: Ranks

    @property
    def lengths(self) -> list[int | None]: ...

    @property
    def position_unit(self) -> str: ...
    @property
    def stream_stride(self) -> int | None: ...
    @property
    def sampler_batch_size(self) -> int | None: ...
    @property
    def total_batch_size(self) -> int | None: ...
    @property
    def sampler_batches_per_step(self) -> int: ...


def check_fits(loader: _Loader, restored: Restored) -> None:
    """Whether the batches of `loader` lead to a saved position.

    Raises:
        DataError: another kind of loader saved the position.
        NotAvailableError: the position means nothing for this number of ranks or workers, or this batch size.
    """
    position = restored.position
    if not position or not restored.batches_yielded:
        return
    unit = loader.position_unit
    if unit not in position:
        counted = {"samples", "base_batches", "local_batches"} & position.keys()
        raise DataError(
            f"The saved position counts {', '.join(sorted(counted))}, but this loader counts {unit}: it is "
            "not the kind of loader, or of sampler, that the state was saved with. Prepare the same loader, or do not "
            "load its state."
        )
    check_lengths(loader, restored)
    check_workers(loader, restored)
    if unit == "local_batches":
        batches_of_stream(loader, restored)
    if unit == "base_batches" or (unit == "local_batches" and loader.stream_stride is None):
        _check_batch_size(loader, restored)


def check_lengths(loader: _Loader, restored: Restored) -> None:
    """Whether the data is as long as it was when a position inside an epoch was saved, which it does not pass.

    Raises:
        DataError: the dataset or the sampler has another length, or the position is behind their end.
    """
    whole = loader.lengths
    for what, before, now in zip(
        ("data set", "order"), restored.options.get("lengths") or (), whole, strict=False
    ):
        if before != now and None not in (before, now):
            raise DataError(
                f"This loader was left after {restored.batches_yielded} batches of an epoch whose {what} had the "
                f"length {before}, and has {now} now: samples would be lost or repeated. Continue with the same data, "
                "or begin an epoch: load the state without use_stateful_dataloader, or one saved between epochs."
            )
    samples = restored.position.get("samples", 0)
    length = next((length for length in reversed(whole) if length is not None), samples)
    if samples > length:
        raise DataError(f"The saved position is after {samples} samples, and this epoch has {length}.")


def check_workers(loader: _Loader, restored: Restored) -> None:
    """Whether the same number of workers read a stream: each has a part or a copy, and they return batches in turn.

    Raises:
        NotAvailableError: another number of workers saved the position.
    """
    before, now = restored.options.get("num_workers"), loader.num_workers
    if before is None or not (loader.indexes is None or loader.asks_dataset):
        return
    if max(before, 1) != max(now, 1):
        raise NotAvailableError(
            f"This stream was left after {restored.batches_yielded} batches that {before} worker(s) had read "
            f"(num_workers={before}), each its own part; {now} worker(s) (num_workers={now}) would read other parts, "
            f"so samples would be lost or repeated. {_ADVICE}"
        )
    dropped = restored.options.get("drop_last")
    if now > 1 and dropped is not None and dropped != loader.drop_last:
        raise NotAvailableError(
            f"This stream was left after {restored.batches_yielded} batches of {now} workers with drop_last={dropped}; "
            f"with drop_last={loader.drop_last} the workers' last batches come in another order. {_ADVICE}"
        )


def _check_batch_size(loader: _Loader, restored: Restored) -> None:
    before, now = restored.options.get("batch_size"), loader.sampler_batch_size
    if "batch_size" in restored.options and before != now:
        raise NotAvailableError(
            f"This loader was left after {restored.batches_yielded} batches with batch size {before}; the batch size "
            f"is {now} now, and the same number of batches holds other samples. {_ADVICE}"
        )


def batches_of_stream(loader: _Loader, restored: Restored) -> int:
    """Number of batches of each rank of a stream up to a saved position.

    Raises:
        NotAvailableError: the position is between two of them.
    """
    batches: int = restored.position["local_batches"]
    ranks, size = restored.ranks, loader.ranks.size
    before, now = restored.position["samples_per_batch"], loader.stream_stride
    if not batches or (ranks == size and (before == now or None in (before, now))):
        return batches
    if before is None or now is None:
        raise NotAvailableError(
            f"This stream was left after {batches} batches on each of {ranks} ranks, each of which read a part of "
            f"its own; {size} ranks would read other parts. Continue with {ranks} ranks, or without "
            "use_stateful_dataloader."
        )
    steps, rest = divmod(batches * int(before), now)
    workers = max(loader.num_workers, 1)
    if rest or batches % workers or steps % workers:
        raise NotAvailableError(
            f"This stream was left after {batches} batches on each of {ranks} ranks; {size} ranks cannot continue "
            f"there, because {batches * int(before)} samples, read by {workers} worker(s) in turn, do not divide into "
            f"batches of {now} samples over all ranks ({before} when it was saved). Continue with {ranks} ranks and "
            "the same batch size, or without use_stateful_dataloader."
        )
    return steps


def refuse_short(restored: Restored | None, wanted: int, passed: int, each: int = 1) -> None:
    """Refuse a stream that ends before a saved position.

    Args:
        restored: the state, if there is one.
        wanted: batches up to the position.
        passed: how many there were.
        each: batches of one step of all ranks, the last of which may have had fewer.

    Raises:
        DataError: there were fewer.
    """
    if restored is not None and restored.batches_yielded and passed <= wanted - each:
        raise DataError(
            f"This loader was left after {wanted} batches of an epoch, which ends after {passed} now, before the saved "
            "position. Continue with the same data, or load a state that was saved between epochs."
        )


def steps_to(loader: _Loader, position: dict[str, Any]) -> float | None:
    """Number of batches of this rank up to a saved position; None if it cannot be computed."""
    if "samples" in position:
        return None if loader.total_batch_size is None else position["samples"] / loader.total_batch_size
    if "local_batches" in position:
        before, now = position["samples_per_batch"], loader.stream_stride
        return None if before is None or now is None else position["local_batches"] * before / now
    return position["base_batches"] / loader.sampler_batches_per_step if position else None
