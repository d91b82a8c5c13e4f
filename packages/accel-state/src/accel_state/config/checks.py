"""Checks of a merged configuration: options that contradict or require each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.config.launch import LaunchConfig
from accel_state.config.schema import schema_of
from accel_state.errors import ConfigError

__all__ = ["check"]

# Options that DeepSpeed's own configuration file sets.
_DEEPSPEED_OWN = (
    "gradient_accumulation.num_steps",
    "deepspeed.gradient_clipping",
    "deepspeed.zero_stage",
    "deepspeed.offload_optimizer_device",
    "deepspeed.offload_param_device",
    "deepspeed.offload_param_nvme_path",
    "deepspeed.offload_optimizer_nvme_path",
    "deepspeed.zero3_save_16bit_model",
)


def check(values: dict[str, Any], origins: dict[str, Any], sources: Mapping[str, str]) -> list[str]:
    """Check merged values; if two contradict each other, the one of lower precedence is dropped.

    Args:
        values: merged value of every option by path; changed in place.
        origins: origin of every option by path, comparable by precedence.
        sources: names of the file and of the flags as typed, for messages.

    Returns:
        Notes about dropped values.

    Raises:
        ConfigError: two values of equal precedence contradict each other, or one requires another that is
            missing.
    """
    merged = _MergedOptions(values, origins, sources)
    _cpu_or_accelerators(merged)
    _enough_processes(merged)
    _parallelism(merged)
    _module_or_program(merged)
    _fsdp_loading(merged)
    _deepspeed_file(merged)
    return merged.notes


class _MergedOptions:
    """The merged values, and their names in messages."""

    def __init__(self, values: dict[str, Any], origins: dict[str, Any], sources: Mapping[str, str]) -> None:
        self.values = values
        self.origins = origins
        self.sources = sources
        self.notes: list[str] = []

    def describe(self, path: str) -> str:
        """The option as the user wrote it, with its value and source."""
        bound = schema_of(LaunchConfig).by_path[path]
        value = self.values[path]
        match self.origins[path].name:
            case "FLAG":
                flag = self.sources.get(f"flag:{path}", bound.label)
                switch = flag.lstrip("-").replace("-", "_") in schema_of(LaunchConfig).switches
                return flag if value is True or switch else f"{flag} {value}"
            case "FILE":
                return f"{bound.file_path}: {value} in {self.sources.get('file', 'the file')}"
            case "ENVIRONMENT":
                variables = [v for meaning, v in bound.about.switches.values() if meaning == value and v]
                return f"{(variables or list(bound.variables))[0]} in the environment"
            case _:
                return f"{path}={value!r}"

    def drop_weaker(self, weak: str, strong: str, value: Any, remedy: str) -> None:
        """Set the option of lower precedence to ``value``; raise if both have equal precedence."""
        if self.origins[weak] >= self.origins[strong]:
            raise ConfigError(f"{self.describe(strong)} contradicts {self.describe(weak)}; {remedy}")
        self.notes.append(f"{self.describe(weak)} is overridden by {self.describe(strong)}")
        self.values[weak] = value
        self.origins[weak] = self.origins[strong]


def _cpu_or_accelerators(merged: _MergedOptions) -> None:
    kind = merged.values["distributed_type"] or ""
    accelerators = (kind.startswith("MULTI_") and kind != "MULTI_CPU") or kind == "XLA"
    if not merged.values["use_cpu"] or not accelerators:
        return
    if merged.origins["distributed_type"] > merged.origins["use_cpu"]:
        merged.drop_weaker("use_cpu", "distributed_type", False, "")
    else:
        merged.drop_weaker(
            "distributed_type",
            "use_cpu",
            None,
            "one selects the CPU, the other accelerators: keep one of them",
        )


def _enough_processes(merged: _MergedOptions) -> None:
    kind = merged.values["distributed_type"] or ""
    if not kind.startswith("MULTI_") or kind == "MULTI_CPU":
        return
    ids = [part for part in str(merged.values["gpu_ids"] or "all").split(",") if part.strip()]
    one_machine = merged.values["num_machines"] == 1
    if merged.values["num_processes"] == 1:
        _single(merged, "num_processes", "request at least 2 processes, or remove the other option")
    elif one_machine and len(ids) == 1 and ids[0] != "all":
        _single(merged, "gpu_ids", "name at least 2 ids, or remove the other option")


def _single(merged: _MergedOptions, path: str, remedy: str) -> None:
    if merged.origins[path] > merged.origins["distributed_type"]:
        merged.drop_weaker("distributed_type", path, "NO", remedy)
    else:
        raise ConfigError(
            f"{merged.describe('distributed_type')} contradicts {merged.describe(path)}; {remedy}"
        )


def _parallelism(merged: _MergedOptions) -> None:
    if not merged.values["use_parallelism_config"]:
        return
    kind = merged.values["distributed_type"]
    if kind not in ("FSDP", "DEEPSPEED"):
        raise ConfigError(
            f"{merged.describe('use_parallelism_config')} needs FSDP (or DeepSpeed, for sequence parallelism), but "
            f"the distributed type is {kind or 'not set'}; add --use_fsdp"
        )
    version = merged.values["fsdp.fsdp_version"]
    if kind == "FSDP" and version is None:
        merged.values["fsdp.fsdp_version"] = 2
    elif kind == "FSDP" and version == 1:
        raise ConfigError(
            f"{merged.describe('use_parallelism_config')} needs FSDP version 2, but "
            f"{merged.describe('fsdp.fsdp_version')} was given; use --fsdp_version 2"
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
    twice = [path for path in _DEEPSPEED_OWN if merged.values[path] is not None]
    if twice:
        raise ConfigError(
            f"{', '.join(merged.describe(path) for path in twice)}: set in DeepSpeed's own configuration instead, "
            f"because {merged.describe(own)} is given; keep these options in one place"
        )
