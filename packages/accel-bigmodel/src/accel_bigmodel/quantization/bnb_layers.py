"""Finding layers of bitsandbytes in a model, and replacing linear layers by them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from accel_bigmodel.quantization.config import BnbQuantizationConfig
from accel_bigmodel.quantization.engine import quantization_engine
from accel_bigmodel.quantization.selection import select_layers

__all__ = ["has_4bit_bnb_layers", "replace_with_bnb_layers"]

Model = TypeVar("Model", bound=nn.Module)


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a model has 4-bit layers of bitsandbytes, made by this library or another."""
    engine = sys.modules.get("bitsandbytes")  # if it is not imported, there are none
    return engine is not None and any(isinstance(module, engine.nn.Linear4bit) for module in model.modules())


def replace_with_bnb_layers(
    model: Model,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> Model:
    """Replace linear layers by layers of bitsandbytes with the same weights, not quantised yet.

    bitsandbytes quantises them when the model is moved from the CPU to a device, including the CPU itself.
    ``load_and_quantize_model`` does all of this in one step, one weight at a time.

    Args:
        model: changed in place; weights on the CPU or on the meta device.
        bnb_quantization_config: how they will be quantised.
        modules_to_not_convert: names of modules that are not replaced; by default those of ``get_keys_to_not_convert``.
        current_key_name: accepted for compatibility with Accelerate; not used.

    Raises:
        MissingDependencyError: bitsandbytes is not installed.
        QuantizationError: the model has no layer to replace.
    """
    config = bnb_quantization_config
    if modules_to_not_convert is not None:
        config = replace(config, skip_modules=list(modules_to_not_convert))
    engine: Any = quantization_engine(config)
    for layer in select_layers(model, config):
        new = engine.unquantized(layer.module, layer.module.weight)
        for name in layer.names:
            model.set_submodule(name, new)
    return model
