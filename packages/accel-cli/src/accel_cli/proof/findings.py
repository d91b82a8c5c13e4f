"""The name of what is wrong in a run on ranks: which value, by which factor, at which line, and what to change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from accel_cli.proof.compare import ORDER, Mismatch, Recorded, StepRecord, differences, distance, scale_of
from accel_cli.proof.runs import STRATEGIES, ProofRun

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ADVICE", "Cause", "Verdict", "cause", "examine", "failed", "passed"]


@dataclass(frozen=True)
class Cause:
    """What is wrong.

    Attributes:
        kind: a short name, such as ``summed`` or ``batch norm``.
        text: one sentence with the values.
        advice: what to change.
        fault: whether the loop trains another model than one process; else it is by its design, or a hint.
        wants: runs that can tell it from another cause: ``probes`` of `examine`.
    """

    kind: str
    text: str
    advice: str
    fault: bool = True
    wants: Sequence[str] = ()


# Kinds that are by design, or a hint.
_NOTES = ("contrasts rows", "planned for ranks", "repeated samples", "shared noise")

_BY_RANK = "look for what depends on the rank: is_main_process, process_index, data or weights of one rank"
ADVICE = {
    "batch norm": "on GPUs convert the model before prepare(): torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), "
    "which does not run on CPUs; or normalise by channels, as GroupNorm does",
    "contrasts rows": "nothing, if that is by design; gather the features to compare the rows of all ranks",
    "divided": "the script divides by the number of ranks or of micro-batches, which backward() does",
    "divided sequence": "take labels from shift_labels and positions from position_ids of the batch, which are those "
    "of the whole sequence",
    "does not resume": "start it so yourself, with accel launch",
    "loss": "what backward() is given is not what the model computed from this rank's samples",
    "metric": "it is of the samples of the main process, or counts rows that pad a batch; gather it: "
    "accelerator.gather_for_metrics(value), or accelerator.reduce(value, 'mean')",
    "missing": "the parameter takes part on one process only; look for a branch by rank, or for a part that is frozen",
    "norm": "clip with accelerator.clip_grad_norm_(), which knows what ranks hold alike",
    "not reduced": "a module that computes on a divided tensor has to be in the plan of parallelize_module()",
    "not repeatable": "set_seed(0), and take no order of data from a clock or a set",
    "one rank": "the parameter takes part on one rank only; look for a branch by rank",
    "other items": "count the items of this rank's samples alone, which backward() sums over ranks; shift labels over "
    "the whole sequence, before ranks divide it",
    "other samples": "let the prepared loader shuffle; data that the script draws, splits or reads, and a sampler of "
    "its own, need the same seed and epoch on all ranks",
    "padding": "accelerator.gather_for_metrics(values) leaves the repeated rows out; gather() does not",
    "passes": "look for a branch, or the end of a loop, that depends on the rank",
    "planned for ranks": "nothing, if each rank has batches of its own; in a proof ranks divide those of one process",
    "ranks apart": "the script writes to weights or steps on some ranks only; do the same on all of them",
    "repeated samples": "DataLoader(drop_last=True) leaves a short last batch out; even_batches=False lets ranks have "
    "fewer",
    "same samples": "prepare the loader: loader = accelerator.prepare(loader); a sampler of the script has to know the "
    "rank, and samples that ranks draw need a seed for each: set_seed(seed, device_specific=True)",
    "scaled loss": "ranks average losses: pass the plain mean over this rank's samples to accelerator.backward(), "
    "without the number of processes",
    "scaled term": "leave out the factor by which the script scales this term, such as the number of ranks",
    "schedule": "pass the scheduler to accelerator.prepare(), and call step() once for each optimizer step; one "
    "planned by the length of a prepared loader needs Accelerator(scale_scheduler=False)",
    "shared noise": "set_seed(seed, device_specific=True) gives each rank its own; models that ranks make themselves "
    "need equal seeds before",
    "summed": "a loss or a gradient is reduced twice; leave out the script's own all_reduce, and pass the plain loss "
    "of this rank's samples to accelerator.backward()",
    "unequal counts": "give the sum and the number: accelerator.backward(loss_sum, num_items=number); of class "
    "weights, divide the sum by accelerator.reduce(weights[labels].sum(), 'mean')",
    "weights": "gradients change after backward(), or the script writes to weights by rank; step with the prepared "
    "optimizer",
}
"""What to change, by the kind of a `Cause`; of others: `_BY_RANK`."""


def cause(kind: str, text: str, wants: Sequence[str] = ()) -> Cause:
    """A `Cause` with the advice that its kind has."""
    return Cause(kind, text, ADVICE.get(kind, _BY_RANK), kind not in _NOTES, wants)


@dataclass(frozen=True)
class Verdict:
    """The result of one strategy.

    Attributes:
        name: the strategy.
        differ: what differs first, and what only follows from it: kinds of ``compare.ORDER``.
        findings: the first is the cause.
        reason: why it has no result; empty: it has.
    """

    name: str
    differ: Sequence[str] = ()
    findings: Sequence[Cause] = ()
    reason: str = ""

    @property
    def has_fault(self) -> bool:
        """Whether a finding is a fault."""
        return any(finding.fault for finding in self.findings)


def passed(verdicts: Sequence[Verdict]) -> bool:
    """Whether something was compared, and nothing is wrong."""
    return not all(verdict.reason for verdict in verdicts) and not any(
        verdict.has_fault for verdict in verdicts
    )


@dataclass(frozen=True)
class _Runs:
    """What `examine` is given, and the relative difference up to which values are equal."""

    reference: Recorded
    other: Recorded
    apart: Recorded | None
    probes: Mapping[str, Recorded]
    bound: float


def examine(reference: Recorded, other: Recorded, apart: Recorded | None, **probes: Recorded) -> Verdict:
    """Compare a run on ranks with that of one process.

    Args:
        reference: the run of one process.
        other: the run on ranks.
        apart: a run on ranks that recorded what each rank's own samples contribute.
        probes: more runs, by the names in `Cause.wants`. ``swapped`` is as ``apart``, and ranks had each other's
            samples; ``terms`` is of one process, and recorded the gradients of each term of a loss that is a sum.
    """
    bound = max(reference.bound, other.bound, _reorder(reference, apart))
    found = differences(reference, other, bound)
    trained = {one.step for one in found if one.kind in ("losses", "gradients")}
    # Other rows alone are padded to the longest of a batch.
    found = [one for one in found if one.kind != "samples" or one.step in trained or _read_alike(one.found)]
    if found and (reason := _why_undecided(found[0], reference, other)):
        return Verdict(other.name, reason=reason)
    kinds = list(dict.fromkeys(difference.kind for difference in found))
    findings: list[Cause] = []
    if found:
        first = [one for one in found if (one.step, one.kind) == (found[0].step, found[0].kind)]
        findings.append(_explain(first, found, _Runs(reference, other, apart, probes, bound)))
    if (hint := _shared_noise(other)) is not None:
        findings.append(hint)
    return Verdict(other.name, kinds, findings)


def _why_undecided(first: Mismatch, reference: Recorded, other: Recorded) -> str:
    """Why a difference says nothing about the script; empty: it does."""
    if other.name in ("cp", "pp") and reference.about["noise"]["drawn"]:
        return "the loop draws noise, which is another one for a part of a sample or of a batch"
    own = first.kind == "samples" and first.step == 0 and not _read_alike(first.found)
    if own and not other.about["reads"]:
        return (
            "each rank has samples of its own, and not a part of those of one process: no prepared loader is read. "
            "Pass the loader to accelerator.prepare(), if ranks are to divide its samples"
        )
    return ""


def failed(run: ProofRun) -> Verdict:
    """The verdict on a run that failed, although one process did not.

    Plain data parallelism takes every loop; another strategy may say that it does not take this model.
    """
    said = run.failure
    if "split_batches=True" in said:
        said = "the batch size is no multiple of the number of ranks, which divide it; choose one that is"
        return Verdict(run.name, reason=said)
    if run.name != "ddp" and any(f"{name}:" in said for name in _REFUSALS):
        return Verdict(run.name, reason=said)
    flags = " ".join(["--cpu", "--num_processes", "2", *STRATEGIES[run.name]])
    advice = f"start the script alone, with accel launch {flags}".rstrip()
    return Verdict(run.name, ORDER, [Cause("fails", f"fails on two ranks: {said}", advice)])


_REFUSALS = ("IncompatibleOptionsError", "OptionError", "PrepareError", "ConfigError")


def _reorder(reference: Recorded, apart: Recorded | None) -> float:
    """Ten times what one process differs from itself when its batch is cut, if that is only rounding."""
    if apart is None or not reference.steps or not apart.steps:
        return 0.0
    halves = _mean_of(apart.steps[0].own)
    right = reference.steps[0].gradients
    parts = [distance(halves[name], right[name]) for name in right if name in halves]
    most = max(parts, default=0.0)
    return 10 * most if most < 1e-4 else 0.0


def _explain(first: Sequence[Mismatch], found: Sequence[Mismatch], runs: _Runs) -> Cause:
    kind, step = first[0].kind, first[0].step
    here = runs.other.steps[step]
    if isinstance(first[0].found, int):
        return cause(
            "passes", f"step {step + 1} has {first[0].found} {kind}, and {first[0].expected} on one process"
        )
    if kind == "samples":
        return _of_samples(first[0])
    if here.weights_apart and not here.gradients_apart:
        names = _some(list(here.weights_apart))
        return cause("ranks apart", f"after step {step + 1} ranks do not have the same values of {names}")
    if kind in ("losses", "gradients"):
        return _of_gradients(first[0], found, runs)
    if kind == "norms":
        return _of_norm(first[0], runs)
    if kind == "rates":
        return _of_rate(first[0], runs.reference, runs.other)
    if kind == "weights":
        return _of_weights(first, runs.other)
    return _of_metric(first[0], runs.reference.steps[step], here)


def _of_samples(difference: Mismatch) -> Cause:
    found: StepRecord = difference.found
    if _read_alike(found):
        read = found.own_rows[0].total()
        return cause("same samples", f"all ranks read the same {read} samples in step {difference.step + 1}")
    right: StepRecord = difference.expected
    missing, more = (right.rows - found.rows).total(), (found.rows - right.rows).total()
    if missing:
        text = f"step {difference.step + 1} lacks {missing} samples of the step of one process, and has {more} others"
        return cause("other samples", text)
    text = f"step {difference.step + 1} repeats samples ({more}), so that all ranks have batches of one size"
    return cause("repeated samples", text)


def _of_gradients(first: Mismatch, found: Sequence[Mismatch], runs: _Runs) -> Cause:
    """Whether the loss is no mean over rows, or what ranks did with their parts."""
    step, bound = first.step, runs.bound
    right, here = runs.reference.steps[step], runs.other.steps[step]
    wrong = [one for one in found if one.step == step and one.kind == "gradients"]
    if any(
        one and abs(one - other) > 1e-9 * one for one, other in zip(right.items, here.items, strict=False)
    ):
        return cause(
            "other items",
            f"the losses of step {step + 1}{_at(right, 'losses')} are sums over {sum(here.items):g} items, and over "
            f"{sum(right.items):g} on one process",
        )
    own = _own_of(runs.other if runs.other.about["divides_sequences"] else runs.apart, step)
    halves = _mean_of(own)
    # Ranks have averaged what each has computed, and perhaps clipped it.
    if halves and _factor(here.gradients, halves, bound) is not None:
        whole = next((_sum_of(passes) for passes in right.own if passes), right.gradients)
        factor = _factor(halves, whole, bound)
        if factor is None:
            return _no_mean_over_rows(runs, step, own)
        if not math.isclose(factor, 1, rel_tol=1e-6):
            at = _at(right, "losses")
            text = f"the loss on each rank{at} is x{factor:.6g} of that of one process, for all parameters"
            return cause("scaled loss", text)
    if not wrong:
        return cause(
            "loss",
            f"the loss of step {step + 1} is {first.found:.6g}, and {first.expected:.6g} on one process"
            f"{_at(right, 'losses')}, with the same gradients",
        )
    shrunk = _factor(here.gradients, right.gradients, bound)
    if shrunk is not None and first.kind == "gradients" and 0.70710 < shrunk < 1:
        return cause(
            "norm",
            f"after backward() the gradients of step {step + 1} become x{shrunk:.6g} of those of one process, for all "
            "parameters, as if clipped by a norm that counts what both ranks hold twice",
        )
    if (term := _scaled_term(runs, right, here)) is not None:
        return term
    kinds: dict[tuple[str, str], list[Mismatch]] = {}
    sums = [_sum_of(rank) for rank in own]
    for one in _before_clipping(wrong, bound):
        kinds.setdefault(_what_happened(one, here, sums, bound), []).append(one)
    texts = []
    for (kind, what), those in kinds.items():
        names = [one.name for one in those]
        share = "all parameters" if len(names) == len(right.gradients) else _some(names)
        most = (
            f" (relative difference {max(one.relative for one in those):.2g})" if kind == "gradient" else ""
        )
        texts.append(f"{share}: {what}{most}")
    kind, _ = max(kinds, key=lambda what: (what[0] != "gradient", len(kinds[what])))
    wants = ("terms",) if kind == "gradient" and step == 0 else ()
    return cause(kind, f"gradients of step {step + 1} are wrong; {'; '.join(texts)}", wants)


def _before_clipping(wrong: Sequence[Mismatch], bound: float) -> Sequence[Mismatch]:
    """What was wrong before all gradients were clipped, which leaves most of them scaled by one factor."""
    factors = [
        _factor({"": one.found}, {"": one.expected}, bound)
        for one in wrong
        if one.found is not None and one.expected.numel() > 1
    ]
    told = Counter(f"{factor:.5g}" for factor in factors if factor is not None)
    for common, times in told.most_common(1):
        if 1 < times < len(wrong) and common not in ("2", "0.5"):
            factor = next(factor for factor in factors if factor is not None and f"{factor:.5g}" == common)
            freed = [one if one.found is None else replace(one, found=one.found / factor) for one in wrong]
            return [
                one
                for one in freed
                if one.found is None or distance(one.found, one.expected) > max(bound, 1e-6)
            ]
    return wrong


def _what_happened(
    one: Mismatch, here: StepRecord, own: Sequence[Mapping[str, Tensor]], bound: float
) -> tuple[str, str]:
    """The kind of a wrong gradient, and the factor or the part that explains it."""
    name, found, right = one.name, one.found, one.expected
    if found is None:
        return "missing", "missing"
    if found.shape != right.shape:
        return "shape", f"of shape {list(found.shape)} instead of {list(right.shape)}"
    if name in here.gradients_apart:
        if distance(_added(here.gradients_apart[name]), right) <= bound:
            return "not reduced", "each rank has a summand, which the ranks do not add"
        return "by rank", "another one on each rank"
    if not found.any():
        return "zero", "zero"
    factor = _factor({name: found}, {name: right}, bound)
    if factor is not None and math.isclose(factor, 2, rel_tol=1e-5):
        return "summed", "summed over ranks, not averaged (x2)"
    if factor is not None and math.isclose(factor, 0.5, rel_tol=1e-5):
        return "divided", "divided once too often (x1/2)"
    if right.numel() > 1:  # any other number is some factor of it
        if factor is not None:
            return "scaled", f"scaled by {factor:.6g}"
        for rank, part in enumerate(own):
            if name in part and _factor({name: found}, {name: part[name]}, bound) is not None:
                return "one rank", f"only of the samples of rank {rank}"
    return "gradient", "another value"


def _factor(found: Mapping[str, Tensor], right: Mapping[str, Tensor], bound: float) -> float | None:
    """The number by which all gradients differ; None: there is none."""
    names = [name for name in right if name in found]
    if any(found[name].shape != right[name].shape for name in names):
        return None
    whole = sum(float((right[name].double() ** 2).sum()) for name in names)
    if not whole:
        return None
    factor = sum(float((found[name].double() * right[name].double()).sum()) for name in names) / whole
    scaled = {name: factor * right[name].double() for name in names}
    return None if _far(found, scaled, max(bound, 1e-6)) else factor


def _no_mean_over_rows(runs: _Runs, step: int, own: Sequence[Sequence[Mapping[str, Tensor]]]) -> Cause:
    """Ranks average what they should, but the loss of the whole batch is not the mean of the ranks' losses."""
    right, here, bound = runs.reference.steps[step], runs.other.steps[step], max(runs.bound, 1e-6)
    place = _at(right, "losses")
    divides_sequences = runs.other.about["divides_sequences"]
    if "swapped" in runs.probes and not divides_sequences:
        for rank, passes in enumerate(own):  # the same samples on this rank and on another
            part, there = _sum_of(passes), _sum_of(runs.probes["swapped"].steps[step].own[rank])
            if _far(part, there, bound):
                factor = _factor(part, there, bound)
                return cause(
                    "by rank",
                    f"the loss{place} of the same samples is another one on another rank"
                    + ("" if factor is None else f" (on rank {rank} x{factor:.6g} of that)"),
                )
    if (term := _scaled_term(runs, right, here)) is not None:
        return term
    everyone = [part for rank in own for part in rank]
    shares = (
        _shares_of_items(right, here) if divides_sequences else _combined(everyone, right.gradients, bound)
    )
    if shares is not None and min(shares) > 0 and len(set(map(len, own))) == 1:
        turns = len(shares) // len(own)
        firsts = shares[::turns]
        told = ", ".join(f"rank {rank} {share / sum(firsts):.1%}" for rank, share in enumerate(firsts))
        alike = all(
            math.isclose(share, firsts[place // turns], rel_tol=1e-5) for place, share in enumerate(shares)
        )
        return cause(
            "unequal counts",
            f"the loss{place} is a mean over items of which ranks have different numbers ({told} in the first batch), "
            f"and each rank {'' if alike else 'and micro-batch '}counts as much",
            () if divides_sequences else ("swapped",),
        )
    apart = _mean_of(_own_of(runs.apart, step))
    if divides_sequences and (not apart or _factor(apart, right.gradients, bound) is not None):
        text = f"the loss{place} of a rank's part of each sequence is not that part of the loss of the whole sequence"
        return cause("divided sequence", text, ("terms",))
    if runs.reference.about["normalises_batches"]:
        text = "BatchNorm normalises by the rows of each rank, on one process by those of the whole batch"
        return cause("batch norm", text)
    return cause(
        "contrasts rows",
        f"the loss{place} depends on which rows are in a batch together, or on noise that has no row for each sample, "
        "so ranks compute another one than one process",
        ("swapped", "terms"),
    )


def _shares_of_items(right: StepRecord, here: StepRecord) -> list[float] | None:
    """Shares by which the first losses of two ranks make up the right one, if they are of whole numbers of items.

    Gradients do not tell: through attention each rank has a part of those of the other one's loss.
    """
    if not right.losses or not here.rank_losses or len(set(here.rank_losses[0])) != 2:
        return None
    one, other = here.rank_losses[0]
    share = (right.losses[0] - other) / (one - other)
    near = float(Fraction(share).limit_denominator(10_000))  # by chance: one of 2,000 numbers
    return [near, 1 - near] if abs(share - near) < 1e-11 else None


def _scaled_term(runs: _Runs, right: StepRecord, here: StepRecord) -> Cause | None:
    """Whether a loss that is a sum counts its terms in other proportions than on one process."""
    terms = runs.probes["terms"].steps[0].terms if "terms" in runs.probes else ()
    bound = max(runs.bound, 1e-6)
    before, after = (_combined(terms, step.gradients, bound) for step in (right, here))
    if len(terms) < 2 or before is None or after is None or not all(before) or not after[0]:
        return None
    factors = [there * before[0] / (one * after[0]) for there, one in zip(after, before, strict=True)]
    for place, factor in enumerate(factors):
        if not math.isclose(factor, 1, rel_tol=1e-5):
            reached = [name for name, value in terms[place].items() if value.any()]
            return cause(
                "scaled term",
                f"the loss{_at(right, 'losses')} is a sum of {len(terms)} terms, and term {place + 1}, of "
                f"{_some(reached)}, counts x{factor:.6g} of what it does on one process",
            )
    return None


def _combined(
    parts: Sequence[Mapping[str, Tensor]], wanted: Mapping[str, Tensor], bound: float
) -> list[float] | None:
    """The factors with which parts add up to the wanted gradients; None: with none."""
    import torch

    names = [name for name in wanted if any(name in part for part in parts)]
    if len(parts) < 2 or len(names) < len(wanted):
        return None

    def column(part: Mapping[str, Tensor]) -> Tensor:
        missing = (part.get(name, torch.zeros_like(wanted[name])) for name in names)
        return torch.cat([value.double().flatten() for value in missing])

    whole, matrix = column(wanted), torch.stack([column(part) for part in parts], dim=1)
    if matrix.shape[0] <= 2 * matrix.shape[1] or not (matrix.isfinite().all() and whole.isfinite().all()):
        return None  # any gradient would be explained, or none
    solved = torch.linalg.lstsq(matrix, whole.unsqueeze(1), driver="gelsd").solution
    if distance((matrix @ solved).flatten(), whole) > bound:
        return None
    return [float(factor) for factor in solved]


def _of_norm(difference: Mismatch, runs: _Runs) -> Cause:
    found, right = difference.found, difference.expected
    factor = found / right if right else math.inf
    counted = math.isclose(factor, math.sqrt(max(2, runs.other.size)), rel_tol=1e-4)
    return cause(
        "norm",
        f"the norm of equal gradients in step {difference.step + 1} is {found:.6g}, and {right:.6g} on one process"
        + (": it counts what every rank holds once for each" if counted else "")
        + _at(runs.reference.steps[difference.step], "norms"),
    )


def _of_rate(difference: Mismatch, reference: Recorded, other: Recorded) -> Cause:
    found, right, size = difference.found, difference.expected, other.size
    text = f"the learning rate of step {difference.step + 1} is {found:.6g}, and {right:.6g} on one process"
    scale = found / right if right else math.inf
    scaled = any(math.isclose(scale, known, rel_tol=1e-6) for known in (size, math.sqrt(size)))
    if scaled and _rates_are_alike(reference.steps, other.steps, scale):
        return cause("planned for ranks", f"{text}: the script multiplies it by {scale:.6g} on {size} ranks")
    if other.about["schedules"] and _rates_are_alike(reference.steps, other.steps[::size], 1):
        return cause(
            "planned for ranks", f"{text}: the schedule is planned to advance {size} times in a step"
        )
    same = [number for number, step in enumerate(reference.steps, 1) if found in step.rates]
    return cause("schedule", text + (f", which has that one in step {same[0]}" if same else ""))


def _rates_are_alike(right: Sequence[StepRecord], found: Sequence[StepRecord], scale: float) -> bool:
    pairs = [*zip(right, found, strict=False)]
    return len(pairs) > 1 and all(
        math.isclose(scale * rate, other)
        for one, two in pairs
        for rate, other in zip(one.rates, two.rates, strict=True)
    )


def _of_metric(difference: Mismatch, right: StepRecord, here: StepRecord) -> Cause:
    text = (
        f"the logged {difference.name} is {difference.found:.6g}, and {difference.expected:.6g} on one process"
        f"{_at(right, 'metrics')}"
    )
    repeated = (here.evaluated - right.evaluated).total()
    if repeated and not right.evaluated - here.evaluated:
        return cause(
            "padding",
            f"{text}; before it ranks repeat rows ({repeated}), so that all have batches of one size",
        )
    return cause("metric", text)


def _of_weights(first: Sequence[Mismatch], other: Recorded) -> Cause:
    everything = len(first) == len(other.steps[first[0].step].weights)
    names = "all parameters" if everything else _some([one.name for one in first])
    text = f"after step {first[0].step + 1} the weights of {names} differ, with equal gradients and rates"
    return cause("weights", text)


def _shared_noise(other: Recorded) -> Cause | None:
    if other.size > 1 and other.about["noise"]["drawn"] and len(set(other.seeds)) == 1:
        return cause(
            "shared noise",
            "all ranks have the same seed and draw noise for their samples, so in a real run samples of different "
            "ranks get the same noise",
        )
    return None


def _read_alike(step: StepRecord) -> bool:
    """Whether all ranks that should read different samples read the same."""
    return len(step.own_rows) > 1 and all(rows == step.own_rows[0] for rows in step.own_rows)


def _own_of(run: Recorded | None, step: int) -> Sequence[Sequence[Mapping[str, Tensor]]]:
    """What each rank computed alone: of its part of the sequences, or of its samples."""
    return run.steps[step].own if run is not None and step < len(run.steps) else ()


def _mean_of(own: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The mean over ranks of their own gradients, over all backward passes of the step."""
    if len(own) < 2 or not all(own):
        return {}
    sums = [_sum_of(rank) for rank in own]
    names = [name for name in sums[0] if all(name in one for one in sums)]
    return {name: _added([one[name] for one in sums]) / len(own) for name in names}


def _sum_of(passes: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for one in passes for name in one)
    return {name: _added([one[name] for one in passes if name in one]) for name in names}


def _added(values: Sequence[Tensor]) -> Tensor:
    return sum((value.double() for value in values[1:]), values[0].double())


def _far(found: Mapping[str, Tensor], right: Mapping[str, Tensor], bound: float) -> bool:
    scale = scale_of(right)
    return any(distance(found[name], right[name], scale) > bound for name in right if name in found)


def _at(step: StepRecord, kind: str) -> str:
    place = step.places.get(kind)
    return f" ({place})" if place else ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
