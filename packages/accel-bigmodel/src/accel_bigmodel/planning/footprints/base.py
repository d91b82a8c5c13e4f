"""Peak memory of a rank in a training step: data in, data out.

``StrategyFootprint`` is the base of one class per strategy, and by itself that of one process. The formulas are those
of the table in docs/guides/strategies.md, taken over the phases of a step; tests-integration/test_plan_memory.py
compares them with runs. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from accel_bigmodel.planning.shape import ModelShape, Phase, Timeline

__all__ = [
    "FP32",
    "DeviceCluster",
    "Footprint",
    "Moment",
    "Setting",
    "StrategyFootprint",
    "Timelines",
    "Workload",
    "optimizer_bytes",
    "with_activations",
]

FP32 = 4
"""Bytes of an element."""

Timelines = Callable[[str, bool], Timeline | None]
"""Function from a name of ``StrategyFootprint.numbers``, and whether units are recomputed, to a timeline or None."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A strategy with the options that determine its memory.

    Attributes:
        name: name for reports.
        strategy: name of the strategy and of its footprint.
        shards: ranks that share one copy of the divided tensors.
        stage: ZeRO stage.
        reshard: fsdp2 frees the parameters of a unit after its forward.
        checkpointing: units are recomputed in the backward.
        offload: parts, gradients and optimizer states are in host memory.
        offload_optimizer: ZeRO keeps optimizer states, master weights and gradients in host memory.
        bucket: number of elements that ZeRO reduces at a time.
        experts: ranks among which the experts of a layer are divided.
        stages: stages of a pipeline, one on a rank.
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
    experts: int = 1
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload: batch size, optimizer, precision and other facts of the training.

    Attributes:
        batch_size: samples of a micro-batch on one rank.
        optimizer: adamw, muon, sgd, adafactor or 8bit.
        precision: no, bf16, fp16 or fp8, which takes what bf16 takes: activations are kept as under bf16.
        micro_batches: micro-batches per step; gradients are summed over them, so they exist in all but the first.
        frozen_bytes: bytes per element of a frozen weight.
        accelerator: whether ranks compute on accelerators; a CPU frees sooner, and steps tensor by tensor.
        seq_length: tokens per sample.
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
class DeviceCluster:
    """The devices and machines to train on.

    Attributes:
        devices: number of devices of all machines; one rank each.
        machines: number of machines.
        memory: bytes per device.
        reserve: bytes per device that are not available for the model: driver context, communication buffers, allocator
            fragmentation.
        host_memory: bytes of host memory per machine; None: not known, and not compared.
    """

    devices: int
    machines: int
    memory: float
    reserve: float = 0.0
    host_memory: float | None = None

    @property
    def usable(self) -> float:
        """Bytes of a device that a rank may take."""
        return self.memory - self.reserve

    @property
    def per_machine(self) -> int:
        """Devices of a machine."""
        return self.devices // self.machines


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory of a rank at one moment of a step, in bytes of the device.

    Attributes:
        weights: weights that the rank keeps, whole or in parts; with buffers.
        masters: float32 copies of weights.
        gradients: complete gradients.
        optimizer: optimizer states.
        gathered: weights that are whole only while they compute, and buffers to gather and reduce.
        activations: tensors that autograd keeps, and temporaries.
        logits: outputs as wide as the vocabulary, their copies and gradients.
        when: name of the moment.
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
    """Peak memory of a rank, on its device and in host memory.

    Attributes:
        peak: the moment of the peak.
        kept: bytes between steps.
        host: bytes of host memory.
        knows_activations: whether activations are included.
    """

    peak: Moment
    kept: float
    host: float
    knows_activations: bool


def optimizer_bytes(shape: ModelShape, workload: Workload, *, flat: bool = False) -> float:
    """Bytes of the optimizer's states for all trained parameters.

    AdamW keeps two moments, SGD without momentum nothing, Adafactor (Shazeer and Stern, 2018) the means of rows and
    columns, AdamW in 8 bits (Dettmers et al., 2021) two bytes and a float32 for every block of 256. Muon keeps one
    momentum in the blocks, whose few vectors are counted as matrices, and what is outside of them has AdamW.

    Args:
        shape: the model.
        workload: names the optimizer.
        flat: the strategy hands it one flat tensor, which has no rows and columns.
    """
    kinds = {
        "adamw": 8.0 * shape.trainable + 4 * shape.tensors,
        "muon": 4.0 * sum(unit.trainable for unit in shape.units) + 8.0 * shape.outside.trainable,
        "sgd": 0.0,
        "adafactor": 4.0 * (shape.trainable if flat else shape.factored),
        "8bit": 2 * shape.trainable * (1 + 4 / 256),
    }
    return kinds[workload.optimizer]


