"""The topics of ``accel launch --help TOPIC``."""

from accel_state.config.strategies import installed_strategies

__all__ = ["TOPICS"]

TOPICS = {
    "run": "starting, supervising, restarting, logs",
    "devices": "processes, machines, devices",
    "gradient_accumulation": "gradient accumulation",
    "dynamo": "torch.compile",
    "fsdp": "fully sharded data parallelism",
    "deepspeed": "DeepSpeed",
    **{each.section_name: each.title for each in installed_strategies()},
    "parallelism": "tensor, context and sequence parallelism",
    "fp8": "fp8",
    "mpirun": "MPI",
    "submission": "jobs of a scheduler",
    "tpu": "TPUs",
    "sagemaker": "Amazon SageMaker",
}
"""Names for ``accel launch --help TOPIC``, with their subjects."""
