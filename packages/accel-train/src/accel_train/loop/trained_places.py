"""Where the parameters of an optimizer are in the prepared models, to see when a script replaces one there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

from accel_train.errors import PrepareError
from accel_train.optimizer_parameters import parameter_ids

__all__ = ["TrainedPlaces"]


class TrainedPlaces:
    """The modules that hold an optimizer's parameters, from the model down, as they are at its first step.

    Args:
        optimizer: about to step.
        models: the prepared models, without wrappers; those without a parameter of the optimizer are not watched.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
        self._models: list[nn.Module] = []
        self._tables: list[dict[str, Any]] = []  # the next three are columns, which one expression compares
        self._names: list[str] = []
        self._values: list[Any] = []
        held, seen = parameter_ids(optimizer), dict[int, bool]()
        for model in models:
            if self._add(model, held, seen):
                self._models.append(model)
        self._known = {id(p) for model in self._models for p in model.parameters()}

    def _add(self, module: nn.Module, held: set[int], seen: dict[int, bool]) -> bool:
        """Add the places in a module; returns whether it has any."""
        if id(module) not in seen:
            tables: tuple[dict[str, Any], ...] = module._parameters, module._modules
            own = [(tables[0], name, p) for name, p in module._parameters.items() if id(p) in held]
            inner = [
                (tables[1], name, child)
                for name, child in module._modules.items()
                if child is not None and self._add(child, held, seen)
            ]
            for table, name, value in (*own, *inner):
                self._tables.append(table)
                self._names.append(name)
                self._values.append(value)
            seen[id(module)] = bool(own or inner)
        return seen[id(module)]

    def are_kept(self) -> bool:
        """Whether each place holds what it held."""
        return all(map(is_, map(dict.get, self._tables, self._names), self._values))

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Check that what has come into the models since is trained by somebody.

        Raises:
            PrepareError: a parameter is new and no prepared optimizer has it.
        """
        held = parameter_ids(*optimizers)
        for model in self._models:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and id(parameter) not in held and id(parameter) not in self._known:
                    raise PrepareError(
                        f"Parameter {name!r} of {type(model).__name__} was replaced after the optimizer's first step, "
                        "and no prepared optimizer has the new one: steps would not train it. Assigning a Parameter or "
                        "a module does that, and load_state_dict(assign=True). Copy values into the parameters that "
                        "are there (load_state_dict() without assign), or build another optimizer, and prepare both."
                    )
