"""Buffers that each rank updates by itself, such as BatchNorm's running averages: evaluation uses the saved ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from accel_ckpt.parts import is_sharded
from accel_state.operations.collectives import broadcast

__all__ = ["running_averages", "saved_buffers", "share_in_evaluation"]


def saved_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that a state dict holds and every rank has whole, each once."""
    found = [
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set and not is_sharded(buffer)
    ]
    return list({id(buffer): buffer for buffer in found}.values())


def running_averages(model: nn.Module) -> list[Tensor]:
    """The saved buffers in which normalisation layers keep averages over batches."""
    own = {
        id(buffer)
        for module in model.modules()
        if isinstance(module, _NormBase)
        for buffer in module.buffers()
    }
    return [buffer for buffer in saved_buffers(model) if id(buffer) in own]


def share_in_evaluation(
    model: nn.Module,
    called: nn.Module,
    buffers: Callable[[nn.Module], list[Tensor]],
    apart: Callable[[], bool] = lambda: False,
    send: Callable[[list[Tensor]], object] = broadcast,
) -> None:
    """Give all ranks rank 0's buffers, which checkpoints hold, in the first evaluation after each training.

    Args:
        model: the model without wrappers.
        called: the module that the script calls; its first forward in evaluation mode is a collective.
        buffers: chooses the buffers of the model; a model without any is left as it is.
        apart: called by such a forward; whether this rank evaluates separately.
        send: gives the ranks that hold the model the values of the first of them; by default all ranks.
    """
    if not buffers(model):
        return
    trained = False

    def share(module: nn.Module, inputs: Any) -> None:
        nonlocal trained
        if torch.compiler.is_compiling():
            return
        if model.training:
            trained = True
        elif trained:
            trained = False
            if not apart():
                with torch.inference_mode(False), torch.no_grad():
                    send(buffers(model))

    called.register_forward_pre_hook(share, prepend=True)
