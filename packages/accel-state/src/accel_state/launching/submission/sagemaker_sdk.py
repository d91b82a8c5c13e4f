"""Starting a SageMaker job with AWS's SDK: ``ModelTrainer`` of SDK 3, Hugging Face's estimator of SDK 2.

Imported only for a SageMaker launch. The names of the two SDKs are in no other module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any

from accel_state.environment import patch_environment, snapshot
from accel_state.errors import ConfigError, LaunchError, MissingDependencyError
from accel_state.launching.submission.sagemaker_job import Credentials, SageMakerJob

__all__ = ["installed_sdk", "start_job"]

_MODEL_PARALLEL = "model_parallel"
"""The key of ``additional_args`` with the parameters of SageMaker's library for model parallelism."""
_SMDDP = ("ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4d.24xlarge", "ml.p4de.24xlarge", "ml.p4dn.24xlarge")
"""Types of machines for which SageMaker has its own library for data parallelism; SDK 2 starts it there."""

_TRAINER: Mapping[str, tuple[str, str]] = {
    "volume_size": ("compute", "volume_size_in_gb"),
    "keep_alive_period_in_seconds": ("compute", "keep_alive_period_in_seconds"),
    "use_spot_instances": ("compute", "enable_managed_spot_training"),
    "max_run": ("stopping_condition", "max_runtime_in_seconds"),
    "max_wait": ("stopping_condition", "max_wait_time_in_seconds"),
    "subnets": ("networking", "subnets"),
    "security_group_ids": ("networking", "security_group_ids"),
    "enable_network_isolation": ("networking", "enable_network_isolation"),
    "encrypt_inter_container_traffic": ("networking", "enable_inter_container_traffic_encryption"),
    "output_path": ("output_data_config", "s3_output_path"),
    "output_kms_key": ("output_data_config", "kms_key_id"),
    "checkpoint_s3_uri": ("checkpoint_config", "s3_uri"),
    "checkpoint_local_path": ("checkpoint_config", "local_path"),
    "requirements": ("source_code", "requirements"),
    "process_count_per_node": ("distributed", "process_count_per_node"),
}
"""Arguments of SDK 2's estimator, and where SDK 3 has them: object and field."""
_ALSO = ("hyperparameters", "environment", "tags", "wait", _MODEL_PARALLEL)


def installed_sdk() -> int:
    """The major version of AWS's SDK for SageMaker.

    Raises:
        MissingDependencyError: it is not installed; the message has the command.
    """
    try:
        version = importlib.metadata.version("sagemaker")
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependencyError(
            "AWS's SDK for SageMaker is not installed; install it: pip install 'sagemaker>=3' (or 'sagemaker<3', whose "
            "estimator Accelerate uses)"
        ) from None
    return 2 if int(version.split(".")[0]) < 3 else 3


def start_job(job: SageMakerJob, credentials: Credentials) -> str:
    """Start the job, and wait until it has ended while its output is shown.

    Returns:
        The location of the trained model; or, if the job is not waited for (``wait: false``), the job's name.

    Raises:
        MissingDependencyError: there is no SDK.
        ConfigError: the profile does not exist, or an additional argument is unknown.
        LaunchError: AWS refuses the job, or it failed; the message is AWS's.
    """
    start = {2: _with_estimator, 3: _with_trainer}[installed_sdk()]
    botocore: Any = importlib.import_module("botocore.exceptions")
    try:
        boto = _boto_session(credentials)
        with patch_environment(**_variables(credentials, boto)):
            return start(job, boto)
    except botocore.NoCredentialsError as error:
        raise LaunchError(
            "AWS credentials are missing, so the job cannot be started. Name a --profile, pass "
            "--aws_access_key_id and --aws_secret_access_key, or run aws configure"
        ) from error
    except ValueError as error:  # the SDK's checks of versions, machines and distributions
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"AWS's SDK for SageMaker refuses the job: {error}") from error
    except (botocore.ClientError, botocore.BotoCoreError) as error:
        raise LaunchError(f"AWS refuses the job: {error}") from error


def _boto_session(credentials: Credentials) -> Any:
    boto3: Any = importlib.import_module("boto3")
    botocore: Any = importlib.import_module("botocore.exceptions")
    try:
        return boto3.Session(
            profile_name=credentials.profile,
            region_name=credentials.region,
            aws_access_key_id=credentials.key,
            aws_secret_access_key=credentials.secret,
        )
    except botocore.ProfileNotFound as error:
        raise ConfigError(
            f"the AWS profile {credentials.profile} does not exist; aws configure list-profiles shows those that do"
        ) from error


