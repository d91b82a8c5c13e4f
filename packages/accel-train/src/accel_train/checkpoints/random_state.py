"""Random numbers as part of a training state."""

from __future__ import annotations

from typing import Any, ClassVar

from accel_state.log import get_logger
from accel_state.seeding import check_rng_state, derive_rng_state, get_rng_state, set_rng_state
from accel_train.ranks import Ranks
from accel_train.setup.shared_draws import share_draws
from accel_train.state_part import SavedTrees, StatePart, Trees

__all__ = ["RandomStates"]

_logger = get_logger(__name__)


class RandomStates(StatePart):
    """The states of this rank's generators: Python's, NumPy's, torch's and the device's.

    Args:
        draws: which ranks must draw the same numbers.
    """

    group: ClassVar[str | None] = "random"

    def __init__(self, draws: Ranks) -> None:
        self._draws = draws

    def dump(self, trees: Trees) -> None:
        """A tree of this rank."""
        trees.own["rng"] = get_rng_state()

    def read(self, saved: SavedTrees) -> dict[str, Any] | None:
        """Read this rank's states; a rank that did not save derives them. None: they are missing, which is allowed."""
        if saved.own is None:
            return None
        rng: dict[str, Any] = saved.own["rng"]
        if saved.ranks > saved.saved_by:
            others = ", ".join(str(other) for other in range(saved.saved_by, saved.ranks))
            if saved.saved_by < saved.world_size:
                _logger.warning(
                    f"{saved.directory} was saved by the main process alone; rank {others} derives its random state "
                    "from that of rank 0."
                )
            else:
                _logger.warning(
                    f"{saved.directory} was saved by {saved.saved_by} ranks; rank {others} is new and derives its "
                    "random state from a saved one."
                )
        check_rng_state(rng)
        return rng if saved.rank < saved.saved_by else derive_rng_state(rng, saved.rank)

    def load(self, taken: dict[str, Any] | None, saved: SavedTrees) -> None:
        """Set the generators; ranks that must draw alike do so, also if another mesh has saved."""
        if taken is not None:
            set_rng_state(taken)
        share_draws(self._draws)
