"""Modules that hold the experts of a mixture-of-experts layer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

__all__ = ["Experts", "find_experts"]

_ARGUMENTS = 3  # hidden states, indices of experts, weights


@dataclass(frozen=True)
class Experts:
    """A module that holds the experts of one layer.

    Attributes:
        name: its name in the model.
        module: called with hidden states (tokens, features), the indices of each token's experts (tokens, k) and
            their weights (tokens, k); returns the weighted sum (tokens, features). A list of experts may have no such
            ``forward``.
        count: experts of all ranks together.
        members: of a list of experts, each one's module; empty: parameters have all experts in their first dimension.
        caller: of a list without a ``forward``, the module that holds it and calls its members.
    """

    name: str
    module: nn.Module
    count: int
    members: tuple[nn.Module, ...] = ()
    caller: nn.Module | None = None


def find_experts(model: nn.Module) -> list[Experts]:
    """The modules that hold experts, in the order of the model.

    Such a module is named ``experts``. Either its ``forward`` takes hidden states, indices and weights, and the first
    dimension of each of its parameters is the number of experts; those of transformers 5 are such modules. Or it is a
    ``ModuleList`` or ``ModuleDict`` of experts that are alike.

    Args:
        model: the model, without wrappers.
    """
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        holder, _, label = name.rpartition(".")
        if label != "experts":
            continue
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            members = tuple(each for each in module._modules.values() if each is not None)
            if members and not module._parameters and _are_alike(members):
                caller = None if _takes_routes(module) else modules[holder]
                found.append(Experts(name, module, len(members), members, caller))
        elif _takes_routes(module):
            own = list(module.parameters())
            if own and all(each.dim() > 1 and each.shape[0] == own[0].shape[0] for each in own):
                found.append(Experts(name, module, own[0].shape[0]))
    return found


def _are_alike(members: Sequence[nn.Module]) -> bool:
    """Whether modules are of one class, with parameters of the same names and shapes, none shared, and no buffers."""
    forms = [
        (type(each), [(name, p.shape, p.dtype) for name, p in each.named_parameters()]) for each in members
    ]
    own = [parameter for each in members for parameter in each.parameters()]
    return (
        bool(own)
        and all(form == forms[0] for form in forms)
        and len(set(map(id, own))) == len(own)
        and all(parameter.is_floating_point() and parameter.dim() for parameter in own)
        and not any(True for each in members for _ in each.buffers())
    )


def _takes_routes(module: nn.Module) -> bool:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each for each in places[_ARGUMENTS:] if each.default is each.empty]
    return len(places) >= _ARGUMENTS and not needed
