"""Environment, devices, processes, collectives, configuration schema and launching for PyTorch programs."""

from accel_state.__about__ import __version__ as __version__
from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "accel_state.config.basic": ("default_config_file", "load_config_from_file", "write_basic_config"),
        "accel_state.config.files": ("load_config", "save_config"),
        "accel_state.config.launch": ("LaunchConfig",),
        "accel_state.config.merge": ("resolve_config",),
        "accel_state.config.sagemaker": ("SageMakerConfig",),
        "accel_state.enums": (
            "BaseEnum",
            "ComputeEnvironment",
            "DistributedType",
            "DynamoBackend",
            "EnumWithContains",
            "FP8BackendType",
            "LoggerType",
            "PrecisionType",
            "RNGType",
            "SageMakerDistributedType",
        ),
        "accel_state.environment": (
            "clear_environment",
            "get_int_from_env",
            "parse_choice_from_env",
            "parse_flag_from_env",
            "patch_environment",
            "str_to_bool",
        ),
        "accel_state.handlers": (
            "InitProcessGroupKwargs",
            "KwargsHandler",
        ),
        "accel_state.process": (
            "PartialState",
            "wait_for_everyone",
        ),
        "accel_state.topology": ("Topology",),
        "accel_state.trees": (
            "TensorInformation",
            "concatenate",
            "convert_to_fp32",
            "find_batch_size",
            "find_device",
            "get_data_structure",
            "get_shape",
            "honor_type",
            "ignorant_find_batch_size",
            "initialize_tensors",
            "is_namedtuple",
            "is_tensor_information",
            "is_torch_tensor",
            "listify",
            "pad_input_tensors",
            "recursively_apply",
            "send_to_device",
            "slice_tensors",
        ),
    },
)
