"""A question of the wizard: one row of its table, and the question as asked after the answers so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_cli.wizard.answers import Answers, Condition
from accel_state.config.option import Option, Section
from accel_state.config.option_types import Bool, StringList
from accel_state.config.roots import complete_root
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.config.schema import BoundOption, schema_of
from accel_state.errors import ConfigError

__all__ = ["Asked", "Choice", "Question"]

_UNSET = "none"
_YES_NO = ("yes", "no")


@dataclass(frozen=True)
class Choice:
    """One of several answers.

    Attributes:
        value: the answer.
        label: its text.
        key: the key that selects it; empty: its number.
    """

    value: Any
    label: str
    key: str = ""


@dataclass(frozen=True)
class Asked:
    """A question as the terminal shows it.

    Attributes:
        name: name of the question.
        message: its text.
        explanation: the text that ``?`` shows.
        choices: the answers to choose from; empty: the answer is typed.
        multiple: several choices may be selected.
        default: the answer of plain Enter; None: there is none.
        hint: text of the default.
        file: the answer is the path of a file.
        parse: the value of a typed answer; raises ConfigError.
    """

    name: str
    message: str
    explanation: str
    choices: tuple[Choice, ...]
    multiple: bool
    default: Any
    hint: str
    file: bool
    parse: Callable[[str], Any]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A row of the table.

    Attributes:
        path: the option that the answer sets; for a question of the wizard itself, its name.
        when: conditions, all of which must hold.
        own: declaration of a question of the wizard itself; None: that of the option.
        root: the configuration that has the option.
        narrow: parts of the declaration that the answers change, such as its limits.
        choices: the answers to choose from; by default those of the declaration.
        default: the answer of plain Enter; by default the value in the existing configuration, or the declared one.
        required: an answer is needed.
        multiple: several choices may be selected.
        separator: the answer is a list, with this text between its items.
        file: the answer is the path of a file.
        check: raises an AccelError if the answer does not fit those before.
    """

    path: str
    when: tuple[Condition, ...] = ()
    own: Option | None = None
    root: type[Section] = field(default_factory=complete_root)
    narrow: Callable[[Answers], dict[str, Any]] | None = None
    choices: Callable[[Answers], Sequence[Choice]] | None = None
    default: Callable[[Answers], Any] | None = None
    required: bool = False
    multiple: bool = False
    separator: str = ""
    file: bool = False
    check: Callable[[Answers, Any], None] | None = None

    @property
    def name(self) -> str:
        """Name of the question, unique in the table."""
        return f"sagemaker.{self.path}" if self.root is SageMakerConfig else self.path

    @property
    def bound(self) -> BoundOption | None:
        """The option that the answer sets; None for a question of the wizard itself."""
        return None if self.own is not None else schema_of(self.root).by_path[self.path]

    def applies(self, answers: Answers) -> bool:
        """Whether the question is asked after these answers."""
        return all(condition(answers) for condition in self.when)

    def ask(self, answers: Answers, remembered: Mapping[str, Any] | None = None) -> Asked:
        """The question after these answers.

        Args:
            answers: the answers before it.
            remembered: answers that were given earlier, before going back.
        """
        about = self._declaration(answers)
        choices = tuple(self.choices(answers)) if self.choices is not None else self._choices(answers, about)
        earlier = remembered or {}
        default = earlier[self.name] if self.name in earlier else self._default(answers)
        default = _within(about, default)
        if choices and not self.multiple and default not in [choice.value for choice in choices]:
            default = choices[0].value
        return Asked(
            name=self.name,
            message=about.prompt,
            explanation=self._explanation(about),
            choices=choices,
            multiple=self.multiple,
            default=default,
            hint=self._hint(default),
            file=self.file,
            parse=lambda text: self._parse(text, answers, about, default),
        )

    def _declaration(self, answers: Answers) -> Option:
        about = self.own if self.own is not None else schema_of(self.root).by_path[self.path].about
        return dataclasses.replace(about, **self.narrow(answers)) if self.narrow is not None else about

    def _choices(self, answers: Answers, about: Option) -> tuple[Choice, ...]:
        bound = self.bound
        if about.choices:
            texts = [text for text in about.choices if answers.situation.offers(self.name, text)]
            return tuple(Choice(text, text) for text in texts)
        if bound is not None and isinstance(bound.option_type, Bool):
            return tuple(Choice(word == "yes", word, word[0]) for word in _YES_NO)
        return ()

    def _default(self, answers: Answers) -> Any:
        if self.default is not None:
            return self.default(answers)
        bound = self.bound
        assert bound is not None, f"{self.name} needs a default"
        declared = bound.about.launch_default if bound.default is None else bound.default
        if declared is None and isinstance(bound.option_type, Bool):
            declared = False
        return answers.before(self.name, declared)

    def _explanation(self, about: Option) -> str:
        bound = self.bound
        if bound is None:
            return about.help
        names = [f"key {bound.file_path}"] if bound.keys else []
        names += [f"flag {bound.flags[0]}"] if bound.flags else []
        names += [f"variable {bound.variables[0]}"] if bound.variables else []
        return f"{about.help} ({', '.join(names)})"

    def _hint(self, default: Any) -> str:
        bound = self.bound
        if default is None:
            return "" if self.required else _UNSET
        if bound is None or self.multiple:
            return ""
        return self.separator.join(default) if self.separator else bound.option_type.format(default)

    def _parse(self, text: str, answers: Answers, about: Option, default: Any) -> Any:
        bound = self.bound
        assert bound is not None, f"{self.name} is answered with a choice"
        text = text.strip()
        if not text:
            value = default
        elif text.lower() == _UNSET and not self.required:
            value = None
        elif self.separator and isinstance(bound.option_type, StringList):
            value = tuple(part for word in text.split(self.separator) if (part := word.strip())) or None
        else:
            value = dataclasses.replace(bound, about=about).parse(text, "the answer")
        if value is None and self.required:
            raise ConfigError("an answer is needed here; < goes back")
        if self.check is not None and value is not None:
            self.check(answers, value)
        return value


def _within(about: Option, value: Any) -> Any:
    """A number moved into the limits, which may have changed since it was given."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    value = value if about.high is None else min(value, type(value)(about.high))
    return value if about.low is None else max(value, type(value)(about.low))
