"""Options of distributed data parallelism (DDP) and of gradient compression."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accel_state.enums import BaseEnum
from accel_state.handlers import KwargsHandler
from accel_train.errors import OptionError

__all__ = ["DDPCommunicationHookType", "DistributedDataParallelKwargs"]


class DDPCommunicationHookType(BaseEnum):
    """Gradient compression in DDP: which communication hook reduces the gradients."""

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
        comm_hook: how gradients are compressed for the all-reduce.
        comm_wrapper: cast gradients around a PowerSGD hook: no, fp16 or bf16.
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
        if self.comm_hook not in allowed:
            self._power_sgd_state()  # find out now what it refuses
        elif self.comm_state_option:
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
        """Register the chosen communication hook on a DDP model; does nothing if none is chosen."""
        found = self.communication_hook()
        if found is not None:
            state, hook = found
            model.register_comm_hook(state, hook)

    def communication_hook(self) -> tuple[Any, Callable[..., Any]] | None:
        """State and function of the chosen hook, as DDP's `register_comm_hook` takes them; None if none is chosen."""
        if self.comm_hook is DDPCommunicationHookType.NO:
            return None
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        from accel_train.plugins.ddp_hooks import batched_power_sgd, on_any_backend

        hooks: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
            DDPCommunicationHookType.BF16: on_any_backend(default_hooks.bf16_compress_hook),
            DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
            DDPCommunicationHookType.BATCHED_POWER_SGD: batched_power_sgd,
        }
        hook = hooks[self.comm_hook]
        if self.comm_wrapper is DDPCommunicationHookType.FP16:
            hook = default_hooks.fp16_compress_wrapper(hook)
        elif self.comm_wrapper is DDPCommunicationHookType.BF16:
            hook = on_any_backend(default_hooks.bf16_compress_wrapper(hook))
        if self.comm_hook in (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD):
            return self._power_sgd_state(), hook
        return None, hook

    def _power_sgd_state(self) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        known = [name for name in inspect.signature(PowerSGDState).parameters if name != "process_group"]
        unknown = [name for name in self.comm_state_option if name not in known]
        if unknown:
            raise OptionError(
                f"comm_state_option has {unknown[0]!r}, which PowerSGDState does not take; it takes "
                f"{', '.join(known)}."
            )
        try:
            return PowerSGDState(process_group=None, **self.comm_state_option)
        except ValueError as error:
            raise OptionError(f"comm_state_option={self.comm_state_option!r}: {error}") from error


def _hook_type(name: str, value: object) -> DDPCommunicationHookType:
    try:
        return DDPCommunicationHookType(value)
    except ValueError:
        known = ", ".join(DDPCommunicationHookType.list())
        raise OptionError(f"{name} must be one of {known}, got {value!r}.") from None
