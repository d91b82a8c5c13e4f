"""The name of what is wrong in a run on ranks: which value, by which factor, at which line, and what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_cli.proof.compare import ORDER, Mismatch, Recorded, StepRecord, differences, distance, scale_of
from accel_cli.proof.runs import SEED, STRATEGIES, ProofRun

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Cause", "Verdict", "examine", "failed"]


@dataclass(frozen=True)
class Cause:
    """What is wrong.

    Attributes:
        kind: a short name, such as ``summed`` or ``batch norm``.
        text: one sentence with the values.
        advice: what to change.
        is_fault: whether the loop trains another model than one process; else it is by its design, or a hint.
    """

    kind: str
    text: str
    advice: str
    is_fault: bool = True


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
        return any(finding.is_fault for finding in self.findings)


def examine(
    reference: Recorded, other: Recorded, apart: Recorded | None, swapped: Recorded | None = None
) -> Verdict:
    """Compare a run on ranks with that of one process.

    Args:
        reference: the run of one process.
        other: the run on ranks.
        apart: a run on ranks that recorded what each rank's own samples contribute.
        swapped: the same, where ranks had each other's samples.
    """
    bound = max(reference.bound, other.bound, _reorder(reference, apart))
    found = differences(reference, other, bound)
    alone = {one.kind for one in found} == {"samples"}
    if alone and not any(_read_alike(one.found) for one in found):
        found = []  # padded to the longest of a batch, or of an evaluation in between: the training is the same
    kinds = list(dict.fromkeys(difference.kind for difference in found))
    findings: list[Cause] = []
    if found:
        first = [one for one in found if (one.step, one.kind) == (found[0].step, found[0].kind)]
        findings.append(_explain(first, found, reference, other, apart, swapped, bound))
    if (hint := _shared_noise(other)) is not None:
        findings.append(hint)
    return Verdict(other.name, kinds, findings)


def failed(run: ProofRun) -> Verdict:
    """The verdict on a run that failed, although one process did not.

    Plain data parallelism takes every loop; another strategy may say that it does not take this model.
    """
    said = run.failure
    if "split_batches=True" in said:
        return Verdict(
            run.name, reason="the batch size of the script is odd, and two ranks divide its batches"
        )
    if run.name != "ddp" and any(f"{name}:" in said for name in _REFUSALS):
        return Verdict(run.name, reason=said)
    flags = " ".join(["--cpu", "--num_processes", "2", *STRATEGIES[run.name]])
    advice = f"start the script alone, with accel launch {flags}"
    return Verdict(run.name, ORDER, [Cause("fails", f"fails on two ranks: {said}", advice.rstrip())])


_REFUSALS = ("IncompatibleOptionsError", "OptionError", "PrepareError", "ConfigError", "LaunchError")


def _reorder(reference: Recorded, apart: Recorded | None) -> float:
    """Ten times what one process differs from itself when its batch is cut, if that is only rounding."""
    if apart is None or not reference.steps or not apart.steps:
        return 0.0
    halves = _mean_of(apart.steps[0].own)
    right = reference.steps[0].gradients
    parts = [distance(halves[name], right[name]) for name in right if name in halves]
    most = max(parts, default=0.0)
    return 10 * most if most < 1e-4 else 0.0


def _explain(
    first: Sequence[Mismatch],
    found: Sequence[Mismatch],
    reference: Recorded,
    other: Recorded,
    apart: Recorded | None,
    swapped: Recorded | None,
    bound: float,
) -> Cause:
    kind = first[0].kind
    if kind == "samples":
        return _of_samples(first[0])
    if kind in ("losses", "gradients"):
        return _of_gradients(first[0], found, reference, other, apart, swapped, bound)
    if kind == "norms":
        return _of_norm(first[0], reference, other)
    if kind == "rates":
        return Cause(
            "schedule",
            f"the learning rate of step {first[0].step + 1} is {first[0].found:.6g}, and {first[0].expected:.6g} on "
            "one process",
            "pass the scheduler to accelerator.prepare() and call step() once for each optimizer step",
        )
    if kind == "weights":
        return _of_weights(first, other)
    return Cause(
        "metric",
        f"the logged {first[0].name} is {first[0].found:.6g}, and {first[0].expected:.6g} on one process"
        f"{_at(reference.steps[first[0].step], 'metrics')}",
        "it is of the samples of the main process, or counts rows that pad a batch; gather it: "
        "accelerator.gather_for_metrics(value), or accelerator.reduce(value, 'mean')",
    )


def _of_samples(difference: Mismatch) -> Cause:
    found: StepRecord = difference.found
    if _read_alike(found):
        return Cause(
            "same samples",
            f"all ranks read the same {found.own_rows[0].total()} samples in step {difference.step + 1}",
            "prepare the loader: loader = accelerator.prepare(loader); a sampler of the script has to know the rank",
        )
    right: StepRecord = difference.expected
    missing, more = (right.rows - found.rows).total(), (found.rows - right.rows).total()
    if not missing:
        return Cause(
            "repeated samples",
            f"step {difference.step + 1} reads {more} samples twice, so that all ranks have batches of one size",
            "DataLoader(drop_last=True) leaves a short last batch out; even_batches=False lets ranks have fewer",
        )
    return Cause(
        "other samples",
        f"step {difference.step + 1} lacks {missing} samples of the step of one process, and has {more} others",
        "let the prepared loader shuffle; a sampler of the script needs set_epoch(), and the same seed on all ranks",
    )


def _of_gradients(
    first: Mismatch,
    found: Sequence[Mismatch],
    reference: Recorded,
    other: Recorded,
    apart: Recorded | None,
    swapped: Recorded | None,
    bound: float,
) -> Cause:
    """Whether the loss is no mean over rows, or what ranks did with their parts."""
    step = first.step
    right, here = reference.steps[step], other.steps[step]
    wrong = [one for one in found if one.step == step and one.kind == "gradients"]
    if any(
        one and abs(one - other) > 1e-9 * one for one, other in zip(right.items, here.items, strict=False)
    ):
        return Cause(
            "other items",
            f"the losses of step {step + 1}{_at(right, 'losses')} are sums over {sum(here.items):g} items, and over "
            f"{sum(right.items):g} on one process",
            "shift labels over the whole sequence, before ranks divide it"
            if other.about.get("divides_sequences")
            else "count the items of this rank's samples alone; backward() sums them over ranks",
        )
    own = apart.steps[0].own if apart is not None and step == 0 and apart.steps else ()
    halves = _mean_of(own)
    # Ranks have averaged what each has computed, and perhaps clipped it.
    if halves and _factor(here.gradients, halves, bound) is not None:
        factor = _factor(halves, right.gradients, bound)
        if factor is None:
            return _no_mean_over_rows(reference, right, own, swapped, bound)
        if right.norms and here.norms:  # before clipping
            factor = here.norms[0] / right.norms[0]
        if not math.isclose(factor, 1, rel_tol=1e-6):
            times = f"x{other.size}" if math.isclose(factor, other.size, rel_tol=1e-6) else f"x{factor:.6g}"
            return Cause(
                "scaled loss",
                f"the loss on each rank{_at(right, 'losses')} is {times} of that of one process, for all parameters",
                "ranks average losses: pass the plain mean over this rank's samples to accelerator.backward(), without "
                "the number of processes",
            )
    if not wrong:
        return Cause(
            "loss",
            f"the loss of step {step + 1} is {first.found:.6g}, and {first.expected:.6g} on one process"
            f"{_at(right, 'losses')}, with the same gradients",
            "what backward() is given is not what the model computed from this rank's samples",
        )
    kinds: dict[str, list[Mismatch]] = {}
    sums = [_sum_of(rank) for rank in own]
    for one in wrong:
        kinds.setdefault(_what_happened(one, sums, other.size, bound), []).append(one)
    texts = []
    for what, those in kinds.items():
        names = [one.name for one in those]
        share = "all parameters" if len(names) == len(right.gradients) else _some(names)
        most = (
            f" (relative difference {max(one.relative for one in those):.2g})"
            if what == "another value"
            else ""
        )
        texts.append(f"{share}: {what}{most}")
    advice = _ADVICE.get(
        next(iter(kinds)).split(" (")[0], "look at what the script does with this parameter by rank"
    )
    return Cause(next(iter(kinds)), f"gradients of step {step + 1} are wrong; {'; '.join(texts)}", advice)


_ADVICE = {
    "missing": "the parameter takes part on one process only; look for a branch by rank, or for a part that is frozen",
    "summed over ranks, not averaged": "a loss or a gradient is reduced twice; leave out the script's own all_reduce, "
    "and pass the plain loss of this rank's samples to accelerator.backward()",
    "divided once too often": "the script divides by the number of ranks or of micro-batches, which backward() does",
}


def _what_happened(one: Mismatch, own: Sequence[Mapping[str, Tensor]], size: int, bound: float) -> str:
    """The factor, or the part, that explains a wrong gradient."""
    if one.found is None:
        return "missing"
    if one.found.shape != one.expected.shape:
        return f"of shape {list(one.found.shape)} instead of {list(one.expected.shape)}"
    if not one.found.any():
        return "zero"
    factor = _factor({one.name: one.found}, {one.name: one.expected}, bound)
    if factor is not None:
        for times in (size, 2):
            if math.isclose(factor, times, rel_tol=1e-5) and times > 1:
                return f"summed over ranks, not averaged (x{times})"
            if math.isclose(factor, 1 / times, rel_tol=1e-5) and times > 1:
                return f"divided once too often (x1/{times})"
        return f"scaled by {factor:.6g}"
    for rank, part in enumerate(own):
        if one.name in part and distance(one.found, part[one.name]) <= max(bound, 1e-6):
            return f"only of the samples of rank {rank}"
    return "another value"


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


def _no_mean_over_rows(
    reference: Recorded,
    right: StepRecord,
    own: Sequence[Sequence[Mapping[str, Tensor]]],
    swapped: Recorded | None,
    bound: float,
) -> Cause:
    """Ranks average what they should, but the loss of the whole batch is not the mean of the ranks' losses."""
    place = _at(right, "losses")
    if swapped is not None and swapped.steps:
        there = [_sum_of(rank) for rank in swapped.steps[0].own]
        if any(
            _far(part, one, max(bound, 1e-6)) for part, one in zip(there, map(_sum_of, own), strict=False)
        ):
            return Cause(
                "by rank",
                f"the loss{place} of the same samples is another one on another rank",
                "look for what depends on the rank: is_main_process, process_index, a draw without a seed",
            )
    shares = _shares(right.gradients, own, max(bound, 1e-6))
    if shares is not None:
        parts = ", ".join(f"rank {rank} {share:.1%}" for rank, share in enumerate(shares))
        return Cause(
            "unequal counts",
            f"the loss{place} is a mean over items of which ranks have different numbers ({parts} in the first batch), "
            "and each rank counts as much",
            "give the sum and the number: accelerator.backward(loss_sum, num_items=number)",
        )
    if reference.about["normalises_batches"]:
        return Cause(
            "batch norm",
            "BatchNorm normalises by the rows of each rank, on one process by those of the whole batch",
            "on GPUs convert the model before prepare(): torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), which "
            "does not run on CPUs; or normalise by channels, as GroupNorm does",
        )
    return Cause(
        "contrasts rows",
        f"the loss{place} depends on which rows are in a batch together, or on noise that has no row for each sample, "
        "so ranks compute another one than one process",
        "nothing, if that is by design; gather the features to compare the rows of all ranks",
        is_fault=False,
    )


