"""Comparing two recorded runs, step by step: samples, losses, gradients, norms, rates, weights, logged values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ORDER", "Mismatch", "RankRecord", "Recorded", "StepRecord", "differences", "distance", "scale_of"]

ORDER = ("samples", "losses", "gradients", "norms", "rates", "weights", "metrics")
"""What is compared, in the order in which a fault shows."""

# Relative; sums of ranks are rounded in another order.
_BOUNDS = {"torch.float64": 1e-9, "torch.float32": 2e-4, "torch.float16": 2e-2, "torch.bfloat16": 5e-2}
# Bounds above this are those of 16-bit dtypes.
_HALF = 1e-2
# Relative; logged values are often rounded to float32.
_METRIC = 1e-6
# Of the largest value of its kind: what is smaller is compared with that.
_TINY = 1e-7


@dataclass(frozen=True)
class RankRecord:
    """What one rank recorded; see ``accel_train.proof.recorder``."""

    about: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of a run, of all ranks together.

    Attributes:
        losses: the loss of each backward pass over the samples of all ranks.
        rank_losses: the losses of ranks of which these are the means.
        items: how many items each was the sum over, on all ranks; 0: the script has not said.
        rows: the samples that models were trained with, as hashes, and how often.
        own_rows: the same, of each rank that reads different samples.
        evaluated: samples that models were given without gradients since the step before.
        norms, metrics: as recorded by the first rank.
        rates: the same; those of another rank, if it has others.
        gradients, weights: by the name of the parameter.
        gradients_apart, weights_apart: those of all ranks, of parameters that ranks do not have alike.
        own: gradients of what each rank computes alone, of each backward pass of the step, where they are known.
        terms: gradients of each term of the losses, if the run was to record them.
        places: the line of the script for ``losses``, ``norms`` and ``metrics``.
    """

    losses: Sequence[float]
    rank_losses: Sequence[Sequence[float]]
    items: Sequence[float]
    rows: Counter[str]
    own_rows: Sequence[Counter[str]]
    evaluated: Counter[str]
    norms: Sequence[float]
    rates: Sequence[float]
    metrics: Sequence[Mapping[str, float]]
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    gradients_apart: Mapping[str, Sequence[Tensor]]
    weights_apart: Mapping[str, Sequence[Tensor]]
    own: Sequence[Sequence[Mapping[str, Tensor]]]
    terms: Sequence[Mapping[str, Tensor]]
    places: Mapping[str, str]


@dataclass(frozen=True)
class Recorded:
    """A run that has records.

    Attributes:
        name: of the run.
        about: facts of the first rank.
        size: how many ranks read different samples.
        seeds: of torch's generators, on ranks that read different samples.
        steps: its steps.
    """

    name: str
    about: Mapping[str, Any]
    size: int
    seeds: Sequence[int]
    steps: Sequence[StepRecord]

    @classmethod
    def of(cls, name: str, ranks: Sequence[RankRecord]) -> Recorded:
        """Merge the records of all ranks."""
        first = ranks[0].about
        indexes: dict[int, RankRecord] = {}
        for rank in ranks:
            indexes.setdefault(rank.about["index"], rank)
        readers = [indexes[index] for index in sorted(indexes)]
        fewest = min(len(rank.about["steps"]) for rank in ranks)
        computing: dict[int, RankRecord] = {}
        for rank in sorted(ranks, key=lambda rank: rank.about["index"]):
            computing.setdefault(rank.about["loss_index"], rank)
        steps = [_step(number, ranks, readers, list(computing.values())) for number in range(fewest)]
        seeds = [rank.about["noise"]["seed"] for rank in readers]
        return cls(name, first, first["size"], seeds, steps)

    def without(self, names: Collection[str]) -> Recorded:
        """The same run without logged values of these names."""
        steps = []
        for step in self.steps:
            kept = [{name: one[name] for name in one.keys() - names} for one in step.metrics]
            steps.append(replace(step, metrics=kept))
        return replace(self, steps=steps)

    @property
    def bound(self) -> float:
        """The relative difference that rounding makes in the least exact dtype of the models."""
        return max((_BOUNDS.get(name, 5e-2) for name in self.about["dtypes"]), default=1e-9)


@dataclass(frozen=True)
class Mismatch:
    """A value that is not that of the reference.

    Attributes:
        kind: one of ``ORDER``.
        step: number of the step, from 0.
        name: the parameter or the logged value; empty for others.
        found, expected: the values: floats, tensors or counts of samples; an `int` is how many values there are.
        relative: the relative difference.
    """

    kind: str
    step: int
    name: str
    found: Any
    expected: Any
    relative: float


def differences(reference: Recorded, other: Recorded, bound: float) -> list[Mismatch]:
    """All differences, in the order of steps and then of ``ORDER``.

    Args:
        reference: the run that is right.
        other: another one, with the same samples in each step.
        bound: relative differences up to this are none.
    """
    found: list[Mismatch] = []
    for number, (right, step) in enumerate(zip(reference.steps, other.steps, strict=False)):
        finite = [all(value.isfinite().all() for value in one.gradients.values()) for one in (right, step)]
        if bound > _HALF and not all(finite):  # a scaler skips such a step
            if any(finite):
                break
            continue
        of_step = [
            *_of_samples(number, right, step),
            *_of_numbers("losses", number, right.losses, step.losses),
            *_of_tensors("gradients", number, right, step, bound),
            *_of_numbers("norms", number, right.norms, step.norms),
            *_of_numbers("rates", number, right.rates, step.rates),
            *_of_tensors("weights", number, right, step, bound),
            *_of_metrics(number, right.metrics, step.metrics),
        ]
        found += [difference for difference in of_step if not difference.relative <= bound]
    return found


