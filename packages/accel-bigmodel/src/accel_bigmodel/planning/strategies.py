"""What a rank holds at most under a strategy: data in, data out.

The formulas are those of the table in docs/guides/strategies.md, taken over the phases of a training step;
tests-integration/test_plan_memory.py compares them with runs. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from accel_bigmodel.planning.shape import ModelShape, Phase, Timeline

__all__ = [
    "Footprint",
    "Moment",
    "Setting",
    "Timelines",
    "Workload",
    "footprint",
    "numbers_of",
    "optimizer_bytes",
]

_FP32 = 4
_LIVE = 1_000_000_000
"""Elements that stage 3 keeps gathered by default: ``stage3_max_live_parameters``."""

_PREFETCH = 50_000_000
"""Elements that it fetches ahead in one piece: ``stage3_prefetch_bucket_size``."""

Timelines = Callable[[str, bool], Timeline | None]
"""From a name of ``numbers_of``, and whether units are recomputed, to a timeline; None: activations are not known."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A strategy with the options that decide what it holds.

    Attributes:
        name: for reports.
        strategy: single, ddp, fsdp2, deepspeed or tp.
        shards: ranks that share one copy of what is divided.
        stage: of ZeRO.
        reshard: fsdp2 frees the parameters of a unit after its forward.
        checkpointing: units are recomputed in the backward.
        offload: parts, gradients and optimizer states are in host memory.
        offload_optimizer: of ZeRO: optimizer states, master weights and gradients are.
        bucket: elements that ZeRO reduces at a time.
    """

    name: str
    strategy: str
    shards: int = 1
    stage: int = 0
    reshard: bool = True
    checkpointing: bool = False
    offload: bool = False
    offload_optimizer: bool = False
    bucket: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, and how.

    Attributes:
        batch_size: samples of a micro-batch on one rank.
        optimizer: adamw, sgd, adafactor or 8bit.
        precision: no, bf16, fp16 or fp8, which takes what bf16 takes: activations are kept as under bf16.
        micro_batches: of a step; gradients are summed over them, so they are there in all but the first.
        frozen_bytes: of an element of a frozen weight.
        accelerator: whether ranks compute on accelerators; a CPU frees sooner, and steps tensor by tensor.
        seq_length: tokens of a sample.
    """

    batch_size: int = 1
    optimizer: str = "adamw"
    precision: str = "no"
    micro_batches: int = 1
    frozen_bytes: int = 4
    accelerator: bool = True
    seq_length: int = 1

    @property
    def accumulates(self) -> bool:
        """Whether gradients are summed over several micro-batches."""
        return self.micro_batches > 1


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank holds at one moment of a step, in bytes of the device.

    Attributes:
        weights: parts that the rank keeps, or all; with buffers.
        masters: float32 copies of weights.
        gradients: complete ones.
        optimizer: its states.
        gathered: weights that are whole only while they compute, and what is needed to gather and reduce.
        activations: what autograd keeps, and temporaries.
        logits: outputs as wide as the vocabulary, their copies and gradients.
        when: the moment.
    """

    weights: float = 0.0
    masters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    when: str = ""

    @property
    def total(self) -> float:
        """The sum."""
        return float(sum(getattr(self, each.name) for each in fields(self) if each.name != "when"))


@dataclass(frozen=True, slots=True)
class Footprint:
    """The most that a rank holds, on its device and in host memory.

    Attributes:
        peak: the moment of the most.
        kept: bytes between steps.
        host: bytes of host memory.
        knows_activations: whether they are in it.
    """

    peak: Moment
    kept: float
    host: float
    knows_activations: bool


def optimizer_bytes(shape: ModelShape, workload: Workload, *, flat: bool = False) -> float:
    """Bytes of the optimizer's states for all trained parameters.

    AdamW keeps two moments, SGD without momentum nothing, Adafactor (Shazeer and Stern, 2018) the means of rows and
    columns, AdamW in 8 bits (Dettmers et al., 2021) two bytes and a float32 for every block of 256.

    Args:
        shape: the model.
        workload: names the optimizer.
        flat: the strategy hands it one flat tensor, which has no rows and columns.
    """
    kinds = {
        "adamw": 8.0 * shape.trainable + 4 * shape.tensors,
        "sgd": 0.0,
        "adafactor": 4.0 * (shape.trainable if flat else shape.factored),
        "8bit": 2 * shape.trainable * (1 + 4 / 256),
    }
    return kinds[workload.optimizer]


def numbers_of(setting: Setting, precision: str) -> str:
    """The name of the numbers in which a strategy computes; see ``planning.timelines``."""
    if precision == "no":
        return "float32"
    low = "float16" if precision == "fp16" else "bfloat16"
    if setting.strategy == "deepspeed":
        return low
    return f"{low} autocast" if setting.strategy == "fsdp2" else f"float32 autocast {low}"


def footprint(shape: ModelShape, setting: Setting, workload: Workload, timelines: Timelines) -> Footprint:
    """The most that a rank holds in a step after the first."""
    timeline = timelines(numbers_of(setting, workload.precision), setting.checkpointing)
    kind: type[_Whole] = {"fsdp2": _Sharded, "deepspeed": _Zero, "tp": _Divided}.get(setting.strategy, _Whole)
    held = kind(shape, setting, workload, timeline)
    moments = [*held.moments()]
    return Footprint(
        peak=max(moments, key=lambda moment: moment.total),
        kept=held.between().total,
        host=held.host(),
        knows_activations=timeline is not None,
    )


class _Whole:
    """Every rank has the whole model: ``single``, and ``ddp``, whose gradients are views of its buckets."""

    def __init__(
        self, shape: ModelShape, setting: Setting, workload: Workload, timeline: Timeline | None
    ) -> None:
        self.shape, self.setting, self.workload = shape, setting, workload
        self.timeline = timeline
        self.low = 4 if workload.precision == "no" else 2
        self.frozen = shape.parameters - shape.trainable

    def between(self) -> Moment:
        """What is held between two steps."""
        keeps = self.setting.strategy == "ddp"
        return Moment(
            weights=_FP32 * self.shape.trainable
            + self.workload.frozen_bytes * self.frozen
            + self.shape.buffers,
            optimizer=optimizer_bytes(self.shape, self.workload),
            gradients=_FP32 * self.shape.trainable if keeps else 0,
            when="between steps",
        )

    def moments(self) -> Iterator[Moment]:
        """The moments that may be the peak."""
        for phase, before in self.phases():
            yield self.at(phase, before)
        yield self.step()

    def phases(self) -> Iterator[tuple[Phase, int]]:
        """Phases, and the elements of gradients that are complete before each; without a timeline one empty phase."""
        done = 0
        phases = self.timeline.phases if self.timeline is not None else _unknown(self.shape)
        for phase in phases:
            yield phase, done
            done += phase.gradients

    def at(self, phase: Phase, before: int) -> Moment:
        """The moment of the most in a phase."""
        base = self.between()
        gradients = base.gradients or _FP32 * (self.shape.trainable if self.workload.accumulates else before)
        return _with_activations(replace(base, gradients=gradients), phase, self.workload.batch_size)

    def step(self) -> Moment:
        """The optimizer's step: all gradients, and what it computes."""
        base = self.between()
        extra = self.temporaries(self.shape.trainable, self.shape.largest_tensor)
        return replace(
            base,
            gradients=_FP32 * self.shape.trainable,
            gathered=base.gathered + extra,
            when="optimizer step",
        )

    def temporaries(self, elements: float, largest: float, *, plain: bool = True) -> float:
        """Bytes that the step allocates: of all tensors together on accelerators, else of one at a time."""
        if self.workload.optimizer == "sgd":
            return 0.0
        together = plain and self.workload.accelerator and self.workload.optimizer == "adamw"
        return _FP32 * elements if together else 2 * _FP32 * largest

    def host(self) -> float:
        """Bytes of host memory of a rank."""
        return 0.0


