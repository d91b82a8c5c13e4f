"""Gradient accumulation: when gradients are reduced, and how they are scaled so that the result is exact.

A *window* is the run of micro-batches between two optimizer steps. Two contracts hold at its end, whatever number of
micro-batches it held and however many ranks there are:

* ``backward(loss)``: gradients are the mean over all micro-batches of all ranks;
* ``backward(loss_sum, num_items=n)``: gradients are those of one big batch, sum of losses over sum of items.

The length of a window is planned when it opens, from what its loader has left. Each micro-batch divides its loss by
the planned length, so that a half-precision sum does not overflow. What is known only at the end (items, the length of
a stream, ranks with different numbers of batches) is corrected on the reduced gradients, after the first backward of
the last micro-batch: until then an engine may keep gradients where nobody else can reach them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accel_ckpt.parts import is_sharded
from accel_state.messages import warn
from accel_state.operations.collectives import gather, reduce
from accel_train.data.active_loaders import ActiveLoaders
from accel_train.errors import AccumulationError, AmbiguousLoaderError, ArgumentTypeError
from accel_train.loop.observers import StepObserver
from accel_train.loop.trained_places import TrainedPlaces
from accel_train.loop.usual_mistakes import FirstWindows, check_trains, compare_whole_gradients
from accel_train.optimizer_parameters import parameters_of
from accel_train.ranks import Ranks
from accel_train.strategies.base import Strategy
from accel_train.strategies.gradients import local_part

__all__ = ["Accumulator", "Window"]


class _Loader(Protocol):
    """The attributes of a prepared loader that are used here."""

    @property
    def end_of_dataloader(self) -> bool: ...
    @property
    def batches_left(self) -> int | None: ...
    @property
    def may_be_uneven(self) -> bool: ...
    @property
    def ends_on_any_rank(self) -> bool | None: ...
    @property
    def batch_rows(self) -> int | None: ...


@dataclass(slots=True)
class CutBatch:
    """Tracks how a script cuts its loader's batches into micro-batches, with one `accumulate()` for each.

    Nobody says how many of the last batch follow, so it is expected to be cut as the batch before.
    """

    moment: int = 0  # when the batch was yielded
    part: int = 0  # micro-batches of it so far
    parts: int = 1  # … expected
    rows: int | None = None  # its rows; read once it is known to be cut
    ended: bool = False  # the last micro-batch ended its window because it seemed to be the loader's last

    def follow(self, loader: _Loader, moment: int) -> int:
        """A micro-batch of the batch that `loader` yielded at `moment` begins; returns how many more are expected."""
        if not moment:  # the loader is named, and not iterated
            self.part = self.parts = 1
        elif moment == self.moment and self.part:
            self.part += 1
            if self.part == 2:
                self.rows = loader.batch_rows
        else:
            self._next_batch(loader, moment)
        return max(self.parts - self.part, 0)

    def _next_batch(self, loader: _Loader, moment: int) -> None:
        before, self.part, self.moment, self.ended = self.part or 1, 1, moment, False
        self.parts = before
        if before > 1:
            rows = loader.batch_rows
            if rows is not None and self.rows:
                self.parts = -(-rows * before // self.rows)  # the last batch may be smaller
            self.rows = rows


@dataclass(slots=True)
class Window:
    """The micro-batches since the last optimizer step of one group of models."""

    models: tuple[nn.Module, ...] = ()
    micro_batches: int = 0
    planned: int = 1  # the length that was planned when it opened; losses were divided by it
    backwards: int = 0  # backward calls so far, over all micro-batches
    backwards_here: int = 0  # … in the current micro-batch
    items: int | Tensor = 0  # sum of num_items on this rank
    weighted: bool = False  # backward(num_items=…) is used
    synchronising: bool = True  # the current micro-batch is the last
    corrected: bool = False  # accumulated gradients are already scaled for the true count
    correction: float | Tensor = (
        1.0  # what gradients of losses divided by `planned` must be multiplied with at the end
    )
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # gradients of earlier windows
    entered: int = 0  # when the last micro-batch began, among those of all windows
    noted: Any = None  # what the guard notes of its losses; a mapping where a state was loaded
    owner: weakref.ref[Any] | None = None
    cut: CutBatch = field(default_factory=CutBatch)

    def keep(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Copy the gradients that optimizers hold, which are of earlier windows."""
        for optimizer in optimizers:
            if not getattr(optimizer, "has_zeros", False):
                held = (p for p in parameters_of(optimizer) if p.grad is not None)
                self.kept += [(p, local_part(p.grad.detach()).clone()) for p in held]  # type: ignore[union-attr]

    def give_back(self, corrected: Iterable[Tensor], correction: float | Tensor) -> None:
        """Undo a correction of these parameters' gradients for what was there before the window."""
        known = set(map(id, corrected)) if self.kept else set()
        for parameter, before in self.kept:
            if parameter.grad is not None and id(parameter) in known:
                factor = correction.to(before.device) if isinstance(correction, Tensor) else correction
                local_part(parameter.grad.detach()).add_((before * (1 - factor)).to(before.dtype))
        self.kept.clear()

    def reset(self) -> None:
        """Close: the next micro-batch opens a new window."""
        self.micro_batches = self.backwards = self.backwards_here = 0
        self.items = 0
        self.kept.clear()
        self.weighted = self.corrected = False
        self.synchronising = True
        self.correction = 1.0


