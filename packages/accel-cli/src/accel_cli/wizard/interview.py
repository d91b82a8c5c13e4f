"""Asks the questions of a table one after the other, forward and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from accel_cli.wizard.answers import Answers, Situation
from accel_cli.wizard.question import Asked, Question

__all__ = ["BACK", "Asker", "Back", "Interview"]


class Back(Enum):
    """The type of ``BACK``."""

    BACK = "back"


BACK = Back.BACK
"""The answer that returns to the question before."""

Asker = Callable[[Asked], Any]
"""Asks a question; returns the answer or ``BACK``."""


class Interview:
    """The state of one run through the questions.

    Going back keeps the answers that were given: they are the defaults when a question comes again.

    Args:
        questions: the table, in the order in which they are asked.
        situation: facts that are known before the first question.
        ask: asks a question.
    """

    def __init__(self, questions: Sequence[Question], situation: Situation, ask: Asker) -> None:
        self._questions = questions
        self._situation = situation
        self._ask = ask
        self._trail: list[str] = []
        self._remembered: dict[str, Any] = {}

    @property
    def answers(self) -> Answers:
        """The answers of the questions that belong to the branch taken."""
        return Answers(self._situation, {name: self._remembered[name] for name in self._trail})

    def run(self) -> Answers:
        """Ask all questions that are open, and return the answers."""
        while (question := self._next()) is not None:
            answer = self._ask(question.ask(self.answers, self._remembered))
            if answer is BACK:
                self.back()
                continue
            self._remembered[question.name] = answer
            self._trail.append(question.name)
        return self.answers

    def back(self) -> None:
        """Open the last question again; at the first one, nothing changes."""
        if self._trail:
            self._trail.pop()

    def _next(self) -> Question | None:
        answers = self.answers
        done = set(self._trail)
        return next((row for row in self._questions if row.name not in done and row.applies(answers)), None)
