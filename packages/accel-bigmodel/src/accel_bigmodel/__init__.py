"""Run PyTorch models that do not fit the device, from the checkpoint files as they are."""

from accel_bigmodel.__about__ import __version__ as __version__
from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "accel_bigmodel.budget": ["available_host_memory", "get_max_memory"],
        "accel_bigmodel.errors": [
            "BigModelError",
            "DeviceMapError",
            "OffloadError",
            "PipelineError",
            "QuantizationError",
        ],
        "accel_bigmodel.hooks.align": ["AlignDevicesHook"],
        "accel_bigmodel.hooks.alignment": [
            "align_module_device",
            "get_state_dict_from_offload",
            "get_state_dict_offloaded_model",
            "has_offloaded_params",
        ],
        "accel_bigmodel.hooks.attach": [
            "attach_align_device_hook",
            "attach_align_device_hook_on_blocks",
            "attach_execution_device_hook",
        ],
        "accel_bigmodel.hooks.base": [
            "ModelHook",
            "SequentialHook",
            "add_hook_to_module",
            "remove_hook_from_module",
            "remove_hook_from_submodules",
        ],
        "accel_bigmodel.hooks.casting": ["LayerwiseCastingHook", "attach_layerwise_casting_hooks"],
        "accel_bigmodel.hooks.cpu_offload": [
            "CpuOffload",
            "UserCpuOffloadHook",
            "cpu_offload_with_hook",
        ],
        "accel_bigmodel.meta": ["init_empty_weights", "init_on_device"],
        "accel_bigmodel.offload_files": [
            "OffloadedWeightsLoader",
            "PrefixedDataset",
            "extract_submodules_state_dict",
            "load_offloaded_weight",
            "load_offloaded_weights",
            "offload_state_dict",
            "offload_weight",
            "save_offload_index",
        ],
        "accel_bigmodel.pipeline": [
            "Pipeline",
            "build_pipeline",
            "find_pippy_batch_size",
            "pippy_forward",
            "prepare_pippy",
        ],
        "accel_bigmodel.stages": ["generate_device_map"],
        "accel_ckpt": [
            "calculate_maximum_sizes",
            "check_nothing_on_meta",
            "compute_module_sizes",
            "compute_module_total_buffer_size",
            "convert_file_size_to_int",
            "dtype_byte_size",
            "find_tied_parameters",
            "get_max_layer_size",
            "get_non_persistent_buffers",
            "named_module_tensors",
            "retie_parameters",
            "set_module_tensor_to_device",
        ],
        "accel_bigmodel.streaming.engine": ["Streamer"],
        "accel_bigmodel.streaming.groups": ["Group", "plan_groups"],
        "accel_bigmodel.streaming.stats": ["StreamStats"],
        "accel_bigmodel.streaming.transfer": ["AcceleratorTransfer", "HostTransfer", "Transfer"],
    },
)
