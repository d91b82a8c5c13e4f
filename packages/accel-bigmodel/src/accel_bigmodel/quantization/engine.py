"""The interface of a quantisation engine, and the engine for a configuration."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from accel_bigmodel.errors import QuantizationError
from accel_bigmodel.quantization.config import QuantizationConfig
from accel_state.errors import MissingDependencyError
from accel_state.host.versions import install_extra

__all__ = ["Engine", "Pieces", "quantization_engine"]

Pieces = Mapping[str, torch.Tensor]
"""The plain tensors that a quantised weight is saved as, by their names after ``<layer>.``."""

# Package of an engine → the one module that imports it, and the class there.
_ENGINES = {
    "bitsandbytes": ("accel_bigmodel.quantization.bnb", "BitsAndBytesEngine"),
    "torchao": ("accel_bigmodel.quantization.ao", "TorchAoEngine"),
}


class Engine(Protocol):
    """A quantisation engine for one configuration."""

    flags: Mapping[str, Any]
    """Attributes to set on the quantised model, which other libraries read."""

    def why_not(self, layer: nn.Linear, device: torch.device) -> str | None:
        """The reason why a layer cannot be quantised on a device; ``None`` if it can."""

    def quantize(self, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> nn.Module:
        """A layer with the quantised ``weight`` that replaces ``layer`` and takes over its bias.

        Args:
            layer: the layer to replace; its own weight is not used.
            weight: values of a floating dtype, on any device.
            device: where the quantised weight goes.
        """

    def expected_pieces(
        self, layer: nn.Linear, device: torch.device
    ) -> Mapping[str, tuple[torch.Size | None, torch.dtype]]:
        """Shape and dtype of every piece of a quantised weight; a shape of ``None`` matches any."""

    def restore(self, layer: nn.Linear, pieces: Pieces, device: torch.device) -> nn.Module:
        """Restore a weight that was saved after quantisation; shapes and dtypes were checked.

        Raises:
            QuantizationError: other metadata in the pieces does not match the configuration.
        """


def quantization_engine(config: QuantizationConfig) -> Engine:
    """The engine of a configuration.

    Raises:
        MissingDependencyError: its package is not installed.
        QuantizationError: ``config`` is not a configuration of an engine.
    """
    package = getattr(config, "engine", "")
    if package not in _ENGINES:
        raise QuantizationError(
            f"{config!r} is not a quantisation configuration; give a BnbQuantizationConfig or a "
            "TorchAoQuantizationConfig"
        )
    module, name = _ENGINES[package]
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingDependencyError(
            f"{config.format} weights need {package}: {install_extra('accel-bigmodel', package)}"
        ) from error
    engine: Engine = getattr(home, name)(config)
    return engine
