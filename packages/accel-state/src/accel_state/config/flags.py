"""Command-line flags of the schema: reading them, and writing a configuration as flags."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from accel_state.config.launch import LaunchConfig
from accel_state.config.option import Section
from accel_state.config.option_types import Bool, BoolOrName, Float, Int, StringList
from accel_state.config.roots import complete_root, selects_installed
from accel_state.config.schema import BoundOption, Schema, all_of, flatten, plain_flag, schema_of, unknown
from accel_state.config.sections.hardware import PROCESSES_PER
from accel_state.config.sources import PER_MACHINE
from accel_state.errors import ConfigError, UnknownKeyError

__all__ = ["ParsedFlags", "parse_flags", "to_flags", "without_flags"]

_NO = "no_"

_REPLACED = {
    "ipex": "IPEX is part of PyTorch now; leave it out",
    "use_xpu": "PyTorch finds the device; leave it out",
    "use_mps_device": "PyTorch finds the device; leave it out",
    "mpirun_ccl": "oneCCL's workers are set by its own variable CCL_WORKER_COUNT; leave it out",
    "fp16": "pass --mixed_precision fp16",
    "bf16": "pass --mixed_precision bf16",
    "use_tp": "pass --use_parallelism_config and --parallelism_config_tp_size",
    "tp_size": "pass --use_parallelism_config and --parallelism_config_tp_size",
    "standalone": "a run on one machine always chooses a free port; leave it out",
    "rdzv_endpoint": "pass --main_process_ip and --main_process_port",
    "redirects": "pass --log_dir, and --tee for the streams of each rank",
    "local_ranks_filter": "lines have the rank before them, and --log_dir writes a file per rank",
    "use_env": "ranks always get their environment variables; leave it out",
    "num_gpus": "pass --num_processes, the number over all machines",
    "hostfile": "pass --deepspeed_hostfile with --use_deepspeed, or --mpirun_hostfile",
}
"""Flags that Accelerate had once, or that other launchers have, and their replacements."""


@dataclasses.dataclass(frozen=True)
class ParsedFlags:
    """A parsed command line.

    Attributes:
        values: option values by path; paths of ``SageMakerConfig`` for flags that only it has.
        spelled: the flag as typed, by path, for messages; also of a denied value.
        rest: everything from the first word that is not a flag: the script and its arguments.
        others: values of the flags in ``extra``, named without dashes and with underscores.
        denied: paths and values to remove if a file or the environment sets them: ``--no-use_fsdp``.
    """

    values: dict[str, Any]
    spelled: dict[str, str]
    rest: tuple[str, ...]
    others: dict[str, Any]
    denied: tuple[tuple[str, str], ...] = ()


def parse_flags(arguments: Sequence[str], extra: dict[str, bool] | None = None) -> ParsedFlags:
    """Read flags until the first word that is not one, or until ``--``.

    Dashes and underscores in a flag are equivalent. A boolean is ``--flag``, ``--no-flag`` or ``--flag=false``; those
    that take a value in Accelerate also accept one as the next word (``--fsdp_offload_params true``). Later flags
    override earlier ones; flags of list options accumulate.

    Args:
        arguments: the words after the name of the command.
        extra: flags of the command itself, without dashes (except ``-h``), and whether they take a value.

    Raises:
        UnknownKeyError: a flag does not exist; the message suggests the closest ones.
        ConfigError: a value is missing or invalid, or two flags exclude each other.
    """
    reader = _Reader(list(arguments), extra or {})
    reader.run()
    rest, denied = tuple(reader.words[reader.at :]), tuple(reader.denied)
    return ParsedFlags(reader.values, reader.spelled, rest, reader.others, denied)


def without_flags(
    arguments: Sequence[str], extra: dict[str, bool] | None, dropped: Callable[[str], bool]
) -> list[str]:
    """The words of a command line without some of its flags and their values; the others stay as they were typed.

    Args:
        arguments: words that ``parse_flags`` has accepted.
        extra: as for ``parse_flags``.
        dropped: whether to leave a flag out, by its name without leading dashes, with underscores.
    """
    reader = _Reader(list(arguments), extra or {})
    reader.run()
    gone = {
        at for name, begin, end in reader.spans if dropped(name.removeprefix(_NO)) for at in range(begin, end)
    }
    return [word for at, word in enumerate(arguments) if at not in gone]


def to_flags(config: Section) -> list[str]:
    """Flags that ``parse_flags`` reads back as the values of ``config`` that differ from their defaults."""
    words: list[str] = []
    values = flatten(config)
    for bound in schema_of(type(config)).options:
        value = values[bound.path]
        if not bound.flags or value is None or value == bound.default:
            continue
        words += _words(bound, value)
    return words


def _words(bound: BoundOption, value: Any) -> list[str]:
    flag = bound.flags[0]
    if isinstance(bound.option_type, StringList):
        return [f"{flag}={item}" for item in value]
    if isinstance(value, bool) and bound.about.toggle:
        return [flag if value else f"--no-{flag[2:]}"]
    return [f"{flag}={bound.option_type.format(value)}"]


class _Reader:
    """One pass over a command line."""

    def __init__(self, words: list[str], extra: dict[str, bool]) -> None:
        self.words = words
        self.extra = {plain_flag(n if n.startswith("-") else f"--{n}"): takes for n, takes in extra.items()}
        self.at = 0
        self.errors: list[ConfigError] = []
        self.values: dict[str, Any] = {}
        self.spelled: dict[str, str] = {}
        self.others: dict[str, Any] = {}
        self.switched: dict[str, str] = {}  # switch as typed to the value that it sets
        self.denied: dict[tuple[str, str], None] = {}
        self.spans: list[
            tuple[str, int, int]
        ] = []  # each flag, without its dashes, and the words that it took

    def run(self) -> None:
        """Read the flags.

        Raises:
            ConfigError: flags are wrong; the message names all mistakes.
        """
        self._read()
        if self.errors:
            raise all_of(self.errors)

    def _read(self) -> None:
        while self.at < len(self.words):
            word = self.words[self.at]
            if word == "--":
                self.at += 1
                return
            if not word.startswith("-") or word == "-":
                return
            began = self.at
            self.at += 1
            flag, equals, text = word.partition("=")
            try:
                self._flag(flag, text if equals else None)
            except ConfigError as error:
                self.errors.append(error)
            self.spans.append((plain_flag(flag), began, self.at))

    def _flag(self, flag: str, text: str | None) -> None:
        name = plain_flag(flag)
        if name in self.extra:
            self.others[name] = self._value(flag, text) if self.extra[name] else True
            if self.others[name] == "":
                raise ConfigError(f"{flag} is ''; expected a value")
            return
        tables = _tables(name)
        denied = name[len(_NO) :] if name.startswith(_NO) and text is None else ""
        if name in tables.switches:
            self._switch(flag, *tables.switches[name], on=text is None or _truth(flag, text))
        elif name in tables.by_flag:
            self._option(flag, tables.by_flag[name], text)
        elif denied in tables.switches:
            self._switch(flag, *tables.switches[denied], on=False)
        elif denied in tables.by_flag and isinstance(tables.by_flag[denied].option_type, (Bool, BoolOrName)):
            self._store(flag, tables.by_flag[denied], False)
        elif name in _REPLACED and flag.startswith("--"):
            raise UnknownKeyError(f"flag {flag} does not exist: {_REPLACED[name]}")
        else:
            known = [*tables.by_flag, *tables.switches, *self.extra]
            shown = (f"--{item}" if not item.startswith("-") else item for item in known)
            script = next((word for word in self.words[self.at :] if word.endswith(".py")), None)
            hint = f"; a flag of {script} comes after it" if script is not None else ""
            raise unknown(f"--{name}" if flag.startswith("--") else flag, shown, "flag", hint)

    def _option(self, flag: str, bound: BoundOption, text: str | None) -> None:
        if text is None and isinstance(bound.option_type, (Bool, BoolOrName)):
            following = self.words[self.at] if self.at < len(self.words) else ""
            if bound.about.toggle or not _reads(bound, following):
                self._store(flag, bound, True)
                return
        text = self._value(flag, text)
        if bound is schema_of(LaunchConfig).by_path["distributed_type"] and selects_installed(text):
            bound = schema_of(complete_root()).by_path[bound.path]
        if bound.path == "num_machines" and re.fullmatch(r"\d+:\d+", text):  # torchrun's form of a range
            least, _, text = text.partition(":")
            self._option(flag, schema_of(LaunchConfig).by_path["min_machines"], least)
        if bound.path == "num_processes" and plain_flag(flag) in PER_MACHINE:
            if text.lower() in PROCESSES_PER:
                self._option(flag, schema_of(LaunchConfig).by_path["processes_per"], text)
                return
            if not text.isdecimal():
                raise ConfigError(
                    f"{flag} is {text!r}; expected a number of processes, or {', '.join(PROCESSES_PER)}"
                )
        value = bound.parse(text, flag)
        choices = ", ".join(bound.listed)
        if not text.strip() and (choices or isinstance(bound.option_type, (Bool, Float, Int))):
            # Probably an unset shell variable.
            raise ConfigError(
                f"{flag} is {text!r}; expected {f'one of {choices}' if choices else bound.option_type.expected}"
            )
        if isinstance(bound.option_type, StringList) and bound.path in self.values:
            value = (*self.values[bound.path], *value)
        self._store(flag, bound, value)

    def _switch(self, flag: str, bound: BoundOption, meaning: str, *, on: bool) -> None:
        if not on:
            self.denied[bound.path, meaning] = None
            if self.values.get(bound.path) == meaning:
                del self.values[bound.path]
            if bound.path not in self.values:
                self.spelled[bound.path] = flag if plain_flag(flag).startswith(_NO) else f"--no-{flag[2:]}"
            self.switched = {before: other for before, other in self.switched.items() if other != meaning}
            return
        for before, other in self.switched.items():
            if other != meaning:
                raise ConfigError(f"{before} and {flag} exclude each other; keep one of them")
        self.denied.pop((bound.path, meaning), None)
        self.switched[flag] = meaning
        self._store(flag, bound, meaning)

    def _store(self, flag: str, bound: BoundOption, value: Any) -> None:
        self.values[bound.path] = value
        self.spelled[bound.path] = flag

    def _value(self, flag: str, text: str | None) -> str:
        if text is not None:
            return text
        if self.at == len(self.words):
            raise ConfigError(f"{flag} needs a value after it")
        self.at += 1
        return self.words[self.at - 1]


def _tables(name: str) -> Schema:
    """The schema with this flag: that of local runs, else that of SageMaker, else that of installed strategies."""
    local = schema_of(LaunchConfig)
    forms = (name, name.removeprefix(_NO))
    if any(form in table for form in forms for table in (local.by_flag, local.switches)):
        return local
    from accel_state.config.sagemaker import SageMakerConfig

    other = schema_of(SageMakerConfig)
    if any(form in other.by_flag for form in forms):
        return other
    return local if name in _REPLACED else schema_of(complete_root())


def _reads(bound: BoundOption, word: str) -> bool:
    """Whether the next word is the value of a boolean flag, not the script."""
    try:
        bound.parse(word, "")
    except ConfigError:
        return False
    return bool(word)


def _truth(flag: str, text: str) -> bool:
    try:
        return Bool().parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}; expected {error}") from None
