"""FSDP2 in its smallest form: a second witness of the seam, on PyTorch's real `fully_shard`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from accel_train.mesh import Mesh
from accel_train.strategies.base import Capabilities, ModelSteps, Strategy
from accel_train.strategies.blocks import repeated_blocks

__all__ = ["FSDP2Witness"]


class FSDP2Witness(Strategy):
    """Every rank holds a part of each parameter, gradient and optimizer state."""

    name: ClassVar[str] = "fsdp2_witness"
    capabilities: ClassVar[Capabilities] = Capabilities(
        needs_process_group=True, hides_gradients=True, saves_windows=False
    )

    @classmethod
    def make_mesh(cls, config: Any, device: torch.device, world_size: int, rank: int) -> Mesh:
        """Parameters are divided among all ranks, which read different samples."""
        return Mesh({"dp_shard": world_size}, device.type, world_size, rank)

    def prepare_model(self, model: nn.Module, steps: ModelSteps) -> nn.Module:
        """Divide blocks, then what is around them; each rank starts with rank 0's weights."""
        model = steps.place(steps.convert(model))
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0)
        mesh = self.options.mesh.device_mesh
        for block in repeated_blocks(model):
            fully_shard(block, mesh=mesh)
        return steps.compile(fully_shard(model, mesh=mesh))

    def begin_micro_batch(self, models: Sequence[nn.Module], *, last: bool, loss_factor: float) -> None:
        """Reduce in the last micro-batch only."""
        self._set_sync(models, last or self.options.sync_each_batch)

    def end_micro_batch(self, models: Sequence[nn.Module], *, last: bool) -> None:
        """Reduce again."""
        self._set_sync(models, True)

    def _set_sync(self, models: Sequence[nn.Module], enabled: bool) -> None:
        for model in models:
            plain = self.plain(model)
            if isinstance(plain, FSDPModule):
                plain.set_requires_gradient_sync(enabled)

    def gradient_norm(self, parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm over all ranks' parts."""
        return _whole(super().gradient_norm(parameters, norm_type))

    def clip_grad_norm_(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip by the norm over all ranks' parts."""
        return _whole(super().clip_grad_norm_(parameters, max_norm, norm_type))

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Whole tensors, gathered on every rank."""
        return {name: _whole(value) for name, value in self.model_state(model).items()}


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value
