"""Runtime support for DeepSpeed: device, process group, and inputs in the dtype of computation."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_state import environment
from accel_state.trees import recursively_apply
from accel_state.world.process import PartialState
from accel_state.world.process_group import leave_at_exit

__all__ = ["cast_inputs", "make_engine", "start"]


def make_engine(device: torch.device, **arguments: Any) -> Any:
    """Create DeepSpeed's engine on this process's device, over its process group.

    Args:
        device: device of this process.
        arguments: arguments of `deepspeed.initialize`.
    """
    start(device)
    import deepspeed

    engine, *_ = deepspeed.initialize(dist_init_required=False, **arguments)
    return engine


def start(device: torch.device) -> None:
    """Make DeepSpeed use this process's device and process group; a single process gets a new group."""
    environment.provide(LOCAL_RANK=PartialState().local_process_index)  # DeepSpeed reads it in every forward
    # Without it DeepSpeed looks for an accelerator, and prints how.
    chosen = {"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {}
    with environment.patch_environment(**chosen):
        _choose(device)


def _choose(device: torch.device) -> None:
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
        leave_at_exit(device)
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if device.type == "cpu":
        if get_accelerator().device_name() != "cpu":
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            set_accelerator(CPU_Accelerator())
        # An operator for inference, which would be compiled here, and is never used in training.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger = deepspeed.utils.logger
    if logger.level < logging.WARNING:
        logger.setLevel(logging.WARNING)  # each engine describes itself in some dozens of lines
    deepspeed.init_distributed(dist_init_required=False, verbose=False)


def cast_inputs(model: nn.Module, compute: torch.dtype | None) -> None:
    """Cast a model's floating-point inputs to the dtype that it computes in, and its outputs to float32.

    Args:
        model: the module inside the engine.
        compute: dtype of computation; None: inputs are not cast.
    """
    if compute is None or getattr(model, "_accel_casts_to", None) == compute:
        return
    model._accel_casts_to = compute  # type: ignore[assignment]

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _floats_to(args, compute), _floats_to(kwargs, compute)

    def leave(module: nn.Module, args: Any, outputs: Any) -> Any:
        return _floats_to(outputs, torch.float32)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave)


def _floats_to(data: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype)

    def wanted(value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype

    return recursively_apply(cast, data, test_type=wanted)
