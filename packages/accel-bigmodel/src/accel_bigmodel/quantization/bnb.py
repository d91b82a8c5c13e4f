"""Linear layers of bitsandbytes in 8 and 4 bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import bitsandbytes.nn as bnb
import torch
from torch import nn

from accel_bigmodel.errors import QuantizationError
from accel_bigmodel.quantization.config import BnbQuantizationConfig
from accel_bigmodel.quantization.engine import Pieces
from accel_ckpt.tensor_storage import as_bytes

__all__ = ["BitsAndBytesEngine", "Linear4bit"]

_BLOCK = 64  # weights per scale
_NESTED_BLOCK = 256  # scales per nested scale

# The layout for AVX512-BF16 requires multiples of these.
_PACKED_OUTPUTS, _PACKED_INPUTS = 32, 64


class Linear4bit(bnb.Linear4bit):  # type: ignore[misc] # bitsandbytes is not there for type checkers
    """bitsandbytes' layer, which refuses to save rounded scales."""

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # bitsandbytes 0.50.2 would undo the layout here, with the scales rounded to bfloat16 and in another order.
        if getattr(self.weight.quant_state, "packing_format_for_cpu", False):
            raise QuantizationError(
                "the first forward repacked the weights of this model for the CPU (bnb_4bit_cpu_packing=True), which "
                "rounds the scales; save the model before its first forward, or load it without bnb_4bit_cpu_packing"
            )
        super()._save_to_state_dict(*args, **kwargs)


