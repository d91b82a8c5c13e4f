"""Put five lines into a PyTorch loop and run it on anything."""

from accel_state._lazy import attach
from accel_train.__about__ import __version__ as __version__

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "accel_train.accelerator": ["Accelerator"],
        "accel_train.compile": ["compile_regions"],
        "accel_train.config": [
            "AutocastKwargs",
            "DDPCommunicationHookType",
            "DataLoaderConfiguration",
            "DistributedDataParallelKwargs",
            "GradScalerKwargs",
            "GradientAccumulationPlugin",
            "ProfileKwargs",
            "ProjectConfiguration",
            "TorchDynamoPlugin",
        ],
        "accel_train.data": ["LoaderLedger"],
        "accel_train.errors": [
            "AccumulationError",
            "AmbiguousLoaderError",
            "DataError",
            "IncompatibleOptionsError",
            "MetricsShapeError",
            "OptionError",
            "PrepareError",
        ],
        "accel_train.optimizer": ["AcceleratedOptimizer"],
        "accel_train.scheduler": ["AcceleratedScheduler"],
        "accel_train.state": ["AcceleratorState", "GradientState"],
        "accel_train.unwrap": ["extract_model_from_parallel", "has_compiled_regions", "is_compiled_module"],
    },
)
