"""The interface through which installed packages add strategies to the launcher.

A distribution names a ``LaunchableStrategy`` in the entry-point group ``accel_state.strategies``. The module that holds
it must not import torch, because the launcher imports it. Whatever reads a configuration or asks for one (flags, files,
variables, help, completion, the wizard, the plan of a launch) finds the strategy there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from accel_state.config.option import Section
from accel_state.registry import Registry

__all__ = [
    "GROUP",
    "LaunchableStrategy",
    "Options",
    "Package",
    "StrategyQuestion",
    "installed_strategies",
]

GROUP = "accel_state.strategies"
"""The entry-point group of launchable strategies."""


class Options(Protocol):
    """The merged options of a run, as the checks of a strategy see them."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Value of every option by path, such as ``num_processes`` or ``fsdp.cpu_offload``."""
        ...

    def origin(self, path: str) -> int:
        """Origin of the value: an ``accel_state.config.Origin``."""
        ...

    def describe(self, path: str) -> str:
        """The option with its value, as the user wrote it."""
        ...

    def remedy(self, path: str, *others: str) -> str:
        """How to unset the value where it was set."""
        ...


def _always(answers: Mapping[str, Any]) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class StrategyQuestion:
    """A question of ``accel config`` about an option of the section; its text is the ``prompt`` of the option.

    Attributes:
        option: field of the section.
        when: whether it is asked, after the answers so far by field of the section; a question that was not asked, or
            was left open, has none.
        default: answer of plain Enter if the existing file has no value; None: the ``launch_default`` of the option.
        required: an answer is needed.
    """

    option: str
    when: Callable[[Mapping[str, Any]], bool] = _always
    default: Any = None
    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that the strategy needs besides its own distribution.

    Attributes:
        module: the module that is imported, such as ``megatron.core``.
        name: its distribution.
        install: the command that installs it.
    """

    module: str
    name: str
    install: str


@dataclass(frozen=True, kw_only=True)
class LaunchableStrategy:
    """A strategy that ``accel launch`` can select.

    Attributes:
        name: name of the strategy in the registry of accel-train; also the name of its footprint in accel-bigmodel.
        distributed_type: value of ``distributed_type`` that selects it.
        title: its name in messages and help.
        summary: its purpose in a few words, for the choice of a strategy and the list of help topics.
        section: class of its options.
        section_name: name of the section in Python, such as ``fsdp``, from which flag and variable follow.
        plugin: ``module:class`` of its plugin, imported by ranks alone.
        questions: those of ``accel config``.
        rules: called whenever options are merged; each raises ConfigError for options that contradict each other.
        checks: called before a start and by ``accel config validate``; each raises NotAvailableError for an option that
            the strategy does not support, or ConfigError.
        packages: packages that must be installed where ranks run.
        devices: types of accelerators that it computes on, such as ``cuda``; None: on the CPU as well, and on all.
        devices_described: those in words, for the error about a machine without them.
        several_processes: it needs more than one process.
        takes_mesh: it supports the degrees of a parallelism configuration.
        computes_fp8: it supports ``mixed_precision: fp8``.
        no_rehearsal: why ``accel rehearse`` cannot run it, in a clause; empty: it can.
    """

    name: str
    distributed_type: str
    title: str
    summary: str
    section: type[Section]
    section_name: str
    plugin: str
    questions: tuple[StrategyQuestion, ...] = ()
    rules: tuple[Callable[[Options], None], ...] = ()
    checks: tuple[Callable[[Options], None], ...] = ()
    packages: tuple[Package, ...] = ()
    devices: frozenset[str] | None = None
    devices_described: str = ""
    several_processes: bool = False
    takes_mesh: bool = False
    computes_fp8: bool = True
    no_rehearsal: str = ""

    @property
    def flag(self) -> str:
        """The flag that selects it, such as ``--use_fsdp``."""
        return f"--use_{self.section_name}"

    @property
    def variable(self) -> str:
        """The environment variable that selects it, such as ``ACCELERATE_USE_FSDP``."""
        return f"ACCELERATE_USE_{self.section_name.upper()}"

    @property
    def selected_by(self) -> str:
        """The words that select it, for help."""
        return f"{self.flag}, or distributed_type: {self.distributed_type} in a file"


def installed_strategies() -> tuple[LaunchableStrategy, ...]:
    """The launchable strategies of all installed distributions, sorted by name.

    Raises:
        ConfigError: a distribution names something that cannot be imported, or that is no ``LaunchableStrategy``.
    """
    return tuple(map(_REGISTRY.get, _REGISTRY.names()))


_REGISTRY: Registry[LaunchableStrategy] = Registry("strategy", GROUP, {}, base=LaunchableStrategy)
