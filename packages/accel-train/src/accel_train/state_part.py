"""`StatePart`, the protocol of objects with a state, and helpers of the parts of this package.

Every object with a state has a part: optimizers, schedulers, loaders, the step guard, the random numbers. `save_state`
and `load_state` collect them. A new kind of state is a class beside its object, and a line in the list of parts
(`accel_train.checkpoints.parts`); a feature that scripts switch on appends its part to `Prepared.parts` then, as
`guard_steps` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError

import accel_ckpt
from accel_ckpt.parts import is_leaf
from accel_ckpt.training.state_part import Groups, SavedTrees, StatePart, Trees
from accel_state.errors import AccelError
from accel_state.messages import first_line

__all__ = ["Groups", "SavedTrees", "StatePart", "Trees", "leaves", "taken_up"]


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


@contextmanager
def taken_up(what: str, directory: Path) -> Iterator[None]:
    """Context that turns errors of objects which load a damaged state into one error that names the checkpoint."""
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
        raise accel_ckpt.CorruptCheckpointError(
            f"{directory}: {what} is not what save_state() writes ({type(error).__name__}: {first_line(error)[:200]}). "
            "The checkpoint is damaged, or something else wrote it; load another one"
        ) from error
