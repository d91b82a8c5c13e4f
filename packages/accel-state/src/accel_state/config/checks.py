"""Checks of a merged configuration: options that contradict or require each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from accel_state.config.launch import LaunchConfig
from accel_state.config.option import Section
from accel_state.config.parallel_degrees import DIMENSIONS, experts_misfit, stages_misfit
from accel_state.config.schema import all_of
from accel_state.config.sections.deepspeed import DEEPSPEED_OPTIONS
from accel_state.config.sources import Origin, Source, Sources
from accel_state.config.strategies import LaunchableStrategy
from accel_state.errors import ConfigError

__all__ = ["check", "find_contradictions"]

# Degrees that one replica of a model can be sharded over.
_SHARDED = ("dp_shard", "cp", "sp")


def check(
    values: dict[str, Any], sources: dict[str, Source], root: type[Section] = LaunchConfig
) -> list[str]:
    """Check merged values; if two contradict each other, the one of lower precedence is dropped.

    Args:
        values: merged value of every option by path; changed in place.
        sources: source of every option that is set, by path; changed in place.
        root: the root that has the options.

    Returns:
        Notes about dropped values.

    Raises:
        ConfigError: two values of equal precedence contradict each other, or one requires another that is
            missing.
    """
    merged = _MergedOptions(values, sources, root)
    if found := list(merged.contradictions()):
        raise all_of(found)
    return merged.notes


def find_contradictions(
    values: dict[str, Any], sources: dict[str, Source], root: type[Section] = LaunchConfig
) -> list[ConfigError]:
    """Every error that ``check`` would raise together, for a report with other errors beside them."""
    return list(_MergedOptions(values, sources, root).contradictions())


class _MergedOptions:
    """The merged values, and their names in messages."""

    def __init__(self, values: dict[str, Any], sources: dict[str, Source], root: type[Section]) -> None:
        self.values = values
        self.sources = sources
        self.root = root
        self.notes: list[str] = []

    @property
    def strategy(self) -> LaunchableStrategy | None:
        """The installed strategy that is selected."""
        strategies = self.root.strategies if issubclass(self.root, LaunchConfig) else ()
        kind = self.values["distributed_type"]
        return next((each for each in strategies if each.distributed_type == kind), None)

    def rules(self) -> tuple[Callable[[_MergedOptions], None], ...]:
        """The checks of every run, and those of the selected strategy."""
        return (*_RULES, *(self.strategy.rules if self.strategy is not None else ()))

    def contradictions(self) -> Iterator[ConfigError]:
        """Apply the rules; yields their errors."""
        for rule in self.rules():
            try:
                rule(self)
            except ConfigError as error:
                yield error

    def origin(self, path: str) -> Origin:
        return Sources(self.sources).of(path).origin

    def describe(self, path: str) -> str:
        """The option as the user wrote it, with its value and source."""
        return Sources(self.sources, self.root).describe(path, self.values[path])

    def remedy(self, path: str, *others: str) -> str:
        """How to unset the option where it was set."""
        return Sources(self.sources, self.root).remedy(path, self.values[path], *others)

    def drop_weaker(self, weak: str, strong: str, value: Any, remedy: str) -> None:
        """Set the option of lower precedence to ``value``; raise if both have equal precedence."""
        if self.origin(weak) >= self.origin(strong):
            raise ConfigError(f"{self.describe(strong)} contradicts {self.describe(weak)}; {remedy}")
        self.notes.append(f"{self.describe(weak)} is overridden by {self.describe(strong)}")
        self.values[weak] = value
        source = Sources(self.sources).of(strong)
        if not source.path:
            source = dataclasses.replace(source, path=strong, value=self.values[strong])
        self.sources[weak] = source


def _cpu_or_accelerators(merged: _MergedOptions) -> None:
    kind = merged.values["distributed_type"] or ""
    accelerators = (kind.startswith("MULTI_") and kind != "MULTI_CPU") or kind == "XLA"
    if not merged.values["use_cpu"]:
        return
    if merged.values["gpu_ids"] not in (None, "all") and merged.origin("gpu_ids") < merged.origin("use_cpu"):
        merged.drop_weaker("gpu_ids", "use_cpu", None, "")
    if not accelerators:
        return
    if merged.origin("distributed_type") > merged.origin("use_cpu"):
        merged.drop_weaker("use_cpu", "distributed_type", False, "")
    else:
        merged.drop_weaker(
            "distributed_type",
            "use_cpu",
            None,
            "one selects the CPU, the other accelerators: keep one of them",
        )


def _processes_per(merged: _MergedOptions) -> None:
    """A count of devices replaces a number; counting CPUs also selects the CPU."""
    if merged.values["processes_per"] is None:
        return
    if merged.values["num_processes"] is not None:
        merged.drop_weaker("num_processes", "processes_per", None, "keep one of them")
    if merged.values["processes_per"] == "cpu" and not merged.values["use_cpu"]:
        merged.values["use_cpu"] = True
        merged.sources["use_cpu"] = dataclasses.replace(
            Sources(merged.sources).of("processes_per"), path="processes_per", value="cpu"
        )


def _enough_processes(merged: _MergedOptions) -> None:
    kind = merged.values["distributed_type"] or ""
    if not kind.startswith("MULTI_") or kind == "MULTI_CPU":
        return
    ids = [part for part in str(merged.values["gpu_ids"] or "all").split(",") if part.strip()]
    one_machine = merged.values["num_machines"] == 1
    both = {merged.origin("distributed_type"), merged.origin("num_processes")}
    if merged.values["num_processes"] == 1 and both == {Origin.FILE}:
        # Accelerate launches such a file, and starts the one process as torchrun does.
        merged.notes.append(
            f"{merged.describe('distributed_type')} has one process ({merged.describe('num_processes')})"
        )
    elif merged.values["num_processes"] == 1:
        _single(merged, "num_processes", "request at least 2 processes, or remove the other option")
    elif one_machine and len(ids) == 1 and ids[0] != "all":
        _single(merged, "gpu_ids", "name at least 2 ids, or remove the other option")


def _single(merged: _MergedOptions, path: str, remedy: str) -> None:
    if merged.origin(path) > merged.origin("distributed_type"):
        merged.drop_weaker("distributed_type", path, "NO", remedy)
    else:
        raise ConfigError(
            f"{merged.describe('distributed_type')} contradicts {merged.describe(path)}; {remedy}"
        )


def _parallelism(merged: _MergedOptions) -> None:
    if not merged.values["use_parallelism_config"]:
        return
    kind = merged.values["distributed_type"]
    if kind == "XLA" or (merged.strategy is not None and not merged.strategy.takes_mesh):
        raise ConfigError(
            f"{merged.describe('use_parallelism_config')} contradicts {merged.describe('distributed_type')}, which "
            f"divides models in its own way; {merged.remedy('use_parallelism_config')}"
        )
    sizes = {name: merged.values[f"parallelism.{name}_size"] or 1 for name in DIMENSIONS}
    if kind == "FSDP" and max(sizes.values()) > 1 and {sizes[name] for name in _SHARDED} == {1}:
        raise ConfigError(
            f"{merged.describe('distributed_type')} has nothing to shard over: dp_shard_size, cp_size and sp_size of "
            "the parallelism configuration are 1; set --parallelism_config_dp_shard_size, or leave FSDP out, which "
            "trains replicas"
        )
    wrong = stages_misfit(sizes)
    if wrong is not None:
        raise ConfigError(f"{merged.describe('parallelism.pp_size')}: {wrong}")
    experts = merged.values["parallelism.ep_size"] or 1
    if experts > 1 and kind != "FSDP":
        raise ConfigError(
            f"{merged.describe('parallelism.ep_size')} needs FSDP, which divides all other parameters; pass "
            f"--use_fsdp, or {merged.remedy('parallelism.ep_size')}"
        )
    wrong = experts_misfit(sizes, experts) if max(sizes.values()) > 1 else None
    if wrong is not None:
        raise ConfigError(f"{merged.describe('parallelism.ep_size')}: {wrong}")
    if kind == "DEEPSPEED" and sizes["tp"] > 1:
        raise ConfigError(
            f"{merged.describe('parallelism.tp_size')} does not go with {merged.describe('distributed_type')}, which "
            "has tensor parallelism of its own: set tensor_parallel.autotp_size in DeepSpeed's configuration, or use "
            "FSDP, which takes all degrees"
        )
    version = merged.values["fsdp.fsdp_version"]
    if kind == "FSDP" and version is None:
        merged.values["fsdp.fsdp_version"] = 2
    elif kind == "FSDP" and version == 1:
        raise ConfigError(
            f"{merged.describe('use_parallelism_config')} needs FSDP version 2, but "
            f"{merged.describe('fsdp.fsdp_version')} was given; pass --fsdp_version 2, or "
            f"{merged.remedy('fsdp.fsdp_version')}"
        )


def _one_process(merged: _MergedOptions) -> None:
    processes = merged.values["num_processes"] or 1
    if merged.values["distributed_type"] != "NO" or processes == 1:
        return
    both = {merged.origin("distributed_type"), merged.origin("num_processes")}
    if both == {Origin.FILE}:
        # Accelerate starts one process for such a file, and files in use have a left-over number in it.
        merged.notes.append(
            f"{merged.describe('num_processes')} is not used: {merged.describe('distributed_type')} is one process"
        )
        merged.values["num_processes"] = 1
    elif merged.origin("num_processes") > merged.origin("distributed_type"):
        merged.values["distributed_type"] = None  # the number says it all, so this is worth no note
    else:
        merged.drop_weaker(
            "num_processes", "distributed_type", 1, f"NO is one process; {merged.remedy('distributed_type')}"
        )


def _module_or_program(merged: _MergedOptions) -> None:
    if merged.values["module"] and merged.values["no_python"]:
        raise ConfigError(
            f"{merged.describe('module')} and {merged.describe('no_python')} exclude each other: "
            "modules run with Python; keep one of them"
        )


def _fsdp_loading(merged: _MergedOptions) -> None:
    if merged.values["distributed_type"] != "FSDP" or (merged.values["fsdp.fsdp_version"] or 1) != 1:
        return
    loading, sync = "fsdp.cpu_ram_efficient_loading", "fsdp.sync_module_states"
    if merged.values[sync] is False and merged.values[loading] is not False:
        if merged.values[loading] is None:
            merged.values[loading] = False
            return
        raise ConfigError(
            f"{merged.describe(loading)} loads weights on one process only, but {merged.describe(sync)} does not "
            "broadcast them to the others; disable the first, or enable the second"
        )


def _deepspeed_file(merged: _MergedOptions) -> None:
    own = "deepspeed.hf_ds_config"
    if merged.values["distributed_type"] != "DEEPSPEED" or merged.values[own] is None:
        return
    given = [path for path in DEEPSPEED_OPTIONS if merged.values[path] is not None]
    # Beside flags and variables DeepSpeed's file counts, as for Accelerate: see `check_deepspeed_file`.
    twice = [path for path in given if merged.origin(path) not in (Origin.ENVIRONMENT, Origin.FLAG)]
    if twice:
        raise ConfigError(
            f"{', '.join(merged.describe(path) for path in twice)}: set in DeepSpeed's own configuration instead, "
            f"because {merged.describe(own)} is given; keep these options in one place"
        )


_RULES: tuple[Callable[[_MergedOptions], None], ...] = (
    _processes_per,
    _cpu_or_accelerators,
    _enough_processes,
    _one_process,
    _parallelism,
    _module_or_program,
    _fsdp_loading,
    _deepspeed_file,
)
