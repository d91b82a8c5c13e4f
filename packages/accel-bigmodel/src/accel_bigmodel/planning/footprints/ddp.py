"""Memory of ``ddp``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from accel_bigmodel.planning.footprints.base import (
    FP32,
    DeviceCluster,
    Moment,
    Setting,
    StrategyFootprint,
    Workload,
)
from accel_bigmodel.planning.shape import ModelShape

__all__ = ["DDPFootprint"]


class DDPFootprint(StrategyFootprint):
    """Footprint of DDP: every rank has the whole model, and gradients that are views of permanent buckets."""

    @classmethod
    def settings(
        cls, shape: ModelShape, cluster: DeviceCluster, workload: Workload, checkpointing: bool
    ) -> Iterable[Setting]:
        """One, on several devices."""
        if cluster.devices > 1:
            yield Setting("ddp", "ddp", cluster.devices, checkpointing=checkpointing)

    @classmethod
    def launch_values(cls, setting: Setting, cluster: DeviceCluster) -> Mapping[str, Any] | None:
        """Replicas are what several devices train without an option."""
        return {}

    def between(self) -> Moment:
        """The memory between two steps."""
        return replace(super().between(), gradients=FP32 * self.shape.trainable)
