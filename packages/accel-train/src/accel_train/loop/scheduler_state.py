"""Learning-rate schedulers as part of a training state."""

from __future__ import annotations

import copy
import math
import numbers
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

import accel_ckpt
from accel_ckpt.format.forms import check_form
from accel_train.state_part import SavedTrees, StatePart, Trees, taken_up

__all__ = ["SchedulerStates"]


class SchedulerStates(StatePart):
    """States of schedulers.

    Args:
        schedulers: the prepared schedulers.
        optimizers: the prepared optimizers.
    """

    group: ClassVar[str | None] = "schedulers"

    def __init__(self, schedulers: Sequence[Any], optimizers: Sequence[Any]) -> None:
        self._schedulers, self._optimizers = schedulers, optimizers

    def _kind_of(self, scheduler: Any) -> str | None:
        """The class of a scheduler of torch, and which optimizers are its; None: another's."""
        inner = getattr(scheduler, "scheduler", scheduler)
        if not type(inner).__module__.startswith("torch.optim."):
            return None
        own = getattr(scheduler, "optimizers", ())
        places = [place for place, known in enumerate(self._optimizers) if any(known is each for each in own)]
        return f"{type(inner).__name__} of optimizer {', '.join(map(str, places))}"

    def dump(self, trees: Trees) -> None:
        """One shared tree for each; what they are is shared progress."""
        trees.progress["schedulers"] = [self._kind_of(scheduler) for scheduler in self._schedulers]
        for index, scheduler in enumerate(self._schedulers):
            trees.shared[f"scheduler_{index}"] = scheduler.state_dict()

    def expected(self) -> Iterator[str]:
        """A tree for each."""
        yield from (f"scheduler_{index}" for index in range(len(self._schedulers)))

    def check(self, taken: Any, saved: SavedTrees) -> None:
        """A state may replace nothing but what is state, and goes to a scheduler of the same class and optimizer."""
        kinds = saved.progress.get("schedulers", [])
        check_form(kinds, [(None, str)], f"{saved.directory}: schedulers")
        for index, (scheduler, there) in enumerate(zip(self._schedulers, kinds, strict=False)):
            here = self._kind_of(scheduler)
            if None not in (here, there) and here != there:
                raise accel_ckpt.StateMismatchError(
                    f"{saved.directory}: scheduler {index} is {there} there and {here} here. Prepare the same "
                    "schedulers in the same order, or load the other parts alone: load_state(…, only=[…])"
                )
        for index, scheduler in enumerate(self._schedulers):
            state = saved.shared[f"scheduler_{index}"]
            _check(scheduler, state, f"{saved.directory}: scheduler {index}")
            with taken_up(f"the state of scheduler {index}", saved.directory):
                _try(getattr(scheduler, "scheduler", scheduler), state)

    def load(self, taken: Any, saved: SavedTrees) -> None:
        """Hand each its state."""
        for index, scheduler in enumerate(self._schedulers):
            with taken_up(f"the state of scheduler {index}", saved.directory):
                scheduler.load_state_dict(saved.shared[f"scheduler_{index}"])


def _check(scheduler: Any, state: Any, where: str) -> None:
    """A scheduler of torch takes every entry as an attribute of its own, also one that is a method."""
    check_form(state, {}, where)
    inner = getattr(scheduler, "scheduler", scheduler)
    known = inner.state_dict()
    taken = [key for key in state if not isinstance(key, str) or (key not in known and hasattr(inner, key))]
    if taken:
        raise accel_ckpt.StateMismatchError(
            f"{where} has the entries {', '.join(str(key)[:80] for key in taken[:5])}, which would replace parts of "
            f"{type(inner).__name__} that are no state. Prepare the same scheduler as the script that saved it"
        )
    forms: dict[str, Any] = {}
    for key in known.keys() & state.keys():
        value = known[key]
        if type(value) in (int, float):
            forms[key] = _number if type(value) is float else _count
        elif isinstance(value, list) and value and all(map(_number, value)):
            forms[key] = _numbers(len(value))
    nested = getattr(inner, "_schedulers", ())
    check_form(state, forms | ({"_schedulers": [{}]} if nested else {}), where)
    for each, its_state in zip(nested, state.get("_schedulers", ()), strict=False):
        _check(each, its_state, where)


def _try(scheduler: Any, state: Any) -> None:
    """Let a copy of one of torch's schedulers take a state and step: then it is known that the scheduler can."""
    if not type(scheduler).__module__.startswith("torch.optim."):
        return
    groups = [
        {key: copy.copy(value) for key, value in group.items() if key != "params"}
        for group in scheduler.optimizer.param_groups
    ]
    stand_in = SimpleNamespace(
        param_groups=groups, step=lambda: None, state={}, defaults=scheduler.optimizer.defaults
    )
    # What the script gave is not copied, as a method would be with its object, and not called.
    given = list(_functions(scheduler))
    own = {id(each): copy.copy(each) if hasattr(each, "__dict__") else each for each in given}
    trial = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in, **own})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedules for which no optimizer has stepped
        trial.load_state_dict(copy.deepcopy(state))
        parts = getattr(trial, "_schedulers", (trial,))  # a chain has no count of its own
        goes_on = all(each.last_epoch + 1 < getattr(each, "total_steps", math.inf) for each in parts)
        if not given and goes_on:
            trial.step(1.0) if isinstance(trial, ReduceLROnPlateau) else trial.step()


def _functions(scheduler: Any) -> Iterator[Any]:
    """The callables that a scheduler, or one that it consists of, was built with."""
    for value in vars(scheduler).values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, LRScheduler):
                yield from _functions(each)
            elif callable(each) and not str(getattr(each, "__module__", "")).startswith("torch."):
                yield each


def _count(value: Any) -> bool:
    """A finite number."""
    return _number(value) and math.isfinite(value)


def _numbers(count: int) -> Any:
    def form(value: Any) -> bool:
        """A list with a number for each group of the optimizer."""
        return isinstance(value, list | tuple) and len(value) == count and all(map(_number, value))

    return form


def _number(value: Any) -> bool:
    """A number, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
