"""The configuration schema of a run, shared by files, environment variables, flags and code."""

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "accel_state.config.sections.accumulation": ("GradientAccumulationSection",),
        "accel_state.config.default_config": (
            "default_config_file",
            "load_config_from_file",
            "write_basic_config",
        ),
        "accel_state.config.codec": (
            "PUBLISHED",
            "decode",
            "encode",
            "launcher_only_fields",
            "publish",
            "rank_environment",
            "variables",
        ),
        "accel_state.config.sections.deepspeed": ("DeepSpeedLaunchSection", "DeepSpeedSection"),
        "accel_state.config.sections.dynamo": ("DynamoSection",),
        "accel_state.config.files": ("DefaultFile", "default_path", "find_default", "load", "save"),
        "accel_state.config.flags": ("ParsedFlags", "parse_flags", "to_flags"),
        "accel_state.config.sections.fp8": ("Fp8Section",),
        "accel_state.config.sections.fsdp": ("FsdpSection",),
        "accel_state.config.sections.hardware": ("DEVICE_LIST_VARIABLES",),
        "accel_state.config.launch": ("LaunchConfig",),
        "accel_state.config.sections.megatron_lm": ("MegatronLMSection",),
        "accel_state.config.merge": ("Resolved", "resolve"),
        "accel_state.config.sections.mpirun": ("MpirunSection",),
        "accel_state.config.option": ("Carrier", "Option", "Section"),
        "accel_state.config.external_variables": ("OTHER_VARIABLES",),
        "accel_state.config.sections.parallelism": ("ParallelismSection",),
        "accel_state.config.sections.runtime": ("RuntimeSection",),
        "accel_state.config.sagemaker": ("SageMakerConfig",),
        "accel_state.config.schema": ("BoundOption", "Schema", "schema_of"),
        "accel_state.config.sources": ("Origin", "Source", "Sources"),
        "accel_state.config.sections.tpu": ("TpuSection",),
    },
)
