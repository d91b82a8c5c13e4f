"""Enumerations shared by configuration files, flags and code. Loads no torch."""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import Self

__all__ = [
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
]


class EnumWithContains(EnumMeta):
    """Enum classes that support ``value in Class`` for plain values."""

    def __contains__(cls, item: object) -> bool:
        """Whether ``item`` is a member, or the value of one."""
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enum whose members print as their value and are looked up case-insensitively."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        # Python 3.11 and 3.12 format members of mixed-in types differently; this is the same on all.
        return format(str(self), spec)

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if isinstance(value, str):
            for member in cls:
                if str(member.value).lower() == value.lower():
                    return member
        return None

    @classmethod
    def list(cls) -> list[str]:
        """The values, in order of definition."""
        return [str(member) for member in cls]


class _NamedStr(str, BaseEnum):
    """A string enum whose ``str()`` is ``Class.NAME``."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class DistributedType(_NamedStr):
    """The kind of distributed run."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


class SageMakerDistributedType(_NamedStr):
    """How a SageMaker job is distributed."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(_NamedStr):
    """The library for 8-bit floating point (fp8) computation."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class ComputeEnvironment(_NamedStr):
    """Where a launched script runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class DynamoBackend(str, BaseEnum):
    """Backends of ``torch.compile``; ``NO`` disables compilation."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class LoggerType(str, BaseEnum):
    """Experiment trackers; ``all`` means every one that is installed."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class PrecisionType(str, BaseEnum):
    """The precision of a model's computation."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(str, BaseEnum):
    """Random number generators whose states can be synchronized across ranks."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"
