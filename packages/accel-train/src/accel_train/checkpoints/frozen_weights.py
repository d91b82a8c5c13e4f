"""Training states without frozen parameters: a save leaves them out, and a load takes them from the script."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import accel_ckpt
from accel_ckpt.format.forms import OTHERS, check_form, natural
from accel_ckpt.modules.names import listed
from accel_ckpt.modules.versions import versions_of, with_versions
from accel_ckpt.parts import is_divided, is_leaf, parts_of, shape_of
from accel_ckpt.saving.draft import fingerprints
from accel_train.errors import OptionError
from accel_train.strategies.state_adapter import SavedModel

__all__ = ["completed", "leave_out_frozen"]

_FORM = [{OTHERS: {"shape": [natural], "dtype": str, "mark": (str, None)}}]
"""Of what `leave_out_frozen` returns."""


def leave_out_frozen(
    weights: Sequence[dict[str, Any]], frozen: Sequence[Collection[str]]
) -> list[dict[str, Any]]:
    """Remove frozen parameters, and entries that quantised ones have beside them.

    Args:
        weights: the weights of each model that this rank saves; changed in place.
        frozen: the names of each model's frozen parameters, also of those that other ranks hold.

    Returns:
        The removed entries of each model: name → shape, dtype, and a mark of its values if it is whole.

    Raises:
        OptionError: no parameter of any model is frozen.
    """
    removed = []
    for held, left_out in zip(weights, map(set, frozen), strict=True):
        names = [name for name in held if not left_out.isdisjoint((name, *_above(name)))]
        removed.append(_described({name: held.pop(name) for name in names}))
    if not any(removed):
        raise OptionError(
            "save_state(trainable_only=True) leaves out parameters with requires_grad=False, and no prepared model has "
            "one. Freeze the base before prepare(), or save the whole state."
        )
    return removed


def _above(name: str) -> list[str]:
    """Candidates for the parameter that an entry belongs to, such as the scale of a quantised one."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _described(leaves: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        name: {"shape": [*shape_of(leaf)], "dtype": _dtype_of(leaf), "mark": None}
        for name, leaf in leaves.items()
        if is_leaf(leaf)
    }
    whole = [name for name in found if _is_whole(leaves[name])]
    for name, mark in zip(whole, fingerprints([leaves[name] for name in whole]), strict=True):
        found[name]["mark"] = mark
    return found


def _is_whole(leaf: Any) -> bool:
    plain = isinstance(leaf, torch.Tensor) and not is_divided(leaf) and not leaf.is_meta
    return plain and leaf.is_contiguous() and type(leaf) in (torch.Tensor, torch.nn.Parameter)


def _dtype_of(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return str(leaf.dtype)
    parts = parts_of(leaf)
    return str(parts[0].tensor.dtype) if parts else ""


def completed(
    saved: SavedModel, frozen: Any, own: Mapping[str, Any], strict: bool, what: str, directory: Path
) -> SavedModel:
    """Complete saved weights with the script's values of the parameters that were left out.

    Args:
        saved: the saved weights of one model.
        frozen: the result of `leave_out_frozen` for it; empty if nothing was left out.
        own: this rank's part of the model here.
        strict: whether the script's values must be the same as at the save.
        what: the model, for messages.
        directory: the checkpoint, for messages.

    Raises:
        StateMismatchError: the model here lacks such a parameter, or its shape, dtype or values differ. Values are
            compared by samples, of tensors that are whole on this rank.
    """
    if not frozen:
        return saved
    check_form([frozen], _FORM, f"{directory}: the frozen parameters of {what}")
    here = _described({name: own[name] for name in frozen if name in own})
    problems = []
    if missing := sorted(frozen.keys() - here.keys()):
        problems.append(f"not here: {listed(missing)}")
    if strict:
        for key, words in (
            ("shape", "of another shape"),
            ("dtype", "of another dtype"),
            ("mark", "with other values"),
        ):
            odd = [
                name
                for name, about in frozen.items()
                if name in here and about[key] and here[name][key] and about[key] != here[name][key]
            ]
            if odd:
                problems.append(f"{words}: {listed(odd)}")
                break  # values are described with shape and dtype
    if problems:
        raise accel_ckpt.StateMismatchError(
            f"{directory} was saved with trainable_only=True, without the frozen parameters of {what}, and those of "
            f"the script differ: {'; '.join(problems)}. Load the same base model before prepare()"
        )
    return _Completed(saved, {name: own[name] for name in frozen})


@dataclass(frozen=True)
class _Known:
    shape: tuple[int, ...]
    dtype: str


class _Completed:
    """Saved weights, and leaves of the script for the others."""

    def __init__(self, saved: SavedModel, kept: Mapping[str, Any]) -> None:
        self._saved, self._kept = saved, kept

    @property
    def about(self) -> Mapping[str, Any]:
        """Of both."""
        kept = {name: _Known(tuple(shape_of(leaf)), _dtype_of(leaf)) for name, leaf in self._kept.items()}
        return self._both(kept, self._saved.about)

    def whole(self) -> dict[str, Any]:
        """Of both; those of the script are its own tensors."""
        return self._both(self._kept, self._saved.whole())

    @staticmethod
    def _both(kept: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        return with_versions({**kept, **saved}, versions_of(saved))

    def check(self, targets: Mapping[str, Any]) -> None:
        """Of what is read."""
        self._saved.check(self._read(targets))

    def fill(self, targets: Mapping[str, Any]) -> None:
        """Read what was saved; copy the script's where the targets are others."""
        self._saved.fill(self._read(targets))
        with torch.no_grad():
            for name, leaf in self._kept.items():
                target = targets.get(name)
                if isinstance(target, torch.Tensor) and target is not leaf:
                    target.copy_(leaf)

    def _read(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        return {name: target for name, target in targets.items() if name not in self._kept}
