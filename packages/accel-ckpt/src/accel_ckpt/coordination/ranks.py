"""Coordination of the ranks of a save: every step succeeds on all ranks or fails on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from accel_ckpt.errors import CheckpointError
from accel_state import environment
from accel_state.clusters.topology import detect
from accel_state.world.process import PartialState, current_state

__all__ = [
    "Coordinator",
    "MainProcess",
    "SingleProcess",
    "WorldCoordinator",
    "default_coordinator",
    "do_together",
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


class WorldCoordinator:
    """The ranks of the default process group."""

    def __init__(self, rank: int, world_size: int, local_rank: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank

    def exchange(self, value: Any) -> list[Any]:
        """All-gather a value; the error names a rank that does not take part, or is in another collective."""
        from accel_state.operations.collectives import gather_object

        values: list[Any] = gather_object([value])
        return values


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
    result: T | None = None
    failure: Exception | None = None
    try:
        result = function()
    except Exception as caught:  # re-raised below, once the other ranks know
        failure = caught
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    answers = coordinator.exchange((result, message))
    if failure is not None:
        raise failure
    errors = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(answers) if why is not None]
    if errors:
        raise error(f"{doing} failed on another rank, and was given up on all. " + "; ".join(errors))
    return [answer for answer, _ in answers]


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
