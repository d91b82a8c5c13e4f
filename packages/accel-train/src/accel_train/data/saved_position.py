"""The epoch that a loader is in, and its saved state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from accel_ckpt.format.forms import OTHERS, Form, check_form, natural, positive
from accel_train.data.iteration import Iteration
from accel_train.data.sampling.permutations import Record
from accel_train.errors import DataError
from accel_train.ranks import Ranks

__all__ = ["Epoch", "Restored"]

_VERSION = 1


def _seed(value: Any) -> bool:
    """A seed of torch's generators."""
    return type(value) is int and -(1 << 63) <= value < 1 << 64


_FORM: Form = {
    "version": natural,
    "epoch": natural,
    "finished": bool,
    "ranks": positive,
    "index": (None, natural),
    "batches_yielded": natural,
    "batches_of_finished": natural,
    "position": {
        "samples": natural,
        "base_batches": natural,
        "local_batches": natural,
        "samples_per_batch": (None, positive),
        "pulled": (None, natural),
        "ended": bool,
        "ahead": [object],
    },
    "draw": {"seed": _seed, "generator": torch.Tensor, "drawn": natural, "exhausted": bool},
    "options": (None, {"lengths": [(None, natural)]}),
    "ahead": (None, {"batches": natural, "rng": {}, "first_rng": (None, {})}),
    "rng_at_start": (None, {"samplers": [object]}),
    "reading": (None, {}),
    "sampler_seed": _seed,
    "generators": [object],
    "samplers": [object],
}
"""What is in a state, where it is there."""
_WORKERS: Form = (None, {"count": positive, "turn": natural, "states": {OTHERS: {}}})


@dataclass(frozen=True, slots=True)
class Restored:
    """A position inside an epoch, as states hold it: the fields are their keys.

    Attributes:
        epoch: its number.
        ranks: how many ranks read different samples.
        index: the index of the rank that saved it; None: the same as here.
        batches_yielded: batches of this rank since the epoch began.
        position: in the data; see `accel_train.data.position_checks`.
        draw: the random draws for the order.
        options: options of the loader on which the position depends: ``num_workers``, ``batch_size``, ``drop_last`` and
            the ``lengths`` of its data.
        rng_at_start: the generators when the epoch began.
        ahead: see `Iteration.read_ahead`.
        source: the position of a dataset that keeps its own.
        workers: the generators of worker processes: their ``count``, whose ``turn`` it is, and the ``states``.
        reading: the random states for reading, where several ranks read the same samples.
    """

    epoch: int
    ranks: int
    index: int | None = None
    batches_yielded: int = 0
    position: dict[str, Any] = field(default_factory=dict)
    draw: Record = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rng_at_start: dict[str, Any] | None = None
    ahead: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] | None = None
    workers: dict[str, Any] | None = None
    reading: dict[str, Any] | None = None

    def is_of(self, ranks: Ranks) -> bool:
        """Whether the state was saved by a rank that read what this one reads; otherwise only the position holds."""
        return self.ranks == ranks.size and self.index in (None, ranks.index)

    def tree(self, *, finished: bool) -> dict[str, Any]:
        """The state, as plain data and tensors.

        Args:
            finished: the epoch is over. The number of batches has another name then: the next epoch begins with its
                first batch. The position is kept for a script that returns to it and skips all its batches.
        """
        state = {name: getattr(self, name) for name in self.__slots__}
        state |= {"version": _VERSION, "finished": finished}
        if finished:
            state |= {
                "epoch": self.epoch + 1,
                "batches_yielded": 0,
                "batches_of_finished": self.batches_yielded,
            }
        return state


