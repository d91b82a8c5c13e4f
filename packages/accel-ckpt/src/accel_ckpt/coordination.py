"""How the ranks of a save agree: every step succeeds on all of them or fails on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from accel_ckpt.errors import CheckpointSaveError

__all__ = [
    "Coordinator",
    "SingleProcess",
    "WorldCoordinator",
    "default_coordinator",
    "is_saving_process",
    "run_together",
]

T = TypeVar("T")


class Coordinator(Protocol):
    """What a save needs to know of the other ranks."""

    rank: int
    world_size: int
    local_rank: int

    def exchange(self, value: Any) -> list[Any]:
        """Give plain data to all ranks; returns what each gave, in rank order. Collective."""


class SingleProcess:
    """One process: every exchange is with itself."""

    rank = 0
    world_size = 1
    local_rank = 0

    def exchange(self, value: Any) -> list[Any]:
        """Return the value given."""
        return [value]


class WorldCoordinator:
    """The ranks of the default process group."""

    def __init__(self, rank: int, world_size: int, local_rank: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank

    def exchange(self, value: Any) -> list[Any]:
        """All-gather a value over the default process group."""
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered


def default_coordinator() -> Coordinator:
    """The ranks of the process group, or a single process where there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return SingleProcess()
    rank = dist.get_rank()
    return WorldCoordinator(rank, dist.get_world_size(), dist.get_node_local_rank(fallback_rank=rank))


def run_together(function: Callable[[], T], coordinator: Coordinator, *, doing: str) -> list[T]:
    """Call a function on every rank; return what each rank's call returned, or raise on all of them.

    Args:
        function: called once on this rank; its result must be plain data.
        coordinator: the ranks.
        doing: what is being done, for the message: ``"writing the checkpoint /x"``.

    Raises:
        Exception: on a rank whose call failed, its own exception.
        CheckpointSaveError: on the others, with the failed rank's error in the message.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:  # re-raised below, once the other ranks know
        failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    answers = coordinator.exchange((result, told))
    if failure is not None:
        raise failure
    errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error is not None]
    if errors:
        raise CheckpointSaveError(
            f"{doing} failed on another rank, and was given up on all. " + "; ".join(errors)
        )
    return [answer for answer, _ in answers]


def is_saving_process(each_node: bool = False) -> bool:
    """Whether this process is the one that writes shared files: rank 0, or the first rank of its node."""
    coordinator = default_coordinator()
    return coordinator.local_rank == 0 if each_node else coordinator.rank == 0
