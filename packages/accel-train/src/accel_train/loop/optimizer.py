"""The optimizer that `prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_state.trees import send_to_device
from accel_train.data.active_loaders import ActiveLoaders
from accel_train.loop import lomo
from accel_train.loop.accumulation import Accumulator
from accel_train.loop.observers import StepObserver
from accel_train.loop.trained_places import TrainedPlaces
from accel_train.mesh import Mesh
from accel_train.optimizer_parameters import parameters_of
from accel_train.precision.base import Precision, PrecisionOptions
from accel_train.strategies.base import Strategy, StrategyOptions

if TYPE_CHECKING:
    from accel_train.loop.state import AcceleratorState, GradientState

__all__ = ["AcceleratedOptimizer", "move_to_device"]


_FIRST_STEPS = 4
_LONGEST_UNCHECKED = 1024


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A prepared optimizer: it steps only when gradients are complete, through the gradient scaler if there is one.

    Everything else is the wrapped optimizer's: `state`, `param_groups`, `defaults`, hooks, state dicts.

    Args:
        optimizer: the optimizer to wrap.
        device_placement: whether its state moves to the device of its parameters.
        scaler: must be None; accepted for scripts that build the wrapper by hand. A prepared optimizer gets its
            precision from the `Accelerator`.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: None = None,
        *,
        accumulator: Accumulator | None = None,
        strategy: Strategy | None = None,
        given: torch.optim.Optimizer | None = None,
    ) -> None:
        self.optimizer = optimizer
        # What the script gave: schedulers that are prepared later may be of it.
        self.given = optimizer if given is None else given
        self._strategy = strategy or _alone()
        self._accumulator = accumulator or Accumulator(
            self._strategy, ActiveLoaders(), all_models=(), all_optimizers=()
        )
        self.device_placement = device_placement
        self._is_accelerate_prepared = False
        self._skipped = False
        self._waits = False  # the last call of step() did nothing, where several windows take turns
        self._used = 0  # when the micro-batch began with which it stepped, there
        self._check_again()
        self._spent = False  # stepped, and its gradients not yet dropped
        self._zeros: list[tuple[int, int]] = []  # which gradients were filled with zeros
        self._called = False
        self._mark: tuple[int, int] | None = None  # what tells whether they are still the same
        if lomo.is_lomo(optimizer):
            lomo.save_moments(optimizer)
            lomo.observe(self._accumulator.observers, optimizer)
        if device_placement:
            move_state_to_parameters(optimizer)

    def follow(self, optimizer: torch.optim.Optimizer, accumulator: Accumulator, strategy: Strategy) -> None:
        """Belong to the accelerator that prepared this optimizer last, and wrap what its strategy returned for it."""
        self.given, self.optimizer = self.optimizer, optimizer
        self._accumulator = accumulator
        self._strategy = strategy
        self._check_again()
        if lomo.is_lomo(optimizer):
            lomo.observe(accumulator.observers, optimizer)

    def _check_again(self) -> None:
        """Count steps from zero, so that the next ones are checked."""
        self._stepped_before = False
        self._places: TrainedPlaces | None = None
        self._steps = 0  # those that all ranks have taken
        self._next_check = 1

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of the `Accelerator`; None unless mixed_precision is "fp16"."""
        return self._strategy.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._strategy.precision.replace_scaler(scaler)

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The state of the newest `Accelerator`."""
        from accel_train.loop.state import AcceleratorState

        return AcceleratorState()

    @property
    def gradient_state(self) -> GradientState:
        """Where the gradient accumulation of the newest `Accelerator` stands."""
        from accel_train.loop.state import GradientState

        return GradientState()

    # The wrapped optimizer's own

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's default options."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)
        self._accumulator.forget_optimizer(self)
        self._check_again()  # perhaps parameters of no prepared model

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    # What differs

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, unless they are still being accumulated; `set_to_none=False` fills them with zeros.

        In a loop, `zero_grad()` may come first or last: gradients that a step has used are dropped, those of an
        unfinished window are kept.
        """
        if self._accumulator.may_drop_gradients(self) or (
            self._spent and self._mark == _mark_of(self.optimizer)
        ):
            self._spent = False
            self._strategy.zero_grad(self.optimizer, set_to_none is not False)
            self._zeros = _versions_of(self.optimizer) if set_to_none is False else []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, unless gradients are still being accumulated; fp16 skips a step with inf or NaN gradients."""
        self._called = True
        if not self._is_due():
            if closure is not None or self._steps < _FIRST_STEPS:
                self._check_waiting(closure is not None)
            return None
        if not self._stepped_before:
            self._stepped_before = True
            self._accumulator.check_first_step(self.optimizer, closure=closure is not None)
            self._places = self._accumulator.places_of(self.optimizer, None)
        elif self._places is not None and not self._places.are_kept():
            self._places = self._accumulator.places_of(self.optimizer, self._places)
        if self._accumulator.steps_together:
            self._steps += 1
            if self._steps >= self._next_check:
                self._check(closure is not None)
        observers = self._accumulator.observers
        for observer in observers:
            observer.before_step(self)
        if closure is not None and self._strategy.replicas_of(self.optimizer) is not None:
            closure = partial(self._agreed, closure)
        self._spent = True
        stepped, result = self._observed(observers, closure)
        self._skipped = not stepped
        self._mark = _mark_of(self.optimizer)
        for observer in observers:
            observer.after_step(self)
        return result

    def _agreed(self, closure: Callable[[], Any]) -> Any:
        """What a closure returns, a loss as the mean of all ranks: a line search decides by it how far to go."""
        loss = closure()
        if isinstance(loss, torch.Tensor):
            return loss.new_tensor(self._accumulator.agreed(loss.item()))
        return self._accumulator.agreed(loss) if isinstance(loss, float) else loss

    def _is_due(self) -> bool:
        """Whether its gradients are complete, and not those with which it has stepped.

        Where several windows take turns, scripts may step all optimizers after all blocks, in every micro-batch.
        """
        accumulator = self._accumulator
        window = accumulator.window_for(self)
        if window is None:
            return accumulator.sync_gradients
        due = window.synchronising and (window is accumulator.current or window.entered != self._used)
        self._waits = not due
        if due:
            self._used = window.entered
        return due

    @property
    def gradients_complete(self) -> bool:
        """Whether it steps, or has stepped, with the gradients of the window that its models were trained in last."""
        accumulator = self._accumulator
        window = accumulator.window_for(self)
        if window is None:
            return accumulator.sync_gradients
        unused = window is accumulator.current or window.entered != self._used
        return window.synchronising and (unused or not self._waits)

    def _observed(self, observers: list[StepObserver], closure: Callable[[], Any] | None) -> tuple[bool, Any]:
        """Step, unless an observer decides about it."""
        for observer in observers:
            stepped = observer.decide(self, closure, together=self._accumulator.may_reduce)
            if stepped is not None:
                return stepped, None
        return self._strategy.step(self.optimizer, closure)

    def _check(self, closure: bool) -> None:
        """Check this step, and choose the next: one of the first, or after the same number again, up to a limit."""
        steps = self._steps
        self._next_check = steps + (1 if steps < _FIRST_STEPS else min(steps, _LONGEST_UNCHECKED))
        if not closure:
            self._accumulator.check_step(self.optimizer)

    def _check_waiting(self, closure: bool) -> None:
        mark = _mark_of(self.optimizer)
        unused = mark is not None and not (self._spent and mark == self._mark)
        self._accumulator.check_waiting(gradients=unused, closure=closure)

    @property
    def may_be_unused(self) -> bool:
        """Whether it was never told to step, and nothing else steps it."""
        return not self._called and not self.steps_in_backward

    @property
    def has_zeros(self) -> bool:
        """Whether gradients were filled with zeros, to which no backward has added since."""
        return bool(self._zeros) and self._zeros == _versions_of(self.optimizer)

    def note_zeros(self) -> None:
        """Note that a loaded state has filled its gradients with zeros again."""
        self._zeros = _versions_of(self.optimizer)

    @property
    def steps_in_backward(self) -> bool:
        """Whether this is an optimizer of lomo-optim, which updates in backward, so that `step()` does nothing."""
        return lomo.is_lomo(self.optimizer)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped: gradients were not finite, or a guard refused it."""
        return self._skipped

    @property
    def _is_overflow(self) -> bool:
        """`step_was_skipped`, under the name by which clients of Accelerate also write it."""
        return self._skipped

    @_is_overflow.setter
    def _is_overflow(self, skipped: bool) -> None:
        self._skipped = skipped

    @property
    def gradients_spent(self) -> bool:
        """Whether a step has used the gradients, so that the next `zero_grad()` drops them."""
        return self._spent

    def restore_flags(self, skipped: bool, spent: bool) -> None:
        """Restore the flags of a saved run: where it was between two steps."""
        self._skipped, self._spent = skipped, spent
        self._mark = _mark_of(self.optimizer)

    def train(self) -> None:
        """Put a schedule-free optimizer into training mode; other optimizers have no such mode."""
        self._switch_mode("train")

    def eval(self) -> None:
        """Put a schedule-free optimizer into evaluation mode; other optimizers have no such mode."""
        self._switch_mode("eval")

    def _switch_mode(self, mode: str) -> None:
        for target in (self.optimizer, getattr(self.optimizer, "optimizer", None)):
            method = getattr(target, mode, None)
            if callable(method):
                method()
                return

    def __getattr__(self, name: str) -> Any:
        # Only called for what neither this class nor torch's Optimizer has. Dunder look-ups by copy and pickle come
        # before `optimizer` exists.
        if name.startswith("__") or name == "optimizer":
            raise AttributeError(name)
        if "step" in name:  # as first_step of an optimizer that looks twice
            self.__dict__["_called"] = True
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__, _places=None)  # a copy is of no model
        # A scheduler built on this object counts its steps; a copy has no such scheduler.
        state.pop("step", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def _alone() -> Strategy:
    """The strategy for an optimizer that no `Accelerator` prepared."""
    options = StrategyOptions(torch.device("cpu"), Mesh.of_world(1, 0), Precision(PrecisionOptions()))
    return Strategy(options)


def _mark_of(optimizer: torch.optim.Optimizer) -> tuple[int, int] | None:
    """Identity and version of the first gradient: both stay until another backward adds to it or makes a new one.

    Scripts may drop gradients by `model.zero_grad()`, of which the optimizer does not know.
    """
    for parameter in parameters_of(optimizer):
        # An engine may step views of its parameters, whose gradients nobody else sees.
        if parameter.is_leaf and parameter.grad is not None:
            return id(parameter.grad), parameter.grad._version
    return None


def _versions_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """The same of all gradients; a backward need not add to the first."""
    gradients = (parameter.grad for parameter in parameters_of(optimizer))
    return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: AcceleratedOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optimizer, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"The wrapped optimizer's `{name}`."
    return method


for _name in filter(lambda name: name.startswith("register_"), dir(torch.optim.Optimizer)):
    setattr(AcceleratedOptimizer, _name, _delegate(_name))


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """Move nested lists, tuples, mappings and tensors to `device`."""
    return send_to_device(state, device)


def move_state_to_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move each parameter's optimizer state to the device of the parameter.

    An optimizer that already has state (loaded from a checkpoint before `prepare`) follows the model this way. Step
    counters in 0-d CPU tensors stay on the CPU, where torch's optimizers want them unless they are capturable.
    """
    entries: dict[Any, Any] = optimizer.state  # torch allows keys that are no parameters
    for parameter, state in entries.items():
        # torch's ZeroRedundancyOptimizer has None for parameters of other ranks.
        if not isinstance(parameter, torch.Tensor) or state is None:
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                if value.dim() > 0 and value.device != parameter.device:
                    state[key] = value.to(parameter.device)
            elif isinstance(value, (list, tuple, dict)):
                state[key] = move_to_device(value, parameter.device)
