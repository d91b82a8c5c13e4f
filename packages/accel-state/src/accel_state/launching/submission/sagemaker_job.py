"""A training job on Amazon SageMaker, computed and checked without AWS's SDK.

SageMaker passes options to a script as *hyperparameters*, a mapping from names to values, so a script for it has only
options with one value each.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_state.config.codec import encode
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.errors import ConfigError, LaunchError, NotAvailableError
from accel_state.launching.target import Target, check_target
from accel_state.messages import without_secrets
from accel_state.whole_files import read_whole

__all__ = [
    "Credentials",
    "SageMakerJob",
    "describe_job",
    "find_credentials",
    "hyperparameters_of",
    "plan_job",
]

_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]+)?|[-+]?\.[0-9]+([eE][-+]?[0-9]+)?")
_OLDEST_PYTHON = 11
"""Minor version of the oldest Python that these packages run with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials to start the job with; empty: AWS's SDK finds them (variables, its files, the machine's role).

    Attributes:
        region: AWS region.
        profile: a profile of AWS's configuration files.
        key, secret: an access key; never shown.
    """

    region: str
    profile: str | None = None
    key: str | None = dataclasses.field(default=None, repr=False)
    secret: str | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class SageMakerJob:
    """A training job that can be started.

    Attributes:
        source_dir: folder that is uploaded: that of the script.
        entry_point: name of the script in it.
        hyperparameters: the script's options, in order: text, numbers and booleans.
        environment: variables of the job.
        role: name or ARN of the role that the job runs as.
        instance_type: type of the machines.
        instance_count: number of machines.
        distribution: ``NO``, ``DATA_PARALLEL`` or ``MODEL_PARALLEL``.
        image_uri: Docker image; None: Hugging Face's of the three versions.
        transformers_version, pytorch_version, py_version: the versions in that image.
        base_job_name: first part of the job's name.
        inputs: channel to location of its data.
        metrics: name of a metric to the regular expression that finds it in the output.
        additional: more arguments of the estimator, or of the trainer; they take precedence.
        notes: messages for the user.
    """

    source_dir: Path
    entry_point: str
    hyperparameters: Mapping[str, Any]
    environment: Mapping[str, str]
    role: str
    instance_type: str
    instance_count: int
    distribution: str
    image_uri: str | None
    transformers_version: str
    pytorch_version: str
    py_version: str
    base_job_name: str
    inputs: Mapping[str, str]
    metrics: Mapping[str, str]
    additional: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def plan_job(config: SageMakerConfig, target: Target, file: Path | None = None) -> SageMakerJob:
    """The job of a configuration.

    Args:
        config: the resolved configuration.
        target: the script and its arguments.
        file: the configuration file, for messages.

    Raises:
        ConfigError: an option is missing, or an argument of the script or a line of a table cannot be used.
        LaunchError: the script does not exist, or is not Python.
        NotAvailableError: the job needs an engine that these packages do not have.
    """
    _check(config, file)
    script = Path(target.name)
    check_target(target, {})
    if script.suffix != ".py" or not script.is_file():
        raise LaunchError(f"{target.name!r} is not a Python script (.py), and SageMaker runs nothing else")
    assert config.ec2_instance_type is not None, "checked"
    assert config.iam_role_name is not None, "checked"
    return SageMakerJob(
        source_dir=script.parent,
        entry_point=script.name,
        hyperparameters=hyperparameters_of(target.args),
        environment=encode(config),
        role=config.iam_role_name,
        instance_type=config.ec2_instance_type,
        instance_count=config.num_machines,
        distribution=config.distributed_type or "NO",
        image_uri=config.image_uri,
        transformers_version=config.transformers_version,
        pytorch_version=config.pytorch_version,
        py_version=config.py_version,
        base_job_name=config.base_job_name,
        inputs=_table(
            config.sagemaker_inputs_file, "sagemaker_inputs_file", ("channel_name", "data_location")
        ),
        metrics=_table(
            config.sagemaker_metrics_file, "sagemaker_metrics_file", ("metric_name", "metric_regex")
        ),
        additional=dict(config.additional_args or {}),
        notes=_notes(config, script),
    )


def _check(config: SageMakerConfig, file: Path | None) -> None:
    where = f" in {file}" if file is not None else ""
    for name, what in (
        ("ec2_instance_type", "ml.g5.xlarge"),
        ("iam_role_name", "my-sagemaker-role, or its ARN"),
    ):
        if not getattr(config, name):
            raise ConfigError(
                f"{name} is not set{where}, and a SageMaker job needs it; pass --{name}, such as {what}"
            )
    if config.is_active("fp8") and config.fp8.backend == "MSAMP":
        raise NotAvailableError(
            f"fp8 backend MSAMP{where} is no longer maintained and not supported; pass --fp8_backend ao (torchao) or "
            "--fp8_backend te (TransformerEngine)"
        )


def find_credentials(config: SageMakerConfig) -> Credentials:
    """Profile and keys; a profile takes precedence, as in Accelerate.

    Raises:
        ConfigError: one half of a key is missing.
    """
    key, secret = config.aws_access_key_id, config.aws_secret_access_key
    if config.profile is not None:
        return Credentials(config.region, profile=config.profile)
    if (key is None) != (secret is None):
        given, missing = ("id", "secret_access_key") if secret is None else ("secret", "access_key_id")
        raise ConfigError(
            f"the {given} of an AWS key was given without its other half; pass --aws_{missing} too, or name a --profile"
        )
    return Credentials(config.region, key=key, secret=secret)


def hyperparameters_of(arguments: Sequence[str]) -> dict[str, Any]:
    """The options of a script as hyperparameters.

    Dashes inside a name stay. ``True`` and ``False`` become booleans, and what reads as a number becomes one, as in
    Accelerate; but not numbers that would be written differently (``007``, ``nan``).

    Raises:
        ConfigError: an argument is not an option with exactly one value; the message names it.
    """
    found: dict[str, Any] = {}
    words = list(arguments)
    at = 0
    while at < len(words):
        flag, equals, text = words[at].partition("=")
        if not _is_flag(flag):
            raise ConfigError(
                f"the script's argument {words[at]!r} does not follow an option; SageMaker passes options with one "
                "value each, such as --model name. Give it a name, and quote a value of several words"
            )
        at += 1
        if not equals:
            if at == len(words) or _is_flag(words[at]):
                raise ConfigError(
                    f"the script's option {flag} has no value, and SageMaker passes options with one value each; let "
                    f"the script accept {flag} True (store_true does not), and pass that"
                )
            text = words[at]
            at += 1
        name = flag.lstrip("-")
        if name in found:
            raise ConfigError(f"the script's option {flag} is given twice; SageMaker passes each option once")
        found[name] = _value(text)
    return found


def _is_flag(word: str) -> bool:
    return len(word.lstrip("-")) > 0 and word.startswith("-") and not _NUMBER.fullmatch(word)


def _value(text: str) -> str | int | float | bool:
    if text in ("True", "False"):
        return text == "True"
    if not _NUMBER.fullmatch(text):
        return text
    number = float(text)
    if number in (float("inf"), float("-inf")):
        return text
    return int(text) if re.fullmatch(r"[-+]?[0-9]+", text) else number


def _table(name: str | None, option: str, columns: tuple[str, str]) -> dict[str, str]:
    """The two columns of a file with tabs between them; the first line is a heading."""
    if name is None:
        return {}
    try:
        lines = read_whole(Path(name).expanduser()).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{option} {name} cannot be read: {error}; pass the path of another file"
        ) from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) != 2 or not all(cells) or cells[0] in found:
            why = "occurs twice" if cells[0] in found else f"has {len(cells)} columns"
            raise ConfigError(
                f"{option} {name}, line {number}: {line!r} {why}; expected {columns[0]}, a tab, {columns[1]}, and one "
                f"line for each {columns[0]}, after a heading"
            )
        found[cells[0]] = cells[1]
    return found


def _notes(config: SageMakerConfig, script: Path) -> tuple[str, ...]:
    notes = []
    old = re.fullmatch(r"py3([0-9]+)", config.py_version)
    if config.image_uri is None and old is not None and int(old.group(1)) < _OLDEST_PYTHON:
        notes.append(
            f"the image has Python 3.{old.group(1)} (py_version {config.py_version}), and accel needs "
            f"3.{_OLDEST_PYTHON}; set transformers_version, pytorch_version and py_version of a newer image, or "
            "image_uri"
        )
    requirements = script.parent / "requirements.txt"
    if config.image_uri is None and not requirements.is_file():
        notes.append(
            f"{requirements} does not exist; the image installs the packages in it, and does not include accel: "
            "create the file with a line accel-train"
        )
    if config.distributed_type == "NO" and config.num_machines > 1:
        notes.append(f"{config.num_machines} machines start one process each, which form one world")
    return tuple(notes)


def describe_job(job: SageMakerJob, credentials: Credentials) -> str:
    """The job as JSON, without secrets."""
    data = dataclasses.asdict(job) | {"source_dir": str(job.source_dir), "region": credentials.region}
    if credentials.profile is not None:
        data["profile"] = credentials.profile
    if credentials.key is not None:
        data["aws_access_key_id"] = data["aws_secret_access_key"] = "***"
    del data["notes"]
    return json.dumps(without_secrets(data), indent=2, default=str)
