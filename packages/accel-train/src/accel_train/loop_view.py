"""The part of `Accelerator` that watches over the steps of a training loop."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

from accel_train.errors import OptionError
from accel_train.loop.garbage import GarbageCollector, collect_garbage
from accel_train.loop.guard import GuardState, StepGuard, StepGuardOptions
from accel_train.setup.prepared import Prepared

__all__ = ["LoopView"]


class LoopView:
    """Skips harmful updates and collects garbage."""

    _prepared: Prepared

    @property
    def step_guard(self) -> StepGuard | None:
        """Skips harmful updates, and counts them; None unless `guard_steps` was called."""
        observers = self._prepared.accumulator.observers
        return next((item for item in observers if isinstance(item, StepGuard)), None)

    def guard_steps(
        self,
        *,
        nonfinite_gradients: bool = True,
        loss_spike: float | None = None,
        reference: Literal["median", "ema"] = "median",
        history: int = 100,
        warmup: int = 20,
        max_consecutive: int | None = 10,
    ) -> StepGuard:
        """From now on skip updates that would harm the model, on all ranks alike; call it before the first backward.

        Prepared schedulers wait where an update is skipped, and `optimizer.step_was_skipped` is true, as after an
        overflow under fp16. Counts and history are part of `save_state`.

        Args:
            nonfinite_gradients: skip an update if a gradient of the optimizer is inf or NaN. Under fp16 the gradient
                scaler does so, and its skipped updates are counted here.
            loss_spike: skip one whose loss, the mean over the window and over ranks, is more than this many times the
                reference, or not finite; None: losses are not looked at.
            reference: "median" of the last losses, or their exponential moving average, "ema". Losses of skipped
                updates do not count.
            history: over how many updates of an optimizer.
            warmup: how many losses are needed before any is judged.
            max_consecutive: skipped updates in a row after which `StepGuardError` is raised; None: never.

        Raises:
            OptionError: a value that cannot be used, or a second call.
            IncompatibleOptionsError: the strategy's engine owns the step (DeepSpeed, Megatron-LM), or an optimizer
                updates during backward (LOMO).
        """
        options = StepGuardOptions(
            nonfinite_gradients, loss_spike, reference, history, warmup, max_consecutive
        )
        here = self._prepared
        if self.step_guard is not None:
            raise OptionError("guard_steps() was called twice; one guard decides about all updates.")
        guard = StepGuard(options, here.plan.strategy, here.process.num_processes, here.prepared_models)
        for optimizer in here.inner_optimizers:
            guard.check_optimizer(optimizer)
        here.accumulator.observers.append(guard)
        here.parts.append(GuardState(guard, here.optimizers))
        return guard

    def collect_garbage(
        self, every: int = 1000, *, generation: int = 2
    ) -> AbstractContextManager[GarbageCollector]:
        """Context in which Python collects garbage after every `every` optimizer steps only, on all ranks together.

        Otherwise each rank collects at moments of its own, and the others wait for it at the next reduction. Everything
        is collected once at the beginning. At the end, also after an error, collection is as it was before.

        Args:
            every: steps of prepared optimizers, skipped ones included.
            generation: as `gc.collect` takes it. Below 2 it is faster, and cycles that live longer stay until the end.

        Raises:
            OptionError: a number below 1, or an unknown generation.
        """
        return collect_garbage(self._prepared.accumulator.observers, GarbageCollector(every, generation))