class _Divided(_Whole):
    """Tensor parallelism: what the model's plan divides is divided, activations are taken as whole."""

    def between(self) -> Moment:
        """What is held between two steps."""
        whole = super().between()
        part = 1 - self.shape.divisible / max(1, self.shape.parameters) * (1 - 1 / self.setting.shards)
        return replace(whole, weights=whole.weights * part, optimizer=whole.optimizer * part)

    def at(self, phase: Phase, before: int) -> Moment:
        """The moment of the most in a phase."""
        found = super().at(phase, before)
        return replace(found, gradients=found.gradients * self._part())

    def step(self) -> Moment:
        """The optimizer's step."""
        found = super().step()
        return replace(
            found, gradients=found.gradients * self._part(), gathered=found.gathered * self._part()
        )

    def _part(self) -> float:
        return 1 - self.shape.divisible / max(1, self.shape.parameters) * (1 - 1 / self.setting.shards)


class _Sharded(_Whole):
    """``fsdp2``: parts, and the units that compute."""

    def parts(self) -> Moment:
        """What is divided, of one rank, wherever it is."""
        n = self.setting.shards
        frozen = self.workload.frozen_bytes * self.frozen
        return Moment(
            weights=(_FP32 * self.shape.trainable + frozen) / n,
            optimizer=optimizer_bytes(self.shape, self.workload) / n,
        )

    def between(self) -> Moment:
        """What is held between two steps."""
        parts = Moment() if self.setting.offload else self.parts()
        return replace(parts, weights=parts.weights + self.shape.buffers, when="between steps")

    def moments(self) -> Iterator[Moment]:
        """The moments that may be the peak."""
        yield from super().moments()
        outside = self.shape.outside
        # The outermost unit reduces last, when all others have.
        yield replace(
            self.between(),
            gradients=self._reduced(self.shape.trainable - outside.trainable) + self.low * outside.trainable,
            gathered=_FP32 * outside.trainable,
            when="last reduction",
        )

    def at(self, phase: Phase, before: int) -> Moment:
        """The moment of the most in a phase."""
        units = self.shape.units
        unit = units[phase.unit] if phase.unit is not None and units else self.shape.outside
        outside = self.shape.outside
        largest = max((each.parameters for each in units), default=0)
        whole = outside.parameters  # gathered all the time
        if self.setting.reshard:
            gathered = whole + (unit.parameters if phase.unit is not None else 0)
        elif phase.unit is None:
            gathered = self.shape.parameters if before < self.shape.trainable else whole
        else:
            gathered = whole + sum(each.parameters for each in units[: phase.unit + 1])
        copies = largest if phase.unit is not None else 0  # of the next unit, which is gathered meanwhile
        reducing = 0.0
        own = 0
        if phase.backward and phase.unit is not None:
            own = unit.trainable
            # Accelerators keep the input of a reduction until the next one begins.
            reducing = _FP32 * unit.trainable if self.workload.accelerator else 0.0
        elif self.workload.accelerator and phase.unit is not None:
            copies += largest
        if self.workload.accumulates:
            # Without a reduction the whole gradients of earlier micro-batches stay on the device.
            gradients = float(self.low * self.shape.trainable)
        else:
            outer = min(before, outside.trainable) if phase.backward else 0
            gradients = self._reduced(max(0, before - outer)) + self.low * (outer + own)
        moment = replace(
            self.between(), gradients=gradients, gathered=self.low * (gathered + copies) + reducing
        )
        return _with_activations(moment, phase, self.workload.batch_size)

    def step(self) -> Moment:
        """The optimizer's step, on parts."""
        n = self.setting.shards
        if self.setting.offload:
            return self.between()
        extra = self.temporaries(self.shape.trainable / n, self.shape.largest_tensor / n, plain=False)
        return replace(
            self.between(),
            gradients=self._reduced(self.shape.trainable),
            gathered=extra,
            when="optimizer step",
        )

    def host(self) -> float:
        """Bytes of host memory of a rank: the parts and their gradients."""
        if not self.setting.offload:
            return 0.0
        return self.parts().total + _FP32 * self.shape.trainable / self.setting.shards

    def _reduced(self, elements: float) -> float:
        return 0.0 if self.setting.offload else _FP32 * elements / self.setting.shards


