"""Objects of a training as parts of its state: optimizers, and objects with `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from accel_ckpt.errors import StateMismatchError
from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.modules.names import listed
from accel_ckpt.training.optimizers import (
    check_optimizer_state,
    load_optimizer_state,
    optimizer_state_by_name,
    steps_only,
)
from accel_ckpt.training.state_part import SavedTrees, StatePart, Trees

__all__ = [
    "ObjectPart",
    "OptimizerPart",
    "Stateful",
    "averages_gradients",
    "check_parts",
    "replicated_optimizers",
]


@runtime_checkable
class Stateful(Protocol):
    """An object with `state_dict` and `load_state_dict`, like most objects of a training."""

    def state_dict(self) -> Any:
        """The state, as nested plain data and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load a state."""


def averages_gradients(module: nn.Module) -> bool:
    """Whether a module is wrapped in DistributedDataParallel, which keeps equal replicas on all ranks."""
    return isinstance(module, nn.parallel.DistributedDataParallel)


def replicated_optimizers(
    optimizers: Mapping[str, torch.optim.Optimizer], replicas: Collection[nn.Module]
) -> list[str]:
    """Names of the optimizers that are equal on all ranks, because they step only replicas.

    Args:
        optimizers: by the names of their trees.
        replicas: modules that are equal on all ranks.
    """
    return [name for name, optimizer in optimizers.items() if steps_only(optimizer, replicas)]


def check_parts(
    here: Mapping[str, Iterable[str]], saved: Mapping[str, Iterable[str]], source: object
) -> None:
    """Check that a program and a checkpoint have the same parts.

    Args:
        here: kind of parts (``"modules"``) → their names in this program.
        saved: the same of the checkpoint.
        source: the checkpoint, for the message.

    Raises:
        StateMismatchError: names the parts that one has and the other lacks.
    """
    problems = []
    for kind, names in here.items():
        own, other = set(names), set(saved.get(kind, ()))
        if own - other:
            problems.append(f"it lacks the {kind} {listed(sorted(own - other))}")
        if other - own:
            problems.append(f"the state lacks its {kind} {listed(sorted(other - own))}")
    if problems:
        raise StateMismatchError(
            f"{source} does not fit the state to be loaded: {'; '.join(problems)}. Pass a state with the same parts as "
            "the one that was saved"
        )


class ObjectPart(StatePart):
    """An object with a state as a part of a state: one tree.

    Args:
        name: name of its tree.
        item: the object.
    """

    def __init__(self, name: str, item: Stateful) -> None:
        self.name, self._item = name, item

    def dump(self, trees: Trees) -> None:
        """Add the state of the object as a tree."""
        trees.shared[self.name] = self._item.state_dict()

    def expected(self) -> Iterator[str]:
        """The name of the tree."""
        yield self.name

    def read(self, saved: SavedTrees) -> Any:
        """Read the tree, whose tensors may not have been read yet."""
        return saved.shared[self.name]

    def load(self, taken: Any, saved: SavedTrees) -> None:
        """Pass the tree to the object's ``load_state_dict``."""
        self._item.load_state_dict(taken)


class OptimizerPart(ObjectPart):
    """An optimizer as a part of a state, saved by parameter name.

    Args:
        name: name of its tree.
        optimizer: the optimizer, which steps parameters of the models.
        models: the models with their canonical names.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, models: Sequence[NamedModel]) -> None:
        super().__init__(name, optimizer)
        self.optimizer, self._models = optimizer, models

    def dump(self, trees: Trees) -> None:
        """Add the state by parameter name as a tree."""
        trees.shared[self.name] = optimizer_state_by_name(self.optimizer, self._models)

    def check(self, taken: Any, saved: SavedTrees) -> None:
        """Check that names, shapes and classes are those of the optimizer here."""
        check_optimizer_state(self.optimizer, taken, self._models)

    def load(self, taken: Any, saved: SavedTrees) -> None:
        """Fill the state in place."""
        load_optimizer_state(self.optimizer, taken, self._models)
