"""Layers that compute plainly and note under which recipe they did."""

from __future__ import annotations

import math
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from transformer_engine.pytorch import fp8
from transformer_engine.pytorch.fp8 import fp8_autocast

__all__ = ["LayerNorm", "Linear", "TransformerLayer", "calls", "fp8", "fp8_autocast"]

calls: list[dict[str, Any]] = []
"""One entry for each forward of a linear layer: whether it was in fp8, and the recipe."""


class _Module(nn.Module):
    """Keeps a history, which is saved beside the parameters as uint8, as the real layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def get_extra_state(self) -> Tensor:
        return torch.tensor(list(pickle.dumps(self.history)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        if state is not None and state.numel():
            self.history = pickle.loads(bytes(state.tolist()))


class Linear(_Module):
    """The arguments that are used here; the real class has more."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        dtype = params_dtype or torch.get_default_dtype()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device))
        else:
            self.bias = torch.Tensor().to(dtype=dtype, device=device)

    def forward(self, inp: Tensor) -> Tensor:
        """A plain product. In fp8 the largest input of all ranks is noted, and scales the next one."""
        enabled, recipe = fp8.ACTIVE[-1] if fp8.ACTIVE else (False, None)
        calls.append({"fp8": enabled, "recipe": recipe})
        bias = self.bias if self.use_bias else None
        if not enabled:
            return nn.functional.linear(inp, self.weight, bias)
        scale = 2.0 ** -math.ceil(math.log2(self.history[-1])) if self.history else 1.0
        largest = inp.detach().abs().max().float()
        if getattr(recipe, "reduce_amax", False) and dist.is_initialized():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        self.history.append(float(largest))
        rounded = (inp * scale * 16).round() / (16 * scale)  # so that the history matters
        return nn.functional.linear(inp + (rounded - inp).detach(), self.weight, bias)


class LayerNorm(_Module):
    """The arguments that are used here; the real class has more."""

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype, device=device))

    def forward(self, inp: Tensor) -> Tensor:
        """Plain."""
        return nn.functional.layer_norm(inp, self.weight.shape, self.weight, self.bias, self.eps)


class TransformerLayer(nn.Module):
    """Only its name is used here."""
