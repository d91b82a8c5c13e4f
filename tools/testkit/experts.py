"""Experts of small models: stacked in two parameters, or a list."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["Stacked", "experts_of", "one_expert", "routed"]

Activation = Callable[[Tensor], Tensor]


def one_expert(x: Tensor, up: Tensor, down: Tensor, activation: Activation) -> Tensor:
    """What an expert with these weights computes."""
    return nn.functional.linear(activation(nn.functional.linear(x, up)), down)


class Stacked(nn.Module):
    """Experts in two stacked parameters."""

    def __init__(
        self, count: int, width: int, hidden: int, activation: Activation, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.num_experts, self.activation = count, activation
        self.up = nn.Parameter(torch.randn(count, hidden, width, dtype=dtype) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, hidden, dtype=dtype) / hidden**0.5)

    def forward(self, hidden_states: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(indices == expert)
            out = one_expert(hidden_states[token], self.up[expert], self.down[expert], self.activation)
            result = result.index_add(0, token, (out * weights[token, place, None]).to(result.dtype))
        return result


class Expert(nn.Module):
    """One of a list."""

    def __init__(self, width: int, hidden: int, activation: Activation, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(hidden, width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


def experts_of(
    kind: str,
    count: int,
    width: int,
    hidden: int,
    activation: Activation = torch.tanh,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Experts.

    Args:
        kind: "stacked" or "list".
        count: of experts.
        width: of what they take and give.
        hidden: of what is between.
        activation: between.
        dtype: of the parameters.
    """
    if kind == "stacked":
        return Stacked(count, width, hidden, activation, dtype)
    return nn.ModuleList(Expert(width, hidden, activation, dtype) for _ in range(count))


def routed(experts: nn.Module, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The sum over the experts of each row, with its weights. A list is called by a loop, as scripts do."""
    if isinstance(experts, Stacked):
        out: Tensor = experts(x, indices, weights)
        return out
    result = torch.zeros_like(x)
    for number, expert in enumerate(experts):  # type: ignore[arg-type]  # also without rows: plain PyTorch has a gradient then
        token, place = torch.where(indices == number)
        result = result.index_add(0, token, (expert(x[token]) * weights[token, place, None]).to(result.dtype))
    return result
