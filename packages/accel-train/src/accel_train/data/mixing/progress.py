"""How far a mixture is, and its saved state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_train.data.mixing.weights import quoted
from accel_train.errors import DataError

__all__ = ["MixtureProgress", "SourceCount", "check_mixture_state"]

#: Version 1 also had `choice`, "random" or "balanced", and `behind`, which was empty for "random".
_VERSION = 2
_NEEDED = {
    "version", "epoch", "step", "in_epoch", "finished", "source", "ended", "seed", "weights", "counts", "sources"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SourceCount:
    """What came from one source so far, over all ranks.

    Attributes:
        batches: steps of all ranks that read from it.
        samples: real samples in these; without what completes a last round.
    """

    batches: int = 0
    samples: int = 0


@dataclass(slots=True)
class MixtureProgress:
    """How far a mixture is.

    Args:
        names: of the sources.
    """

    names: Sequence[str]
    epoch: int = 0
    """The number of the epoch of the mixture."""
    step: int = 0
    """Batches so far, over all epochs: the number of the next one."""
    in_epoch: int = 0
    """Batches of the epoch."""
    over: bool = False
    """Whether the last batch was the last of its epoch."""
    continues: bool = False
    """Whether the next iteration goes on inside a loaded epoch."""
    source: str | None = None
    """The name of the source of the last batch."""
    ended: set[str] = field(default_factory=set)
    """Sources that came to their end in this epoch."""
    batches: dict[str, int] = field(default_factory=dict)
    """Batches by source."""
    samples: dict[str, int] = field(default_factory=dict)
    """Samples by source, over all ranks."""

    def __post_init__(self) -> None:
        self.batches = dict.fromkeys(self.names, 0)
        self.samples = dict.fromkeys(self.names, 0)

    @property
    def has_begun(self) -> bool:
        """Whether a new iteration begins the next epoch: this one has yielded since it was loaded."""
        return bool(self.in_epoch) and not self.continues

    def next_epoch(self) -> None:
        """Another epoch begins."""
        self.epoch += 1
        self.in_epoch, self.over = 0, False
        self.ended.clear()

    def took(self, name: str, samples: int) -> None:
        """A batch of this source is returned; `samples` counts its rows over all ranks."""
        self.source = name
        self.step += 1
        self.in_epoch += 1
        self.batches[name] += 1
        self.samples[name] += samples
        self.continues = False

    def dump(self) -> dict[str, Any]:
        """The progress as plain data."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "step": self.step,
            "in_epoch": self.in_epoch,
            "finished": self.over,
            "source": self.source,
            "ended": sorted(self.ended),
            "counts": {name: [self.batches[name], self.samples[name]] for name in self.names},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `dump` returned."""
        self.epoch, self.step, self.in_epoch = int(state["epoch"]), int(state["step"]), int(state["in_epoch"])
        self.over = bool(state["finished"])
        self.continues = not self.over
        self.source = state["source"]
        self.ended = set(state["ended"])
        for name, (batches, samples) in state["counts"].items():
            self.batches[name], self.samples[name] = int(batches), int(samples)


def check_mixture_state(state: Mapping[str, Any], names: Iterable[str]) -> None:
    """Whether a state is one of a mixture of these sources.

    Raises:
        DataError: it is none, of a newer version, of other sources, or of choices that this release does not make.
    """
    missing = _NEEDED - set(state)
    if missing:
        raise DataError(
            f"This is not the state of a mixture: {', '.join(sorted(missing))} missing in a mapping with the keys "
            f"{sorted(map(str, state))}. Pass what `state_dict()` of a MixedDataLoader returned; a checkpoint of a "
            "script that trained on one loader has none."
        )
    if state["version"] > _VERSION:
        raise DataError(
            f"The state of the mixture has version {state['version']}, this release reads up to {_VERSION}. Upgrade "
            "accel-train."
        )
    here, saved = set(names), set(state["sources"])
    if here != saved:
        parts = [f"it has no {quoted(sorted(here - saved))}"] if here - saved else []
        parts += [f"this mixture has no {quoted(sorted(saved - here))}"] if saved - here else []
        raise DataError(
            f"The state is of a mixture of {quoted(sorted(saved))}: {', and '.join(parts)}. Build the mixture with the "
            "same names: the weight 0 leaves one out. To begin with other sources, restore the rest alone: "
            "load_state(folder, only=['models', 'optimizers', 'schedulers', 'random'])."
        )
    if state.get("choice", "random") != "random":
        raise DataError(
            f"The state is of a mixture with choice={state['choice']!r}, which this release does not have: sources are "
            "drawn at random. Finish that run with the release that saved it, or restore the rest alone: "
            "load_state(folder, only=['models', 'optimizers', 'schedulers', 'random'])."
        )
