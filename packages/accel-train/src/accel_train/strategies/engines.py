"""Base of strategies whose engine holds gradients and steps: DeepSpeed and Megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from accel_ckpt.errors import StateMismatchError
from accel_ckpt.modules.names import listed
from accel_state.errors import NotAvailableError
from accel_train.errors import ArgumentTypeError
from accel_train.strategies.base import Strategy, StrategyOptions
from accel_train.strategies.state_adapter import StateAdapter
from accel_train.strategies.window_gradients import WindowGradients

__all__ = ["EngineStates", "EngineStrategy", "check_groups"]


class _Gradients(Protocol):
    """The gradients of an engine."""

    @property
    def waiting(self) -> bool: ...

    def step(self) -> bool: ...

    def drop(self) -> None: ...


class _Made(Protocol):
    """The objects that an engine was made from; without optimizer and gradients it is only evaluated."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...

    @property
    def gradients(self) -> _Gradients | None: ...

    @property
    def groups(self) -> list[list[Tensor]] | None: ...


MadeT = TypeVar("MadeT", bound=_Made)


class EngineWindowGradients(WindowGradients):
    """The gradients of an open window that engines have."""

    strategy: EngineStrategy[Any]

    @property
    def wait_in_engine(self) -> bool:
        """Whether an engine holds gradients that wait for a step."""
        return any(item.gradients is not None and item.gradients.waiting for item in self.strategy.made)


class EngineStates(StateAdapter):
    """State adapter that asks the engines for the script's parameter groups, and for gradients that wait."""

    strategy: EngineStrategy[Any]
    window_gradients: ClassVar[type[WindowGradients]] = EngineWindowGradients

    def parameter_groups(self, optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
        """The parameters of each group of the script; engines leave empty groups behind."""
        item = self.strategy.of_optimizer(optimizer)
        return super().parameter_groups(optimizer) if item is None or item.groups is None else item.groups

    def load_rank_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Drop gradients that wait in an engine: the loaded state takes the place of the open window."""
        item = self.strategy.of_model(model)
        if item is not None and item.gradients is not None and item.gradients.waiting:
            item.gradients.drop()


class EngineStrategy(Strategy, Generic[MadeT]):
    """Finds the engine of a model or an optimizer, and delegates work on gradients to it.

    Attributes:
        made: the engines, and the objects that they were made from.
    """

    #: What steps, as errors call it.
    stepper: ClassVar[str]
    adapter: ClassVar[type[StateAdapter]] = EngineStates

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        self.made: list[MadeT] = []

    def is_outdated(self, model: nn.Module) -> bool:
        """False: an engine places the parameters that it holds itself."""
        return False

    def of_model(self, model: nn.Module) -> MadeT | None:
        """The engine of a model, wrapped or not."""
        plain = self.plain(model)
        return next((item for item in self.made if item.model is plain), None)

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> MadeT | None:
        """The engine that steps an optimizer."""
        return next((item for item in self.made if item.optimizer is optimizer), None)

    def gradient_norm(self, parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        """Norm of complete gradients; inside a window they are not complete, and completing them would end it."""
        return torch.zeros((), device=self.options.device)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: an engine that scales losses unscales gradients in its step."""

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> tuple[bool, Any]:
        """Let the engine of an optimizer reduce and clip gradients, and step.

        Raises:
            ArgumentTypeError: a closure is given, which the engine does not take.
        """
        item = self.of_optimizer(optimizer)
        if item is None or item.gradients is None:
            return super().step(optimizer, closure)
        if closure is not None:
            raise ArgumentTypeError(
                f"optimizer.step(closure) is not known to {self.stepper}. Use an optimizer without closures."
            )
        return item.gradients.step(), None

    def zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """Drop gradients that wait; after a step the engine has done so itself."""
        item = self.of_optimizer(optimizer)
        if item is None or item.gradients is None:
            super().zero_grad(optimizer, set_to_none)
        else:
            item.gradients.drop()

    def check_offload(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        kinds: Collection[str],
    ) -> None:
        """Refuse: an engine keeps states in buffers of its own; a strategy whose engine moves them overrides this."""
        raise NotAvailableError(
            f"offload_states() is not available under the strategy {self.name!r}: {self.stepper} keeps parameters, "
            "gradients and optimizer states in buffers that it cannot give back. Save the state with save_state(), end "
            "the process, and load it again."
        )

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Do nothing: the engine decides when it reduces, in its step at the latest."""
        yield

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Do nothing: the step reduces all gradients that wait."""
        yield


def check_groups(groups: Sequence[Sequence[str]], tree: Mapping[str, Any]) -> None:
    """Check that a saved optimizer has the same parameters in the same groups; empty groups do not count.

    Args:
        groups: names of the parameters here, by group.
        tree: the saved state by parameter name.

    Raises:
        StateMismatchError: the parameters or their groups differ.
    """
    here = {frozenset(names) for names in groups if names}
    there = {frozenset(group["params"]) for group in tree["param_groups"] if group["params"]}
    mine, saved = set().union(*here), set().union(*there)
    problems = []
    if mine - saved:
        problems.append(f"it lacks {listed(sorted(mine - saved))}")
    if saved - mine:
        problems.append(f"{listed(sorted(saved - mine))} are in none of the groups here")
    if not problems and here != there:
        problems.append("its parameters are grouped otherwise")
    if problems:
        raise StateMismatchError(
            f"the saved optimizer does not fit: {'; '.join(problems)}. Build the optimizer as it was when the "
            "checkpoint was saved"
        )