def _shares(
    right: Mapping[str, Tensor], own: Sequence[Sequence[Mapping[str, Tensor]]], bound: float
) -> list[float] | None:
    """The shares of ranks in the first backward pass with which their gradients make up the right ones, if any do."""
    import torch

    passes = min(map(len, own), default=0)
    names = [name for name in right if all(name in part for rank in own for part in rank)]
    if not names or len(own) < 2 or not passes:
        return None
    columns = [
        torch.cat([part[name].double().flatten() for name in names]) for rank in own for part in rank[:passes]
    ]
    wanted = torch.cat([right[name].double().flatten() for name in names])
    matrix = torch.stack(columns, dim=1)
    if matrix.shape[0] <= 2 * matrix.shape[1]:
        return None  # any gradient would be explained
    solved = torch.linalg.lstsq(matrix, wanted.unsqueeze(1), driver="gelsd").solution
    shares = [float(solved[rank * passes]) for rank in range(len(own))]
    if distance((matrix @ solved).flatten(), wanted) > bound or min(shares) <= 0:
        return None
    return [share / sum(shares) for share in shares]  # clipping has scaled all of them


def _of_norm(difference: Mismatch, reference: Recorded, other: Recorded) -> Cause:
    found, right = difference.found, difference.expected
    factor = found / right if right else math.inf
    counted = math.isclose(factor, math.sqrt(max(2, other.size)), rel_tol=1e-4)
    return Cause(
        "norm",
        f"the norm of equal gradients in step {difference.step + 1} is {found:.6g}, and {right:.6g} on one process"
        + (": it counts what every rank holds once for each" if counted else "")
        + _at(reference.steps[difference.step], "norms"),
        "clip with accelerator.clip_grad_norm_(), which knows what ranks hold alike",
    )


