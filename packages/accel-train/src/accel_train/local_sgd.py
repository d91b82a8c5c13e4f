"""Local SGD: ranks train copies of a model without communication, and average them now and then."""

from __future__ import annotations

from types import TracebackType
from typing import Self, cast

from torch import nn

from accel_train.accelerator import Accelerator
from accel_train.errors import AccumulationError, ArgumentTypeError, IncompatibleOptionsError, OptionError
from accel_train.strategies.local_training import LocalTraining

__all__ = ["LocalSGD"]


class LocalSGD:
    """Context for Local SGD: each rank trains its own copy of the model, and the copies are averaged now and then.

    The copies are replaced by their mean every `local_sgd_steps` updates and at the end of the context, and so are
    averages of their weights (`AveragedWeights`). Optimizer states are not averaged; at the end of the context all
    ranks take over the states and schedules of rank 0. Floating-point buffers, such as the running averages of batch
    normalisation, are averaged with the parameters. Other buffers are taken from rank 0, unless
    `broadcast_buffers=False` lets every rank keep its own.

    Ranks may take different numbers of steps: ranks that are done wait at the end, and their copies still count in the
    averages of the others. If an exception leaves the context, nothing is averaged, so no rank waits there; the model
    cannot be trained again before its copies are equal. `save_state` is refused while copies may differ, so also
    inside.

    Args:
        accelerator: the `Accelerator` that prepared the model.
        model: the prepared model.
        local_sgd_steps: optimizer updates between two averages, the same on all ranks.
        enabled: False: train as without this context.

    Attributes:
        num_steps: updates since the context was entered.

    Raises:
        IncompatibleOptionsError: ranks cannot train their own copies under the accelerator's strategy, or a step guard
            (`guard_steps`) decides on all ranks together.
        PrepareError: the model was not prepared for training.
        OptionError: `local_sgd_steps` is not a positive whole number.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if isinstance(local_sgd_steps, bool) or not isinstance(cast(object, local_sgd_steps), int):
            raise ArgumentTypeError(
                f"LocalSGD(local_sgd_steps=…) takes a number of updates, got {type(local_sgd_steps).__name__}: "
                f"{local_sgd_steps!r:.80}."
            )
        if local_sgd_steps < 1:
            raise OptionError(
                f"LocalSGD(local_sgd_steps={local_sgd_steps}): local_sgd_steps must be at least 1 update."
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        self.enabled = bool(enabled) and accelerator.num_processes > 1
        self._entered = False
        self._copies: LocalTraining | None = None
        if self.enabled:
            strategy = accelerator.strategy
            if not strategy.capabilities.separate_steps:
                raise IncompatibleOptionsError(
                    f"LocalSGD lets every rank train a whole copy of the model, which the strategy {strategy.name!r} "
                    "cannot. Train with the strategy 'ddp', or pass LocalSGD(…, enabled=False)."
                )
            strategy.local.check(model)
            self._copies = strategy.local

    def __enter__(self) -> Self:
        if self._entered:
            raise AccumulationError(
                "This LocalSGD was entered twice. Leave it first, or build one per block."
            )
        if self._copies is not None:
            if self.accelerator.step_guard is not None:
                raise IncompatibleOptionsError(
                    "LocalSGD cannot be combined with guard_steps(): a guard lets all ranks decide about each update "
                    "together, and with LocalSGD ranks may take different numbers of them. Leave one of them out."
                )
            self._copies.begin(self.model)
        self._entered = True
        self.num_steps = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        if self._copies is None:
            return
        averaged = False
        try:
            if kind is None:
                # The others may average several times before they come here.
                while not averaged:
                    averaged = self._copies.average(self.model, finished=True)
                self.accelerator.share_states()
        finally:
            self._copies.end(self.model, averaged=averaged)

    def step(self) -> None:
        """Count an update, and average the copies every `local_sgd_steps` updates; call it after the optimizer's step.

        Inside an accumulation window, where the optimizer does not step, it does nothing.

        Raises:
            AccumulationError: called outside the context.
        """
        if not self._entered:
            raise AccumulationError(
                "LocalSGD.step() was called outside its context. Call it inside `with local_sgd: …`."
            )
        if not self.accelerator.gradients_complete(self.model):
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self.average()

    def average(self) -> None:
        """Average the copies now, on all ranks, for example before an evaluation between two averages."""
        if not self._entered:
            raise AccumulationError(
                "LocalSGD.average() was called outside its context, where all copies are equal already."
            )
        if self._copies is not None:
            self._copies.average(self.model, finished=False)
