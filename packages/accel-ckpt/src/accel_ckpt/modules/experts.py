"""Modules that hold the experts of a mixture-of-experts layer."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

__all__ = ["Experts", "find_experts"]

_ARGUMENTS = 3  # hidden states, indices of experts, weights


@dataclass(frozen=True)
class Experts:
    """A module that computes the experts of one layer.

    Attributes:
        name: its name in the model.
        module: called with hidden states (tokens, features), the indices of each token's experts (tokens, k) and
            their weights (tokens, k); returns the weighted sum (tokens, features).
        count: experts of all ranks together.
    """

    name: str
    module: nn.Module
    count: int


def find_experts(model: nn.Module) -> list[Experts]:
    """The modules that compute experts, in the order of the model.

    Such a module is named ``experts``, its ``forward`` takes hidden states, indices and weights, and the first
    dimension of each of its parameters is the number of experts. Those of transformers 5 are such modules.

    Args:
        model: the model, without wrappers.
    """
    found = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts" or not _takes_routes(module):
            continue
        own = list(module.parameters())
        if own and all(each.dim() > 1 and each.shape[0] == own[0].shape[0] for each in own):
            found.append(Experts(name, module, own[0].shape[0]))
    return found


def _takes_routes(module: nn.Module) -> bool:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each for each in places[_ARGUMENTS:] if each.default is each.empty]
    return len(places) >= _ARGUMENTS and not needed
