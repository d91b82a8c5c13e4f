"""States of DeepSpeed's engines in host memory, by `offload_states` and `reload_states` of the engines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from accel_state.errors import NotAvailableError
from accel_train.errors import OffloadedStatesError
from accel_train.offload.host_copies import Offloaded

__all__ = ["EngineOffload", "check_engine"]

_STATES = {
    "parameters": ("lp_params",),
    "gradients": ("lp_grads", "contiguous_grad_buffer"),
    "optimizer": ("hp_params", "optim_states"),
}


def check_engine(engine: Any, *, stage: int, kinds: Collection[str], waiting: bool) -> None:
    """Check that an engine can move kinds of states, before it asserts so in the middle of moving them.

    Args:
        engine: the engine.
        stage: of ZeRO.
        kinds: kinds of states.
        waiting: gradients wait for a step.

    Raises:
        NotAvailableError: it cannot.
        OffloadedStatesError: it cannot now.
    """
    if not hasattr(engine.optimizer, "offload_states"):
        raise NotAvailableError(
            f"offload_states() under DeepSpeed moves what ZeRO's stages 1 to 3 hold, and this engine has "
            f"{type(engine.optimizer).__name__} (stage {stage}). Set zero_stage=1 or higher, and prepare the model "
            "with its optimizer."
        )
    offload = engine.zero_offload_param()
    if offload is not None and offload.device != "none":
        raise NotAvailableError(
            "offload_states() under DeepSpeed does not move states of an engine whose parameters offload_param already "
            "keeps elsewhere. Leave offload_param out."
        )
    if stage == 3 and "optimizer" in kinds and not engine.zero_use_cpu_optimizer():
        _check_adam(engine)
    if waiting:
        raise OffloadedStatesError(
            "offload_states() was called between backward() and step(), and DeepSpeed drops gradients when it moves "
            "states. Call it after optimizer.step()."
        )


def _check_adam(engine: Any) -> None:
    from deepspeed.ops.adam import FusedAdam

    if type(engine.basic_optimizer) is not FusedAdam:
        raise NotAvailableError(
            f"offload_states() of optimizer states under ZeRO's stage 3 needs DeepSpeed's FusedAdam, and the engine "
            f"steps {type(engine.basic_optimizer).__name__}. Let the DeepSpeed configuration make an Adam or AdamW "
            "(section 'optimizer', DummyOptim), or pass include=('parameters', 'gradients')."
        )


class EngineOffload:
    """States of one engine in host memory.

    Args:
        engine: accepted by `check_engine`.
        kinds: kinds of states.
        device: of this rank.
        pinned: pin host memory.

    Attributes:
        freed: bytes by kind and device, as the difference of what torch's allocator has given out.
        kept: nothing.
    """

    def __init__(self, engine: Any, kinds: Collection[str], device: torch.device, pinned: bool) -> None:
        self._engine = engine
        self.freed: dict[tuple[str, str], int] = {}
        self.kept: Mapping[str, int] = {}
        try:
            for kind in sorted(kinds):
                self._offload(kind, device, pinned)
        except BaseException:
            self.reload()
            raise

    def _offload(self, kind: str, device: torch.device, pinned: bool) -> None:
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        include = [OffloadStateTypeEnum(name) for name in _STATES[kind]]
        if device.type == "cpu":  # where there is nothing to pin memory for, and nothing to count
            self._engine.offload_states(include=include, pin_memory=False)
            return
        before = torch.accelerator.memory_allocated(device)
        self._engine.offload_states(include=include, pin_memory=pinned)
        self.freed[kind, str(device)] = before - torch.accelerator.memory_allocated(device)

    def check_reload(self, others: Iterable[Offloaded]) -> None:
        """Always possible: an engine shares nothing with others."""

    def reload(self) -> None:
        """Move all states of the engine back, also those that other calls have moved."""
        self._engine.reload_states()
