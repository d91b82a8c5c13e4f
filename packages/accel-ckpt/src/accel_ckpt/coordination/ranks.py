"""Coordination of the ranks of a save: every step succeeds on all ranks or fails on all ranks.

What ranks tell each other is mostly the same on all of them. So `exchange` compares a hash first, which costs a rank
the same in a world of any size, and sends values only where they differ.
"""

from __future__ import annotations

import array
import hashlib
import pickle
import zlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from accel_ckpt.errors import CheckpointError
from accel_state import environment
from accel_state.clusters.topology import detect
from accel_state.world.process import PartialState, current_state

__all__ = [
    "Coordinator",
    "MainProcess",
    "SingleProcess",
    "WorldCoordinator",
    "broadcast",
    "default_coordinator",
    "do_together",
    "gather",
    "gather_together",
    "is_saving_process",
    "run_together",
]

T = TypeVar("T")


class Coordinator(Protocol):
    """How a save exchanges data with the other ranks."""

    rank: int
    world_size: int
    local_rank: int

    def exchange(self, value: Any) -> list[Any]:
        """Send plain data to all ranks; returns the data of all ranks, in rank order. Collective."""


@runtime_checkable
class _Gathers(Protocol):
    """What a coordinator may have besides, so that only the first rank pays for what each rank says."""

    def gather(self, value: Any) -> list[Any] | None:
        """Bring plain data of all ranks to the first; returns them there, in rank order. Collective."""


def gather(value: Any, ranks: Coordinator) -> list[Any] | None:
    """Bring plain data of all ranks to the first, which gets them in rank order; the others get None. Collective."""
    if isinstance(ranks, _Gathers):
        return ranks.gather(value)
    answers = ranks.exchange(value)
    return answers if ranks.rank == 0 else None


def broadcast(value: Any, ranks: Coordinator) -> Any:
    """Return the first rank's value, plain data, on all ranks. Collective."""
    if isinstance(ranks, WorldCoordinator):
        return ranks.broadcast(value)
    return ranks.exchange(value if ranks.rank == 0 else None)[0]


class SingleProcess:
    """One process: every exchange is with itself."""

    rank = 0
    world_size = 1
    local_rank = 0

    def exchange(self, value: Any) -> list[Any]:
        """Return the value given."""
        return [value]


class MainProcess(SingleProcess):
    """The main process of a world whose other ranks take no part.

    Args:
        world_size: number of ranks in the world.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


_FEW = 8
"""Ranks that send each other everything at once, which takes less time than a comparison first."""


class WorldCoordinator:
    """The ranks of the default process group."""

    def __init__(self, rank: int, world_size: int, local_rank: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank

    def exchange(self, value: Any) -> list[Any]:
        """All-gather a value; the error names a rank that does not take part, or is in another collective.

        In a large world each different value is sent once, by the first rank that has it; equal ones are one object.
        """
        from accel_state.operations import collectives

        if self.world_size <= _FEW:
            values: list[Any] = collectives.gather_object([value])
            return values
        data = pickle.dumps(value)
        if collectives.all_agree(data):
            return [value] * self.world_size
        marks = self.gather(hashlib.blake2b(data, digest_size=16).digest())
        speakers, listed = self.broadcast(_speakers(marks))
        if 2 * len(speakers) > self.world_size:
            return list(collectives.gather_object([value]))
        by_speaker = {rank: pickle.loads(self._spoken_by(rank, data)) for rank in speakers}
        numbers = array.array("I", zlib.decompress(listed))
        return [by_speaker[speakers[number]] for number in numbers]

    def gather(self, value: Any) -> list[Any] | None:
        """Bring plain data of all ranks to the first."""
        from accel_state.operations import collectives

        return collectives.gather_to_first(value)

    def broadcast(self, value: Any) -> Any:
        """Return the first rank's value."""
        return self._spoken_by(0, value)

    def _spoken_by(self, rank: int, value: Any) -> Any:
        from accel_state.operations import collectives

        [found] = collectives.broadcast_object_list([value if self.rank == rank else None], rank)
        return found


def _speakers(marks: list[bytes] | None) -> tuple[list[int], bytes] | None:
    """The first rank of each different mark; and for each rank which of them has its mark, compressed."""
    if marks is None:
        return None
    first: dict[bytes, int] = {}
    numbers: dict[bytes, int] = {}
    for rank, mark in enumerate(marks):
        numbers.setdefault(mark, len(first))
        first.setdefault(mark, rank)
    return list(first.values()), zlib.compress(array.array("I", [numbers[mark] for mark in marks]).tobytes())


def default_coordinator() -> Coordinator:
    """Return the coordinator of this process's world; a process that no launcher started is alone."""
    import torch.distributed as dist

    grouped = current_state() is not None or (dist.is_available() and dist.is_initialized())
    if not grouped and detect(environment.snapshot()).world_size == 1:
        return SingleProcess()
    state = PartialState()
    if state.num_processes == 1:
        return SingleProcess()
    return WorldCoordinator(state.process_index, state.num_processes, state.local_process_index)


def run_together(
    function: Callable[[], T],
    coordinator: Coordinator,
    *,
    doing: str,
    error: type[Exception] = CheckpointError,
) -> list[T]:
    """Call a function on every rank; return the results of all ranks, or raise on all ranks.

    Args:
        function: called once on this rank; its result must be plain data.
        coordinator: the ranks.
        doing: description of the call, for the message: ``"writing the checkpoint /x"``.
        error: raised on ranks whose own call did not fail.

    Raises:
        Exception: on a rank whose call failed, its own exception.
        CheckpointError: ``error`` on the others, with the failed rank's error in the message.
    """
    result, failure = _tried(function)
    answers = coordinator.exchange((result, _message(failure)))
    _raise_on_all(failure, [why for _, why in answers], doing, error)
    return [answer for answer, _ in answers]


def gather_together(
    function: Callable[[], T],
    coordinator: Coordinator,
    *,
    doing: str,
    error: type[Exception] = CheckpointError,
) -> list[T] | None:
    """Call a function on every rank, and bring all results at least to the first, or raise on all ranks.

    The arguments and errors are those of :func:`run_together`.
    """
    if coordinator.world_size <= _FEW:
        return run_together(function, coordinator, doing=doing, error=error)
    result, failure = _tried(function)
    _raise_on_all(failure, coordinator.exchange(_message(failure)), doing, error)
    return gather(result, coordinator)


def _tried(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as failure:  # raised once the other ranks know
        return None, failure


def _message(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def _raise_on_all(
    failure: Exception | None, messages: list[str | None], doing: str, error: type[Exception]
) -> None:
    if failure is not None:
        raise failure
    errors = [f"rank {rank}: {why}" for rank, why in enumerate(messages) if why is not None]
    if errors:
        raise error(f"{doing} failed on another rank, and was given up on all. " + "; ".join(errors))


def do_together(function: Callable[[], T], coordinator: Coordinator, *, doing: str) -> T:
    """Call a function on every rank; return this rank's result, of any type, or raise on all ranks.

    The arguments and errors are those of :func:`run_together`.
    """
    results: list[T] = []
    run_together(lambda: results.append(function()), coordinator, doing=doing)
    return results[0]


def is_saving_process(each_node: bool = False) -> bool:
    """Whether this process writes shared files: rank 0, or the first rank of its node."""
    coordinator = default_coordinator()
    return coordinator.local_rank == 0 if each_node else coordinator.rank == 0
