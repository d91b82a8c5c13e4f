"""Where each value comes from, in the user's own words: a line of a file, a variable, a flag as typed, or code.

Errors about a value name its source and explain how to change it there: removing a flag is no help if a file sets the
value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from accel_state.config.launch import LaunchConfig
from accel_state.config.option import Section
from accel_state.config.schema import BoundOption, plain_flag, schema_of

__all__ = ["PER_MACHINE", "FilePlace", "Origin", "Source", "Sources", "variable_in_use"]

PER_MACHINE = frozenset({"nproc_per_node"})
"""torchrun's flags that count for each machine, where our option counts all machines; as ``plain_flag`` spells them."""


class Origin(IntEnum):
    """Origin of a value; greater origins take precedence."""

    DEFAULT = 0
    FILE = 1
    SCHEDULER = 2
    ENVIRONMENT = 3
    FLAG = 4
    CODE = 5


class FilePlace(NamedTuple):
    """A key in a configuration file.

    Attributes:
        key: the full key as written, such as ``fsdp_config.fsdp_version``.
        line: its line, counted from 1; None if the file does not have it (it follows from another key).
    """

    key: str
    line: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where one value comes from.

    Attributes:
        origin: kind of source.
        name: the key, variable, flag as typed, or name in code; empty for a default.
        file: path of the file, for values from one.
        line: line of the key in that file, if known.
        path: the option that the name sets, if it is another one (``--cpu`` also decides the distributed type).
        value: the value that it has there.
        text: the text of a variable, or of a flag whose value counts for each machine.
    """

    origin: Origin = Origin.DEFAULT
    name: str = ""
    file: str = ""
    line: int | None = None
    path: str = ""
    value: Any = None
    text: str = ""

    def __str__(self) -> str:
        match self.origin:
            case Origin.FILE:
                line = f", line {self.line}" if self.line is not None else ""
                return f"{self.file}{line}: {self.name}"
            case Origin.SCHEDULER:
                return f"scheduler: {self.name}"
            case Origin.ENVIRONMENT:
                return f"environment variable {self.name}"
            case Origin.FLAG:
                return f"flag {self.name}"
            case Origin.CODE:
                return f"code: {self.name}"
            case _:
                return "default"


@dataclasses.dataclass(frozen=True)
class Sources:
    """The source of every option that is set.

    Attributes:
        by_path: source by path of the option; an option that is not there has its default.
        root: the root of the schema.
    """

    by_path: Mapping[str, Source] = dataclasses.field(default_factory=dict)
    root: type[Section] = LaunchConfig

    def of(self, path: str) -> Source:
        """The source of an option."""
        return self.by_path.get(path, Source())

    def is_per_machine(self, path: str) -> bool:
        """Whether the option was typed as a flag of torchrun that counts for each machine: ``--nproc_per_node``."""
        source = self.of(path)
        return source.origin is Origin.FLAG and plain_flag(source.name) in PER_MACHINE

    def describe(self, path: str, value: Any) -> str:
        """An option with its value as the user wrote it.

        Examples: ``--multi_gpu``, ``--num_processes 4``, ``distributed_type: FSDP in f.yaml, line 3``,
        ``ACCELERATE_USE_FSDP in the environment``.
        """
        source = self.of(path)
        if source.path and source.path != path:
            path, value = source.path, source.value
        bound = schema_of(self.root).by_path[path]
        shown = _text(bound, value)
        match source.origin:
            case Origin.FILE:
                line = f", line {source.line}" if source.line is not None else ""
                return f"{source.name}: {shown} in {source.file}{line}"
            case Origin.SCHEDULER:
                return f"{path} {shown}, from the scheduler ({source.name}),"
            case Origin.ENVIRONMENT:
                return f"{source.name}={source.text or shown} in the environment"
            case Origin.FLAG:
                bare = _is_bare(bound, source.name, value)
                return source.name if bare else f"{source.name} {source.text or shown}"
            case Origin.CODE:
                return f"{source.name}={value!r}"
            case _ if bound.flags:
                return f"{bound.flags[0]} {shown}"
            case _:
                return f"{path}={value!r}"

    def remedy(self, path: str, value: Any, *others: str) -> str:
        """How to unset a value where it was set, and which flag to pass instead.

        Args:
            path: the option.
            value: its value.
            others: other flags that resolve the contradiction, such as ``--cpu``.
        """
        source = self.of(path)
        if source.path and source.path != path:
            path, value = source.path, source.value
        bound = schema_of(self.root).by_path[path]
        ways = [f"pass {flag}" for flag in (*_opposite(bound, value), *others)]
        match source.origin:
            case Origin.FILE:
                at = "that line" if source.line is not None else source.name
                return _either([*ways, f"edit {at}"])
            case Origin.SCHEDULER:
                return _either([*ways, "pass --cluster none to ignore the scheduler"])
            case Origin.ENVIRONMENT:
                return _either([f"unset {source.name}", *ways])
            case Origin.FLAG:
                return _either([f"leave {source.name} out", *(f"pass {flag}" for flag in others)])
            case Origin.CODE:
                return _either([f"leave {source.name} out", *(f"pass {flag}" for flag in others)])
            case _:
                return _either([f"pass {flag}" for flag in others] or [f"set {bound.label}"])


def variable_in_use(bound: BoundOption, value: Any, environ: Mapping[str, str]) -> str:
    """The variable of ``environ`` that sets the option to ``value``."""
    named = [name for meaning, name in bound.about.switches.values() if name and meaning == value]
    return next((name for name in (*named, *bound.variables) if environ.get(name)), bound.label)


def _text(bound: BoundOption, value: Any) -> str:
    if bound.about.secret:
        return "***"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value) if value is None else bound.option_type.format(value)


def _is_bare(bound: BoundOption, flag: str, value: Any) -> bool:
    """Whether the flag was typed without a value."""
    plain = flag.lstrip("-").replace("-", "_")
    switches = {name.lstrip("-") for name in bound.about.switches}
    return value is True or plain.removeprefix("no_") in switches or plain.startswith("no_") or value is None


def _opposite(bound: BoundOption, value: Any) -> list[str]:
    """Flags that override the value."""
    for switch, (meaning, _) in bound.about.switches.items():
        if meaning == value and switch.startswith("--use_"):
            return [f"--no-{switch[2:]}"]
    if bound.path == "distributed_type":
        return [f"{bound.flags[0]} NO"]
    if isinstance(value, bool) and bound.flags:
        return [f"--no-{bound.flags[0][2:]}" if value else bound.flags[0]]
    if "no" in bound.about.choices and bound.flags:
        return [f"{bound.flags[0]} no"]
    return []


def _either(ways: list[str]) -> str:
    return ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])}, or {ways[-1]}"
