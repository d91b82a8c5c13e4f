"""Estimates the memory to load a model, to train it and to generate with it, from its shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from accel_bigmodel.device_maps.model_outline import Outline
from accel_bigmodel.errors import EstimateError
from accel_bigmodel.estimates.activations import estimate_activations
from accel_bigmodel.estimates.kv_cache import check_counts, estimate_kv_cache
from accel_ckpt.modules.sizes import DType, dtype_byte_size
from accel_ckpt.modules.tensors import check_is_module, named_module_tensors
from accel_state.messages import readable_size

__all__ = [
    "MemoryEstimate",
    "TrainingEstimate",
    "WeightsEstimate",
    "estimate_activations",
    "estimate_kv_cache",
    "estimate_memory",
    "estimate_training",
    "estimate_weights",
]

DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")


@dataclass(frozen=True)
class WeightsEstimate:
    """Bytes of a model's parameters and buffers in one dtype.

    Attributes:
        dtype: name of the dtype.
        total: total bytes; a tied parameter counts once.
        largest_layer: bytes of the largest layer, the minimum that a device needs to run the model with offloading.
            Direct tensors of a module with submodules, such as stacked experts, count together as a layer.
        largest_layer_names: the layers of that size; ``""`` stands for the model's direct tensors.
    """

    dtype: str
    total: int
    largest_layer: int
    largest_layer_names: tuple[str, ...]


@dataclass(frozen=True)
class TrainingEstimate:
    """Bytes for training with Adam, without activations.

    Attributes:
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``.
        weights: parameters and buffers.
        gradients: gradients of the trainable parameters.
        optimizer: two moments of each trainable parameter, and its step.
        low_precision_copy: the copies of weights that autocast makes in mixed precision.
    """

    mixed_precision: str
    weights: int
    gradients: int
    optimizer: int
    low_precision_copy: int

    @property
    def total(self) -> int:
        """The sum, when the gradients are complete."""
        return self.weights + self.gradients + self.optimizer + self.low_precision_copy


@dataclass(frozen=True)
class MemoryEstimate:
    """The results of ``estimate_memory``, in bytes.

    Attributes:
        name: the model's class.
        parameters: number of parameters; a tied one counts once.
        weights: one entry per dtype.
        training: one entry per precision.
        batch_size: batch size for the activations and the cache; None without them.
        sequence_length: sequence length for the activations and the cache; None without them.
        activations: bytes that a training forward keeps for backward; None if not requested.
        kv_cache: bytes of the KV cache during generation; None if not requested.
    """

    name: str
    parameters: int
    weights: tuple[WeightsEstimate, ...]
    training: tuple[TrainingEstimate, ...]
    batch_size: int | None = None
    sequence_length: int | None = None
    activations: int | None = None
    kv_cache: int | None = None

    def table(self) -> str:
        """The figures as lines of text; GB are 10^9 bytes."""
        rows = [("weights", "total", "largest layer", "")]
        for each in self.weights:
            names = (each.largest_layer_names[0] or "its own tensors") if each.largest_layer_names else ""
            if len(each.largest_layer_names) > 1:
                names += f" and {len(each.largest_layer_names) - 1} more"
            rows.append((each.dtype, readable_size(each.total), readable_size(each.largest_layer), names))
        rows.append(("training with Adam", "total", "weights", "gradients + optimizer + low-precision copy"))
        for step in self.training:
            parts = (step.gradients, step.optimizer, step.low_precision_copy)
            label = "full precision" if step.mixed_precision == "no" else f"mixed, {step.mixed_precision}"
            rest = " + ".join(map(readable_size, parts))
            rows.append((label, readable_size(step.total), readable_size(step.weights), rest))
        if self.activations is not None or self.kv_cache is not None:
            text = f"batch {self.batch_size}, length {self.sequence_length}"
            rows.append(("the inputs given" if self.batch_size is None else text, "total", "", ""))
        if self.activations is not None:
            rows.append(("activations, training", readable_size(self.activations), "", ""))
        if self.kv_cache is not None:
            rows.append(("keys and values, generating", readable_size(self.kv_cache), "", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{self.name}: {self.parameters:,} parameters"]
        for label, total, part, rest in rows:
            lines.append(f"{label:<{widths[0]}}  {total:>{widths[1]}}  {part:>{widths[2]}}  {rest}".rstrip())
        return "\n".join(lines)


def estimate_memory(
    model: nn.Module,
    *,
    dtypes: DType | Sequence[DType] = DTYPES,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
) -> MemoryEstimate:
    """Estimate the memory to load, train and generate with a model; it may be on the meta device.

    Args:
        model: the model.
        dtypes: dtypes of weights to list.
        batch_size: with ``sequence_length`` and a text model of transformers: also estimate activations and cache.
        sequence_length: tokens per sequence.
        example_args: inputs for estimating the activations of any other model; only shapes matter.
        example_kwargs: keyword inputs.

    Raises:
        EstimateError: a dtype is unknown, a number is negative or not whole, or the model cannot run on the given
            inputs.
        TypeError: ``model`` is not a module.
    """
    check_is_module(model)
    inputs = dict(example_kwargs or {})
    config = getattr(model, "config", None)
    text = batch_size is not None and sequence_length is not None
    if (batch_size is None) != (sequence_length is None):
        raise EstimateError("batch_size and sequence_length must be given together; give both, or neither")
    if text:
        check_counts(batch_size=batch_size, sequence_length=sequence_length)
    if text and not len(example_args) and not inputs:
        inputs = _text_inputs(model, batch_size or 0, sequence_length or 0)
    runs = len(example_args) > 0 or bool(inputs)
    cache = None
    if text and config is not None and _generates(model):
        cache = estimate_kv_cache(config, batch_size or 0, sequence_length or 0, dtype=_float_dtype(model))
    return MemoryEstimate(
        name=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights=estimate_weights(model, dtypes),
        training=tuple(estimate_training(model, mixed_precision=each) for each in ("no", "bf16")),
        batch_size=batch_size,
        sequence_length=sequence_length,
        activations=estimate_activations(model, example_args, inputs) if runs else None,
        kv_cache=cache,
    )


def estimate_weights(
    model: nn.Module, dtypes: DType | Sequence[DType] = DTYPES
) -> tuple[WeightsEstimate, ...]:
    """Estimate the bytes of parameters and buffers for each dtype.

    A floating-point dtype applies to every floating-point tensor. ``int8``, ``int4`` and other integer dtypes apply to
    the weights of linear layers, as quantisation does; other tensors count with 16 bits, and scales are not counted.

    Args:
        model: on any device, meta included.
        dtypes: names, dtypes or members of ``CustomDtype``; one or several.

    Raises:
        EstimateError: a dtype is unknown.
        TypeError: ``model`` is not a module.
    """
    check_is_module(model)
    listed = [dtypes] if isinstance(dtypes, str | torch.dtype | Enum) else dtypes
    names = [
        dtype.value if isinstance(dtype, Enum) else str(dtype).removeprefix("torch.") for dtype in listed
    ]
    return tuple(_weights_in(model, name) for name in names)


def estimate_training(model: nn.Module, *, mixed_precision: str = "no") -> TrainingEstimate:
    """Estimate the bytes for training with Adam or AdamW, without activations.

    For n bytes of trainable parameters: n of weights, n of gradients, 2n of moments, and 4 bytes per parameter tensor
    for its count of steps (``torch.optim.Adam`` keeps state in the dtype of the parameter). With mixed precision the
    weights are float32 masters, so 16 bytes per parameter, and autocast adds 2 bytes for each weight of a layer that it
    computes in low precision. The breakdown follows ZeRO (Rajbhandari et al., 2020, section 3.1), which has 16 bytes
    per parameter because it counts 16-bit gradients; those of autocast have the dtype of the weights.

    Args:
        model: on any device, meta included; parameters with ``requires_grad=False`` are frozen.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``.

    Raises:
        EstimateError: the precision is another one.
        TypeError: ``model`` is not a module.
    """
    check_is_module(model)
    if mixed_precision not in ("no", "fp16", "bf16"):
        raise EstimateError(f"mixed_precision must be 'no', 'fp16' or 'bf16', got {mixed_precision!r}")
    mixed = mixed_precision != "no"
    parameters = list(model.parameters())

    def size(tensor: torch.Tensor) -> int:
        return tensor.numel() * (4 if mixed and tensor.is_floating_point() else tensor.element_size())

    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = sum(map(size, trainable))
    return TrainingEstimate(
        mixed_precision=mixed_precision,
        weights=sum(map(size, parameters)) + sum(buffer.nbytes for buffer in model.buffers()),
        gradients=gradients,
        optimizer=2 * gradients + 4 * len(trainable),
        low_precision_copy=sum(2 * weight.numel() for weight in _cast_by_autocast(model)) if mixed else 0,
    )


def _weights_in(model: nn.Module, dtype: str) -> WeightsEstimate:
    try:
        dtype_byte_size(dtype)
    except (ValueError, TypeError) as error:
        raise EstimateError(f"{dtype!r} is not a dtype; give one of PyTorch, or int4") from error
    quantised = dtype.startswith(("int", "uint"))
    linear = {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    }
    chosen = {
        name: dtype if not quantised or name in linear else "float16"
        for name, tensor in named_module_tensors(model, recurse=True)
        if tensor.is_floating_point()
    }
    outline = Outline.of(model, getattr(model, "_no_split_modules", None), special_dtypes=chosen)
    layers = outline.groups(outline.layers())
    largest = max(layers.values(), default=0)
    names = tuple(name for name, size in layers.items() if size == largest)
    return WeightsEstimate(dtype, outline.sizes.get("", 0), largest, names)


def _cast_by_autocast(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that autocast copies: those of layers that multiply matrices."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        own = list(module.parameters(recurse=False))
        if any(weight.dim() > 1 for weight in own):
            found |= {id(weight): weight for weight in own if weight.is_floating_point()}
    return list(found.values())


def _text_inputs(model: nn.Module, batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
    name = getattr(model, "main_input_name", None)
    if name != "input_ids":
        raise EstimateError(
            f"{type(model).__name__} does not declare that it takes tokens (main_input_name is {name!r}); give its "
            "inputs as example_args or example_kwargs"
        )
    ids = torch.empty((batch_size, sequence_length), dtype=torch.long, device="meta")
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return {"input_ids": ids, "decoder_input_ids": ids} if encoder_decoder else {"input_ids": ids}


def _generates(model: nn.Module) -> bool:
    asked = getattr(model, "can_generate", None)
    return bool(asked()) if callable(asked) else False


def _float_dtype(model: nn.Module) -> torch.dtype | None:
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