def scale_of(values: Mapping[str, Tensor]) -> float:
    """The norm below which a tensor among others is compared with this and not with its own norm."""
    return _TINY * max((float(value.double().norm()) for value in values.values()), default=0.0)


def distance(value: Tensor, right: Tensor, scale: float = 0.0) -> float:
    """The norm of a difference in ratio to that of the right value, or to a scale if that is larger."""
    if value.shape != right.shape:
        return float("inf")
    if not right.isfinite().all() and not value.isfinite().all():
        return 0.0  # both have diverged
    error = float((value.double() - right.double()).norm())
    if math.isnan(error):
        return float("inf")
    whole = max(float(right.double().norm()), scale)
    return error / whole if whole else (0.0 if not error else float("inf"))


def _step(
    number: int, ranks: Sequence[RankRecord], readers: Sequence[RankRecord], computing: Sequence[RankRecord]
) -> StepRecord:
    told = [rank.about["steps"][number] for rank in readers]
    first, first_about = ranks[0].about["steps"][number], ranks[0].about
    gradients, gradients_apart = _merged(ranks, f"{number}/gradient/")
    weights, weights_apart = _merged(ranks, f"{number}/weight/")
    backwards = [*zip(*(rank.about["steps"][number].get("losses", []) for rank in computing), strict=False)]
    losses = [_mean(backward) for backward in backwards]
    items = [sum(count or 0 for _, count in backward) for backward in backwards]
    # Of a sequence that is divided each rank has a part.
    own_rows = [
        Counter() if first_about["divides_sequences"] else Counter(one.get("rows", [])) for one in told
    ]
    return StepRecord(
        losses=[loss for loss in losses if loss is not None],
        rank_losses=[[value for value, _ in backward if value is not None] for backward in backwards],
        items=items,
        rows=sum(own_rows, Counter()),
        own_rows=own_rows,
        evaluated=sum((Counter(one.get("evaluated", [])) for one in told), Counter()),
        norms=first.get("norms", []),
        rates=next((one["rates"] for one in told if one["rates"] != first["rates"]), first["rates"]),
        metrics=first.get("metrics", []),
        gradients=gradients,
        weights=weights,
        gradients_apart=gradients_apart,
        weights_apart=weights_apart,
        own=[_in_turn(rank, f"{number}/own") for rank in computing],
        terms=_in_turn(ranks[0], f"{number}/term"),
        places=first.get("places", {}),
    )


def _in_turn(rank: RankRecord, prefix: str) -> list[dict[str, Tensor]]:
    return list(takewhile(bool, (_named(rank, f"{prefix} {place}/") for place in count())))


def _merged(ranks: Sequence[RankRecord], prefix: str) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """The values of the first rank that has them (of a pipeline each has its own), and what ranks do not have alike."""
    held: dict[str, list[Tensor]] = {}
    for rank in ranks:
        for name, value in _named(rank, prefix).items():
            held.setdefault(name, []).append(value)
    first = {name: values[0] for name, values in held.items()}
    apart = {
        name: values
        for name, values in held.items()
        if any(distance(value, first[name]) > _BOUNDS.get(str(value.dtype), 5e-2) for value in values)
    }
    return first, apart


def _named(rank: RankRecord, prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value for name, value in rank.tensors.items() if name.startswith(prefix)
    }


def _mean(backward: Sequence[Sequence[float | None]]) -> float | None:
    """The loss of one backward pass over all ranks; None if it was no number."""
    values = [value for value, _ in backward]
    items = [items for _, items in backward]
    if None in values:
        return None
    total: float = sum(value for value in values if value is not None)
    if None in items:
        return total / len(values)
    return total / max(1.0, sum(count for count in items if count is not None))


def _of_samples(number: int, right: StepRecord, step: StepRecord) -> Iterator[Mismatch]:
    if right.rows and step.rows and right.rows != step.rows:
        missing = (right.rows - step.rows).total()
        yield Mismatch("samples", number, "", step, right, missing / max(1, right.rows.total()) or 1.0)


def _of_numbers(kind: str, number: int, right: Sequence[float], found: Sequence[float]) -> Iterator[Mismatch]:
    for place, (one, other) in enumerate(zip(right, found, strict=False)):
        diverged = not math.isfinite(one) and not math.isfinite(other)
        relative = 0.0 if diverged else abs(other - one) / max(abs(one), 1e-12)
        yield Mismatch(kind, number, f"{place}" if len(right) > 1 else "", other, one, relative)
    if len(right) != len(found):
        yield Mismatch(kind, number, "", len(found), len(right), float("inf"))


def _of_tensors(
    kind: str, number: int, right: StepRecord, step: StepRecord, bound: float
) -> Iterator[Mismatch]:
    wanted, found, apart = getattr(right, kind), getattr(step, kind), getattr(step, f"{kind}_apart")
    scale = scale_of(wanted) / (_TINY if bound > _HALF else 1)  # half of a small gradient may be rounding
    for name, value in wanted.items():
        others = apart.get(name, [found[name]] if name in found else [])
        far = {distance(other, value, scale): other for other in others}
        relative = max(far, default=float("inf"))
        yield Mismatch(kind, number, name, far.get(relative), value, relative)


def _of_metrics(
    number: int, right: Sequence[Mapping[str, float]], found: Sequence[Mapping[str, float]]
) -> Iterator[Mismatch]:
    for one, other in zip(right, found, strict=False):
        for name in one.keys() & other.keys():
            relative = abs(other[name] - one[name]) / max(abs(one[name]), 1e-12)
            if relative > _METRIC:
                yield Mismatch("metrics", number, name, other[name], one[name], relative)
