"""Memory of ``tp``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from accel_bigmodel.planning.footprints.base import (
    DeviceCluster,
    Moment,
    Setting,
    StrategyFootprint,
    Workload,
)
from accel_bigmodel.planning.shape import ModelShape, Phase

__all__ = ["TensorParallelFootprint"]


class TensorParallelFootprint(StrategyFootprint):
    """Parameters in the model's tensor-parallel plan are divided; activations count as whole."""

    waits: ClassVar[str] = "sums activations in every block"
    selected_in_script: ClassVar[str] = "torch_tp_plugin=, and a model loaded with tp_plan='auto'"

    @classmethod
    def settings(
        cls, shape: ModelShape, cluster: DeviceCluster, workload: Workload, checkpointing: bool
    ) -> Iterable[Setting]:
        """One, among the devices of a machine, if the model's plan divides by their number."""
        n = cluster.per_machine  # its traffic is for the links inside a machine
        if workload.precision in ("fp16", "fp8") or shape.adapters or n == 1 or not shape.tensor_parallel:
            return
        if all(count % n == 0 for count in shape.tensor_parallel):
            yield Setting("tp", "tp", n, checkpointing=checkpointing)

    @classmethod
    def launch_values(cls, setting: Setting, cluster: DeviceCluster) -> Mapping[str, Any] | None:
        """None: the script loads the model with its plan."""
        return None

    def traffic(self, cluster: DeviceCluster) -> float:
        """Two sums of activations in forward and two in backward for every block, which block the computation."""
        tokens = self.workload.batch_size * self.workload.seq_length * self.workload.micro_batches
        return 8 * len(self.shape.units) * self.shape.hidden_size * self.low * tokens * self.share

    def between(self) -> Moment:
        """The memory between two steps."""
        whole = super().between()
        part = self._part()
        return replace(whole, weights=whole.weights * part, optimizer=whole.optimizer * part)

    def at(self, phase: Phase, before: int) -> Moment:
        """The moment of the peak in a phase."""
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
