"""The declaration of an option, and the base class of sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

__all__ = ["Carrier", "Option", "Section", "option"]


class Carrier(Enum):
    """A place that can hold the value of an option."""

    FILE = "file"
    FLAG = "flag"
    ENVIRONMENT = "environment"
    LAUNCHER = "launcher"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of an option, in addition to the field's name, type and default.

    Attributes:
        help: one sentence for ``--help`` and the reference page.
        name: name outside Python; by default the section's prefix and the field's name. It is the flag, and the
            key in a file unless ``key`` is set.
        key: key in a configuration file, if it differs from ``name``.
        keys: additional keys accepted in a file.
        flags: additional flags, with their dashes.
        env: environment variables. None: derived from the section; empty: no variable.
        choices: the allowed values, in their canonical spelling; matched in any case.
        unlisted: choices that help and messages do not list, because hardly anybody needs them.
        group: entry-point group whose names are allowed values, too.
        synonyms: alternative spellings of choices, in lower case.
        numbered: a choice may also be given by its number, counted from 1.
        switches: flags that each set one value, and the variable for that value, if any.
        unset: words that mean "not set", in lower case.
        launch_default: default that ``resolve`` sets in an active section. A plugin created in code without a
            launcher keeps the plugin's own default, as in Accelerate.
        prompt: question of the interactive wizard; empty: no question.
        toggle: a boolean whose flag takes no value (``--debug``, ``--no-debug``).
        comma_list: a list written as one comma-separated text in files, flags and variables.
        in_file: the option is allowed in a configuration file.
        in_flags: the option has a flag.
        ours: Accelerate does not have the key, so it is only written if it differs from the default.
        secret: the value is never shown.
        low, high: limits of numbers, inclusive.
    """

    help: str
    name: str | None = None
    key: str | None = None
    keys: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    env: tuple[str, ...] | None = None
    choices: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    group: str = ""
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbered: bool = False
    switches: Mapping[str, tuple[str, str | None]] = dataclasses.field(default_factory=dict)
    unset: tuple[str, ...] = ()
    launch_default: Any = None
    prompt: str = ""
    toggle: bool = False
    comma_list: bool = False
    in_file: bool = True
    in_flags: bool = True
    ours: bool = False
    secret: bool = False
    low: float | None = None
    high: float | None = None


def option(default: Any = None, help: str = "", **about: Any) -> Any:
    """Declare a field of a section; the keyword arguments are those of ``Option``."""
    return dataclasses.field(default=default, metadata={"option": Option(help=help, **about)})


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Section:
    """A group of options. Subclasses are frozen dataclasses whose fields come from ``option``; a section
    inside a section is a field with its class as default factory.

    Attributes:
        file_key: key of the section's mapping in a file; None: its options are at the top level.
        prefix: prefix of its option names outside Python.
        env_prefix: prefix of their variables; None: only options with an explicit ``env`` have a variable.
        title: heading in help and documentation.
    """

    file_key: ClassVar[str | None] = None
    prefix: ClassVar[str] = ""
    env_prefix: ClassVar[str | None] = None
    title: ClassVar[str] = ""

    def launch_defaults(self) -> dict[str, Any]:
        """The launcher's defaults for unset fields of an active section."""
        found = {}
        for field in dataclasses.fields(self):
            about = field.metadata.get("option")
            if about is not None and about.launch_default is not None and getattr(self, field.name) is None:
                found[field.name] = about.launch_default
        return found

    # Defined once here instead of generated per section: generating them would slow down every start of the command.
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and all(
            getattr(self, field.name) == getattr(other, field.name) for field in dataclasses.fields(self)
        )

    def __hash__(self) -> int:
        return hash((type(self), *(getattr(self, field.name) for field in dataclasses.fields(self))))

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            default = field.default_factory() if callable(field.default_factory) else field.default
            if value != default:
                about = field.metadata.get("option")
                shown.append(f"{field.name}={'***' if about is not None and about.secret else repr(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"
