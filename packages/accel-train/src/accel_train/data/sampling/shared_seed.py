"""Random draws that all ranks agree on: rank 0's value, sent to the others once an epoch."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.operations import collectives
from accel_state.world.process import current_state
from accel_train.ranks import Ranks

__all__ = ["Alone", "FromMain", "Sharing", "sharing_for"]


class Alone:
    """One rank, or several ranks that are only simulated: what is drawn here holds."""

    alone = True

    def integer(self, value: int) -> int:
        """The value itself."""
        return value

    def state(self, value: Tensor) -> Tensor:
        """The state itself."""
        return value

    def of_index(self, value: Any, ranks: Ranks) -> Any:
        """The value itself."""
        return value


class FromMain:
    """Sends a random draw of rank 0 to every rank of the world group.

    Args:
        device: where tensors must be for the group's backend.
    """

    alone = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def integer(self, value: int) -> int:
        """Rank 0's `value` (fits int64, also without a sign)."""
        signed = value - 2**64 if value >= 2**63 else value
        tensor = torch.tensor([signed], dtype=torch.int64, device=self._device)
        collectives.broadcast(tensor)
        return int(tensor.item()) % 2**64

    def state(self, value: Tensor) -> Tensor:
        """Rank 0's state of a generator, a uint8 CPU tensor of the same length on all ranks."""
        tensor = value.to(self._device, copy=True)
        collectives.broadcast(tensor)
        return tensor.cpu()

    def of_index(self, value: Any, ranks: Ranks) -> Any:
        """The `value` of the first rank that has this rank's index."""
        values = collectives.gather_object([value if ranks.is_first else None])
        return values[ranks.index_of.index(ranks.index)]


Sharing: TypeAlias = Alone | FromMain
"""How ranks agree on random draws."""


def communication_device() -> torch.device:
    """The device of tensors that the world group can send: host memory if a backend for it exists."""
    if "cpu" in dist.get_backend_config():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "a process group without a CPU backend runs on an accelerator"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def sharing_for(ranks: Ranks) -> Sharing:
    """All ranks of the world share draws, those that read the same samples included; without a world, none."""
    process = current_state()
    if process is not None and process.rehearsal is not None:
        return Alone()
    if ranks.world_size > 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return FromMain(communication_device())
    return Alone()