def _variables(credentials: Credentials, boto: Any) -> dict[str, str]:
    """Set AWS's variables during the call: SDK 3 creates its own sessions beside the one that it is given."""
    found = {"AWS_DEFAULT_REGION": credentials.region}
    if credentials.key is not None and credentials.secret is not None:
        found |= {"AWS_ACCESS_KEY_ID": credentials.key, "AWS_SECRET_ACCESS_KEY": credentials.secret}
    elif credentials.profile is not None:
        found["AWS_PROFILE"] = credentials.profile
        if "AWS_ACCESS_KEY_ID" in snapshot():  # which would take precedence over the profile
            frozen = boto.get_credentials().get_frozen_credentials()
            found |= {"AWS_ACCESS_KEY_ID": frozen.access_key, "AWS_SECRET_ACCESS_KEY": frozen.secret_key}
            found["AWS_SESSION_TOKEN"] = frozen.token or ""
    return found


def _role_arn(role: str, boto: Any) -> str:
    """The ARN of a role. SDK 3 takes nothing else, and SDK 2 would look for it after it has uploaded the script."""
    if role.startswith("arn:"):
        return role
    arn: str = boto.client("iam").get_role(RoleName=role)["Role"]["Arn"]
    return arn


# SDK 2


def _with_estimator(job: SageMakerJob, boto: Any) -> str:
    sagemaker: Any = importlib.import_module("sagemaker")
    huggingface: Any = importlib.import_module("sagemaker.huggingface")
    more = dict(job.additional)
    parallel = more.pop(_MODEL_PARALLEL, None)
    wait = bool(more.pop("wait", True))
    # The estimator passes these on with its older launcher only; the library reads this hyperparameter.
    divided = {"mp_parameters": _parallel(parallel)} if job.distribution == "MODEL_PARALLEL" else {}
    arguments: dict[str, Any] = {
        "sagemaker_session": sagemaker.Session(boto_session=boto),
        "image_uri": job.image_uri,
        "entry_point": job.entry_point,
        "source_dir": str(job.source_dir),
        "role": _role_arn(job.role, boto),
        "transformers_version": job.transformers_version,
        "pytorch_version": job.pytorch_version,
        "py_version": job.py_version,
        "base_job_name": job.base_job_name,
        "instance_count": job.instance_count,
        "instance_type": job.instance_type,
        "debugger_hook_config": False,
        "distribution": _distribution(job),
        "hyperparameters": {**job.hyperparameters, **divided},
        "environment": dict(job.environment),
        "metric_definitions": [{"Name": name, "Regex": regex} for name, regex in job.metrics.items()] or None,
    }
    estimator = huggingface.HuggingFace(**_merged(arguments, more))
    estimator.training_image_uri()  # raises if there is none; fit() would find out after it has uploaded the script
    estimator.fit(inputs=dict(job.inputs) or None, wait=wait)
    return str(estimator.model_data if wait else estimator.latest_training_job.name)


def _distribution(job: SageMakerJob) -> dict[str, Any] | None:
    if job.distribution == "NO":
        return None
    if job.distribution == "DATA_PARALLEL" and job.instance_type in _SMDDP:
        return {"smdistributed": {"dataparallel": {"enabled": True}}}
    return {"torch_distributed": {"enabled": True}}


def _parallel(parameters: Any) -> dict[str, Any]:
    if not isinstance(parameters, Mapping) or not parameters:
        raise ConfigError(
            "distributed_type MODEL_PARALLEL needs the parameters of SageMaker's library: additional_args: "
            f"{{{_MODEL_PARALLEL}: {{tensor_parallel_degree: 4}}}} in the configuration file"
        )
    return dict(parameters)


