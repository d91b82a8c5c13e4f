"""Memory of ``deepspeed``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
from accel_bigmodel.planning.shape import ModelShape, Phase

__all__ = ["DeepSpeedFootprint"]

_LIVE = 1_000_000_000
"""Elements that stage 3 keeps gathered by default: ``stage3_max_live_parameters``."""

_PREFETCH = 50_000_000
"""Elements that it fetches ahead in one piece: ``stage3_prefetch_bucket_size``."""


class DeepSpeedFootprint(StrategyFootprint):
    """Footprint of DeepSpeed: weights and gradients in the dtype of computation, float32 masters, flat parts."""

    needs_package: ClassVar[bool] = True

    @classmethod
    def settings(
        cls, shape: ModelShape, cluster: DeviceCluster, workload: Workload, checkpointing: bool
    ) -> Iterable[Setting]:
        """The stages of ZeRO, each without and with offload."""
        if workload.precision == "fp8" or workload.optimizer == "muon":
            return  # DeepSpeed's engine does not compute in fp8, and flattens the matrices that Muon needs
        n = cluster.devices
        # The bucket is what "auto" in DeepSpeed's configuration becomes; without a hidden size its default.
        bucket = shape.hidden_size**2 or 500_000_000
        for stage in (1, 2, 3):
            base = Setting(
                f"deepspeed zero {stage}",
                "deepspeed",
                n,
                stage=stage,
                checkpointing=checkpointing,
                bucket=bucket,
            )
            if n > 1:
                yield base
            if workload.optimizer == "adamw":  # DeepSpeed steps in host memory with an Adam of its own
                yield replace(base, name=f"{base.name} + offload", offload_optimizer=True)
                if stage == 3:
                    yield replace(
                        base, name=f"{base.name} + full offload", offload_optimizer=True, offload=True
                    )

    @classmethod
    def numbers(cls, precision: str) -> str:
        """The engine casts the model."""
        return "float32" if precision == "no" else cls.low_dtype(precision)

    @classmethod
    def launch_values(cls, setting: Setting, cluster: DeviceCluster) -> Mapping[str, Any] | None:
        """A configuration of DeepSpeed's own."""
        zero: dict[str, Any] = {"stage": setting.stage, "reduce_bucket_size": setting.bucket}
        if setting.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        if setting.offload:
            zero["offload_param"] = {"device": "cpu"}
        own = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": zero,
        }
        values = {"distributed_type": "DEEPSPEED", "deepspeed.hf_ds_config": json.dumps(own)}
        return values | ({"deepspeed.zero3_init_flag": True} if setting.stage == 3 else {})

    def traffic(self, cluster: DeviceCluster) -> float:
        """Stages 2 and 3 keep divided gradients, so they reduce every micro-batch."""
        micro_batches, stage = self.workload.micro_batches, self.setting.stage
        reduced = self.low * self.shape.trainable * self.share * (micro_batches if stage > 1 else 1)
        return self.gathered_bytes() * (2 * micro_batches if stage == 3 else 1) + reduced

    def between(self) -> Moment:
        """The memory between two steps."""
        n, stage = self.setting.shards, self.setting.stage
        trained = self.shape.trainable
        weights = self.low * self.shape.parameters / (n if stage == 3 else 1)
        if self.setting.offload:
            weights = 0.0
        if self.setting.offload_optimizer:
            return Moment(weights=weights + self.shape.buffers, when="between steps")
        return Moment(
            weights=weights + self.shape.buffers,
            masters=FP32 * trained / n,
            optimizer=optimizer_bytes(self.shape, self.workload, flat=True) / n,
            gradients=self.low * trained / n if stage == 3 else 0.0,  # a buffer that stays
            when="between steps",
        )

    def at(self, phase: Phase, before: int) -> Moment:
        """The moment of the peak in a phase."""
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
        return with_activations(moment, phase, self.workload.batch_size)

    def step(self) -> Moment:
        """The optimizer's step, on one flat part: float32 copies of gradients, and AdamW's temporaries."""
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
        return (2 * FP32 * self.shape.trainable + states + weights) / n
