"""The questions of a job on Amazon SageMaker."""

from __future__ import annotations

from accel_cli.wizard.answers import Condition, equals, negated
from accel_cli.wizard.place_questions import SAGEMAKER
from accel_cli.wizard.question import Question
from accel_cli.wizard.run_questions import compile_questions, fp8_questions
from accel_state.config.sagemaker import SageMakerConfig

__all__ = ["SAGEMAKER_QUESTIONS"]

_JOB: tuple[Condition, ...] = (equals("place", SAGEMAKER),)


def _asked(path: str, *more: Condition, **about: bool) -> Question:
    return Question(path=path, root=SageMakerConfig, when=(*_JOB, *more), **about)  # type: ignore[arg-type]


SAGEMAKER_QUESTIONS = (
    _asked("profile"),
    _asked("region", required=True),
    _asked("iam_role_name", required=True),
    _asked("ec2_instance_type", required=True),
    _asked("distributed_type"),
    _asked("num_machines", negated(equals("sagemaker.distributed_type", "NO")), required=True),
    _asked("image_uri"),
    _asked("sagemaker_inputs_file", file=True),
    _asked("sagemaker_metrics_file", file=True),
    _asked("mixed_precision"),
    *fp8_questions(SageMakerConfig),
    _asked("dynamo.backend"),
    *compile_questions(SageMakerConfig, negated(equals("sagemaker.dynamo.backend", None, "NO"))),
)
"""The questions of a job."""
