"""Configurations of quantised models, one class per engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch

from accel_bigmodel.errors import QuantizationError
from accel_ckpt.tensor_storage import parse_dtype
from accel_state.messages import warn

__all__ = ["BnbQuantizationConfig", "QuantizationConfig", "TorchAoQuantizationConfig"]

_SHORT = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class BnbQuantizationConfig:
    """Quantise linear layers to 8 or 4 bits with bitsandbytes.

    Exactly one of ``load_in_8bit`` and ``load_in_4bit`` must be on. Names, order and defaults are Accelerate's.

    Args:
        load_in_8bit: 8 bits per weight, one scale per row.
        llm_int8_threshold: with 8 bits: input columns that contain a larger magnitude are computed in 16 bits.
        load_in_4bit: 4 bits per weight, one scale per 64 weights.
        bnb_4bit_quant_type: with 4 bits: the data type, ``"fp4"`` or ``"nf4"``.
        bnb_4bit_use_double_quant: with 4 bits: quantise the scales too.
        bnb_4bit_compute_dtype: with 4 bits: the dtype of computation: ``"fp32"``, ``"fp16"``, ``"bf16"``, or a dtype.
        torch_dtype: dtype of tensors that are not quantised, and of weights just before quantisation; by default
            float16 with 8 bits and the compute dtype with 4 bits.
        skip_modules: names of modules that are not quantised: a full name, or a part of one between dots. By default
            those of `get_keys_to_not_convert`. A weight with several names is never quantised.
        keep_in_fp32_modules: names of modules that are not quantised and stay in float32. By default those that
            transformers lists for the model's class, such as ``wo`` of T5.
        bnb_4bit_cpu_packing: with 4 bits, on processors with AVX512-BF16: let bitsandbytes repack the weights before
            the first forward in evaluation mode. Measured on 2048 by 2048: one row 25 times as fast, 256 rows 4 times
            as slow. Repacking rounds the scales to bfloat16, so ``state_dict()`` raises afterwards. Only for layers
            whose outputs are a multiple of 32 and inputs of 64.

    Raises:
        QuantizationError: a value is invalid, or options contradict each other.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: str | torch.dtype | None = None
    skip_modules: Sequence[str] | None = None
    keep_in_fp32_modules: Sequence[str] | None = None
    _: KW_ONLY
    bnb_4bit_cpu_packing: bool = False

    engine: ClassVar[str] = "bitsandbytes"

    def __post_init__(self) -> None:
        """Check the values, and convert names of dtypes to dtypes."""
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant", "bnb_4bit_cpu_packing"):
            _require(self, name, bool, "True or False")
        if self.load_in_8bit == self.load_in_4bit:
            both = "are both on" if self.load_in_8bit else "are both off"
            raise QuantizationError(f"load_in_8bit and load_in_4bit {both}; turn on exactly one of them")
        if isinstance(self.llm_int8_threshold, bool):
            raise QuantizationError(
                f"llm_int8_threshold is {self.llm_int8_threshold}; give a number such as 6.0"
            )
        _require(self, "llm_int8_threshold", (int, float), "a number such as 6.0")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise QuantizationError(
                f"bnb_4bit_quant_type is {self.bnb_4bit_quant_type!r}; give 'fp4' or 'nf4'"
            )
        _check_names(self)
        compute = _dtype_of(self, "bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        object.__setattr__(self, "bnb_4bit_compute_dtype", compute)
        wanted = self.torch_dtype or (torch.float16 if self.load_in_8bit else compute)
        object.__setattr__(self, "torch_dtype", _dtype_of(self, "torch_dtype", wanted))
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            warn("llm_int8_threshold has no effect with load_in_4bit; leave it out")
        if self.load_in_8bit and self.bnb_4bit_cpu_packing:
            raise QuantizationError("bnb_4bit_cpu_packing has no effect with load_in_8bit; leave it out")

    @property
    def format(self) -> str:
        """The row of the support table."""
        return "bitsandbytes int8" if self.load_in_8bit else f"bitsandbytes {self.bnb_4bit_quant_type}"

    @property
    def dtype(self) -> torch.dtype:
        """``torch_dtype``, resolved."""
        return parse_dtype(self.torch_dtype)  # type: ignore[arg-type] # set by __post_init__

    @property
    def stored_as(self) -> str:
        """The name of an integer type with the size of a quantised weight."""
        return "int8" if self.load_in_8bit else "int4"

    @property
    def overhead(self) -> float:
        """Bytes of scales per byte of quantised weights; scales per row are not counted."""
        if self.load_in_8bit:
            return 0.0
        scale = 1 + 4 / 256 if self.bnb_4bit_use_double_quant else 4
        return scale / (64 / 2)


@dataclass(frozen=True)
class TorchAoQuantizationConfig:
    """Quantise the weights of linear layers with torchao; activations keep their dtype.

    Args:
        weights: ``"int8"`` or ``"float8"`` (e4m3): one scale per row; ``"int4"``: scale and zero point per group.
        group_size: with ``"int4"``: weights of a row per scale: 32, 64 or 128.
        torch_dtype: dtype of computation, of tensors that are not quantised, and of weights just before quantisation:
            ``"fp32"``, ``"fp16"``, ``"bf16"``, or a dtype.
        skip_modules: names of modules that are not quantised: a full name, or a part of one between dots. By default
            those of `get_keys_to_not_convert`. A weight with several names is never quantised.
        keep_in_fp32_modules: names of modules that are not quantised and stay in float32. By default those that
            transformers lists for the model's class, such as ``wo`` of T5.

    Raises:
        QuantizationError: a value is invalid.
    """

    weights: str
    _: KW_ONLY
    group_size: int = 128
    torch_dtype: str | torch.dtype = torch.bfloat16
    skip_modules: Sequence[str] | None = None
    keep_in_fp32_modules: Sequence[str] | None = None

    engine: ClassVar[str] = "torchao"

    def __post_init__(self) -> None:
        """Check the values, and convert the name of a dtype to the dtype."""
        if self.weights not in ("int8", "int4", "float8"):
            raise QuantizationError(f"weights is {self.weights!r}; give 'int8', 'int4' or 'float8'")
        if self.group_size not in (32, 64, 128):
            raise QuantizationError(f"group_size is {self.group_size!r}; give 32, 64 or 128")
        if self.weights != "int4" and self.group_size != 128:
            raise QuantizationError(f"group_size has no effect with {self.weights!r} weights; leave it out")
        _check_names(self)
        object.__setattr__(self, "torch_dtype", _dtype_of(self, "torch_dtype", self.torch_dtype))

    @property
    def format(self) -> str:
        """The row of the support table."""
        return f"torchao {self.weights}"

    @property
    def dtype(self) -> torch.dtype:
        """``torch_dtype``, resolved."""
        return parse_dtype(self.torch_dtype)

    @property
    def stored_as(self) -> str:
        """The name of an integer type with the size of a quantised weight."""
        return "int4" if self.weights == "int4" else "int8"

    @property
    def overhead(self) -> float:
        """Bytes of scales and zero points per byte of quantised weights; scales per row are not counted."""
        return 2 * self.dtype.itemsize / (self.group_size / 2) if self.weights == "int4" else 0.0


QuantizationConfig = BnbQuantizationConfig | TorchAoQuantizationConfig


def _require(config: Any, name: str, kind: type | tuple[type, ...], expected: str) -> None:
    value = getattr(config, name)
    if not isinstance(value, kind):
        raise QuantizationError(f"{name} is {value!r}; give {expected}")


def _check_names(config: Any) -> None:
    for name in ("skip_modules", "keep_in_fp32_modules"):
        value = getattr(config, name)
        plain = isinstance(value, list | tuple) and all(isinstance(item, str) and item for item in value)
        if value is not None and not plain:
            raise QuantizationError(
                f"{name} is {value!r}; give a list of names of modules, such as ['lm_head']"
            )


def _dtype_of(config: Any, name: str, value: Any) -> torch.dtype:
    try:
        dtype = parse_dtype(_SHORT.get(value, value))
    except (ValueError, TypeError) as error:
        raise QuantizationError(
            f"{name} of {type(config).__name__} is {value!r}; give {_choices()}"
        ) from error
    if dtype not in _SHORT.values():
        raise QuantizationError(f"{name} of {type(config).__name__} is {dtype}; give {_choices()}")
    return dtype


def _choices() -> str:
    return "'fp32', 'fp16', 'bf16', or the dtype of one of them"
