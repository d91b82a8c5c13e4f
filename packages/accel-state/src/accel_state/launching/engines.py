"""Refuse, before a start, options that belong to no selected engine, or that the selected engine does not support."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel_state.config.merge import Origin, Resolved
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.config.schema import schema_of, value_of
from accel_state.config.strategies import Package
from accel_state.errors import ConfigError, NotAvailableError

if TYPE_CHECKING:
    from accel_state.config.launch import LaunchConfig

__all__ = [
    "check_available",
    "check_installed",
    "unused_options",
]

_SELECTED_BY = {
    "tpu": "--tpu",
    "fp8": "--mixed_precision fp8",
    "parallelism": "--use_parallelism_config",
}
"""Flags that select the engine of a section, where that is not ``--use_`` and the section's name."""

_WITHOUT_FP8 = {"DEEPSPEED": "DeepSpeed", "XLA": "TPUs"}
"""Distributed types whose engine does not support fp8, with their names in messages."""

_LIBRARIES = {"opt_level": "MSAMP", "enable_fsdp_float8_all_gather": "AO", "pad_inner_dim": "AO"}
"""Options of fp8 that are not TransformerEngine's, and the library that they are for."""

_ENGINES = {
    "DEEPSPEED": Package(module="deepspeed", name="DeepSpeed", install="pip install deepspeed"),
    "XLA": Package(
        module="torch_xla",
        name="torch_xla",
        install="pip install 'torch_xla[tpu]>=2.9', of the same version as torch",
    ),
}
"""Distributed types that need a package."""

_ENGINE_SECTIONS = frozenset({"deepspeed", "fp8", "fsdp", "parallelism", "tpu"})
"""Sections that a run uses only if their engine is selected, beside those of installed strategies."""


def check_available(resolved: Resolved) -> LaunchConfig:
    """Check that the selected engine supports every option that is set; returns the local configuration.

    Raises:
        NotAvailableError: an engine does not support an option; the message names the option and the alternative.
        ConfigError: an option belongs to another engine.
    """
    config = resolved.config
    if isinstance(config, SageMakerConfig):
        raise NotAvailableError(
            f"{resolved.file or 'the configuration'} describes a SageMaker job, which only accel launch "
            "starts; name another --config_file"
        )
    _check_tpu(resolved, config)
    for check in config.strategy.checks if config.strategy is not None else ():
        check(resolved)
    _check_fp8(resolved, config)
    return config


def check_installed(resolved: Resolved) -> None:
    """Check that the packages which compute this run are installed for this interpreter.

    Raises:
        NotAvailableError: one is not; the message has the command that installs it.
    """
    config = resolved.local()
    engine = _ENGINES.get(config.distributed_type or "")
    packages = config.strategy.packages if config.strategy is not None else (engine,) if engine else ()
    for package in packages:
        if not _is_found(package.module):
            raise NotAvailableError(
                f"{resolved.describe('distributed_type')} needs {package.name}, which is not installed; "
                f"{package.install}"
            )
    for missing in _missing_for_fp8(resolved, config):
        raise NotAvailableError(missing)


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around a submodule
        return False


def _check_tpu(resolved: Resolved, config: LaunchConfig) -> None:
    asked = [
        path for path in ("tpu.tpu_use_cluster", "tpu.downcast_bf16") if resolved.origin(path) >= Origin.FLAG
    ]
    for path in asked:
        bound = schema_of(type(config)).by_path[path]
        if value_of(config, bound) and not config.use_tpu:
            raise ConfigError(
                f"{resolved.describe(path)} is for TPUs, and the run does not use them; add --tpu, or "
                f"{resolved.remedy(path)}"
            )
    if config.use_tpu and config.tpu.downcast_bf16 and config.mixed_precision != "bf16":
        raise ConfigError(
            f"downcast_bf16 needs mixed_precision bf16, but it is {config.mixed_precision}; pass "
            "--mixed_precision bf16, or --no-downcast_bf16"
        )