class StrategyFootprint:
    """Memory footprint of a rank under a strategy. In this base class every rank has the whole model and nothing else.

    A strategy overrides the methods in which its memory differs. Other packages register their class in the entry-point
    group ``accel_bigmodel.footprints``, under the name of the strategy.

    Args:
        shape: the model.
        setting: the options that determine the memory.
        workload: the training.
        timeline: activations over a step; None: they are not known.
    """

    needs_package: ClassVar[bool] = False
    """Whether the strategy needs a package besides these."""

    waits: ClassVar[str] = ""
    """What the computation waits for besides the gradients of a step, in words; empty: nothing."""

    checkpoints: ClassVar[bool] = False
    """Whether the strategy recomputes units by an option of its own; otherwise the script has to."""

    selected_in_script: ClassVar[str] = "strategy="
    """How a script selects the strategy, where no option of ``accel launch`` does."""

    def __init__(
        self, shape: ModelShape, setting: Setting, workload: Workload, timeline: Timeline | None
    ) -> None:
        self.shape, self.setting, self.workload = shape, setting, workload
        self.timeline = timeline
        self.low = 4 if workload.precision == "no" else 2
        self.frozen = shape.parameters - shape.trainable

    @classmethod
    def settings(
        cls, shape: ModelShape, cluster: DeviceCluster, workload: Workload, checkpointing: bool
    ) -> Iterable[Setting]:
        """List the settings in which the strategy can train the model on these devices.

        Args:
            shape: the model.
            cluster: the devices.
            workload: the training.
            checkpointing: the script recomputes units under every strategy.
        """
        if cluster.devices == 1:
            yield Setting("single", "single", checkpointing=checkpointing)

    @classmethod
    def numbers(cls, precision: str) -> str:
        """The name of the dtypes in which the strategy computes; see ``planning.timelines``."""
        return "float32" if precision == "no" else f"float32 autocast {cls.low_dtype(precision)}"

    @classmethod
    def low_dtype(cls, precision: str) -> str:
        """The 16-bit dtype of a mixed precision."""
        return "float16" if precision == "fp16" else "bfloat16"

    @classmethod
    def launch_values(cls, setting: Setting, cluster: DeviceCluster) -> Mapping[str, Any] | None:
        """Options of ``accel launch`` that select the setting, by path; None: only a script can select it.

        Without a ``distributed_type`` the run has one replica of the model on each device.
        """
        return {"distributed_type": "NO"}

    def traffic(self, cluster: DeviceCluster) -> float:
        """Bytes that a rank sends in a step: gradients, in rings that send every byte to all but one of the ranks."""
        return 2 * self.reduced_bytes()

    def reduced_bytes(self) -> float:
        """Bytes that a rank sends when all gradients are reduced to parts."""
        return FP32 * self.shape.trainable * self.share

    def gathered_bytes(self) -> float:
        """Bytes that a rank sends when all weights are gathered from parts."""
        return self.low * self.shape.parameters * self.share

    @property
    def share(self) -> float:
        """The share of divided tensors that other ranks have."""
        return (self.setting.shards - 1) / self.setting.shards

    def between(self) -> Moment:
        """The memory between two steps."""
        return Moment(
            weights=FP32 * self.shape.trainable
            + self.workload.frozen_bytes * self.frozen
            + self.shape.buffers,
            optimizer=optimizer_bytes(self.shape, self.workload),
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
        """The moment of the peak in a phase."""
        base = self.between()
        gradients = base.gradients or FP32 * (self.shape.trainable if self.workload.accumulates else before)
        return with_activations(replace(base, gradients=gradients), phase, self.workload.batch_size)

    def step(self) -> Moment:
        """The moment of the optimizer's step: all gradients, and its temporaries."""
        base = self.between()
        extra = self.temporaries(self.shape.trainable, self.shape.largest_tensor)
        return replace(
            base,
            gradients=FP32 * self.shape.trainable,
            gathered=base.gathered + extra,
            when="optimizer step",
        )

    def temporaries(self, elements: float, largest: float, *, plain: bool = True) -> float:
        """Bytes that the step allocates: of all tensors together on accelerators, else of one at a time."""
        if self.workload.optimizer == "sgd":
            return 0.0
        together = plain and self.workload.accelerator and self.workload.optimizer == "adamw"
        return FP32 * elements if together else 2 * FP32 * largest

    def host(self) -> float:
        """Bytes of host memory of a rank."""
        return 0.0


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


def with_activations(moment: Moment, phase: Phase, batch_size: int) -> Moment:
    """The moment with the activations of a phase, and its name."""
    total = phase.at(batch_size)
    logits = min(total, phase.logits * batch_size)
    where = "embeddings, head and loss" if phase.unit is None else f"block {phase.unit}"
    return replace(
        moment,
        activations=total - logits,
        logits=logits,
        when=f"{'backward' if phase.backward else 'forward'} of {where}",
    )
