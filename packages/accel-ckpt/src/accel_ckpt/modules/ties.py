"""Tied parameters: several names for one parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["find_tied_parameters", "parent_and_leaf", "retie_parameters"]


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Find tied parameters: groups of names of the same parameter object (views of a parameter do not count).

    Args:
        model: the module to search.
        **kwargs: passed to ``named_parameters``, as in ``recurse=False``.

    Returns:
        The groups, each sorted, in the order in which their first names appear.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(**{"remove_duplicate": False, **kwargs}):
        groups.setdefault(id(parameter), []).append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie parameters again: every name of a group becomes the group's first parameter that has values.

    Args:
        model: changed in place.
        tied_params: groups of names, as ``find_tied_parameters`` returned before the ties were lost.
    """
    for group in tied_params:
        homes = [parent_and_leaf(model, name) for name in group]
        present = [
            module._parameters[leaf] for module, leaf in homes if module._parameters.get(leaf) is not None
        ]
        real = [p for p in present if p is not None and p.device != torch.device("meta")]
        if not real:
            continue
        for module, leaf in homes:
            if leaf in module._parameters:
                module._parameters[leaf] = real[0]


def parent_and_leaf(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that owns a tensor, and the tensor's name in it.

    Raises:
        AttributeError: the path does not exist.
    """
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
