"""The steps of preparing a model, which a strategy calls in the order that its engine needs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from accel_ckpt.modules.ties import find_tied_parameters, retie_parameters
from accel_train.errors import PrepareError
from accel_train.plugins import TorchDynamoPlugin
from accel_train.precision.base import Precision
from accel_train.precision.restoring import restore_model
from accel_train.setup.compile import compile_model
from accel_train.setup.unwrap import plain_module
from accel_train.strategies.fsdp2.initial_values import place_whole
from accel_train.strategies.wrappers import reduced_by_fsdp

__all__ = ["Steps", "place_model"]


@dataclass(frozen=True)
class Steps:
    """The steps for the models of one `prepare()` call.

    Attributes:
        precision: converts models.
        device: where they go.
        dynamo: whether and how they are compiled.
        as_is: models that the script moves itself, by `id`.
    """

    precision: Precision
    device: torch.device
    dynamo: TorchDynamoPlugin
    as_is: Collection[int] = ()

    def convert(self, model: nn.Module) -> nn.Module:
        """Make a model compute in the precision; what an earlier accelerator did to it is undone."""
        inner = plain_module(model)
        restore_model(inner)
        converted = self.precision.convert(inner)
        return model if converted is inner else converted

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, unless the script moves it itself or a device map already spread it."""
        return model if id(model) in self.as_is else place_model(model, self.device)

    def compile(self, model: nn.Module) -> nn.Module:
        """`torch.compile`, as the dynamo plugin says."""
        return compile_model(model, self.dynamo)

    def compile_in_place(self, model: nn.Module) -> None:
        """Compile without a wrapper, for engines that need the module itself."""
        compile_model(model, self.dynamo, in_place=True)


def place_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model, except what `fully_shard` manages, unless a device map already spread it.

    Raises:
        PrepareError: parameters without storage, which no `.to()` can fill.
    """
    device_map = getattr(model, "hf_device_map", None)
    if device_map is not None and len(set(device_map.values())) > 1:
        return model
    devices = {tensor.device.type for tensors in (model.parameters(), model.buffers()) for tensor in tensors}
    if devices <= {"cpu"} and device.type == "cpu" and type(model).to is nn.Module.to:
        return model  # nothing can be elsewhere; walking the modules to find that out takes most of `prepare`
    managed = reduced_by_fsdp(plain_module(model))
    if managed:  # where FSDP has put them, which may be the host
        tensors = (*model.parameters(), *model.buffers())
        place_whole((tensor for tensor in tensors if id(tensor) not in managed), device)
        return model
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        raise PrepareError(
            f"Parameter {meta[0]!r} (the first of {len(meta)}) is on the meta device and has no values to move to "
            f"{device}. Load a checkpoint first (load_checkpoint_in_model), or build the model without "
            "init_empty_weights()."
        )
    # A move to XLA puts new parameters in the place of the old ones, for each name another.
    tied = find_tied_parameters(model) if device.type == "xla" else []
    moved = model.to(device)
    retie_parameters(moved, tied)
    return moved