class Accumulator:
    """Windows of one `Accelerator`.

    Args:
        strategy: computes, reduces and scales gradients.
        ledger: which loader yielded last.
        all_models: the prepared models.
        all_optimizers: the prepared optimizers.
        num_steps: planned length of a window.
        sync_with_dataloader: whether a window also ends with its loader.
        rehearsed: the other ranks are not there.

    Attributes:
        observers: see backward passes and steps.
        may_reduce: whether all ranks take part in what this one does; false where a rank may be out of data.
    """

    def __init__(
        self,
        strategy: Strategy,
        ledger: ActiveLoaders,
        *,
        all_models: Sequence[nn.Module],
        all_optimizers: Sequence[torch.optim.Optimizer],
        num_steps: int = 1,
        sync_with_dataloader: bool = True,
        rehearsed: bool = False,
    ) -> None:
        self.num_steps = num_steps
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_gradients = True
        self.observers: list[StepObserver] = []
        self._rehearsed = rehearsed
        self._strategy = strategy
        # Most strategies need not be told of micro-batches; each call saved is one per micro-batch.
        self._tells_begin = type(strategy).begin_micro_batch is not Strategy.begin_micro_batch
        self._tells_end = type(strategy).end_micro_batch is not Strategy.end_micro_batch
        self._scaled = strategy.precision.scaler is not None  # only a scaler asks which gradients wait
        # Models of which ranks train copies, without the others; empty but inside LocalSGD.
        self._alone: Sequence[nn.Module] = (
            strategy.local.trained_alone if strategy.capabilities.separate_steps else ()
        )
        self._ledger = ledger
        self._all_models = all_models
        self._all_optimizers = all_optimizers
        self._first: FirstWindows | None = FirstWindows(strategy, ledger, all_models, all_optimizers)
        self._windows: dict[tuple[nn.Module, ...], Window] = {}
        self._naming: dict[int, list[Window]] = {}  # by optimizer, the windows that name a model of it
        self._current: Window | None = None
        self._entries = 0  # micro-batches of all windows
        self.last_owner: weakref.ref[Any] | None = None
        self.manual = Window()  # for backward() outside accumulate()
        self._latest = self.manual  # of the last backward
        self._held_back = 0  # depth of no_sync() contexts
        self.may_reduce = True

    # Windows

    def unfinished(self) -> list[Window]:
        """Windows that hold micro-batches and go on; one whose last micro-batch is running ends with it."""
        return [
            window
            for window in self._windows.values()
            if window.micro_batches and not (window is self._current and window.synchronising)
        ]

    def windows(self) -> list[Window]:
        """The windows of all groups of models, open or not."""
        return list(self._windows.values())

    def window_of(self, models: tuple[nn.Module, ...]) -> Window:
        """The window of a group of models, opened now if there is none."""
        if models not in self._windows:
            self._windows[models] = Window(models)
            self._naming.clear()
        return self._windows[models]

    @property
    def windows_take_turns(self) -> bool:
        """Whether there are several, so that gradients of one model may be complete when those of another are not."""
        return len(self._windows) > 1

    @property
    def current(self) -> Window:
        """The window of the running micro-batch; outside of `accumulate()` the one made by hand."""
        return self._current or self.manual

    def window_for(self, optimizer: torch.optim.Optimizer) -> Window | None:
        """The window that completes an optimizer's gradients, where several windows take turns; None: the last one.

        Of the windows that name a model of the optimizer it is the one that was entered last.
        """
        return None if len(self._windows) < 2 else self._last_naming(optimizer)

    def forget_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Look again which models an optimizer steps: it has got further parameters."""
        self._naming.pop(id(optimizer), None)

    def judged_with(self, optimizer: torch.optim.Optimizer) -> Window:
        """The window whose losses led to the gradients of an optimizer."""
        return self._last_naming(optimizer) or self._latest

    def _last_naming(self, optimizer: torch.optim.Optimizer) -> Window | None:
        windows = self._naming.get(id(optimizer))
        if windows is None:
            windows = self._naming[id(optimizer)] = self._with_any(parameters_of(optimizer))
        return max(windows, key=lambda window: window.entered, default=None)

    def _with_any(self, parameters: Iterable[Tensor]) -> list[Window]:
        """The windows that name a model with any of these parameters."""
        wanted, parts_of = {id(parameter) for parameter in parameters}, self._strategy.gathered.parts_of
        return [
            window
            for models, window in self._windows.items()
            if any(id(part) in wanted for model in models for part in parts_of(list(model.parameters())))
        ]

    def are_complete(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the gradients of some parameters are complete: the last micro-batch of their window was entered."""
        if not self.windows_take_turns:
            return self.sync_gradients
        windows = self._with_any(parameters)
        last = max(windows, key=lambda window: window.entered, default=None)
        return self.sync_gradients if last is None else last.synchronising

    def micro_batch(self, models: tuple[nn.Module, ...], loader: _Loader | None) -> _MicroBatch:
        """The context of one micro-batch; see `Accelerator.accumulate`."""
        try:
            window = self._windows.get(models)
        except TypeError:  # a list is no key; it is refused like every other object that is no model
            window = None
        if window is None:
            for model in models:
                if not isinstance(model, nn.Module):
                    raise ArgumentTypeError(
                        f"accumulate() takes the models that are trained, got {type(model).__name__}. Pass the models "
                        "that prepare() returned, as in accumulate(a, b). Pass a loader as dataloader=…."
                    )
            window = self.window_of(models)
        if loader is not None and not hasattr(loader, "may_be_uneven"):
            raise ArgumentTypeError(
                f"accumulate(dataloader=…) takes a prepared loader, got {type(loader).__name__}. Pass the loader that "
                "prepare() returned."
            )
        return _MicroBatch(self, window, loader)

    def forget(self) -> None:
        """Drop every window and the models they were for."""
        self._windows.clear()
        self._naming.clear()
        self._latest = self.manual
        self._current = self.last_owner = None
        self.manual.reset()
        self.manual.noted = None
        self.sync_gradients = True
        if self._first is not None:
            self._first.forget()
        for observer in self.observers:
            observer.forget()

    def forget_model(self, model: nn.Module) -> None:
        """Drop the windows of a model that is prepared again."""
        for models in [key for key in self._windows if any(item is model for item in key)]:
            del self._windows[models]
        self._naming.clear()
        self._latest = self.manual
        if self._first is not None:
            self._first.forget()

    def enter(self, window: Window, loader: _Loader | None) -> None:
        """A micro-batch begins."""
        if self._current is not None:
            raise AccumulationError(
                "accumulate() was entered inside another accumulate(). Name all models in one call: "
                "accumulate(model_a, model_b)."
            )
        synchronise = True
        if self.num_steps > 1:
            owner, cut = self._owner(window, loader), window.cut
            more = 0 if owner is None else cut.follow(owner, self._ledger.last_yield(owner))
            if not window.micro_batches:
                window.planned = self._planned(owner, cut.parts, more)
            synchronise = window.micro_batches + 1 >= self.num_steps
            if owner is not None and self.sync_with_dataloader and not more:
                if cut.part > cut.parts:  # more than expected, so this need not be the last one either
                    self._warn_of_cut_batch(owner, cut)
                elif self._ends(owner):
                    synchronise = cut.ended = True
        elif not window.micro_batches:
            window.planned = 1
        window.micro_batches += 1
        window.entered = self._entries = self._entries + 1
        window.backwards_here = 0
        window.synchronising = self.sync_gradients = synchronise
        self._current = window
        if self._first is not None:
            self._first.entered(window.models, opens=window.micro_batches == 1)
        if self._tells_begin:
            self._strategy.begin_micro_batch(
                window.models or self._all_models, last=synchronise, loss_factor=1 / window.planned
            )

    def exit(self, window: Window, failed: bool) -> None:
        """A micro-batch ended."""
        self._current = None
        if self._tells_end:
            self._strategy.end_micro_batch(window.models or self._all_models, last=window.synchronising)
        if failed and not window.backwards_here:
            window.micro_batches -= 1  # it left nothing behind
            window.cut.part = max(window.cut.part - 1, 0)
        if window.synchronising and not (failed and window.micro_batches):
            window.reset()

    def _warn_of_cut_batch(self, owner: _Loader, cut: CutBatch) -> None:
        if not cut.ended:
            return
        cut.ended = False
        warn(
            f"accumulate() begins once more for the last batch of {_describe(owner)}. Its micro-batch number "
            f"{cut.part - 1} was expected to be the last: that update used only a part of the window. The number of "
            "micro-batches is predicted from the batch before, and known from the next epoch on. Cut all batches "
            "alike, or end windows by their length alone: GradientAccumulationPlugin(sync_with_dataloader=False).",
        )

    def _planned(self, owner: _Loader | None, parts: int = 1, more: int = 0) -> int:
        """Plan the number of micro-batches of a window that opens now; the same number on all ranks.

        Args:
            owner: the loader whose end ends the window.
            parts: how many micro-batches a batch is cut into.
            more: how many of them follow of this batch.
        """
        if owner is None or not self.sync_with_dataloader:
            return self.num_steps
        left = None if owner.may_be_uneven else owner.batches_left
        if left is not None:
            return min(self.num_steps, left * parts + more + 1)
        if self._strategy.capabilities.window == "planned":
            raise AccumulationError(
                f"The strategy {self._strategy.name!r} must know how many micro-batches a window holds when it "
                f"opens, but {_describe(owner)} has no known number of batches left. Give the dataset a length, use "
                "GradientAccumulationPlugin(sync_with_dataloader=False), or gradient_accumulation_steps=1."
            )
        return self.num_steps

    def _ends(self, loader: _Loader) -> bool:
        """Whether the loader's batch ends the window."""
        if self.may_reduce or not loader.may_be_uneven:
            return loader.end_of_dataloader
        # Ranks that still have data must reduce together with the one that ends here.
        ends = loader.ends_on_any_rank
        if ends is None:
            raise AccumulationError(
                "accumulate() inside join_uneven_inputs() cannot tell where other ranks run out of batches "
                f"of {_describe(loader)}. Use gradient_accumulation_steps=1 here, or a map-style dataset with "
                "torch's own samplers."
            )
        return ends

    def _owner(self, window: Window, loader: _Loader | None) -> _Loader | None:
        """The loader whose end ends the window; chosen when the window opens, or when its loader was left early."""
        if loader is not None:
            window.owner = self.last_owner = weakref.ref(loader)
            return loader
        ledger = self._ledger
        if window.micro_batches and window.owner is not None:
            current: _Loader | None = window.owner()
            if current is not None and ledger.is_live(current):
                return current
        active: _Loader | None = ledger.active
        if active is None:
            window.owner = None
            return None
        rivals = ledger.interleaved()
        if rivals:
            previous = self.last_owner() if self.last_owner is not None else None
            if previous is not active and previous not in rivals:
                names = ", ".join(sorted(_describe(item) for item in [active, *rivals]))
                raise AmbiguousLoaderError(
                    f"accumulate() cannot tell which data loader ends the window: {names} are being iterated in turn. "
                    "Name it: accelerator.accumulate(model, dataloader=train_loader)."
                )
            active = previous
        window.owner = self.last_owner = weakref.ref(active)
        return active

    def may_drop_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `zero_grad()` means what it says here: no gradients of an unfinished window would be lost.

        Before the first backward of a window none exist; after the backward of its last micro-batch it is the user's
        decision to leave the step out. Before that backward they wait for it.
        """
        window = self.window_for(optimizer) or self._current
        if window is None or window is not self._current:
            return self.sync_gradients if window is None else window.synchronising
        return window.backwards == 0 or (window.synchronising and window.backwards_here > 0)

    # Backward

    def backward(self, loss: Tensor, num_items: int | Tensor | None, kwargs: dict[str, Any]) -> None:
        """See `Accelerator.backward`."""
        strategy, window, inside = self._strategy, self._current or self.manual, self._current is not None
        for observer in self.observers:
            observer.before_backward(loss, num_items, kwargs)
        averages = not kwargs or strategy.averages(kwargs)  # else the script has scaled the loss itself
        if not inside:  # no_sync() says which backward is the last of a window
            window.synchronising = not self._held_back
            if not window.backwards:
                window.planned = self.num_steps
        # The first backward passes show how the script is written, and whether ranks have samples of their own.
        first = self._first
        if first is not None and first.over:
            first = self._first = None
        if first is not None:
            first.before_backward()
            if not inside and num_items is None and averages:
                first.saw_backward_outside()
            if window.synchronising and not self._rehearsed and self.steps_together:
                first.saw_loss(loss)
        # An optimizer that steps only in some windows has gradients of earlier ones. They are complete: the correction
        # of this window is not theirs. An engine steps after each window.
        goes_on = self.num_steps > 1 if inside else not window.synchronising
        if goes_on and not window.backwards and not strategy.capabilities.prepares_together:
            window.keep(self._all_optimizers)
        correction: float | Tensor | None = None
        if num_items is not None or window.weighted:
            loss, correction = self._weigh(window, loss, num_items, kwargs, averages)
        elif averages and not inside:
            loss = loss / self.num_steps if self.num_steps > 1 else loss
        elif averages and (window.planned > 1 or (self.num_steps > 1 and window.synchronising)):
            loss, correction = self._average(window, loss)
        others = self._windows.values() if inside else (window,)
        pending = self._scaled and any(other.backwards for other in others)
        window.backwards += 1
        window.backwards_here += inside
        self._latest = window
        try:
            strategy.backward(window.models or self._all_models, loss, pending=pending, kwargs=kwargs)
            if first is not None and inside:
                first.saw_backward(window.models)
            if correction is not None:
                parameters = list(self._trained_in(window))
                strategy.scale_gradients(parameters, correction)
                window.give_back(parameters, correction)
        finally:
            if not inside and window.synchronising:
                window.reset()
        if first is not None:
            first.after_backward()
        for observer in self.observers:
            observer.after_backward()

    @property
    def steps_together(self) -> bool:
        """Whether all ranks take the same number of steps at this time."""
        return self.may_reduce and not self._alone

    def check_first_step(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Check an optimizer that is about to step for the first time; `closure`: its gradients come in the step."""
        self._check_averaged(optimizer)
        if not closure and not self._strategy.capabilities.prepares_together:
            plain = [self._strategy.plain(model) for model in self._all_models]
            check_trains(optimizer, plain, self._all_optimizers)
            mesh, together = self._strategy.options.mesh, self._strategy.replicas_of(optimizer) is not None
            if mesh.degrees["tp"] > 1 and together and self.steps_together and not self._rehearsed:
                compare_whole_gradients(optimizer, plain, mesh)

    def places_of(
        self, optimizer: torch.optim.Optimizer, before: TrainedPlaces | None
    ) -> TrainedPlaces | None:
        """Where an optimizer's parameters are in the models, `before` being no longer so; None: an engine knows.

        Raises:
            PrepareError: a parameter that nothing trains is in the place of one of them.
        """
        if self._strategy.capabilities.prepares_together:
            return None
        self._strategy.gathered.free()  # what FSDP has gathered is in the place of its parts
        if before is not None:
            if before.are_kept():
                return before
            before.check(self._all_optimizers)
        return TrainedPlaces(optimizer, map(self._strategy.plain, self._all_models))

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ranks are about to take the same step, with gradients that are there."""
        if self._first is not None and self._current is None:
            self._first.saw_step(self.num_steps)
        if self._strategy.loss.size > 1 and not self._rehearsed:
            if self._first is not None:
                self._first.about_to_step(optimizer)
            self._strategy.check_step(optimizer, self._all_models)

    def expect_equal_losses(self) -> None:
        """Accept equal losses on all ranks from now on: the script computes them over the samples of all ranks."""
        if self._first is not None:
            self._first.expect_equal_losses()

    def check_waiting(self, *, gradients: bool, closure: bool) -> None:
        """Check an optimizer that waits for the end of a window.

        Args:
            gradients: it holds gradients that it did not step with.
            closure: it was given one.

        Raises:
            AccumulationError: the gradients did not come from `Accelerator.backward`, or would only come now.
        """
        window = self._current
        if window is None or self._strategy.capabilities.prepares_together:
            return
        if closure and not window.backwards_here:
            raise AccumulationError(
                "optimizer.step(closure) was called inside accumulate() before the window's last micro-batch: the "
                "closure would not run, and its gradients would be missing. Call accelerator.backward(loss) in every "
                "micro-batch and step without a closure, or accumulate inside the closure, outside of accumulate()."
            )
        if gradients and not window.backwards:
            raise AccumulationError(
                "The optimizer holds gradients of this accumulation window, and accelerator.backward() was not called "
                "in it: the loss went to loss.backward(), which does not divide it by the number of micro-batches. "
                "Call accelerator.backward(loss) instead."
            )

    def agreed(self, metric: Any) -> Any:
        """One metric for all ranks: the mean of what each has measured, as a number; a collective.

        A metric that is equal on all ranks comes back as it is.
        """
        if self._strategy.loss.world_size == 1 or self._rehearsed or not self.may_reduce:
            return metric
        values: list[float] = gather(torch.tensor([float(metric)], dtype=torch.float64)).tolist()
        return metric if len(set(values)) == 1 else sum(values) / len(values)

    def _check_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of parameters that every rank would train with its own samples, before their first step."""
        strategy = self._strategy
        if strategy.loss.size == 1 or strategy.capabilities.prepares_together:
            return
        averaged = {id(p) for model in self._all_models for p in strategy.plain(model).parameters()}
        found = [
            (number, parameter)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None and id(parameter) not in averaged and not is_sharded(parameter)
        ]
        if found and strategy.loss.rank == 0:
            number, parameter = found[0]
            count = "a parameter" if len(found) == 1 else f"{len(found)} parameters"
            warn(
                f"{type(optimizer).__name__} trains {count} of no prepared model, the first of shape "
                f"{tuple(parameter.shape)} (group {number}). {self._strategy.name} does not average their gradients, "
                f"so each of {self._strategy.loss.size} ranks trains its own values, unless the script "
                "averages them. Pass the module that holds them to prepare().",
            )

    def _average(self, window: Window, loss: Tensor) -> tuple[Tensor, float | Tensor | None]:
        """First contract: the mean over micro-batches and ranks.

        Returns:
            The loss to differentiate, and what gradients must be multiplied with after its backward, or None.
        """
        if not window.synchronising:
            return loss / window.planned, None
        owner = window.owner() if window.owner is not None else None
        uneven = self.may_reduce and owner is not None and owner.may_be_uneven
        if not uneven and window.micro_batches == window.planned:
            return (loss / window.planned if window.planned > 1 else loss), None
        if self._strategy.capabilities.window == "planned":
            raise AccumulationError(
                f"This window holds {window.micro_batches} micro-batches and {window.planned} were planned when it "
                f"opened, which the strategy {self._strategy.name!r} cannot correct. Do not leave the loader inside a "
                "window, and change gradient_accumulation_steps only between two windows."
            )
        if not window.corrected:
            ranks = self._averaged_over(window)
            if uneven:
                total = self._summed(torch.tensor(window.micro_batches, dtype=torch.int64), ranks).item()
            else:
                total = window.micro_batches * ranks.size
            window.correction = window.planned * ranks.size / total
        return self._corrected(window, loss)

    def _weigh(
        self,
        window: Window,
        loss: Tensor,
        num_items: int | Tensor | None,
        kwargs: dict[str, Any],
        averages: bool,
    ) -> tuple[Tensor, float | Tensor | None]:
        """Second contract: the sum of losses over the sum of items, as on one big batch; returns as `_average`."""
        items = _checked(num_items)
        if not averages:
            words = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
            raise AccumulationError(
                f"backward(num_items=…) divides the loss by its items, but backward({words}) asks to leave it "
                "unchanged. Pass only one of them."
            )
        if not self._strategy.capabilities.num_items:
            raise AccumulationError(
                f"The strategy {self._strategy.name!r} cannot weigh micro-batches by their items, because its engine "
                "uses gradients before the items of all ranks are known. Call backward(loss) with the mean loss."
            )
        if not self.may_reduce:
            raise AccumulationError(
                "backward(num_items=…) sums the items of all ranks, which a rank without data cannot take part in. "
                "Outside join_uneven_inputs() it needs no join: loaders with even_batches=True give every rank the "
                "same number of batches."
            )
        if window.backwards_here:
            raise AccumulationError(
                "backward(num_items=…) was called twice in one micro-batch; their items would be counted twice. Add "
                "the losses up and call backward once."
            )
        if window.backwards and not window.weighted:
            raise AccumulationError(
                "backward(num_items=…) follows a backward() without num_items in the same window; gradients cannot "
                "be both a mean over micro-batches and a mean over items. Pass num_items every time."
            )
        window.weighted = True
        window.items = window.items + items
        if not window.synchronising:
            return loss / window.planned, None
        # Gradients are averaged over R ranks, so a sum over ranks divided by the items is R / items times the average;
        # what is accumulated was divided by the planned window. Without any item gradients are zero, not 0/0.
        ranks = self._averaged_over(window)
        scale = window.planned * ranks.size
        if isinstance(window.items, Tensor):
            total = self._summed(window.items, ranks)
            window.correction = torch.where(total > 0, scale / total.clamp(min=1).double(), 0.0)
        else:
            count = int(self._summed(torch.tensor(window.items, dtype=torch.int64), ranks).item())
            window.correction = scale / count if count else 0.0
        return self._corrected(window, loss)

    def _corrected(self, window: Window, loss: Tensor) -> tuple[Tensor, float | Tensor | None]:
        """The loss of a last micro-batch: times the correction where nothing waits that would need it too."""
        correction, planned = window.correction, window.planned
        if window.backwards and not window.corrected:
            window.corrected = True
            return loss / planned, correction
        window.corrected = True
        factor = correction / planned
        return loss * (factor.to(loss.dtype) if isinstance(factor, Tensor) else factor), None

    def _averaged_over(self, window: Window) -> Ranks:
        """The ranks over which gradients of a window are averaged: all, or this one alone inside LocalSGD."""
        if not self._alone:
            return self._strategy.loss
        plain = self._strategy.plain
        alone = {id(plain(model)) for model in self._alone}
        trained = [plain(model) for model in window.models or self._all_models]
        kinds = {id(model) in alone for model in trained if any(p.requires_grad for p in model.parameters())}
        if len(kinds) > 1:
            raise AccumulationError(
                "A window trains a model inside LocalSGD, on one rank, together with a model outside of it, on all "
                "ranks. Use two accumulate() blocks: one for the models inside LocalSGD, one for the others."
            )
        return Ranks() if kinds == {True} else self._strategy.loss

    def _summed(self, counts: Tensor, ranks: Ranks) -> Tensor:
        """The sum over the ranks whose losses are averaged."""
        if ranks.size == 1:
            return counts
        summed: Tensor = reduce(counts, reduction="sum", group=ranks.group)
        return summed

    def _trained_in(self, window: Window) -> Iterator[Tensor]:
        """Parameters whose gradients a window holds: of the models it names, and of all that no other window names.

        Many scripts train two models and name one; `accumulate()` asks for a name only to hold back reductions.
        """
        for model in window.models:
            yield from model.parameters()
        others = [models for models in self._windows if models != window.models]
        elsewhere = {
            id(parameter) for models in others for model in models for parameter in model.parameters()
        }
        for model in self._all_models:
            yield from (parameter for parameter in model.parameters() if id(parameter) not in elsewhere)
        yield from (p for p in parameters_of(*self._all_optimizers) if id(p) not in elsewhere)

    def rescale_pending(self, factor: float) -> None:
        """Multiply the gradients of every open window, each once; the loss scale changed while they waited.

        Raises:
            AccumulationError: they are where nothing but their engine can reach them.
        """
        waiting = [window for window in [*self._windows.values(), self.manual] if window.backwards]
        if waiting and self._strategy.capabilities.hides_gradients:
            raise AccumulationError(
                "Under mixed_precision='fp16' an optimizer stepped twice while gradients of another window waited, and "
                f"the strategy {self._strategy.name!r} cannot rescale those. Step optimizers equally often, or use "
                "mixed_precision='bf16'."
            )
        parameters = (parameter for window in waiting for parameter in self._trained_in(window))
        self._strategy.scale_gradients(parameters, factor)

    # Contexts

    @contextlib.contextmanager
    def hold_back(self) -> Iterator[None]:
        """Backward passes inside are not the last of a hand-made window (used by `no_sync`)."""
        self._held_back += 1
        try:
            yield
        finally:
            self._held_back -= 1

    @contextlib.contextmanager
    def without_counting(self) -> Iterator[None]:
        """No communication of counts inside, because a rank may be out of data (used by `join_uneven_inputs`)."""
        before, self.may_reduce = self.may_reduce, False
        try:
            yield
        finally:
            self.may_reduce = before

    def __deepcopy__(self, memo: dict[int, Any]) -> Accumulator:
        return self  # a copied optimizer still belongs to its accelerator

    def __getstate__(self) -> dict[str, Any]:
        # An open window refers to live iterations, which do not travel to another process.
        state = dict(self.__dict__)
        manual = Window()
        state.update(_windows={}, _naming={}, _current=None, last_owner=None, manual=manual, _latest=manual)
        state["_first"] = None
        return state


