"""The options of a root configuration with their names in files, flags and variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from accel_state.config.option import Carrier, Option, Section
from accel_state.config.option_types import BoolOrName, OptionType, option_type_of
from accel_state.entry_points import entry_points
from accel_state.errors import ConfigError, UnknownKeyError
from accel_state.messages import HIDDEN, did_you_mean, shown, without_secrets

__all__ = [
    "BoundOption",
    "Schema",
    "all_of",
    "build",
    "flatten",
    "plain_flag",
    "schema_of",
    "unknown",
    "value_of",
    "variables_of",
]


@dataclasses.dataclass(frozen=True)
class BoundOption:
    """An option of a root: its declaration and all its names.

    Attributes:
        path: name inside the root, such as ``num_processes`` or ``fsdp.cpu_offload``.
        section: attribute of the root for its section; empty for the root's own fields.
        attribute: name of the field in its section.
        title: heading in help.
        about: the declaration of the field.
        option_type: how values are read and written.
        default: value if it is not set.
        file_key: key of its mapping in a file; None: the top level.
        prefix: the prefix of its section, in flags and keys.
        flags: accepted flags, with their dashes; the first is written.
        variables: its environment variables; empty: it has none.
    """

    path: str
    section: str
    attribute: str
    title: str
    about: Option
    option_type: OptionType
    default: Any
    file_key: str | None
    prefix: str
    flags: tuple[str, ...]
    variables: tuple[str, ...]

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, those of installed packages included; empty: any."""
        if not self.about.group:
            return self.about.choices
        return (*self.about.choices, *sorted(entry_points(self.about.group).keys() - {*self.about.choices}))

    @property
    def listed(self) -> list[str]:
        """The choices that help and messages list."""
        return [choice for choice in self.choices if choice not in self.about.unlisted]

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Accepted keys in its mapping in a file; the first is written. Ranks read no files."""
        if not self.about.in_file:
            return ()
        forms = [self.about.key or self.about.name or self.prefix + self.attribute, *self.about.keys]
        if self.prefix:
            # Accelerate adds a section's prefix to keys without it, so both forms are in use.
            bare = [form.removeprefix(self.prefix) for form in forms]
            forms += [*bare, *[self.prefix + form for form in bare]]
        return tuple(dict.fromkeys(forms))

    @property
    def carriers(self) -> frozenset[Carrier]:
        """The places that can hold a value of this option."""
        found = set()
        if self.keys:
            found.add(Carrier.FILE)
        if self.flags:
            found.add(Carrier.FLAG)
        found.add(Carrier.ENVIRONMENT if self.variables else Carrier.LAUNCHER)
        return frozenset(found)

    @property
    def file_path(self) -> str:
        """Full key in a file."""
        return f"{self.file_key}.{self.keys[0]}" if self.file_key else self.keys[0]

    @property
    def label(self) -> str:
        """The name of the option in messages: its flag, else its variable, else its path."""
        return self.flags[0] if self.flags else (self.variables[0] if self.variables else self.path)

    def parse(self, text: str, where: str) -> Any:
        """The value of ``text``.

        Raises:
            ConfigError: it is invalid; the message starts with ``where``.
        """
        return self._convert(text, where, self.option_type.parse)

    def read(self, data: Any, where: str) -> Any:
        """The value of ``data`` from YAML, JSON or code.

        Raises:
            ConfigError: it is invalid; the message starts with ``where``.
        """
        if data is False and "no" in (choice.lower() for choice in self.about.choices):
            data = "no"  # YAML 1.1 reads an unquoted ``no`` as false
        if data in ([], {}):
            return None  # old files have these for unset options
        return self._convert(data, where, self.option_type.read)

    def _convert(self, data: Any, where: str, convert: Any) -> Any:
        if isinstance(data, str) and (not data.strip() or data.strip().lower() in self.about.unset):
            return None
        try:
            value = self._check(convert(data))
            return None if value in ((), {}) else value
        except ValueError as error:
            text = HIDDEN if self.about.secret else shown(without_secrets(data))
            raise ConfigError(f"{where} is {text}; expected {error}") from None

    def _check(self, value: Any) -> Any:
        about = self.about
        if self.choices and not isinstance(value, bool):
            return self._choice(str(value))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            low, high = about.low, about.high
            if (low is not None and value < low) or (high is not None and value > high):
                raise ValueError(f"{self.option_type.expected} {_limits(low, high)}")
        return value

    def _choice(self, text: str) -> str:
        word = text.strip().lower()
        about = self.about
        for choice in self.choices:
            if choice.lower() == word:
                return choice
        if word in about.synonyms:
            return about.synonyms[word]
        if about.numbered and word.isdecimal() and 1 <= int(word) <= len(about.choices):
            return about.choices[int(word) - 1]
        words = ["true", "false"] if isinstance(self.option_type, BoolOrName) else []
        raise ValueError(f"one of {', '.join([*words, *self.listed])}")


class Schema:
    """All options of one root, with lookup tables by name.

    Attributes:
        root: the root's class.
        options: every option, in order of declaration.
        by_path, by_variable: name to option.
        sections: attribute of the root to section class.
    """

    def __init__(self, root: type[Section]) -> None:
        self.root = root
        self.sections: dict[str, type[Section]] = {}
        self.options: tuple[BoundOption, ...] = tuple(self._bind(root))
        self.by_path = {bound.path: bound for bound in self.options}
        self.by_variable = {name: bound for bound in self.options for name in bound.variables}
        for bound in self.options:
            for _, variable in bound.about.switches.values():
                if variable:
                    self.by_variable[variable] = bound

    # Launchers need these, ranks only the variables.

    @cached_property
    def by_flag(self) -> dict[str, BoundOption]:
        """Plain flag to option."""
        return {plain_flag(flag): bound for bound in self.options for flag in bound.flags}

    @cached_property
    def by_key(self) -> dict[tuple[str | None, str], BoundOption]:
        """Key of the mapping in a file, None at the top, and key in it, to option."""
        return {(bound.file_key, key): bound for bound in self.options for key in bound.keys}

    @cached_property
    def switches(self) -> dict[str, tuple[BoundOption, Any]]:
        """Plain flag to the option and the value that it sets."""
        return {
            plain_flag(flag): (bound, value)
            for bound in self.options
            for flag, (value, _) in bound.about.switches.items()
        }

    @property
    def file_keys(self) -> dict[str, str]:
        """Keys of section mappings in a file to section names."""
        return {cls.file_key: name for name, cls in self.sections.items() if cls.file_key is not None}

    def _bind(self, root: type[Section]) -> list[BoundOption]:
        fields: list[tuple[str, type[Section], dataclasses.Field[Any]]] = []
        for field in dataclasses.fields(root):
            section: Any = field.default_factory
            if isinstance(section, type) and issubclass(section, Section):
                self.sections[field.name] = section
                fields += [(field.name, section, inner) for inner in dataclasses.fields(section)]
            else:
                fields.append(("", root, field))
        options = []
        for name, cls, field in fields:
            about: Option = field.metadata["option"]
            flags = (f"--{about.name or cls.prefix + field.name}", *about.flags) if about.in_flags else ()
            variables = (cls.env_prefix + field.name.upper(),) if cls.env_prefix else ()
            bound = BoundOption(
                path=f"{name}.{field.name}" if name else field.name,
                section=name,
                attribute=field.name,
                title=cls.title,
                about=about,
                option_type=option_type_of(str(field.type), comma_list=about.comma_list),
                default=field.default,
                file_key=cls.file_key,
                prefix=cls.prefix,
                flags=flags,
                variables=variables if about.env is None else about.env,
            )
            options.append(bound)
        return options


def schema_of(root: type[Section]) -> Schema:
    """The schema of a root, computed once."""
    if root not in _SCHEMAS:
        _SCHEMAS[root] = Schema(root)
    return _SCHEMAS[root]


_SCHEMAS: dict[type[Section], Schema] = {}


def plain_flag(flag: str) -> str:
    """The normalized spelling of a flag: underscores, no leading dashes; ``-m`` is unchanged."""
    return flag[2:].replace("-", "_") if flag.startswith("--") else flag


def variables_of(bound: BoundOption) -> tuple[str, ...]:
    """All variables of the option, including those of its switches."""
    switches = (variable for _, variable in bound.about.switches.values() if variable)
    return (*bound.variables, *switches)


def flatten(config: Section) -> dict[str, Any]:
    """Every option's path and value."""
    return {bound.path: value_of(config, bound) for bound in schema_of(type(config)).options}


