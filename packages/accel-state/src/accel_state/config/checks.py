"""Options that exclude or need each other, checked when a configuration has been merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.config.launch import LaunchConfig
from accel_state.config.schema import schema_of
from accel_state.errors import ConfigError

__all__ = ["check"]

# What DeepSpeed's own configuration file says itself.
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
    """Check merged values; where two contradict each other, the one of weaker origin gives way.

    Args:
        values: path of every option to its merged value; changed in place.
        origins: path to the origin, comparable by strength.
        sources: names of the file and of typed flags, for messages.

    Returns:
        Notes about values that gave way.

    Raises:
        ConfigError: two values of the same strength contradict each other, or one needs another that is
            not there.
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
    """The merged values, and how messages speak of them."""

    def __init__(self, values: dict[str, Any], origins: dict[str, Any], sources: Mapping[str, str]) -> None:
        self.values = values
        self.origins = origins
        self.sources = sources
        self.notes: list[str] = []

    def said(self, path: str) -> str:
        """The option as the user wrote it, with its value and where it stood."""
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

    def give_way(self, weak: str, strong: str, value: Any, remedy: str) -> None:
        """Set the weaker of two contradicting options to ``value``; raise if neither is the stronger."""
        if self.origins[weak] >= self.origins[strong]:
            raise ConfigError(f"{self.said(strong)} contradicts {self.said(weak)}; {remedy}")
        self.notes.append(f"{self.said(weak)} gives way to {self.said(strong)}")
        self.values[weak] = value
        self.origins[weak] = self.origins[strong]


def _cpu_or_accelerators(merged: _MergedOptions) -> None:
    kind = merged.values["distributed_type"] or ""
    accelerators = (kind.startswith("MULTI_") and kind != "MULTI_CPU") or kind == "XLA"
    if not merged.values["use_cpu"] or not accelerators:
        return
    if merged.origins["distributed_type"] > merged.origins["use_cpu"]:
        merged.give_way("use_cpu", "distributed_type", False, "")
    else:
        merged.give_way(
            "distributed_type", "use_cpu", None, "one says CPU, the other accelerators: give one of them"
        )


def _enough_processes(merged: _MergedOptions) -> None:
    kind = merged.values["distributed_type"] or ""
    if not kind.startswith("MULTI_") or kind == "MULTI_CPU":
        return
    ids = [part for part in str(merged.values["gpu_ids"] or "all").split(",") if part.strip()]
    one_machine = merged.values["num_machines"] == 1
    if merged.values["num_processes"] == 1:
        _single(merged, "num_processes", "ask for at least 2 processes, or leave the other away")
    elif one_machine and len(ids) == 1 and ids[0] != "all":
        _single(merged, "gpu_ids", "name at least 2 ids, or leave the other away")


def _single(merged: _MergedOptions, path: str, remedy: str) -> None:
    if merged.origins[path] > merged.origins["distributed_type"]:
        merged.give_way("distributed_type", path, "NO", remedy)
    else:
        raise ConfigError(f"{merged.said('distributed_type')} contradicts {merged.said(path)}; {remedy}")


def _parallelism(merged: _MergedOptions) -> None:
    if not merged.values["use_parallelism_config"]:
        return
    kind = merged.values["distributed_type"]
    if kind not in ("FSDP", "DEEPSPEED"):
        raise ConfigError(
            f"{merged.said('use_parallelism_config')} needs FSDP (or DeepSpeed, for sequence parallelism), but "
            f"the distributed type is {kind or 'not set'}; add --use_fsdp"
        )
    version = merged.values["fsdp.fsdp_version"]
    if kind == "FSDP" and version is None:
        merged.values["fsdp.fsdp_version"] = 2
    elif kind == "FSDP" and version == 1:
        raise ConfigError(
            f"{merged.said('use_parallelism_config')} needs FSDP version 2, but "
            f"{merged.said('fsdp.fsdp_version')} was given; use --fsdp_version 2"
        )


def _module_or_program(merged: _MergedOptions) -> None:
    if merged.values["module"] and merged.values["no_python"]:
        raise ConfigError(
            f"{merged.said('module')} and {merged.said('no_python')} exclude each other: "
            "Python runs modules; give one of them"
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
            f"{merged.said(loading)} loads weights on one process only, but {merged.said(sync)} keeps them from "
            "the others; switch the first off, or the second on"
        )


def _deepspeed_file(merged: _MergedOptions) -> None:
    own = "deepspeed.hf_ds_config"
    if merged.values["distributed_type"] != "DEEPSPEED" or merged.values[own] is None:
        return
    twice = [path for path in _DEEPSPEED_OWN if merged.values[path] is not None]
    if twice:
        raise ConfigError(
            f"{', '.join(merged.said(path) for path in twice)}: set in DeepSpeed's own configuration instead, "
            f"because {merged.said(own)} is given; keep these options in one place"
        )
