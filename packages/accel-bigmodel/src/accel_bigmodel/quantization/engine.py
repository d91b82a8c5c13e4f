"""What an engine has to offer, and finding the one for a configuration."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from accel_bigmodel.errors import QuantizationError
from accel_bigmodel.quantization.config import QuantizationConfig
from accel_state.errors import MissingDependencyError

__all__ = ["Engine", "Pieces", "quantization_engine"]

Pieces = Mapping[str, torch.Tensor]
"""Plain tensors that a quantised weight is saved as, by what stands behind ``<layer>.`` in their names."""

# Package of an engine → the one module that imports it, and the class there.
_ENGINES = {
    "bitsandbytes": ("accel_bigmodel.quantization.bnb", "BitsAndBytesEngine"),
    "torchao": ("accel_bigmodel.quantization.ao", "TorchAoEngine"),
}


class Engine(Protocol):
    """One engine, set up for one configuration."""

    flags: Mapping[str, Any]
    """Attributes that the quantised model gets, for others to read."""

    def why_not(self, layer: nn.Linear, device: torch.device) -> str | None:
        """Why a layer cannot be quantised on a device; ``None`` if it can."""

    def quantize(self, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> nn.Module:
        """A layer that computes with a quantised ``weight`` in place of ``layer``, whose bias it takes over.

        Args:
            layer: what to replace; its own weight is not looked at.
            weight: plain values of a floating dtype, on any device.
            device: where the quantised weight goes.
        """

    def expected_pieces(
        self, layer: nn.Linear, device: torch.device
    ) -> Mapping[str, tuple[torch.Size | None, torch.dtype]]:
        """Shape and dtype of every piece of a quantised weight; a shape of ``None`` is any."""

    def restore(self, layer: nn.Linear, pieces: Pieces, device: torch.device) -> nn.Module:
        """As ``quantize``, of a weight that was quantised before it was saved; shapes and dtypes are as expected.

        Raises:
            QuantizationError: what the pieces say besides is not what the configuration asks for.
        """


def quantization_engine(config: QuantizationConfig) -> Engine:
    """The engine of a configuration.

    Raises:
        MissingDependencyError: its package is not installed.
        QuantizationError: ``config`` is no configuration of an engine.
    """
    package = getattr(config, "engine", "")
    if package not in _ENGINES:
        raise QuantizationError(
            f"{config!r} is no configuration; give a BnbQuantizationConfig or a TorchAoQuantizationConfig"
        )
    module, name = _ENGINES[package]
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingDependencyError(
            f"{config.format} weights need {package}: pip install 'accel-bigmodel[{package}]'"
        ) from error
    engine: Engine = getattr(home, name)(config)
    return engine