def value_of(config: Section, bound: BoundOption) -> Any:
    """The option's value in ``config``."""
    holder = getattr(config, bound.section) if bound.section else config
    return getattr(holder, bound.attribute)


def build(root: type[Section], values: Mapping[str, Any]) -> Any:
    """An instance of ``root`` from values by path; other options keep their default."""
    known = schema_of(root)
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        bound = known.by_path[path]
        if value is None:
            value = bound.default
        (inner.setdefault(bound.section, {}) if bound.section else own)[bound.attribute] = value
    sections = {name: known.sections[name](**found) for name, found in inner.items()}
    return root(**own, **sections)


def unknown(name: str, known: Iterable[str], what: str, otherwise: str = "") -> UnknownKeyError:
    """The error for an unknown name, with the closest known names; with ``otherwise`` if none is close."""
    return UnknownKeyError(f"{what} {name} does not exist{did_you_mean(name, known, otherwise)}")


def all_of(errors: Sequence[ConfigError]) -> ConfigError:
    """Join errors into one, with a line for each; a single error is returned unchanged.

    Args:
        errors: at least one.
    """
    if len(errors) == 1:
        return errors[0]
    kind = UnknownKeyError if all(isinstance(error, UnknownKeyError) for error in errors) else ConfigError
    return kind("\n  ".join([f"{len(errors)} errors:", *map(str, errors)]))


def _limits(low: float | None, high: float | None) -> str:
    if high is None:
        return f"of at least {low}"
    return f"from {low} to {high}" if low is not None else f"of at most {high}"
