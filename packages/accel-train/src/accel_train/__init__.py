"""Put five lines into a PyTorch loop and run it on anything.

What a training script imports from Accelerate and its `utils` is here too, whichever package below is its home.
"""

from accel_state._lazy import attach
from accel_train.__about__ import __version__ as __version__

__getattr__, __dir__, __all__ = attach(
    __name__,
    elsewhere={
        "accel_bigmodel": (
            "AlignDevicesHook",
            "BnbQuantizationConfig",
            "CpuOffload",
            "CustomDtype",
            "LayerwiseCastingHook",
            "ModelHook",
            "OffloadedWeightsLoader",
            "PrefixedDataset",
            "SequentialHook",
            "UserCpuOffloadHook",
            "add_hook_to_module",
            "align_module_device",
            "attach_align_device_hook",
            "attach_align_device_hook_on_blocks",
            "attach_execution_device_hook",
            "attach_layerwise_casting_hooks",
            "calculate_maximum_sizes",
            "check_device_map",
            "check_tied_parameters_in_config",
            "check_tied_parameters_on_same_device",
            "clean_device_map",
            "cpu_offload",
            "cpu_offload_with_hook",
            "disk_offload",
            "dispatch_model",
            "extract_submodules_state_dict",
            "get_balanced_memory",
            "get_max_layer_size",
            "get_max_memory",
            "get_module_size_with_ties",
            "get_state_dict_from_offload",
            "get_state_dict_offloaded_model",
            "has_4bit_bnb_layers",
            "has_offloaded_params",
            "infer_auto_device_map",
            "init_empty_weights",
            "init_on_device",
            "load_and_quantize_model",
            "load_checkpoint_and_dispatch",
            "load_offloaded_weight",
            "load_offloaded_weights",
            "offload_state_dict",
            "offload_weight",
            "prepare_pippy",
            "remove_hook_from_module",
            "remove_hook_from_submodules",
            "save_offload_index",
        )
    },
)
