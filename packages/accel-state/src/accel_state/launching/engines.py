"""Options whose engine is not available in this version; they raise before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel_state.config.merge import Origin, Resolved
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.config.schema import schema_of, value_of
from accel_state.errors import NotAvailableError

if TYPE_CHECKING:
    from accel_state.config.launch import LaunchConfig

__all__ = ["MISSING_SECTIONS", "MISSING_TYPES", "check_available", "unused_sections"]

MISSING_TYPES = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "MEGATRON_LM": "Megatron-LM", "XLA": "TPU"}
"""Distributed types without an engine, and their common names."""

MISSING_SECTIONS = {
    "fsdp": "FSDP",
    "deepspeed": "DeepSpeed",
    "megatron_lm": "Megatron-LM",
    "parallelism": "tensor, context and sequence parallelism",
    "fp8": "fp8",
    "tpu": "TPU",
}
"""Sections of the schema without an engine."""


def check_available(resolved: Resolved) -> LaunchConfig:
    """The configuration, if every requested feature is available in this version.

    Raises:
        NotAvailableError: it needs an engine that is not available; the message names the option.
    """
    config = resolved.config
    if isinstance(config, SageMakerConfig):
        raise NotAvailableError(
            f"{resolved.file or 'the configuration'} describes a SageMaker job; SageMaker jobs are not "
            "available in this version. Launch local processes, or pass another --config_file"
        )
    kind = config.distributed_type or ""
    if kind in MISSING_TYPES:
        raise _missing(resolved, "distributed_type", MISSING_TYPES[kind])
    if config.use_parallelism_config:
        raise _missing(resolved, "use_parallelism_config", MISSING_SECTIONS["parallelism"])
    if config.mixed_precision == "fp8":
        raise _missing(resolved, "mixed_precision", "fp8")
    for path, section in _changed(resolved, config):
        if resolved.origin(path) >= Origin.FLAG:
            raise _missing(resolved, path, MISSING_SECTIONS[section])
    return config


def unused_sections(resolved: Resolved) -> tuple[str, ...]:
    """Names of sections that a file sets although the run does not use them."""
    config = resolved.local()
    found = (section for path, section in _changed(resolved, config) if resolved.origin(path) == Origin.FILE)
    return tuple(dict.fromkeys(found))


def _changed(resolved: Resolved, config: LaunchConfig) -> Iterator[tuple[str, str]]:
    for bound in schema_of(type(config)).options:
        given = bound.section in MISSING_SECTIONS and resolved.origin(bound.path) != Origin.DEFAULT
        if given and value_of(config, bound) != bound.default:
            yield bound.path, bound.section


def _missing(resolved: Resolved, path: str, engine: str) -> NotAvailableError:
    config = resolved.local()
    bound = schema_of(type(config)).by_path[path]
    value = value_of(config, bound)
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
    shown_as = bound.label if value is True else f"{bound.label} {shown}"
    for switch, (meaning, _) in bound.about.switches.items():
        shown_as = f"{switch} ({path} {shown})" if meaning == value else shown_as
    match resolved.origin(path):
        case Origin.FILE:
            shown_as = f"{bound.file_path}: {shown} in {resolved.file}"
        case Origin.ENVIRONMENT:
            shown_as = f"{path} {shown}, from the environment,"
        case _:
            pass
    return NotAvailableError(
        f"{shown_as} needs {engine}, which is not available in this version; remove it to train with one replica of "
        "the model per process"
    )
