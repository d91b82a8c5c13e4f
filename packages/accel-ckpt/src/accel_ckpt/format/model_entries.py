"""Finding the weights of a model among what programs save beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from accel_ckpt.errors import CheckpointNotFoundError
from accel_ckpt.modules.names import listed

__all__ = ["model_entries", "nested_keys"]

Key = tuple[Any, ...]

# The names of the model where a program saves more: the first of them that is there.
_MODEL = ("model", "state_dict", "model_state_dict", "module")

# What programs save beside a model.
_BESIDE = re.compile(
    r"(optim|optimizer|lr_scheduler|scheduler|dataloader|train_state|scaler|grad_scaler|rng)s?(_states?|_dict|_\d+)*"
)


def nested_keys(content: Mapping[Any, Any], above: Key = ()) -> dict[Key, Any]:
    """Flatten nested dictionaries to their values by the path of keys."""
    found: dict[Key, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value and len(above) < 8:
            found |= nested_keys(value, (*above, key))
        else:
            found[(*above, key)] = value
    return found


def model_entries(keys: Mapping[Key, bool], where: object) -> dict[Key, str]:
    """The entries that are weights of the model, with their names in its state dict.

    Found are: a state dict alone; one under ``model`` or the like, as in ``{"app": AppState}`` of PyTorch's recipes;
    the only one that is beside states of optimizers and the like, or below one other key; parameters at the top beside
    these, as torchtitan saves them.

    Args:
        keys: of everything that was saved: the keys that lead there → whether it is a tensor.
        where: for messages.

    Raises:
        CheckpointNotFoundError: there is no model, or one of several could be meant; names what there is.
    """
    path: Key = ()
    while (step := _next_step(keys, path, where)) is not None:
        path = (*path, step)
    below = _below(keys, path)
    beside = [name for name in _branches(below) if _is_beside(name)]
    return {
        (*path, *key): ".".join(map(str, key))
        for key in below
        if len(key) == 1 or not beside or key[0] not in beside
    }


def _below(keys: Mapping[Key, bool], path: Key) -> dict[Key, bool]:
    depth = len(path)
    return {key[depth:]: tensor for key, tensor in keys.items() if len(key) > depth and key[:depth] == path}


def _branches(below: Mapping[Key, bool]) -> list[Any]:
    """The keys under which there are more keys and, at the end of some, tensors."""
    return list(dict.fromkeys(key[0] for key, tensor in below.items() if len(key) > 1 and tensor))


def _next_step(keys: Mapping[Key, bool], path: Key, where: object) -> Any | None:
    """The key below which the model is; ``None``: it is here."""
    below = _below(keys, path)
    branches = _branches(below)
    others = [name for name in branches if not _is_beside(name)]
    has_tensors = any(tensor for key, tensor in below.items() if len(key) == 1)
    named = next((name for name in _MODEL if name in others), None)
    if named is not None and not (path and has_tensors and len(others) == len(branches)):
        return named  # also beside counters, where the state of an optimizer says that this is no model
    if path and path[-1] in _MODEL and len(others) == len(branches):
        return None  # nested dictionaries of weights
    here = f"{where} holds {listed([*map(str, dict.fromkeys(key[0] for key in below))])}" + (
        f" under {'.'.join(map(str, path))!r}" if path else ""
    )
    advice = "save the model's state dict alone, or as {'model': …}"
    if {"state", "param_groups"} >= set(branches) and "state" in branches:
        raise CheckpointNotFoundError(f"{here}, which is the state of an optimizer, and no weights; {advice}")
    if has_tensors and others:
        raise CheckpointNotFoundError(
            f"{here}: tensors beside dictionaries, and no model under the key 'model'; {advice}"
        )
    if has_tensors or not branches:
        return None
    if not others:
        raise CheckpointNotFoundError(f"{here} and no model; {advice}")
    if len(others) > 1:
        if path and len(others) == len(branches):
            return None
        raise CheckpointNotFoundError(f"{here} and no model under the key 'model'; {advice}")
    return others[0]


def _is_beside(name: object) -> bool:
    return isinstance(name, str) and (_BESIDE.fullmatch(name) is not None or name.endswith("_extra_state"))
