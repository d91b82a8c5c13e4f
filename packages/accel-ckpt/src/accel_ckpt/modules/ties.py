"""Tied tensors: several names for one parameter or buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

__all__ = ["find_tied_parameters", "find_tied_tensors", "parent_and_leaf", "retie_parameters"]


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Find tied parameters: groups of names of the same parameter object (views of a parameter do not count).

    Args:
        model: the module to search.
        **kwargs: passed to ``named_parameters``, as in ``recurse=False``.

    Returns:
        The groups, each sorted, in the order in which their first names appear.
    """
    return _groups(model.named_parameters(**{"remove_duplicate": False, **kwargs}))


def find_tied_tensors(model: nn.Module) -> list[list[str]]:
    """Find tied parameters and buffers, such as the buffers of a module that several layers share.

    Returns:
        The groups, as those of ``find_tied_parameters``.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    return _groups(chain(parameters, model.named_buffers(remove_duplicate=False)))


def _groups(named: Iterable[tuple[str, torch.Tensor]]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie parameters and buffers again: every name of a group becomes the group's first tensor that has values.

    Args:
        model: changed in place.
        tied_params: groups of names, as ``find_tied_parameters`` returned before the ties were lost.
    """
    for group in tied_params:
        homes: list[tuple[dict[str, Any], str]] = []
        for module, leaf in (parent_and_leaf(model, name) for name in group):
            tables: list[dict[str, Any]] = [module._parameters, module._buffers]
            homes += [(table, leaf) for table in tables if leaf in table]
        present = [table[leaf] for table, leaf in homes if table[leaf] is not None]
        real = [tensor for tensor in present if tensor.device != torch.device("meta")]
        for table, leaf in homes if real else ():
            table[leaf] = real[0]


def parent_and_leaf(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that owns a tensor, and the tensor's name in it.

    Raises:
        AttributeError: the path does not exist.
    """
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
