"""What a field of the schema declares, and the base class of the sections that fields stand in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

__all__ = ["Carrier", "Option", "Section", "option"]


class Carrier(Enum):
    """A way by which the value of an option travels."""

    FILE = "file"
    FLAG = "flag"
    ENVIRONMENT = "environment"
    LAUNCHER = "launcher"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """Everything that a field says about itself besides its name, type and default.

    Attributes:
        help: one sentence for ``--help`` and the reference page.
        name: name outside Python; the prefix of the section and the field's name by default. It is the flag,
            and the key in a file unless ``key`` says otherwise.
        key: key in a configuration file, where it differs from ``name``.
        keys: further keys that are accepted in a file.
        flags: further flags that are accepted, with their dashes.
        env: environment variables. None: the section's rule; empty: the value does not travel by environment.
        choices: the values allowed, in their canonical spelling; matched in any case.
        synonyms: other spellings of choices, in lower case.
        numbered: a choice may also be given by its number, counted from 1.
        switches: flags that stand for one value each, and the variable that carries it to the ranks, if any.
        unset: words that mean "not set", in lower case.
        launch_default: what ``resolve`` fills in for an active section. A plugin built in code without a
            launcher keeps the plugin's own default, as users of Accelerate know it.
        prompt: question of the interactive wizard; empty: it is not asked.
        toggle: a truth value whose flag takes no word after it (``--debug``, ``--no-debug``).
        comma_list: a list that is one text with commas in files, flags and variables.
        in_file: the option may stand in a configuration file.
        in_flags: the option has a flag.
        ours: Accelerate does not know the key, so it is only written when it differs from the default.
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
        file_key: key of the mapping that holds the section in a file; None: its options stand at the top.
        prefix: what the names of its options start with outside Python.
        env_prefix: what their variables start with; None: only options that name a variable
            travel by environment.
        title: heading in help and documentation.
    """

    file_key: ClassVar[str | None] = None
    prefix: ClassVar[str] = ""
    env_prefix: ClassVar[str | None] = None
    title: ClassVar[str] = ""

    def launch_defaults(self) -> dict[str, Any]:
        """What a launcher fills in for fields that nobody set, when the section is active."""
        found = {}
        for field in dataclasses.fields(self):
            about = field.metadata.get("option")
            if about is not None and about.launch_default is not None and getattr(self, field.name) is None:
                found[field.name] = about.launch_default
        return found

    # Written once here instead of generated per section: sections are made at every start of the command.
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
