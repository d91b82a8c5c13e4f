"""`StatePart`, the protocol of objects with a state, and helpers of the parts of this package.

Every object with a state has a part: optimizers, schedulers, loaders, the step guard, the random numbers. `save_state`
and `load_state` collect them. A new kind of state is a class beside its object, and a line in the list of parts
(`accel_train.checkpoints.parts`); a feature that scripts switch on appends its part to `Prepared.parts` then, as
`guard_steps` does.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError

import accel_ckpt
from accel_ckpt.format.forms import check_form
from accel_ckpt.parts import is_leaf
from accel_ckpt.training.state_part import Groups, SavedTrees, StatePart, Trees
from accel_state.errors import AccelError
from accel_state.messages import first_line, module_of
from accel_state.registry import Registry
from accel_train.errors import OptionError

__all__ = [
    "STATE_PARTS",
    "Groups",
    "SavedTrees",
    "StatePart",
    "Trees",
    "check_order",
    "leaves",
    "taken_up",
]

STATE_PARTS: Registry[type[StatePart]] = Registry(
    "kind of state", "accel_train.state_parts", {}, base_class=StatePart, error=OptionError
)
"""The kinds of state of installed packages, which every `Accelerator` has; called with its `Prepared`."""


_NOT_OF_THE_SCRIPT = {"accel_state", "accel_ckpt", "accel_train", "torch", "numpy", *sys.stdlib_module_names}


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a tree: tensors, parts of divided tensors, plain values."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)) and not is_leaf(tree):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def check_order(what: str, here: Sequence[str], saved: SavedTrees, name: str) -> None:
    """Refuse objects that have changed places; any may have become another kind.

    Args:
        what: the objects, in the singular.
        here: the kinds of the objects, in their order.
        saved: has the saved kinds among its progress.
        name: under this name.

    Raises:
        StateMismatchError: a state would go to an object that has another one.
    """
    there = saved.progress.get(name, [])
    check_form(there, [str], f"{saved.directory}: {name}")
    pairs = list(zip(here, there, strict=False))
    for index, (one, other) in enumerate(pairs):
        if one != other and ((other, one) in pairs or sorted(here) == sorted(there)):
            raise accel_ckpt.StateMismatchError(
                f"{saved.directory}: the {what} {index} is {other} there and {one} here. Prepare and register the same "
                f"objects in the same order: {', '.join(there)}"
            )


@contextmanager
def taken_up(what: str, directory: Path) -> Iterator[None]:
    """Context that turns errors of objects which load a damaged state into one error that names the checkpoint.

    What an object of the script raises by itself stays as it is, with a note: it says more about the state than we can.
    """
    try:
        yield
    except (AccelError, MemoryError, OSError, torch.OutOfMemoryError, DistError):
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        NameError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if module_of(frame).partition(".")[0] not in _NOT_OF_THE_SCRIPT:
            error.add_note(f"raised while {what} was taken from {directory}")
            raise
        raise accel_ckpt.CorruptCheckpointError(
            f"{directory}: {what} is not what save_state() writes ({type(error).__name__}: {first_line(error)[:200]}). "
            "The checkpoint is damaged, or something else wrote it; load another one"
        ) from error
