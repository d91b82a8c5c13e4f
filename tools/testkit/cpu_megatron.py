"""Run megatron-core on the CPU, for tests: what it asks of `torch.cuda` by name is answered by the CPU.

megatron-core allocates on "cuda", seeds CUDA's generators and waits for CUDA's streams wherever it runs. None of this
changes what it computes, so its layers, schedules and optimizers can be compared with plain PyTorch without a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["install"]

_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # which needs a device to copy to
        return factory(*args, **kwargs)

    return made


def _named_as_cuda(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return named


def install() -> None:
    """Route megatron-core's calls of `torch.cuda` to the CPU in this process, and let the strategy run there."""
    if getattr(torch.cuda, "_answered_by_cpu", False):
        return
    torch.cuda._answered_by_cpu = True  # type: ignore[attr-defined]
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.type = _named_as_cuda(torch.Tensor.type)  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign, assignment]
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args: None
    cuda.empty_cache = lambda: None
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.default_stream = cuda.current_stream = lambda *args: _Stream()
    cuda.stream = lambda *args: contextlib.nullcontext()
    warnings.filterwarnings("ignore", module="megatron")
    # That the CPU's random state changes in what it takes for the GPU's: here they are one.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    from accel_train.strategies.megatron.strategy import MegatronStrategy

    MegatronStrategy.capabilities = dataclasses.replace(
        MegatronStrategy.capabilities, device_types=frozenset({"cpu", "cuda"})
    )


class _Stream:
    def wait_stream(self, other: object) -> None:
        """Nothing runs beside the CPU."""
