"""Memory of the strategy, for `accel plan`; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from accel_bigmodel.planning.footprints.base import FP32, DeviceCluster, Moment, Setting, Workload
from accel_bigmodel.planning.footprints.ddp import DDPFootprint
from accel_bigmodel.planning.shape import ModelShape

__all__ = ["ZeroRedundancyFootprint"]


class ZeroRedundancyFootprint(DDPFootprint):
    """As ddp, but with the states of a part of the parameters; a parameter is not divided."""

    @classmethod
    def settings(
        cls, shape: ModelShape, cluster: DeviceCluster, workload: Workload, checkpointing: bool
    ) -> Iterable[Setting]:
        """One, on several devices."""
        if cluster.devices > 1:
            yield Setting("zero redundancy", "zero_redundancy", cluster.devices, checkpointing=checkpointing)

    @classmethod
    def launch_values(cls, setting: Setting, cluster: DeviceCluster) -> Mapping[str, Any] | None:
        """The distributed type; its options have no effect on the peak."""
        return {"distributed_type": "ZERO_REDUNDANCY"}

    def between(self) -> Moment:
        """What is held between two steps."""
        whole = super().between()
        return replace(whole, optimizer=whole.optimizer * self.part())

    def part(self) -> float:
        """The part of the trained elements that the rank with the most has: at least the largest tensor."""
        trained = max(1, self.shape.trainable)
        return max(1 / self.setting.shards, self.shape.largest_tensor / trained)

    def temporaries(self, elements: float, largest: float, *, plain: bool = True) -> float:
        """Each rank steps its part."""
        return super().temporaries(elements * self.part(), largest, plain=plain)

    def traffic(self, cluster: DeviceCluster) -> float:
        """Gradients as ddp sends them; then every rank sends the parameters that it has stepped."""
        return super().traffic(cluster) + FP32 * self.shape.trainable * self.share
