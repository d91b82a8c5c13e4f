"""Skipping updates that would harm a model: gradients that are inf or NaN, and loss spikes.

All ranks decide alike: one small reduction per update sums three numbers of each rank on the device. The host reads the
result once, as a gradient scaler reads its flag.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accel_state.log import get_logger
from accel_state.operations.collectives import reduce
from accel_train.errors import AccumulationError, IncompatibleOptionsError, OptionError, StepGuardError
from accel_train.loop.accumulation import Accumulator, Window
from accel_train.loop.lomo import check_guarded
from accel_train.loop.observers import StepObserver
from accel_train.optimizer_parameters import parameters_of
from accel_train.state_part import SavedTrees, StatePart, Trees, taken_up
from accel_train.strategies.base import Strategy
from accel_train.strategies.gradients import local_part

__all__ = ["GuardState", "StepGuard", "StepGuardOptions"]

_logger = get_logger(__name__)
Reason = Literal["gradients", "loss"]


@dataclass(frozen=True)
class StepGuardOptions:
    """Which updates are skipped; see `Accelerator.guard_steps`.

    Attributes:
        nonfinite_gradients: skip an update if a gradient is inf or NaN. Under a gradient scaler the scaler does that.
        loss_spike: skip an update if its loss is not finite or more than this many times the reference; None: losses
            are not checked.
        reference: "median" of the last losses, or their exponential moving average, "ema".
        history: number of updates that the median, or the average (its weight is 2 / (history + 1)), covers.
        warmup: number of losses of an optimizer before the first one is judged.
        max_consecutive: skipped updates in a row, of one optimizer, after which an error is raised; None: never.

    Raises:
        OptionError: a value that cannot be used.
    """

    nonfinite_gradients: bool = True
    loss_spike: float | None = None
    reference: Literal["median", "ema"] = "median"
    history: int = 100
    warmup: int = 20
    max_consecutive: int | None = 10

    def __post_init__(self) -> None:
        if self.loss_spike is not None and not (self.loss_spike > 1 and math.isfinite(self.loss_spike)):
            raise OptionError(
                f"guard_steps(loss_spike={self.loss_spike!r}): loss_spike must be a factor above 1; an update is "
                "skipped if its loss is more than that many times the reference."
            )
        if self.reference not in ("median", "ema"):
            raise OptionError(
                f'guard_steps(reference={self.reference!r}): reference must be "median" or "ema".'
            )
        for name in ("history", "warmup", "max_consecutive"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise OptionError(
                    f"guard_steps({name}={value!r}): expected a whole number of at least 1 update."
                )
        if self.warmup > self.history:
            raise OptionError(
                f"guard_steps(warmup={self.warmup}, history={self.history}): warmup must not be larger than history, "
                "because the warm-up is part of it."
            )
        if not self.nonfinite_gradients and self.loss_spike is None:
            raise OptionError(
                "guard_steps(nonfinite_gradients=False, loss_spike=None) would skip nothing. Give a loss_spike, or "
                "leave the call out."
            )


class _Watched:
    """The history of one optimizer."""

    def __init__(self, options: StepGuardOptions) -> None:
        self.options = options
        self.consecutive = 0
        self.seen = 0
        self.average: float | None = None
        self.losses: deque[float] = deque(maxlen=options.history if options.reference == "median" else 0)

    def reference(self) -> float | None:
        """The reference for a loss; None while too few losses are known, or if a multiple of it is meaningless."""
        if self.seen < self.options.warmup:
            return None
        value = statistics.median(self.losses) if self.options.reference == "median" else self.average
        return value if value is not None and value > 0 else None

    def add(self, loss: float) -> None:
        self.seen += 1
        self.losses.append(loss)
        weight = 2 / (self.options.history + 1)
        self.average = loss if self.average is None else self.average + weight * (loss - self.average)

    def state_dict(self) -> dict[str, Any]:
        return {
            "consecutive": self.consecutive,
            "seen": self.seen,
            "average": self.average,
            "losses": list(self.losses),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.consecutive, self.seen = int(state["consecutive"]), int(state["seen"])
        self.average = None if state["average"] is None else float(state["average"])
        self.losses.clear()
        self.losses.extend(state["losses"])


class _Losses:
    """What one window has added since it was judged last.

    Args:
        device: of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self.signal = torch.zeros(3, device=device)
        self.bad, self.loss, self.weight = self.signal.unbind()
        self.items = 0  # counted on the host
        self.backwards = 0  # whose losses are in the signal
        self.verdict: Reason | None = None  # on those that were judged last
        self.explanation = ""

    def add(self, loss: Tensor, num_items: int | Tensor | None) -> None:
        self.backwards += 1
        self.loss.add_(local_part(loss.detach()).reshape(()))
        if isinstance(num_items, Tensor):
            self.weight.add_(num_items.detach().reshape(()))
        else:
            self.items += 1 if num_items is None else num_items

    def dump(self) -> dict[str, Any]:
        _, loss, weight = self.signal.tolist()
        return {
            "loss": loss, "weight": weight + self.items, "backwards": self.backwards, "verdict": self.verdict
        }  # fmt: skip

    @classmethod
    def restored(cls, saved: Mapping[str, Any], device: torch.device) -> _Losses:
        losses = cls(device)
        losses.backwards, losses.verdict = saved["backwards"], saved["verdict"]
        losses.loss.fill_(saved["loss"])
        losses.weight.fill_(saved["weight"])
        return losses