class BitsAndBytesEngine:
    """Quantises with bitsandbytes, for one configuration."""

    def __init__(self, config: BnbQuantizationConfig) -> None:
        self.config = config
        self.flags: Mapping[str, Any] = {
            "is_loaded_in_8bit": config.load_in_8bit,
            "is_loaded_in_4bit": config.load_in_4bit,
            "quantization_method": "bitsandbytes",
        }

    def why_not(self, layer: nn.Linear, device: torch.device) -> str | None:
        """Refuse odd numbers of 4-bit weights, because two share a byte."""
        if self.config.load_in_4bit and layer.in_features * layer.out_features % 2:
            return "has an odd number of weights, but bitsandbytes stores two in a byte"
        return None

    def quantize(self, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> nn.Module:
        """A layer of bitsandbytes with these weights, quantised on ``device``."""
        if self.config.load_in_8bit:
            weight = weight.cpu()  # it quantises only weights that are moved from the CPU
        new: nn.Module = self.unquantized(layer, weight)
        new.weight = new.weight.to(device)
        return new

    def unquantized(self, layer: nn.Linear, weight: torch.Tensor) -> Any:
        """A layer of bitsandbytes whose weights are quantised when they are moved from the CPU to a device."""
        new = self._without_weight(layer)
        new.weight = (
            bnb.Int8Params(weight.detach(), requires_grad=False, has_fp16_weights=False)
            if self.config.load_in_8bit
            else bnb.Params4bit(
                weight.detach(),
                requires_grad=False,
                compress_statistics=self.config.bnb_4bit_use_double_quant,
                quant_type=self.config.bnb_4bit_quant_type,
                module=new,
            )
        )
        return new

    def expected_pieces(
        self, layer: nn.Linear, device: torch.device
    ) -> dict[str, tuple[torch.Size | None, torch.dtype]]:
        """The entries of the state dicts of bitsandbytes' `Linear8bitLt` and `Linear4bit`."""
        shape = torch.Size((layer.out_features, layer.in_features))
        if self.config.load_in_8bit:
            return {
                "weight": (shape, torch.int8),
                "SCB": (shape[:1], torch.float32),
                "weight_format": (torch.Size(()), torch.uint8),
            }
        scales = -(-shape.numel() // _BLOCK)
        nested = self.config.bnb_4bit_use_double_quant
        expected: dict[str, tuple[torch.Size | None, torch.dtype]] = {
            "weight": (torch.Size((shape.numel() // 2, 1)), torch.uint8),
            "weight.absmax": (torch.Size((scales,)), torch.uint8 if nested else torch.float32),
            "weight.quant_map": (torch.Size((16,)), torch.float32),
            self._description: (None, torch.uint8),
        }
        if nested:
            expected["weight.nested_absmax"] = torch.Size((-(-scales // _NESTED_BLOCK),)), torch.float32
            expected["weight.nested_quant_map"] = torch.Size((256,)), torch.float32
        return expected

    def restore(self, layer: nn.Linear, pieces: Pieces, device: torch.device) -> nn.Module:
        """A layer of bitsandbytes from its saved tensors."""
        new: nn.Module = self._without_weight(layer)
        if self.config.load_in_8bit:
            if (order := int(pieces["weight_format"])) != 0:
                raise QuantizationError(
                    f"weight_format is {order}; bitsandbytes reads only 0, row-major order"
                )
            # Copies, because the engine's kernels do not support mapped files.
            weight, scale = (pieces[name].to(device, copy=True) for name in ("weight", "SCB"))
            new.weight = bnb.Int8Params(
                weight, requires_grad=False, has_fp16_weights=False, CB=weight, SCB=scale
            )
            return new
        self._check_description(layer, pieces[self._description])
        beside = {name: value.to(device, copy=True) for name, value in pieces.items() if name != "weight"}
        beside[self._description] = pieces[self._description]
        new.weight = bnb.Params4bit.from_prequantized(
            pieces["weight"].to(device, copy=True), beside, requires_grad=False, device=device, module=new
        )
        return new

    @property
    def _description(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.config.bnb_4bit_quant_type}"

    def _check_description(self, layer: nn.Linear, text: torch.Tensor) -> None:
        """Refuse metadata with which the engine would read past the end of the weights."""
        try:
            found = json.loads(bytes(as_bytes(text.cpu().contiguous())))
        except (ValueError, RecursionError) as error:
            raise QuantizationError(f"{self._description} cannot be read: {error}") from error
        expected: dict[str, Any] = {
            "quant_type": self.config.bnb_4bit_quant_type,
            "blocksize": _BLOCK,
            "shape": [layer.out_features, layer.in_features],
        }
        if self.config.bnb_4bit_use_double_quant:
            expected |= {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32"}
        seen = {key: found.get(key) for key in expected} if isinstance(found, dict) else found
        if seen != expected or found.get("dtype") not in ("float32", "float16", "bfloat16"):
            raise QuantizationError(f"{self._description} is {found}, expected {expected}")
        numbers = ["nested_offset"] if self.config.bnb_4bit_use_double_quant else []
        # The engine asserts the names, and would take an entry with the name of a tensor for it.
        if unknown := sorted(found.keys() - expected.keys() - {"dtype", *numbers}):
            raise QuantizationError(
                f"{self._description} has unknown entries {unknown}, expected {[*expected, 'dtype', *numbers]}"
            )
        if numbers and not _is_number(found.get("nested_offset")):
            raise QuantizationError(f"{self._description} is {found}, expected a number as nested_offset")

    def _without_weight(self, layer: nn.Linear) -> Any:
        sizes = layer.in_features, layer.out_features
        new: Any
        if self.config.load_in_8bit:
            threshold = float(self.config.llm_int8_threshold)
            new = bnb.Linear8bitLt(
                *sizes, bias=False, has_fp16_weights=False, threshold=threshold, device="meta"
            )
        else:
            new = Linear4bit(
                *sizes,
                bias=False,
                compute_dtype=self.config.bnb_4bit_compute_dtype,
                compress_statistics=self.config.bnb_4bit_use_double_quant,
                quant_type=self.config.bnb_4bit_quant_type,
                device="meta",
            )
            fits = not (layer.out_features % _PACKED_OUTPUTS or layer.in_features % _PACKED_INPUTS)
            # bitsandbytes 0.50.2 fails on other sizes at the first forward.
            if not (self.config.bnb_4bit_cpu_packing and fits):
                new.support_avx512bf16_for_cpu = False
        new.bias = layer.bias
        return new.train(layer.training)


def _is_number(value: Any) -> bool:
    """Whether JSON's value can be a float: its integers have no limit."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
