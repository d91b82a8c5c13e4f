"""The objects of a training and their states: collecting them for a save, comparing them with what was saved, and
restoring them in place. For ``Checkpointer``, and for trainers that save what they have prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from accel_ckpt.errors import StateMismatchError
from accel_ckpt.loading.load_module import check_weights, load_weights_into
from accel_ckpt.loading.load_state import SavedWeights
from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.modules.names import listed
from accel_ckpt.training.optimizers import (
    check_optimizer_state,
    load_optimizer_state,
    optimizer_state_by_name,
    steps_only,
)

__all__ = [
    "Restore",
    "Stateful",
    "TrainingObjects",
    "averages_gradients",
    "check_parts",
    "replicated_optimizers",
]

Restore = Callable[[], object]
"""Puts one thing back; what can fail has been tried before."""


@runtime_checkable
class Stateful(Protocol):
    """What most objects of a training are."""

    def state_dict(self) -> Any:
        """The state, as nested plain data and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go back to a state."""


def averages_gradients(module: nn.Module) -> bool:
    """Whether torch keeps equal replicas of a module on all ranks (DistributedDataParallel)."""
    return isinstance(module, nn.parallel.DistributedDataParallel)


def replicated_optimizers(
    optimizers: Mapping[str, torch.optim.Optimizer], replicas: Collection[nn.Module]
) -> list[str]:
    """Names of the optimizers of which all ranks hold the same, because they step nothing but replicas.

    Args:
        optimizers: by the names of their trees.
        replicas: modules that are equal on all ranks.
    """
    return [name for name, optimizer in optimizers.items() if steps_only(optimizer, replicas)]


def check_parts(
    here: Mapping[str, Iterable[str]], saved: Mapping[str, Iterable[str]], source: object
) -> None:
    """Compare which parts there are.

    Args:
        here: kind of parts (``"modules"``) → their names in this program.
        saved: the same of the checkpoint.
        source: the checkpoint, for the message.

    Raises:
        StateMismatchError: names what one has and the other lacks.
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


@dataclass(frozen=True)
class TrainingObjects:
    """Modules, optimizers and other objects with a state, by name; names of modules are worked out once."""

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    objects: Mapping[str, Stateful] = field(default_factory=dict)

    @cached_property
    def models(self) -> Sequence[NamedModel]:
        """The modules with their canonical names."""
        return [NamedModel(module) for module in self.modules.values()]

    def weights(self) -> list[dict[str, Any]]:
        """The state dict of each module, by canonical names."""
        return [model.state_dict() for model in self.models]

    def trees(self) -> dict[str, Any]:
        """The states of optimizers and objects."""
        trees = {name: optimizer_state_by_name(o, self.models) for name, o in self.optimizers.items()}
        return trees | {name: item.state_dict() for name, item in self.objects.items()}

    def restores(
        self, weights: Mapping[str, SavedWeights], trees: Mapping[str, Any], strict: bool = True
    ) -> list[Restore]:
        """What puts the saved state back, in order; everything is compared, and read as far as it can be, here.

        Args:
            weights: name of a module → its saved weights.
            trees: name of an optimizer or object → its state; of optimizers as ``lazy_shared`` gives it.
            strict: names of weights must be the same, not only shapes.

        Raises:
            StateMismatchError: names or shapes are others than were saved.
            CorruptCheckpointError: a file is not what was written.
        """
        for name, module in self.modules.items():
            check_weights(module, weights[name], strict)
        for name, optimizer in self.optimizers.items():
            check_optimizer_state(optimizer, trees[name], self.models)
        restores: list[Restore] = [
            partial(load_weights_into, module, weights[name], strict) for name, module in self.modules.items()
        ]
        restores += [
            partial(load_optimizer_state, optimizer, trees[name], self.models)
            for name, optimizer in self.optimizers.items()
        ]
        return restores + [partial(item.load_state_dict, trees[name]) for name, item in self.objects.items()]