@dataclass(slots=True)
class Epoch:
    """Which epoch a loader is in; shared with the loaders that `skip_first_batches` makes of it.

    An epoch counts as soon as a batch of it was returned and another iteration begins, also if the loop was left
    before its end. The script may choose the number: of the loader, of a sampler or of the dataset.
    """

    iteration: int = 0
    """The number of the iteration that began last, or one that was chosen or loaded since."""
    restored: Restored | None = None
    running: Iteration | None = field(default=None)
    chosen: bool = False
    """Whether `iteration` was chosen since an iteration began."""
    told: list[tuple[Any, int]] = field(default_factory=list)
    """What follows the epoch and shows it as its ``epoch``, with the value after it was told."""

    def __getstate__(self) -> tuple[int, Restored | None]:
        return self.following(), self.restored  # a running iteration does not travel

    def __setstate__(self, state: tuple[int, Restored | None]) -> None:
        self.iteration, self.restored = state
        self.running, self.chosen, self.told = None, False, []

    def choose(self, epoch: int) -> None:
        """Make `epoch` the next one; a loaded state of another epoch is of no use then."""
        self.iteration, self.chosen = epoch, True
        self.restored = self.waiting()

    def following(self) -> int:
        """The number of an iteration that would begin now."""
        running = self.running
        if running is None or not running.yielded or running.epoch != self.iteration or self.chosen:
            return self.iteration
        return self.iteration + 1

    def begin(self, left_out: int, told: Mapping[int, int]) -> Restored | None:
        """An iteration begins: find its number; returns the loaded state for it.

        Args:
            left_out: how many batches it skips. The rest of an epoch that was left after so many belongs to it.
            told: by `id` of the sampler or dataset, the epoch that a loader set last, not the script.
        """
        running = self.running
        if running is None or not left_out or running.place()[0] != left_out:
            self.iteration = self.following()
        for follower, epoch in self.told:
            # A sampler may have given itself the next number at its end.
            known = (epoch, self.iteration, told.get(id(follower)))
            if follower.epoch not in known and not self.chosen:
                self.choose(follower.epoch)
        waiting, self.restored = self.waiting(), None
        return waiting

    def go_on(self, iteration: Iteration) -> None:
        """An iteration that began before the one that runs, or before a load, goes on.

        A loop that was left in between counts. A state that was loaded in the middle of a loop, as to go back after a
        bad step, no longer says where the loader is.
        """
        if self.running is None:
            self.restored = None
            if not self.chosen:
                self.iteration = iteration.epoch
        elif self.running.closed:
            self.iteration = self.following()
        self.running = iteration

    def end(self, iteration: Iteration) -> None:
        """The iteration returned its last batch; a number that was chosen meanwhile holds."""
        if not self.chosen:
            self.iteration = max(self.iteration, iteration.epoch + 1)

    def waiting(self) -> Restored | None:
        """The loaded state, if the next iteration is of its epoch."""
        restored = self.unread()
        return restored if restored is not None and restored.epoch == self.iteration else None

    def unread(self) -> Restored | None:
        """The loaded state of which nothing has been read: no iteration has taken it, or one that yielded nothing.

        It still says where the loader is. The next iteration takes it, and the next save repeats it.
        """
        running = self.running
        if self.restored is None and running is not None and not running.yielded and not running.ended:
            taken: Restored | None = running.restored
            return taken
        return self.restored

    def between(self, ranks: Ranks, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """The state between two epochs, as plain data."""
        return Restored(self.iteration - 1, ranks.size, ranks.index, options=options or {}).tree(
            finished=True
        )

    def dump(self, ranks: Ranks, options: dict[str, Any], finished: bool) -> dict[str, Any]:
        """The state as plain data and tensors.

        Args:
            ranks: those that read different samples.
            options: see `Restored.options`.
            finished: whether the last returned batch was the last of its epoch.
        """
        waiting, running = self.unread(), self.running
        before = self.iteration - (0 if self.chosen else 1)  # a loaded epoch that was over
        if waiting is not None and waiting.epoch in (self.iteration, before):
            return waiting.tree(finished=waiting.epoch < self.iteration)
        if running is None or running.ended or self.chosen or running.epoch != self.iteration:
            return self.between(ranks, options)
        # An epoch whose last batch was returned is over, whether or not the loop has asked for more.
        batches, position = running.place()
        return Restored(
            epoch=self.iteration,
            ranks=ranks.size,
            index=ranks.index,
            batches_yielded=batches,
            position=position,
            draw=running.draw(finished),
            options=options,
            rng_at_start=running.rng_at_start,
            ahead=running.read_ahead(),
            source=None if finished else running.position_of_source(),
            workers=running.states_of_workers(),
            reading=None if running.states is None else running.states.tree(),
        ).tree(finished=finished)

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state that `dump` made, and `read` has checked."""
        self.iteration, self.chosen = int(state["epoch"]), False
        self.running, self.restored = None, read(state)


def read(state: dict[str, Any]) -> Restored | None:
    """Read the part of a state that waits for the next iterator of its epoch; None if there is none.

    Raises:
        DataError: the state is not one, or of a newer version.
    """
    needed = {"version", "epoch", "finished", "position", "batches_yielded", "ranks", "draw"}
    missing = needed - set(state)
    if missing:
        raise DataError(
            f"This is not the state of a data loader: {', '.join(sorted(missing))} missing in a mapping with the keys "
            f"{sorted(map(str, state))}. Pass what `state_dict()` of a prepared loader returned."
        )
    if state["version"] > _VERSION:
        raise DataError(
            f"The loader state has version {state['version']}, this release reads up to {_VERSION}. Upgrade "
            "accel-train, or start the epoch from its beginning."
        )
    check_form(state, _FORM, "the state of a data loader", partial=True)
    check_form(state.get("workers"), _WORKERS, "the state of a data loader['workers']")
    finished = state["finished"]
    batches = int((finished and state.get("batches_of_finished")) or state["batches_yielded"])
    if finished and not batches:
        return None
    known = {key: state[key] for key in Restored.__slots__ if state.get(key) is not None}
    return Restored(**known | {"epoch": int(state["epoch"]) - finished, "batches_yielded": batches})
