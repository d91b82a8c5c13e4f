"""Checkpoints for PyTorch training that are atomic, verified and safe to load."""

from accel_ckpt.__about__ import __version__ as __version__
from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "accel_ckpt.saving.background": ["BackgroundSaver", "SaveHandle"],
        "accel_ckpt.checkpointer": ["Checkpointer", "RandomState", "Stateful"],
        "accel_ckpt.saving.commit": ["checkpoints_from", "complete_checkpoints", "prune_checkpoints"],
        "accel_ckpt.convert.accelerate": [
            "AccelerateCheckpoint",
            "accelerate_checkpoints",
            "is_accelerate_checkpoint",
        ],
        "accel_ckpt.convert.export": ["export_to_accelerate"],
        "accel_ckpt.convert.merge": ["merge_fsdp_weights", "merge_weights"],
        "accel_ckpt.coordination": ["Coordinator", "SingleProcess", "default_coordinator", "run_together"],
        "accel_ckpt.errors": [
            "CheckpointError",
            "CheckpointNotFoundError",
            "CheckpointSaveError",
            "CheckpointVersionError",
            "CorruptCheckpointError",
            "FileChangedError",
            "MissingPartError",
            "NameCollisionError",
            "SaveInProgressError",
            "StateMismatchError",
            "UninitializedTensorError",
            "UnsafeCheckpointError",
            "UnsupportedValueError",
        ],
        "accel_ckpt.hub": ["push_to_hub"],
        "accel_ckpt.format.index": [
            "SAFE_WEIGHTS_INDEX_NAME",
            "SAFE_WEIGHTS_NAME",
            "WEIGHTS_INDEX_NAME",
            "WEIGHTS_NAME",
        ],
        "accel_ckpt.loading.load_model": [
            "LoadReport",
            "load_checkpoint_in_model",
            "load_state_dict",
        ],
        "accel_ckpt.format.manifest": ["MANIFEST_NAME", "Manifest"],
        "accel_ckpt.saving.save_model": ["TORCH_SAFE_GLOBALS", "load", "save", "save_model"],
        "accel_ckpt.modules.sizes": [
            "calculate_maximum_sizes",
            "compute_module_sizes",
            "compute_module_total_buffer_size",
            "dtype_byte_size",
            "get_max_layer_size",
        ],
        "accel_ckpt.modules.tensors": [
            "check_nothing_on_meta",
            "get_non_persistent_buffers",
            "named_module_tensors",
            "set_module_tensor_to_device",
        ],
        "accel_ckpt.modules.ties": ["find_tied_parameters", "retie_parameters"],
        "accel_ckpt.modules.names": ["canonical_name", "canonical_names", "canonical_state_dict"],
        "accel_ckpt.optimizers": ["check_optimizer_state", "load_optimizer_state", "optimizer_state_by_name"],
        "accel_ckpt.saving.plan": ["convert_file_size_to_int"],
        "accel_ckpt.format.reader": ["TensorEntry", "read_header"],
        "accel_ckpt.saving.save_state": ["Tree", "save_training_state"],
        "accel_ckpt.loading.load_state": ["TrainingCheckpoint", "open_training_state"],
        "accel_ckpt.tensor_storage": ["clean_state_dict_for_safetensors", "id_tensor_storage"],
        "accel_ckpt.loading.weights": ["WeightSource", "open_weights"],
    },
)