class _MicroBatch:
    """Context manager of one micro-batch."""

    __slots__ = ("_accumulator", "_loader", "_window")

    def __init__(self, accumulator: Accumulator, window: Window, loader: _Loader | None) -> None:
        self._accumulator = accumulator
        self._window = window
        self._loader = loader

    def __enter__(self) -> None:
        self._accumulator.enter(self._window, self._loader)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._accumulator.exit(self._window, failed=kind is not None)


def _checked(num_items: int | Tensor | None) -> int | Tensor:
    if num_items is None:
        raise AccumulationError(
            "backward() without num_items follows backward(num_items=…) in the same window; gradients cannot be both a "
            "mean over items and a mean over micro-batches. Pass num_items every time."
        )
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1 or num_items.is_floating_point() or num_items.is_complex():
            raise AccumulationError(
                f"num_items must be one whole number, got a {num_items.dtype} tensor of shape "
                f"{tuple(num_items.shape)}; count the items with `.sum()` of a boolean or integer mask."
            )
        return num_items.detach().reshape(()).to(torch.int64)
    if isinstance(num_items, bool) or not isinstance(num_items, int):
        raise AccumulationError(f"num_items must be a whole number, got {num_items!r}.")
    if num_items < 0:
        raise AccumulationError(f"num_items must not be negative, got {num_items}.")
    return num_items


def _describe(loader: object) -> str:
    dataset = getattr(loader, "dataset", None)
    try:
        rows = f", {len(dataset)} samples"  # type: ignore[arg-type]
    except TypeError:
        rows = ""
    return f"{type(loader).__name__}({type(dataset).__name__}{rows})"
