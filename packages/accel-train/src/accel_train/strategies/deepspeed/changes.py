"""Detects changes of a model or an optimizer that DeepSpeed's engine cannot follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_train.errors import AccumulationError, PrepareError

__all__ = ["NewParameterGuard"]

_NEXT = (
    "Change the model before prepare(), or make a new engine on all ranks: `model = accelerator.unwrap_model(model)`, "
    "`accelerator.free_memory()`, and prepare() of the model, a new optimizer and the loaders."
)


class NewParameterGuard:
    """Forward pre-hook of an engine that refuses parameters which the engine does not know.

    An engine copies the trained parameters into flat partitions when it is created. A parameter that is added or
    unfrozen later would silently keep its values, and one that is frozen would still change by its momentum and weight
    decay. A check walks over the modules, without communication; ranks that change their models alike get the same
    error.

    Args:
        engine: DeepSpeed's engine.
        model: the module inside it.
        optimizer: the optimizer that the engine steps; None: the engine only evaluates.
    """

    def __init__(self, engine: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer
        # The parameters are kept, so that their `id`s stay their own.
        self._known = {
            id(parameter): (parameter, parameter.requires_grad) for parameter in model.parameters()
        }
        self._names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._groups = len(optimizer.param_groups) if optimizer is not None else 0
        self._stage: int = engine.zero_optimization_stage()
        self._forwards = self._backwards = 0  # since a forward followed a backward
        engine.register_forward_pre_hook(self)

    def __call__(self, engine: nn.Module, inputs: Any) -> None:
        """Refuse a forward in training, or one that would fail under stage 3, because of new parameters.

        Below stage 2 a script may freeze one model while it trains another through it. The hooks of stages 2 and 3 take
        such a backward for one of the frozen model, and fail, or change gradients of the next one.

        Raises:
            PrepareError: a parameter was added or replaced; from stage 2 on also: frozen or unfrozen.
        """
        trains = torch.is_grad_enabled()
        if trains:
            if self._backwards:
                self._forwards = self._backwards = 0
            self._forwards += 1
        if trains or self._stage == 3:
            self._check(flags=trains and self._stage >= 2)

    def check(self) -> None:
        """Refuse a backward whose gradients the engine would ignore, or would need and not get.

        Raises:
            PrepareError: a parameter was added, replaced, frozen or unfrozen, or a group was added to the optimizer.
            AccumulationError: under stage 3, this is the second of two backward passes after two forwards.
        """
        self._check(flags=True)
        if self._stage == 3 and self._backwards and self._forwards > 1:
            raise AccumulationError(
                f"backward() was called {self._backwards + 1} times after {self._forwards} forwards of "
                f"{type(self.model).__name__}, for which DeepSpeed's ZeRO stage 3 computes wrong gradients. Add the "
                "losses up and call backward() once, or call it after each forward."
            )
        self._backwards += 1
        if self.optimizer is not None and len(self.optimizer.param_groups) != self._groups:
            raise PrepareError(
                f"{type(self.optimizer).__name__} had {self._groups} groups of parameters when it was prepared, and "
                f"has {len(self.optimizer.param_groups)}; DeepSpeed's engine would not average the gradients of what "
                f"was added. {_NEXT}"
            )

    def _check(self, flags: bool) -> None:
        known = self._known
        for module in self.model.modules():
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                found = known.get(id(parameter))
                if found is None or (flags and found[1] is not parameter.requires_grad):
                    raise PrepareError(self._message(parameter))

    def _message(self, parameter: nn.Parameter) -> str:
        name = next(name for name, p in self.model.named_parameters(remove_duplicate=False) if p is parameter)
        if id(parameter) not in self._known:
            change = "replaced in" if name in self._names else "added to"
            what = f"was {change} {type(self.model).__name__}"
            result = "does not know it: it would keep its values"
        elif parameter.requires_grad:
            what = f"of {type(self.model).__name__} was frozen when the model was prepared, and unfrozen"
            result = "does not train it: it would keep its values"
        else:
            what = f"of {type(self.model).__name__} was frozen"
            result = "would go on to change it by its momentum and weight decay"
            if self._stage >= 2:
                result += "; only zero_stage=1 can freeze a model while another is trained through it"
        return f"The parameter {name!r} {what} after prepare(), and DeepSpeed's engine {result}. {_NEXT}"