def _merged(arguments: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``more`` over ``arguments``; mappings are merged."""
    found = dict(arguments)
    for name, value in more.items():
        before = found.get(name)
        found[name] = (
            _merged(before, value) if isinstance(before, dict) and isinstance(value, Mapping) else value
        )
    return found


# SDK 3


def _with_trainer(job: SageMakerJob, boto: Any) -> str:
    if short := [name for name in job.hyperparameters if len(name) == 1]:
        raise ConfigError(
            f"SageMaker's SDK 3 passes the script's option -{short[0]} as --{short[0]}; write its long form, or "
            "install 'sagemaker<3'"
        )
    unknown = [name for name in job.additional if name not in _TRAINER and name not in _ALSO]
    if unknown:
        known = ", ".join([*_TRAINER, *_ALSO])
        raise ConfigError(
            f"additional_args.{unknown[0]} is not known for SageMaker's SDK 3; known: {known}. Others need "
            "'sagemaker<3'"
        )
    configs: Any = importlib.import_module("sagemaker.core.training.configs")
    train: Any = importlib.import_module("sagemaker.train.model_trainer")
    session: Any = importlib.import_module("sagemaker.core.helper.session_helper").Session(boto_session=boto)
    parts = _parts(job)
    trainer = train.ModelTrainer(
        sagemaker_session=session,
        role=_role_arn(job.role, boto),
        base_job_name=job.base_job_name,
        training_image=job.image_uri or _image(job, boto.region_name),
        source_code=configs.SourceCode(
            source_dir=str(job.source_dir.resolve()), entry_script=job.entry_point, **parts["source_code"]
        ),
        distributed=_driver(job, parts["distributed"]),
        compute=configs.Compute(
            instance_type=job.instance_type, instance_count=job.instance_count, **parts["compute"]
        ),
        networking=configs.Networking(**parts["networking"]) if parts["networking"] else None,
        stopping_condition=_made(configs, "StoppingCondition", parts["stopping_condition"]),
        output_data_config=_made(configs, "OutputDataConfig", parts["output_data_config"]),
        checkpoint_config=_made(configs, "CheckpointConfig", parts["checkpoint_config"]),
        environment={**job.environment, **job.additional.get("environment", {})},
        hyperparameters=_as_typed({**job.hyperparameters, **job.additional.get("hyperparameters", {})}),
        tags=job.additional.get("tags"),
    )
    if job.metrics:
        trainer.with_metric_definitions(
            [configs.MetricDefinition(name=name, regex=regex) for name, regex in job.metrics.items()]
        )
    data = [configs.InputData(channel_name=name, data_source=place) for name, place in job.inputs.items()]
    wait = bool(job.additional.get("wait", True))
    trainer.train(input_data_config=data or None, wait=wait, logs=wait)
    started: Any = trainer._latest_training_job
    return str(started.model_artifacts.s3_model_artifacts if wait else started.training_job_name)


def _parts(job: SageMakerJob) -> dict[str, dict[str, Any]]:
    """The fields of each object of the trainer that ``additional_args`` sets."""
    found: dict[str, dict[str, Any]] = {owner: {} for owner, _ in _TRAINER.values()}
    for name, value in job.additional.items():
        if name in _TRAINER:
            owner, field = _TRAINER[name]
            found[owner][field] = value
    if "requirements" not in found["source_code"] and (job.source_dir / "requirements.txt").is_file():
        found["source_code"]["requirements"] = "requirements.txt"
    return found


def _made(configs: Any, name: str, fields: dict[str, Any]) -> Any:
    return getattr(configs, name)(**fields) if fields else None


def _driver(job: SageMakerJob, fields: dict[str, Any]) -> Any:
    """Torchrun on every machine, which SDK 3 has for data and for model parallelism."""
    if job.distribution == "NO":
        return None
    distributed: Any = importlib.import_module("sagemaker.train.distributed")
    if job.distribution == "MODEL_PARALLEL":
        fields = {**fields, "smp": distributed.SMP(**_parallel(job.additional.get(_MODEL_PARALLEL)))}
    return distributed.Torchrun(**fields)


def _image(job: SageMakerJob, region: str) -> str:
    images: Any = importlib.import_module("sagemaker.core.image_uris")
    try:
        found: str = images.retrieve(
            "huggingface",
            region=region,
            version=job.transformers_version,
            base_framework_version=f"pytorch{job.pytorch_version}",
            py_version=job.py_version,
            instance_type=job.instance_type,
            image_scope="training",
        )
    except ValueError as error:
        raise ConfigError(
            f"there is no image of Hugging Face with transformers_version {job.transformers_version}, pytorch_version "
            f"{job.pytorch_version} and py_version {job.py_version} for {job.instance_type}: {error}. Set them, or "
            "image_uri"
        ) from error
    return found


def _as_typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """SDK 3 hands a boolean to the script as ``true``; text stays as it was typed."""
    return {name: str(value) if isinstance(value, bool) else value for name, value in values.items()}
