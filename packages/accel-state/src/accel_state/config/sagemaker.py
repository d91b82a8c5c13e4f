"""The root of the schema for jobs on Amazon SageMaker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from accel_state.config.data import to_data
from accel_state.config.option import option
from accel_state.config.sections.common import CommonOptions
from accel_state.config.sections.dynamo import DynamoSection
from accel_state.config.sections.fp8 import Fp8Section
from accel_state.enums import SageMakerDistributedType

__all__ = ["SageMakerConfig"]


@dataclass(frozen=True, repr=False, eq=False)
class SageMakerConfig(CommonOptions):
    """The configuration of a job on Amazon SageMaker."""

    title = "SageMaker"
    compute_environment: ClassVar[str] = "AMAZON_SAGEMAKER"

    distributed_type: str | None = option(
        help="How the job is distributed.",
        name="sagemaker_distributed_type",
        key="distributed_type",
        env=("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE",),
        choices=tuple(member.value for member in SageMakerDistributedType),
        prompt="How is the job distributed?",
    )
    ec2_instance_type: str | None = option(
        help="Type of the machines, such as ml.p3.2xlarge.",
        prompt="Which type of machines, such as ml.p3.2xlarge, will the job use?",
    )
    iam_role_name: str | None = option(
        help="Role that the job runs as.", prompt="Which IAM role will the job run as?"
    )
    image_uri: str | None = option(
        help="Docker image of the job.",
        prompt="Which Docker image will the job use (none: that of SageMaker)?",
    )
    profile: str | None = option(
        help="AWS profile to log in with.",
        prompt="Which AWS profile do you log in with (none: the keys in the environment)?",
    )
    region: str = option(
        "us-east-1",
        help="AWS region of the job.",
        prompt="Which AWS region will the job run in?",
    )
    base_job_name: str = option("accelerate-sagemaker-1", help="First part of the name of the job.")
    pytorch_version: str = option("1.10.2", help="Version of PyTorch in the job's image.")
    transformers_version: str = option("4.17.0", help="Version of transformers in the job's image.")
    py_version: str = option("py38", help="Version of Python in the job's image.")
    sagemaker_inputs_file: str | None = option(
        help="TSV file with the columns channel_name and data_location.",
        prompt="Which TSV file has the channels of input data?",
    )
    sagemaker_metrics_file: str | None = option(
        help="TSV file with the columns metric_name and metric_regex.",
        prompt="Which TSV file has the metrics to read from the log?",
    )
    additional_args: Mapping[str, Any] | None = option(
        help="More arguments of the SDK's estimator or trainer, as a JSON object on the command line."
    )
    aws_access_key_id: str | None = option(
        help="Key to log in with, when no profile is named.",
        in_file=False,
        secret=True,
    )
    aws_secret_access_key: str | None = option(
        help="Secret to log in with, when no profile is named.",
        in_file=False,
        secret=True,
    )
    dry_run: bool = option(
        False,
        help="Print the job; start nothing.",
        env=(),
        toggle=True,
        in_file=False,
    )
    quiet: bool = option(False, help="Print no notes.", flags=("-q",), env=(), toggle=True, in_file=False)
    dynamo: DynamoSection = field(default_factory=DynamoSection)
    fp8: Fp8Section = field(default_factory=Fp8Section)

    def is_active(self, section: str) -> bool:
        """Whether the job uses the section."""
        if section == "dynamo":
            return self.dynamo.backend not in (None, "NO")
        return section == "fp8" and self.mixed_precision == "fp8"

    def to_dict(self) -> dict[str, Any]:
        """The configuration as data for a file, without unset options and empty sections."""
        return {"compute_environment": self.compute_environment, **to_data(self)}