class StepGuard(StepObserver):
    """Decides which updates of one `Accelerator` are skipped; see `accelerator.step_guard`.

    Args:
        options: what is skipped.
        strategy: how ranks cooperate.
        ranks: how many there are; all of them decide together.
        models: the prepared models, named by an error.
        windows: which losses led to an optimizer's gradients.

    Attributes:
        skipped: how many updates were skipped, by reason: "gradients" (those that a gradient scaler skipped included)
            or "loss".
        last_reason: why the last update was skipped; None if it was not.

    Raises:
        IncompatibleOptionsError: the strategy's engine owns the step.
    """

    def __init__(
        self,
        options: StepGuardOptions,
        strategy: Strategy,
        ranks: int,
        models: Sequence[nn.Module],
        windows: Accumulator,
    ) -> None:
        if not strategy.capabilities.skips_steps:
            raise IncompatibleOptionsError(
                f"guard_steps() skips updates, which the strategy {strategy.name!r} cannot: its engine counts "
                "micro-batches and steps itself. Use the engine's own checks, or another strategy."
            )
        self.options = options
        self.skipped: Counter[Reason] = Counter()
        self.last_reason: Reason | None = None
        self._strategy = strategy
        self._ranks = ranks
        self._models = models
        self._scaled = strategy.precision.scaler is not None
        self._finite = options.nonfinite_gradients and not self._scaled
        self._windows = windows
        self._explanation = ""
        self._norm: tuple[set[int], Tensor] | None = None
        self._refused = False  # the last step
        self._watched: dict[int, _Watched] = {}

    # What the loop reports

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that updates during backward."""
        check_guarded(optimizer)

    def before_backward(self, loss: Any, num_items: int | Tensor | None, kwargs: Mapping[str, Any]) -> None:
        """Record the loss, if losses are judged."""
        self._norm = None
        if self.options.loss_spike is not None:
            self._losses(self._windows.current).add(loss, num_items)

    def _losses(self, window: Window) -> _Losses:
        noted, device = window.noted, self._strategy.options.device
        if not isinstance(noted, _Losses):  # none yet, or those of a loaded state
            noted = window.noted = _Losses(device) if noted is None else _Losses.restored(noted, device)
        return noted

    def clipped(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Record the norm, which is finite only if the gradients are."""
        if self._finite:
            self._norm = (set(map(id, parameters)), norm)

    # Deciding

    def decide(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, *, together: bool
    ) -> bool | None:
        """Decide on an update: False if it is skipped. Collective.

        Raises:
            OptionError: there is a closure.
            AccumulationError: ranks may have run out of data, so that they could not take part.
        """
        if closure is not None:
            raise OptionError(
                "optimizer.step(closure) cannot be combined with guard_steps(): the closure computes the gradients "
                "inside the step, after the guard has decided. Use an optimizer without a closure."
            )
        self._refused = not self._allows(optimizer, together)
        return False if self._refused else None

    def _allows(self, optimizer: torch.optim.Optimizer, together: bool) -> bool:
        if self._ranks > 1 and not together:
            raise AccumulationError(
                "guard_steps() decides on all ranks together, which a rank without data cannot take part in. Outside "
                "join_uneven_inputs() it needs no join: loaders with even_batches=True give every rank the same "
                "number of batches."
            )
        watched, losses = self._watch(optimizer), self._losses(self._windows.judged_with(optimizer))
        fresh = losses.backwards > 0
        if self._finite or fresh:
            bad, loss, weight = self._exchanged(optimizer, losses)
            if fresh:
                losses.verdict = self._judge(watched, loss / weight if weight else 0.0)
                losses.explanation = self._explanation
            if bad:
                self._explanation = "gradients are inf or NaN"
                return self._skip(watched, "gradients")
        if losses.verdict is None:
            return True
        self._explanation = losses.explanation
        return self._skip(watched, losses.verdict)

    def _exchanged(self, optimizer: torch.optim.Optimizer, losses: _Losses) -> tuple[float, float, float]:
        """How many ranks have bad gradients, the sum of losses and what it is over; the noted ones are used up."""
        if self._finite:
            losses.bad.copy_(self._nonfinite(optimizer))
        if losses.items:
            losses.weight.add_(losses.items)
        whole = losses.signal if self._ranks == 1 else reduce(losses.signal, reduction="sum")
        bad, loss, weight = whole.tolist()
        losses.signal.zero_()
        losses.items = losses.backwards = 0
        return bad, loss, weight

    def _nonfinite(self, optimizer: torch.optim.Optimizer) -> Tensor:
        parameters = [*parameters_of(optimizer)]
        if self._norm is not None:
            known, norm = self._norm
            if all(id(parameter) in known for parameter in parameters):
                return ~torch.isfinite(norm)
        return self._strategy.has_nonfinite_gradients(parameters)

    def _judge(self, watched: _Watched, loss: float) -> Reason | None:
        """Whether a loss is bad; a good one joins the history."""
        factor = self.options.loss_spike
        assert factor is not None, "losses are noted only where they are judged"
        if not math.isfinite(loss):
            if self._scaled:
                return None  # its gradients are not finite either, and the scaler has to know
            self._explanation = f"the loss is {loss}"
            return "loss"
        reference = watched.reference()
        if reference is not None and loss > factor * reference:
            self._explanation = (
                f"the loss {loss:.4g} is {loss / reference:.3g} times the {self.options.reference} {reference:.4g} of "
                f"earlier ones (loss_spike={factor:g})"
            )
            return "loss"
        watched.add(loss)
        return None

    def _skip(self, watched: _Watched, reason: Reason) -> bool:
        watched.consecutive += 1
        self.skipped[reason] += 1
        self.last_reason = reason
        _logger.warning(
            f"An update was skipped: {self._explanation}. {self.skipped.total()} were skipped so far."
        )
        return False

    def after_step(self, optimizer: Any) -> None:
        """Count skipped updates, and raise if there were too many in a row; on all ranks alike.

        Raises:
            StepGuardError: too many updates in a row were skipped.
        """
        if not self._refused:
            self._saw_step(self._watch(optimizer), skipped=optimizer.step_was_skipped)
        self._check(optimizer)

    def _saw_step(self, watched: _Watched, *, skipped: bool) -> None:
        """An optimizer that may step has stepped, unless the gradient scaler has skipped the update."""
        if skipped:
            watched.consecutive += 1
            self.skipped["gradients"] += 1
            self.last_reason = "gradients"
            self._explanation = "the gradient scaler found inf or NaN"
        else:
            watched.consecutive = 0
            self.last_reason = None
        self._norm = None

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        limit, watched = self.options.max_consecutive, self._watch(optimizer)
        if limit is None or watched.consecutive < limit:
            return
        names = self._nonfinite_names()
        where = f" Gradients that are not finite on this rank: {', '.join(names)}." if names else ""
        raise StepGuardError(
            f"{watched.consecutive} updates in a row were skipped (max_consecutive={limit}); the last one because "
            f"{self._explanation}.{where} Lower the learning rate or clip gradients, look at the batches of these "
            "updates, or continue from an earlier checkpoint."
        )

    def _nonfinite_names(self) -> list[str]:
        """The first parameters of which this rank holds a gradient that is not finite."""
        names: list[str] = []
        for model in self._models:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and bool(self._strategy.has_nonfinite_gradients([parameter])):
                    names.append(name)
                    if len(names) == 3:
                        return [*names, "…"]
        return names

    # State

    def _watch(self, optimizer: torch.optim.Optimizer) -> _Watched:
        watched = self._watched.get(id(optimizer))
        if watched is None:
            watched = self._watched[id(optimizer)] = _Watched(self.options)
        return watched

    def forget(self) -> None:
        """Forget optimizers; counts stay."""
        self._watched.clear()
        self._norm = None

    def state_dict(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """The state that is the same on all ranks: counts, and the history of each optimizer, in this order."""
        return {
            "skipped": dict(self.skipped),
            "last_reason": self.last_reason,
            "optimizers": [self._watch(optimizer).state_dict() for optimizer in optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Restore what `state_dict` returned."""
        self.forget()
        self.skipped, self.last_reason = Counter(state["skipped"]), state["last_reason"]
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            self._watch(optimizer).load_state_dict(saved)


class GuardState(StatePart):
    """A guard's counts and histories; what it has noted of open windows is saved with these.

    Args:
        guard: decides about the updates.
        optimizers: the prepared optimizers, as they are when a state is saved or loaded.
    """

    def __init__(self, guard: StepGuard, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._guard, self._optimizers = guard, optimizers

    def dump(self, trees: Trees) -> None:
        """Save them as progress, since all ranks have the same."""
        trees.progress["guard"] = self._guard.state_dict(self._optimizers)

    def load(self, taken: Any, saved: SavedTrees) -> None:
        """Go back to them."""
        if "guard" in saved.progress:
            with taken_up("the state of the guard of steps", saved.directory):
                self._guard.load_state_dict(saved.progress["guard"], self._optimizers)
