"""The answers so far, and the conditions of questions on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_cli.machine import Machine

__all__ = [
    "Answers",
    "Condition",
    "Situation",
    "contains",
    "equals",
    "known",
    "more_than",
    "negated",
    "offered",
    "only_if",
]

Offers = Callable[[str, Any], bool]
"""Whether this version supports a value of an option."""


def _everything(path: str, value: Any) -> bool:
    return True


@dataclass(frozen=True)
class Situation:
    """Facts that are known before the first question.

    Attributes:
        machine: this machine.
        existing: values of the configuration that exists already, by the name of their question.
        offers: whether this version supports a value of an option.
    """

    machine: Machine = field(default_factory=Machine)
    existing: Mapping[str, Any] = field(default_factory=dict)
    offers: Offers = _everything


class Answers:
    """The answers of the questions that were asked, by name.

    Args:
        situation: facts that are known before the first question.
        given: the answers.
    """

    def __init__(self, situation: Situation, given: Mapping[str, Any] | None = None) -> None:
        self.situation = situation
        self.given = dict(given or {})

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The answer; ``otherwise`` if the question was not asked, or left open."""
        value = self.given.get(name)
        return otherwise if value is None else value

    def before(self, name: str, otherwise: Any = None) -> Any:
        """The value in the configuration that exists already."""
        value = self.situation.existing.get(name)
        return otherwise if value is None else value


Condition = Callable[[Answers], bool]
"""Whether a question is asked after these answers; it may look at earlier questions only."""


def equals(name: str, *values: Any) -> Condition:
    """The answer is one of ``values``; False if the question was not asked."""
    return lambda answers: answers.get(name) in values


def contains(name: str, item: str) -> Condition:
    """The answer is a selection that has ``item``."""
    return lambda answers: item in answers.get(name, ())


def more_than(name: str, limit: int) -> Condition:
    """The answer is a number above ``limit``."""
    return lambda answers: answers.get(name, limit) > limit


def offered(path: str, value: Any = True) -> Condition:
    """This version supports the value of the option."""
    return lambda answers: answers.situation.offers(path, value)


def known(test: Callable[[Machine], bool]) -> Condition:
    """The machine has a property."""
    return lambda answers: test(answers.situation.machine)


def negated(condition: Condition) -> Condition:
    """The condition does not hold."""
    return lambda answers: not condition(answers)


def only_if(*conditions: Condition) -> Condition:
    """All conditions hold."""
    return lambda answers: all(condition(answers) for condition in conditions)