def _check_fp8(resolved: Resolved, config: LaunchConfig) -> None:
    if config.fp8.backend == "MSAMP" and (
        config.is_active("fp8") or resolved.origin("fp8.backend") >= Origin.FLAG
    ):
        raise NotAvailableError(
            f"{resolved.describe('fp8.backend')} asks for MS-AMP, which is no longer maintained and not supported; "
            "pass --fp8_backend ao (torchao) or --fp8_backend te (TransformerEngine)"
        )
    strategy = config.strategy
    engine = _WITHOUT_FP8.get(config.distributed_type or "")
    if strategy is not None and not strategy.computes_fp8:
        engine = strategy.title
    if config.is_active("fp8") and engine is not None:
        raise NotAvailableError(
            f"{resolved.describe('mixed_precision')} does not run with {engine} "
            f"({resolved.describe('distributed_type')}); pass --mixed_precision bf16, or train with --use_fsdp or with "
            "one replica of the model per process"
        )


def unused_options(resolved: Resolved) -> list[str]:
    """A sentence for each section, and each flag, that is set although nothing selects its engine.

    And one about fp8 if no library for it is installed here.
    """
    config = resolved.local()
    own = {each.section_name: each.flag for each in config.strategies}
    found = []
    for path, section in _changed(resolved, config):
        if config.is_active(section) or (section == "tpu" and config.use_tpu):
            continue
        if resolved.origin(path) == Origin.FILE:
            found.append(f"{section} in {resolved.file} is not used by this run")
        elif resolved.origin(path) == Origin.FLAG:
            flag = resolved.sources.of(path).name
            adding = own.get(section) or _SELECTED_BY.get(section, f"--use_{section}")
            by_script = "chooses fp8" if section == "fp8" else "passes the plugin"
            when = "with TPUs" if section == "tpu" else f"if the script {by_script} itself"
            found.append(f"{flag} is used only {when}; to select it, add {adding}")
    found += [*_unused_of_backend(resolved, config)]
    return list(dict.fromkeys(found))


def _unused_of_backend(resolved: Resolved, config: LaunchConfig) -> Iterator[str]:
    """A sentence for each fp8 option of a library that is not the one in use."""
    backend = config.fp8.backend
    if not config.is_active("fp8"):
        return
    yield from _missing_for_fp8(resolved, config)
    if backend is None:
        return
    for path, section in _changed(resolved, config):
        library = _LIBRARIES.get(path.removeprefix("fp8."), "TE")
        if section == "fp8" and path != "fp8.backend" and library != backend:
            bound = schema_of(type(config)).by_path[path]
            if value_of(config, bound) != bound.about.launch_default:
                yield f"{resolved.describe(path)} is an option of {library}, but fp8 uses {backend}; it is not used"


def _missing_for_fp8(resolved: Resolved, config: LaunchConfig) -> Iterator[str]:
    """A sentence if no library for fp8 is installed."""
    if not config.is_active("fp8"):
        return
    # Here, because a machine that only starts jobs of SageMaker has no torch, whose version is read there.
    from accel_state.host.available import is_torchao_available, is_transformer_engine_available

    backend = config.fp8.backend
    installed = {"AO": is_torchao_available, "TE": is_transformer_engine_available}
    if not any(check() for name, check in installed.items() if backend in (None, name)):
        needed = {"AO": "torchao", "TE": "transformer-engine"}.get(
            backend or "", "torchao or transformer-engine"
        )
        yield (
            f"{resolved.describe('mixed_precision')} needs {needed}, which is not installed here; pip install "
            f"{'transformer-engine[pytorch]' if backend == 'TE' else 'torchao'}"
        )


def _changed(resolved: Resolved, config: LaunchConfig) -> Iterator[tuple[str, str]]:
    """Options of engines' sections that have another value than their default."""
    sections = _ENGINE_SECTIONS | {each.section_name for each in config.strategies}
    for bound in schema_of(type(config)).options:
        given = bound.section in sections and resolved.origin(bound.path) != Origin.DEFAULT
        if given and value_of(config, bound) != bound.default:
            yield bound.path, bound.section
