"""Options of distributed data parallelism (DDP) and of the compression of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accel_state.enums import BaseEnum
from accel_state.handlers import KwargsHandler
from accel_train.errors import OptionError

__all__ = ["DDPCommunicationHookType", "DistributedDataParallelKwargs"]


class DDPCommunicationHookType(BaseEnum):
    """Gradient compression of ddp."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of `torch.nn.parallel.DistributedDataParallel`, under its names and with its defaults.

    `gradient_as_bucket_view` is on: gradients are views of the communication buckets, which saves one copy of them.

    Attributes:
        comm_hook: compression of the gradients in flight.
        comm_wrapper: cast around a PowerSGD hook: no, fp16 or bf16.
        comm_state_option: options of `PowerSGDState`.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = _hook_type("comm_hook", self.comm_hook)
        self.comm_wrapper = _hook_type("comm_wrapper", self.comm_wrapper)
        allowed = (
            DDPCommunicationHookType.NO,
            DDPCommunicationHookType.FP16,
            DDPCommunicationHookType.BF16,
        )
        if self.comm_wrapper not in allowed:
            raise OptionError(f"comm_wrapper must be no, fp16 or bf16, got {str(self.comm_wrapper)!r}.")
        if self.comm_wrapper is not allowed[0] and self.comm_hook is allowed[0]:
            raise OptionError(
                f"comm_wrapper={str(self.comm_wrapper)!r} casts around a comm_hook, and there is none. To compress "
                f"gradients alone, use comm_hook={str(self.comm_wrapper)!r}."
            )
        if self.comm_state_option and self.comm_hook in allowed:
            raise OptionError(
                f"comm_state_option={self.comm_state_option!r} is for comm_hook='power_sgd' and 'batched_power_sgd', "
                f"and comm_hook is {str(self.comm_hook)!r}."
            )

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The arguments of the DDP constructor: all fields but those of the communication hook."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Register the chosen hook on a DDP model; does nothing without one."""
        if self.comm_hook is DDPCommunicationHookType.NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
            DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
            DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
        }
        hook = hooks[self.comm_hook]
        state: Any = None
        if self.comm_hook in (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD):
            state = powerSGD_hook.PowerSGDState(process_group=None, **self.comm_state_option)
        if self.comm_wrapper in wrappers:
            hook = wrappers[self.comm_wrapper](hook)
        model.register_comm_hook(state, hook)


def _hook_type(name: str, value: object) -> DDPCommunicationHookType:
    try:
        return DDPCommunicationHookType(value)
    except ValueError:
        known = ", ".join(DDPCommunicationHookType.list())
        raise OptionError(f"{name} must be one of {known}, got {value!r}.") from None
