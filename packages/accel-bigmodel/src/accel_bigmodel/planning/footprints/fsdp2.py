"""Memory of ``fsdp2``."""

from __future__ import annotations

import math
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
    optimizer_bytes,
    with_activations,
)
from accel_bigmodel.planning.shape import ModelShape, Phase, UnitSizes

__all__ = ["FSDP2Footprint"]


class FSDP2Footprint(StrategyFootprint):
    """Footprint of FSDP2: parts, and the gathered units that compute."""

    checkpoints: ClassVar[bool] = True

    @classmethod
    def settings(
        cls, shape: ModelShape, cluster: DeviceCluster, workload: Workload, checkpointing: bool
    ) -> Iterable[Setting]:
        """Each without and with recomputation, unless the script recomputes: resharded or not, offloaded, hybrid."""
        if cluster.devices == 1:
            return
        for again in [True] if checkpointing else [False, True]:
            words = " + recompute" if again and not checkpointing else ""
            sharded = Setting("fsdp2" + words, "fsdp2", cluster.devices, checkpointing=again)
            yield sharded
            yield replace(sharded, name="fsdp2, no reshard" + words, reshard=False)
            yield replace(sharded, name="fsdp2 + offload" + words, offload=True)
            ranks = math.gcd(shape.experts, cluster.per_machine) if shape.experts else 1
            if ranks > 1:
                yield replace(sharded, name=f"fsdp2, experts over {ranks}" + words, experts=ranks)
            if cluster.machines > 1 and cluster.per_machine > 1:
                yield replace(sharded, name="hsdp" + words, shards=cluster.per_machine)

    @classmethod
    def numbers(cls, precision: str) -> str:
        """Units are cast as a whole; autocast does the rest."""
        if precision == "no":
            return "float32"
        low = cls.low_dtype(precision)
        return f"{low} autocast"

    @classmethod
    def launch_values(cls, setting: Setting, cluster: DeviceCluster) -> Mapping[str, Any] | None:
        """The options of the section ``fsdp``."""
        hybrid = setting.shards < cluster.devices
        found: dict[str, Any] = {
            "distributed_type": "FSDP",
            "fsdp.fsdp_version": 2,
            "fsdp.reshard_after_forward": "HYBRID_SHARD" if hybrid else setting.reshard,
            "fsdp.cpu_offload": setting.offload,
            "fsdp.activation_checkpointing": setting.checkpointing,
            "fsdp.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }
        if setting.experts > 1:
            found |= {
                "use_parallelism_config": True,
                "parallelism.dp_shard_size": cluster.devices,
                "parallelism.ep_size": setting.experts,
            }
        return found

    def traffic(self, cluster: DeviceCluster) -> float:
        """Weights are gathered for every micro-batch, gradients reduced once."""
        gathers = (2 if self.setting.reshard else 1) * self.workload.micro_batches
        sent = self.gathered_bytes() * gathers + self.reduced_bytes()
        if self.setting.experts > 1:
            # Tokens go to their experts and back, in the forward and in the backward.
            away = 1 - 1 / self.setting.experts
            tokens = self.workload.batch_size * self.workload.seq_length * self.workload.micro_batches
            layers = sum(layer.experts > 0 for layer in self.shape.layers)
            sent += 4 * self.low * away * layers * self.shape.routes * tokens * self.shape.hidden_size
        if self.setting.shards < cluster.devices:  # replicas average their parts between machines
            sent += 2 * FP32 * self.shape.trainable / self.setting.shards
        return sent

    def reduced_bytes(self) -> float:
        """As in the base class; the ranks that hold the same experts reduce these."""
        return FP32 * sum(self._sent(layer.trainable, layer.trained_experts) for layer in self.shape.layers)

    def gathered_bytes(self) -> float:
        """As in the base class; the ranks that hold the same experts gather these."""
        return self.low * sum(self._sent(layer.parameters, layer.experts) for layer in self.shape.layers)

    def _sent(self, elements: float, experts: float) -> float:
        """How many elements of a layer a rank sends; `experts` of them belong to experts, which fewer ranks hold."""
        holders = self.setting.shards / self.setting.experts
        return (elements - experts) * self.share + experts / self.setting.experts * (holders - 1) / holders

    def _held(self, layer: UnitSizes) -> float:
        """Elements that a rank gathers of a unit: all but the experts of other ranks."""
        return layer.parameters - layer.experts * (1 - 1 / self.setting.experts)

    def _trained(self, layer: UnitSizes) -> float:
        """The trained ones of these."""
        return layer.trainable - layer.trained_experts * (1 - 1 / self.setting.experts)

    def parts(self) -> Moment:
        """One rank's parts, on the device or in host memory."""
        n = self.setting.shards
        frozen = self.workload.frozen_bytes * self.frozen
        return Moment(
            weights=(FP32 * self.shape.trainable + frozen) / n,
            optimizer=optimizer_bytes(self.shape, self.workload) / n,
        )

    def between(self) -> Moment:
        """The memory between two steps."""
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
            gathered=FP32 * outside.trainable,
            when="last reduction",
        )

    def at(self, phase: Phase, before: int) -> Moment:
        """The moment of the peak in a phase."""
        units = self.shape.units
        unit = units[phase.unit] if phase.unit is not None and units else self.shape.outside
        outside = self.shape.outside
        largest = max((self._held(each) for each in units), default=0)
        whole = self._held(outside)  # gathered all the time
        if self.setting.reshard:
            gathered = whole + (self._held(unit) if phase.unit is not None else 0)
        elif phase.unit is None:
            gathered = sum(map(self._held, self.shape.layers)) if before < self.shape.trainable else whole
        else:
            gathered = whole + sum(self._held(each) for each in units[: phase.unit + 1])
        copies = largest if phase.unit is not None else 0  # of the next unit, which is gathered meanwhile
        reducing = own = 0.0
        if phase.backward and phase.unit is not None:
            own = self._trained(unit)
            # Accelerators keep the input of a reduction until the next one begins.
            reducing = FP32 * own if self.workload.accelerator else 0.0
        elif self.workload.accelerator and phase.unit is not None:
            copies += largest
        if self.workload.accumulates:
            # Without a reduction the whole gradients of earlier micro-batches stay on the device, in the dtype of the
            # reduction. Those of lower precision are added to them when a unit's backward ends.
            trained = sum(map(self._trained, self.shape.layers))
            gradients = FP32 * trained + (self.low * own if self.low != FP32 else 0)
        else:
            outer = min(before, outside.trainable) if phase.backward else 0
            gradients = self._reduced(max(0, before - outer)) + self.low * (outer + own)
        moment = replace(
            self.between(), gradients=gradients, gathered=self.low * (gathered + copies) + reducing
        )
        return with_activations(moment, phase, self.workload.batch_size)

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
        return self.parts().total + FP32 * self.shape.trainable / self.setting.shards

    def _reduced(self, elements: float) -> float:
        return 0.0 if self.setting.offload else FP32 * elements / self.setting.shards
