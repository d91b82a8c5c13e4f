"""Turns answers into a configuration, its text, and the commands that start the run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_cli.wizard.answers import Answers, Situation
from accel_cli.wizard.place_questions import CPU, SAGEMAKER, TPU
from accel_cli.wizard.run_questions import EXTRAS
from accel_cli.wizard.table import QUESTIONS
from accel_state.config.files import read_layer, save
from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import resolve
from accel_state.config.option import Section
from accel_state.config.option_types import Bool
from accel_state.config.roots import root_for
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.config.schema import build, flatten, schema_of
from accel_state.errors import NotAvailableError
from accel_state.launching.engines import check_available

__all__ = [
    "Config",
    "configuration",
    "existing_values",
    "kept_values",
    "next_steps",
    "offers",
    "text_of",
    "warnings_about",
]

Config = LaunchConfig | SageMakerConfig

_DERIVED = frozenset({"use_cpu", "fsdp.fsdp_version", "num_machines", "enable_cpu_affinity", "debug"})
"""Options that the answers decide without a separate question."""

_VERSION_1 = frozenset(
    f"fsdp.{name}"
    for name in (
        "sharding_strategy",
        "backward_prefetch",
        "forward_prefetch",
        "use_orig_params",
        "sync_module_states",
    )
)
"""Options of FSDP version 1; the questions write version 2."""

_CONTEXT: Mapping[str, Mapping[str, Any]] = {
    "use_parallelism_config": {"distributed_type": "FSDP", "fsdp.fsdp_version": 2},
    "deepspeed.deepspeed_multinode_launcher": {"distributed_type": "DEEPSPEED"},
    "tpu.tpu_use_cluster": {"distributed_type": "XLA"},
}
"""Options that must be set for another option to be validated."""


def offers(path: str, value: Any) -> bool:
    """Whether this version supports a value of an option, as the launcher decides it.

    Options that a job on SageMaker shares with a local run are offered alike, because its ranks refuse the same ones.
    """
    if path.startswith("sagemaker.") and path != "sagemaker.mixed_precision":
        return True
    path = path.removeprefix("sagemaker.")
    resolved = resolve(environ={}, code={**_CONTEXT.get(path, {}), path: value}, use_default_file=False)
    try:
        check_available(resolved)
    except NotAvailableError:
        return False
    return True


def existing_values(path: Path) -> dict[str, Any]:
    """The values of a configuration file, by the name of their question.

    Raises:
        ConfigError: the file cannot be read.
    """
    layer = read_layer(path)
    prefix = "sagemaker." if layer.root is SageMakerConfig else ""
    return {f"{prefix}{name}": value for name, value in layer.values.items()}


def configuration(answers: Answers) -> Config:
    """The configuration that the answers describe, with the values that ``kept_values`` keeps."""
    local = answers.get("place") != SAGEMAKER
    rows = {row.name: row for row in QUESTIONS}
    values = {
        rows[name].path: value
        for name, value in answers.given.items()
        if rows[name].own is None and issubclass(rows[name].root, LaunchConfig) is local
    }
    if local:
        values |= _derived(answers)
    root: type[Section] = root_for(values) if local else SageMakerConfig
    config: Config = build(root, values)
    kept = {name: answers.situation.existing[name] for name in kept_values(answers.situation, config)}
    final: Config = build(
        root, {**{name.removeprefix("sagemaker."): value for name, value in kept.items()}, **values}
    )
    return final


def kept_values(situation: Situation, config: Config) -> list[str]:
    """Names of existing values that no question of any branch asks for, and that the new run uses."""
    ours = isinstance(config, SageMakerConfig)
    asked = {row.name for row in QUESTIONS} | _DERIVED | _VERSION_1
    found = []
    for name in situation.existing:
        if name in asked or name.startswith("sagemaker.") is not ours:
            continue
        bound = schema_of(type(config)).by_path[name.removeprefix("sagemaker.")]
        several = not isinstance(config, LaunchConfig) or config.num_machines > 1
        if (name != "rdzv_conf" or several) and (not bound.section or config.is_active(bound.section)):
            found.append(name)
    return found


def text_of(config: Config, path: Path) -> str:
    """The text of the file; it is written, read and resolved in a temporary folder first.

    Raises:
        ConfigError: values contradict each other.
    """
    with tempfile.TemporaryDirectory(prefix="accel-config-") as folder:
        trial = save(config, Path(folder) / path.name)
        resolve(trial, environ={})
        return trial.read_text(encoding="utf-8")


def warnings_about(answers: Answers, config: Config) -> list[str]:
    """Warnings before the file is written, one sentence each."""
    found = []
    for row in QUESTIONS:
        value = answers.get(row.name)
        if row.file and value is not None and not Path(value).expanduser().exists():
            found.append(f"{value} does not exist on this machine")
    kept = kept_values(answers.situation, config)
    if kept:
        found.append(f"kept from the existing file, without a question: {', '.join(kept)}")
    if config.mixed_precision == "fp16" and config.use_cpu:
        found.append(
            "fp16 is meant for accelerators; on CPUs bf16 is faster and needs no scaling of the loss"
        )
    if isinstance(config, LaunchConfig):
        try:
            check_available(resolve(environ={}, code=_set(config), use_default_file=False))
        except NotAvailableError as error:
            found.append(f"accel launch cannot run this yet: {error}")
    return found


def next_steps(config: Config, path: Path, default: Path) -> list[str]:
    """Next steps once the file is written, with commands to copy.

    Args:
        config: the configuration that was written.
        path: the file that was written.
        default: the file that ``accel launch`` reads by itself.
    """
    import shlex

    flag = "" if path == default else f"--config_file {shlex.quote(str(path))} "
    start = f"accel launch {flag}"
    if isinstance(config, SageMakerConfig):
        return ["To start the job:", f"  {start}train.py"]
    if config.use_tpu and (config.tpu.commands or config.tpu.command_file):
        setup = ["To set up the machines of the pod:", f"  accel tpu-config {flag}".rstrip()]
        return [*setup, "To start a script:", f"  {start}train.py"]
    if config.num_machines == 1:
        return ["To start a script:", f"  {start}train.py"]
    launcher = config.deepspeed.deepspeed_multinode_launcher if config.use_deepspeed else None
    if config.mpirun.hostfile or launcher not in (None, "standard", "nossh"):
        return ["To start a script, on this machine only:", f"  {start}train.py"]
    here, count = config.machine_rank, config.num_machines
    others = [rank for rank in range(count) if rank != here]
    found = [
        f"To start a script, on this machine, {here + 1} of {count}:",
        f"  {start}train.py",
        "On the others, with a copy of the file:",
    ]
    found += [f"  {start}--machine_rank {rank} train.py" for rank in others[:2]]
    return [*found, f"  ... up to --machine_rank {others[-1]}"] if len(others) > 2 else found


def _set(config: LaunchConfig) -> dict[str, Any]:
    """The values that differ from the defaults."""
    by_path = schema_of(type(config)).by_path
    return {path: value for path, value in flatten(config).items() if value != by_path[path].default}


def _derived(answers: Answers) -> dict[str, Any]:
    extras = answers.get("extras", ())
    by_path = schema_of(LaunchConfig).by_path
    values: dict[str, Any] = {
        path: True for path in EXTRAS if path in extras and isinstance(by_path[path].option_type, Bool)
    }
    values["use_cpu"] = answers.get("devices") == CPU
    machines = answers.get("num_machines", 1)
    values["num_machines"] = machines
    values["num_processes"] = machines * answers.get("num_processes", 1)
    if answers.get("place") == TPU:
        values["distributed_type"] = "XLA"
    if answers.get("distributed_type") == "FSDP":
        values["fsdp.fsdp_version"] = 2
    if answers.get("use_parallelism_config"):
        values["use_parallelism_config"] = True
    return values
