"""Linear layers whose weights are quantised by torchao."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torchao.quantization as torchao
from torch import nn

from accel_bigmodel.quantization.config import TorchAoQuantizationConfig
from accel_bigmodel.quantization.engine import Pieces

__all__ = ["TorchAoEngine", "TorchAoLinear"]

_PREFIX = "weight."
_PACKED_OUTPUTS = 16  # packed together by torch's CPU kernel


class TorchAoLinear(nn.Linear):
    """A linear layer whose ``weight`` is a tensor subclass of torchao.

    Its state dict holds the plain tensors inside the weight, as ``weight.<part>``, so that safetensors can save them;
    state dicts that hold the weight itself are loaded as well.
    """

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = destination.pop(f"{prefix}weight")
        for part, value in parts_of(weight).items():
            destination[f"{prefix}{_PREFIX}{part}"] = value

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        mine = parts_of(self.weight)
        if all(f"{prefix}{_PREFIX}{part}" in state_dict for part in mine):
            found = {part: state_dict.pop(f"{prefix}{_PREFIX}{part}") for part in mine}
            state_dict[f"{prefix}weight"] = rebuilt(self.weight, found)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def parts_of(weight: Any) -> dict[str, torch.Tensor]:
    """The plain tensors inside a torchao tensor."""
    names, _ = weight.__tensor_flatten__()
    return {name: getattr(weight, name) for name in names}


def rebuilt(like: Any, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A torchao tensor like another one, with other plain tensors inside."""
    _, attributes = like.__tensor_flatten__()
    made: torch.Tensor = type(like).__tensor_unflatten__(dict(parts), attributes, like.shape, like.stride())
    return made


class TorchAoEngine:
    """Quantises with torchao, for one configuration."""

    def __init__(self, config: TorchAoQuantizationConfig) -> None:
        self.config = config
        self.flags: Mapping[str, Any] = {"quantization_method": "torchao"}
        # Layers of one size have parts of the same sizes.
        self._expected: dict[torch.Size, dict[str, tuple[torch.Size | None, torch.dtype]]] = {}

    def why_not(self, layer: nn.Linear, device: torch.device) -> str | None:
        """Layers that torchao would skip silently, or fail on."""
        if self.config.weights != "int4":
            return None
        if device.type == "cuda" and self.config.dtype != torch.bfloat16:
            return (
                f"would be computed in {self.config.dtype}; torchao's int4 on CUDA computes in bfloat16 only"
            )
        if layer.in_features % self.config.group_size:
            return (
                f"has {layer.in_features} inputs, not a multiple of the group size {self.config.group_size}"
            )
        if device.type == "cpu" and layer.out_features % _PACKED_OUTPUTS:
            return f"has {layer.out_features} outputs, not a multiple of the CPU kernel's {_PACKED_OUTPUTS}"
        return None

    def quantize(self, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> nn.Module:
        """A linear layer with these weights, quantised by torchao on ``device``."""
        plain = nn.Linear(1, 1, bias=False, device="meta")
        plain.weight = nn.Parameter(weight.detach().to(device, self.config.dtype), requires_grad=False)
        torchao.quantize_(plain, self._recipe(device))
        return self._layer(layer, plain.weight.detach())

    def expected_pieces(
        self, layer: nn.Linear, device: torch.device
    ) -> dict[str, tuple[torch.Size | None, torch.dtype]]:
        """The tensors that this version of torchao makes for a weight of this size."""
        shape = torch.Size((layer.out_features, layer.in_features))
        if shape not in self._expected:
            parts = parts_of(self._like(layer, device))
            self._expected[shape] = {
                _PREFIX + part: (value.shape, value.dtype) for part, value in parts.items()
            }
        return self._expected[shape]

    def restore(self, layer: nn.Linear, pieces: Pieces, device: torch.device) -> nn.Module:
        """A linear layer with saved weights; their metadata is that of a new weight of this size."""
        parts = {name.removeprefix(_PREFIX): value.to(device, copy=True) for name, value in pieces.items()}
        return self._layer(layer, rebuilt(self._like(layer, device), parts))

    def _like(self, layer: nn.Linear, device: torch.device) -> torch.Tensor:
        zeros = torch.zeros(layer.out_features, layer.in_features, dtype=self.config.dtype, device=device)
        weight: Any = self.quantize(layer, zeros, device).weight
        return weight.detach()  # type: ignore[no-any-return]

    def _recipe(self, device: torch.device) -> Any:
        """The configuration for `quantize_`; it does not change the compiler's process-wide settings."""
        if self.config.weights == "int8":
            return torchao.Int8WeightOnlyConfig(set_inductor_config=False)
        if self.config.weights == "float8":
            return torchao.Float8WeightOnlyConfig(set_inductor_config=False)
        if device.type == "cpu":
            from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

            return PrototypeInt4WeightOnlyConfig(group_size=self.config.group_size, set_inductor_config=False)
        # The layout of torch's own kernel; torchao's default layout needs another package.
        return torchao.Int4WeightOnlyConfig(
            group_size=self.config.group_size,
            int4_packing_format="tile_packed_to_4d",
            set_inductor_config=False,
        )

    def _layer(self, layer: nn.Linear, weight: torch.Tensor) -> TorchAoLinear:
        new = TorchAoLinear(layer.in_features, layer.out_features, bias=False, device="meta")
        new.weight = nn.Parameter(weight, requires_grad=False)
        new.bias = layer.bias
        return new.train(layer.training)
