"""The topics of ``accel launch --help TOPIC``, and the flags of ``accel launch`` that the schema does not have."""

from accel_state.config.strategies import installed_strategies

__all__ = ["OWN", "TOPICS"]

OWN = {
    "--help": "Show the flags that most people need, or those of a topic.",
    "--help-all": "Show all flags.",
    "--config_file FILE": "Configuration file to read.",
    "--as_accelerate": "Let this library answer `import accelerate` in the script and in the modules it imports.",
}
"""Flags with the placeholder of their value, and their help."""

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
