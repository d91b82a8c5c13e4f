"""Memory of ``pp``, and of ``fsdp2`` inside of its stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from accel_bigmodel.planning.footprints.base import (
    FP32,
    DeviceCluster,
    Moment,
    Setting,
    StrategyFootprint,
    Workload,
    with_activations,
)
from accel_bigmodel.planning.footprints.fsdp2 import FSDP2Footprint
from accel_bigmodel.planning.shape import ModelShape, Phase, Timeline, UnitSizes
from accel_state.balance import balanced_starts

__all__ = ["PipelineFootprint", "ShardedPipelineFootprint"]

_MICRO_BATCHES = 2  # for each stage, as the strategy cuts a batch by default
_NOTHING = UnitSizes(0, 0, 0)


class PipelineFootprint(StrategyFootprint):
    """Footprint of the pipeline's rank with the most: a stage, and the activations of its micro-batches in flight.

    The schedule is "1f1b", which is the default where the last stage computes the loss. The batch of a rank is cut into
    two micro-batches for each stage.
    """

    waits: ClassVar[str] = "waits for other stages"
    degree: ClassVar[str] = "parallelism.dp_replicate_size"
    """The option for the number of ranks that hold the same stage."""

    def __init__(
        self, shape: ModelShape, setting: Setting, workload: Workload, timeline: Timeline | None
    ) -> None:
        super().__init__(shape, setting, workload, timeline)
        sizes = [unit.parameters for unit in shape.units]
        sizes[0] += (shape.first or _NOTHING).parameters
        sizes[-1] += (shape.last or _NOTHING).parameters
        bounds = [*balanced_starts(sizes, setting.stages), len(sizes)]
        self._stages = [
            self.stage()(shape, setting, workload, timeline, number, start, stop)
            for number, (start, stop) in enumerate(itertools.pairwise(bounds))
        ]

    @classmethod
    def settings(
        cls, shape: ModelShape, cluster: DeviceCluster, workload: Workload, checkpointing: bool
    ) -> Iterable[Setting]:
        """Each number of stages that divides the devices, with replicas of the pipeline on the others."""
        for stages in _numbers_of_stages(shape, cluster, workload):
            replicas = cluster.devices // stages
            yield Setting(f"pp, {stages} stages", "pp", replicas, checkpointing=checkpointing, stages=stages)

    @classmethod
    def stage(cls) -> type[_Stage]:
        """The footprint of a stage."""
        return _Stage

    @classmethod
    def launch_values(cls, setting: Setting, cluster: DeviceCluster) -> Mapping[str, Any] | None:
        """Degrees of parallelism."""
        return {
            "use_parallelism_config": True,
            "parallelism.pp_size": setting.stages,
            cls.degree: setting.shards,
        }

    def traffic(self, cluster: DeviceCluster) -> float:
        """Activations to the next stage and their gradients to the one before; replicas send gradients of a stage."""
        tokens = self.workload.batch_size * self.workload.seq_length * self.workload.micro_batches
        return 2 * FP32 * tokens * self.shape.hidden_size + super().traffic(cluster) / self.setting.stages

    def between(self) -> Moment:
        """The memory between two steps."""
        return max((stage.between() for stage in self._stages), key=lambda moment: moment.total)

    def moments(self) -> Iterator[Moment]:
        """The moments that may be the peak, on any rank."""
        for stage in self._stages:
            yield from stage.moments()


class ShardedPipelineFootprint(PipelineFootprint):
    """Footprint of a pipeline whose stages FSDP2 shards over the ranks that hold the same one."""

    degree: ClassVar[str] = "parallelism.dp_shard_size"

    @classmethod
    def settings(
        cls, shape: ModelShape, cluster: DeviceCluster, workload: Workload, checkpointing: bool
    ) -> Iterable[Setting]:
        """Each number of stages that leaves several ranks for a stage."""
        for stages in _numbers_of_stages(shape, cluster, workload):
            shards = cluster.devices // stages
            if shards > 1:
                name = f"pp x fsdp2, {stages} stages"
                yield Setting(name, "pp x fsdp2", shards, checkpointing=checkpointing, stages=stages)

    @classmethod
    def stage(cls) -> type[_Stage]:
        """The footprint of a stage."""
        return _ShardedStage

    @classmethod
    def numbers(cls, precision: str) -> str:
        """The dtypes of FSDP2 inside a stage."""
        return FSDP2Footprint.numbers(precision)

    def traffic(self, cluster: DeviceCluster) -> float:
        """Activations as above; a stage is gathered for each micro-batch, and its gradients are reduced once."""
        calls = self.workload.micro_batches
        gathers = _MICRO_BATCHES * self.setting.stages * calls
        reduced = self.reduced_bytes() / self.setting.stages
        return super().traffic(cluster) - reduced + gathers * self.gathered_bytes() / self.setting.stages


def _numbers_of_stages(shape: ModelShape, cluster: DeviceCluster, workload: Workload) -> list[int]:
    """Numbers of stages into which a model can be cut, and that divide the devices."""
    if shape.first is None or shape.adapters or workload.precision == "fp8":
        return []
    most = min(cluster.devices, len(shape.units), workload.batch_size)
    return [stages for stages in range(2, most + 1) if cluster.devices % stages == 0]


class _Stage(StrategyFootprint):
    """Footprint of one stage.

    Args:
        shape: the whole model.
        setting: the number of stages.
        workload: the training.
        timeline: of the whole model.
        number: of the stage.
        start: its first unit.
        stop: the unit after its last one.
    """

    def __init__(
        self,
        shape: ModelShape,
        setting: Setting,
        workload: Workload,
        timeline: Timeline | None,
        number: int,
        start: int,
        stop: int,
    ) -> None:
        is_first, is_last = number == 0, number == setting.stages - 1
        ends = [shape.first if is_first else None, shape.last if is_last else None]
        own = replace(
            shape,
            units=shape.units[start:stop],
            outside=_joined([end for end in ends if end is not None]),
            tensors=shape.tensors // setting.stages,
        )
        phases, self._buffers = _flow(timeline, setting.stages, number, start, stop, workload.batch_size)
        # Gradients of earlier micro-batches wait when a later one goes forward.
        accumulating = replace(workload, micro_batches=max(2, workload.micro_batches))
        #: The number of its first unit in phases; those of no timeline are counted from 0.
        self.start = 0 if phases is None else start
        super().__init__(own, setting, accumulating, phases)

    def between(self) -> Moment:
        """The memory between two steps."""
        found = super().between()
        return replace(
            found, gathered=self._buffers, when=f"{found.when}, stage of {len(self.shape.units)} blocks"
        )


class _ShardedStage(_Stage, FSDP2Footprint):
    """Footprint of a stage that FSDP2 shards. Gradients stay whole until all micro-batches are through."""

    def moments(self) -> Iterator[Moment]:
        """The moments that may be the peak."""
        for phase, before in self.phases():
            yield self.at(phase, before)
        step = self.step()
        yield replace(step, gathered=step.gathered + self._buffers)
        # Units are reduced one after the other, each from a copy; until then all are gathered.
        largest = max(layer.trainable for layer in self.shape.layers)
        base = self.between()
        yield replace(
            base,
            gradients=FP32 * self.shape.trainable,
            gathered=base.gathered + self.low * self.shape.parameters + FP32 * largest,
            when="last reduction",
        )

    def at(self, phase: Phase, before: int) -> Moment:
        """The moment of the peak in a phase, after the backward of earlier micro-batches.

        A backward leaves the units gathered, and the next forward frees them one by one.
        """
        base, units = self.between(), self.shape.units
        place = None if phase.unit is None else phase.unit - self.start
        gathered: float = self.shape.outside.parameters  # all the time
        own = 0.0
        if place is None:
            gathered = self.shape.parameters if phase.backward and before else gathered
        else:
            gathered += sum(unit.parameters for unit in units[place:])
            if phase.backward:
                # The unit before it is gathered meanwhile.
                gathered += units[place - 1].parameters if place else 0
                own = units[place].trainable if self.low != FP32 else 0.0
        moment = replace(
            base,
            gradients=FP32 * self.shape.trainable + self.low * own,
            gathered=base.gathered + self.low * gathered,
        )
        return with_activations(moment, phase, self.workload.batch_size)


def _joined(ends: list[UnitSizes]) -> UnitSizes:
    return ends[0] if len(ends) == 1 else _NOTHING


def _flow(
    timeline: Timeline | None, stages: int, number: int, start: int, stop: int, batch_size: int
) -> tuple[Timeline | None, float]:
    """The phases of a stage whose micro-batches in flight are the most, and bytes of buffers for what it receives."""
    if timeline is None:
        return None, 0.0
    rows = batch_size / (_MICRO_BATCHES * stages)
    phases = timeline.phases
    sizes = [max(0.0, phase.fixed + phase.per_sample * rows) for phase in phases]
    forward = [(size, at) for at, (phase, size) in enumerate(zip(phases, sizes, strict=True)) if _runs(phase)]
    grows = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(forward)]
    grows.append(grows[-1])  # what the last unit keeps
    sent = sizes[0]  # the output of the embeddings, which is as large as that of each unit
    is_first, is_last = number == 0, number == stages - 1
    kept = sum(grows[start:stop]) + (sent if is_first else 0)
    elsewhere = sum(grows[:start]) + (0 if is_first else sent)
    waiting = kept * (stages - number - 1)  # of earlier micro-batches
    head = range(forward[-1][1] + 1, next(at for at, phase in enumerate(phases) if _returns(phase)))
    found = [
        replace(
            phase, fixed=size - elsewhere + waiting, per_sample=0.0, logits=phase.logits * rows / batch_size
        )
        for at, (phase, size) in enumerate(zip(phases, sizes, strict=True))
        if (start <= phase.unit < stop if phase.unit is not None else (is_last if at in head else is_first))
    ]
    buffers = _MICRO_BATCHES * stages * sent * ((not is_first) + (not is_last))
    return Timeline(tuple(found)), buffers


def _runs(phase: Phase) -> bool:
    return phase.unit is not None and not phase.backward


def _returns(phase: Phase) -> bool:
    return phase.unit is not None and phase.backward