def _of_weights(first: Sequence[Mismatch], other: Recorded) -> Cause:
    names = [one.name for one in first]
    everything = len(names) == len(other.steps[first[0].step].weights)
    return Cause(
        "weights",
        f"after step {first[0].step + 1} the weights of {'all parameters' if everything else _some(names)} differ, "
        "with equal gradients and rates",
        "gradients change after backward(), or the script writes to weights by rank; step with the prepared optimizer",
    )


def _shared_noise(other: Recorded) -> Cause | None:
    alike = len(set(other.seeds)) == 1 and other.seeds[0] != SEED
    if other.size > 1 and other.about["noise"]["drawn"] and alike:
        return Cause(
            "shared noise",
            "all ranks have the same seed and draw noise for their samples, so in a real run samples of different "
            "ranks get the same noise",
            "set_seed(seed, device_specific=True) gives each rank its own; models that ranks make themselves need "
            "equal seeds before",
            is_fault=False,
        )
    return None


def _read_alike(step: StepRecord) -> bool:
    """Whether all ranks that should read different samples read the same."""
    return len(step.own_rows) > 1 and all(rows == step.own_rows[0] for rows in step.own_rows)


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
    total = values[0].double()
    for value in values[1:]:
        total = total + value
    return total


def _far(found: Mapping[str, Tensor], right: Mapping[str, Tensor], bound: float) -> bool:
    scale = scale_of(right)
    return any(distance(found[name], right[name], scale) > bound for name in right if name in found)


def _at(step: StepRecord, kind: str) -> str:
    place = step.places.get(kind)
    return f" ({place})" if place else ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