class _Zero(_Whole):
    """DeepSpeed: weights and gradients in the dtype that computes, float32 masters, flat parts."""

    def between(self) -> Moment:
        """What is held between two steps."""
        n, stage = self.setting.shards, self.setting.stage
        trained = self.shape.trainable
        weights = self.low * self.shape.parameters / (n if stage == 3 else 1)
        if self.setting.offload:
            weights = 0.0
        if self.setting.offload_optimizer:
            return Moment(weights=weights + self.shape.buffers, when="between steps")
        return Moment(
            weights=weights + self.shape.buffers,
            masters=_FP32 * trained / n,
            optimizer=optimizer_bytes(self.shape, self.workload, flat=True) / n,
            gradients=self.low * trained / n if stage == 3 else 0.0,  # a buffer that stays
            when="between steps",
        )

    def at(self, phase: Phase, before: int) -> Moment:
        """The moment of the most in a phase."""
        n, stage, trained = self.setting.shards, self.setting.stage, self.shape.trainable
        base = self.between()
        bucket = min(self.setting.bucket, trained)
        gathered = self.low * bucket * (1 + (self.workload.accelerator and phase.backward))
        gradients = base.gradients
        if stage == 3:
            unit = self.shape.largest_unit
            live = min(self.shape.parameters, max(_LIVE, unit))
            gathered += self.low * live
            if phase.backward:
                gathered += self.low * min(unit, trained)
            else:  # of what is fetched ahead, through a copy
                gathered += self.low * min(self.shape.parameters, _PREFETCH)
        elif stage == 1 and not self.setting.offload_optimizer:
            gradients = self.low * (trained if self.workload.accumulates else before)
        elif not self.setting.offload_optimizer:
            gradients = self.low * (trained if self.workload.accumulates else before) / n
        moment = replace(base, gradients=gradients, gathered=gathered)
        return _with_activations(moment, phase, self.workload.batch_size)

    def step(self) -> Moment:
        """The step, on one flat part: copies of gradients in float32, and what AdamW computes."""
        n, stage, trained = self.setting.shards, self.setting.stage, self.shape.trainable
        base = self.between()
        if self.setting.offload_optimizer:
            return replace(base, gathered=self.low * trained / n, when="optimizer step")
        copies = {0: 4, 1: 4, 2: 8, 3: 12}[stage] * trained / n
        gradients = {1: self.low * trained, 2: self.low * trained / n}.get(stage, base.gradients)
        return replace(base, gradients=gradients, gathered=copies, when="optimizer step")

    def host(self) -> float:
        """Bytes of host memory of a rank: masters, states and gradients of its part, and with them its weights."""
        n = self.setting.shards
        if not self.setting.offload_optimizer:
            return 0.0
        states = optimizer_bytes(self.shape, self.workload, flat=True)
        weights = self.low * self.shape.parameters if self.setting.offload else 0
        return (2 * _FP32 * self.shape.trainable + states + weights) / n


def _unknown(shape: ModelShape) -> tuple[Phase, ...]:
    """Phases without activations, in the order of a forward and backward."""
    units = [
        Phase(index, True, 0.0, 0.0, 0.0, unit.trainable)
        for index, unit in reversed([*enumerate(shape.units)])
    ]
    return (
        Phase(None, False, 0.0, 0.0, 0.0, 0),
        *units,
        Phase(None, True, 0.0, 0.0, 0.0, shape.outside.trainable),
    )


def _with_activations(moment: Moment, phase: Phase, batch_size: int) -> Moment:
    total = phase.at(batch_size)
    logits = min(total, phase.logits * batch_size)
    where = "embeddings, head and loss" if phase.unit is None else f"block {phase.unit}"
    return replace(
        moment,
        activations=total - logits,
        logits=logits,
        when=f"{'backward' if phase.backward else 'forward'} of {where}",
    )
