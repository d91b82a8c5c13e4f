"""Availability of packages and devices. Loads no torch until a device is queried.

Each package is one row: the module to import, the distributions that can provide it, and the supported versions.
Packages are looked up once per process.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from packaging.version import parse

from accel_state import environment
from accel_state.errors import ConfigError, MissingDependencyError
from accel_state.host.versions import installed_version, is_torch_version

__all__ = [
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_aim_available",
    "is_amdsmi_available",
    "is_bf16_available",
    "is_bitsandbytes_multi_backend_available",
    "is_bnb_available",
    "is_boto3_available",
    "is_clearml_available",
    "is_comet_ml_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_dvclive_available",
    "is_fp8_available",
    "is_fp16_available",
    "is_habana_gaudi1",
    "is_hpu_available",
    "is_import_timer_available",
    "is_lomo_available",
    "is_matplotlib_available",
    "is_megatron_lm_available",
    "is_mlflow_available",
    "is_mlu_available",
    "is_mps_available",
    "is_msamp_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_numpy_available",
    "is_pandas_available",
    "is_peft_available",
    "is_pippy_available",
    "is_pynvml_available",
    "is_pytest_available",
    "is_rich_available",
    "is_rocm_available",
    "is_sagemaker_available",
    "is_schedulefree_available",
    "is_sdaa_available",
    "is_swanlab_available",
    "is_tensorboard_available",
    "is_timm_available",
    "is_torch_distributed_available",
    "is_torch_xla_available",
    "is_torchao_available",
    "is_torchdata_available",
    "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available",
    "is_tqdm_available",
    "is_trackio_available",
    "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available",
    "is_transformers_available",
    "is_triton_available",
    "is_wandb_available",
    "is_weights_only_available",
    "is_xccl_available",
    "is_xpu_available",
    "torchao_required",
]

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (
        ModuleNotFoundError,
        ValueError,
    ):  # the parent package is missing, or the loaded module has no spec
        return False


def _package(
    module: str, *distributions: str, at_least: str | None = None, below: str | None = None
) -> Callable[[], bool]:
    """A function that returns whether ``module`` can be imported in a supported version.

    A folder of the same name does not count: one of ``distributions`` must be installed.
    """
    sources = distributions or (module,)

    def answer() -> bool:
        version = installed_version(*sources)
        if version is None or not _found(module):
            return False
        return (at_least is None or version >= parse(at_least)) and (below is None or version < parse(below))

    bounds = "".join(f" {sign} {bound}" for sign, bound in ((">=", at_least), ("<", below)) if bound)
    answer.__doc__ = f"Whether {' or '.join(sources)}{bounds} is installed."
    return answer


is_4bit_bnb_available = _package("bitsandbytes", at_least="0.39.0")
is_8bit_bnb_available = _package("bitsandbytes", at_least="0.37.2")
is_aim_available = _package("aim", below="4.0.0")
is_amdsmi_available = _package("amdsmi")
is_boto3_available = _package("boto3")
is_clearml_available = _package("clearml")
is_comet_ml_available = _package("comet_ml")
is_datasets_available = _package("datasets")
is_deepspeed_available = _package("deepspeed")
is_dvclive_available = _package("dvclive")
is_import_timer_available = _package("import_timer")
is_lomo_available = _package("lomo_optim")
is_matplotlib_available = _package("matplotlib")
is_mlflow_available = _package("mlflow", "mlflow", "mlflow-skinny")
is_msamp_available = _package("msamp", "ms-amp")
is_pandas_available = _package("pandas")
is_peft_available = _package("peft")
is_pynvml_available = _package("pynvml", "pynvml", "nvidia-ml-py")
is_pytest_available = _package("pytest")
is_sagemaker_available = _package("sagemaker")
is_schedulefree_available = _package("schedulefree")
is_swanlab_available = _package("swanlab")
is_timm_available = _package("timm")
is_torchao_available = _package("torchao", at_least="0.6.1")
is_torchdata_available = _package("torchdata")
is_torchdata_stateful_dataloader_available = _package("torchdata", at_least="0.8.0")
is_torchvision_available = _package("torchvision")
is_tqdm_available = _package("tqdm")
is_trackio_available = _package("trackio")
is_transformers_available = _package("transformers")
is_triton_available = _package("triton", "triton", "triton-xpu", "pytorch-triton-rocm")
is_wandb_available = _package("wandb")
_rich_installed = _package("rich")
_tensorboard_installed = _package("tensorboard")
_tensorboardx_installed = _package("tensorboardX")
_transformer_engine_installed = _package(
    "transformer_engine", "transformer-engine", "transformer-engine-torch", "transformer-engine-cu12"
)
_intel_transformer_engine_installed = _package("intel_transformer_engine")
_megatron_core_installed = _package("megatron", "megatron-core", at_least="0.16")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, in version ``min_version`` or later."""
    return _package("bitsandbytes", at_least=min_version)()


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether NumPy is installed, in version ``min_version`` or later."""
    return _package("numpy", at_least=min_version)()


def is_rich_available() -> bool:
    """Whether rich is installed and enabled by ACCELERATE_ENABLE_RICH."""
    return _rich_installed() and environment.parse_flag_from_env("ACCELERATE_ENABLE_RICH", False)


def is_tensorboard_available() -> bool:
    """Whether tensorboard or tensorboardX is installed."""
    return _tensorboard_installed() or _tensorboardx_installed()


def is_transformer_engine_available() -> bool:
    """Whether Transformer Engine is installed (on Gaudi: Intel's)."""
    return _intel_transformer_engine_installed() if is_hpu_available() else _transformer_engine_installed()


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine is installed and this device computes in MXFP8."""
    if not is_transformer_engine_available():
        return False
    fp8 = importlib.import_module("transformer_engine.pytorch.fp8")
    return bool(fp8.check_mxfp8_support()[0])


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes is installed with support for devices other than CUDA."""
    if not is_bnb_available():
        return False
    return "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", set())


def is_megatron_lm_available() -> bool:
    """Whether megatron-core is installed, and Megatron-LM enabled by ACCELERATE_USE_MEGATRON_LM."""
    return environment.parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM", False) and _megatron_core_installed()


def is_fp8_available() -> bool:
    """Whether a library for fp8 training is installed; the hardware is not checked."""
    return is_torchao_available() or is_transformer_engine_available() or is_msamp_available()


def is_pippy_available() -> bool:
    """Whether PyTorch has ``torch.distributed.pipelining``, since 2.4."""
    return is_torch_version(">=", "2.4.0")


def is_weights_only_available() -> bool:
    """Whether ``torch.load`` supports ``weights_only``, since 2.4."""
    return is_torch_version(">=", "2.4.0")


def is_torch_distributed_available() -> bool:
    """Whether this build of PyTorch has ``torch.distributed``."""
    import torch.distributed

    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Whether this build of PyTorch has XCCL, the communication library of Intel GPUs."""
    import torch.distributed

    return torch.distributed.is_available() and torch.distributed.is_xccl_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed and not disabled by USE_TORCH_XLA.

    Args:
        check_is_tpu: also require a TPU.
        check_is_gpu: also require a GPU.

    Raises:
        ConfigError: both are set.
    """
    if check_is_tpu and check_is_gpu:
        raise ConfigError("check_is_tpu=True and check_is_gpu=True exclude each other; pass one of them")
    if not environment.parse_flag_from_env("USE_TORCH_XLA", True) or not _found("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = importlib.import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in ("GPU", "CUDA")


def _device(kind: str) -> bool:
    """Whether PyTorch's module for a device type finds a device; vendor plugins are loaded by torch."""
    import torch

    module: Any = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def is_cuda_available() -> bool:
    """Whether there is a CUDA or ROCm device; checked through NVML, so that a later fork can still use it."""
    with environment.patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return _device("cuda")


def is_rocm_available() -> bool:
    """Whether there is an AMD device and this is PyTorch's build for it."""
    import torch

    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is an Apple GPU, and PyTorch is ``min_version`` or later."""
    import torch

    mps = torch.backends.mps
    return is_torch_version(">=", min_version) and mps.is_available() and mps.is_built()


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether there is an Intel GPU; ``check_device`` has no effect: the device is always checked."""
    return _device("xpu")


def is_npu_available(check_device: bool = False) -> bool:
    """Whether there is an Ascend NPU; ``check_device`` has no effect: the device is always checked."""
    return _device("npu")


def is_mlu_available(check_device: bool = False) -> bool:
    """Whether there is a Cambricon MLU; ``check_device`` has no effect: the device is always checked."""
    return _device("mlu")


def is_musa_available(check_device: bool = False) -> bool:
    """Whether there is a Moore Threads GPU; ``check_device`` has no effect: the device is always checked."""
    return _device("musa")


def is_sdaa_available(check_device: bool = False) -> bool:
    """Whether there is a Teco SDAA; ``check_device`` has no effect: the device is always checked."""
    return _device("sdaa")


def is_neuron_available(check_device: bool = False) -> bool:
    """Whether there is a Trainium chip; ``check_device`` has no effect: the device is always checked."""
    return _device("neuron")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether there is a Gaudi; ``init_hccl`` also loads its communication library."""
    if not _device("hpu"):
        return False
    if init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return True


def is_habana_gaudi1() -> bool:
    """Whether the device is a first-generation Gaudi, which has neither fp16 nor fp8."""
    if not is_hpu_available():
        return False
    synapse = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return bool(synapse._get_device_type() == synapse.synDeviceType.synDeviceGaudi)


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether this device supports bfloat16.

    Args:
        ignore_tpu: return False on a TPU.
    """
    import torch

    if is_torch_xla_available() and is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return True
    if accelerator.type == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    ask = getattr(torch.get_device_module(accelerator.type), "is_bf16_supported", None)
    return True if ask is None else bool(ask())


def is_fp16_available() -> bool:
    """Whether this device supports float16."""
    return not is_habana_gaudi1()


def torchao_required(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``func`` to raise MissingDependencyError when torchao is not installed."""

    @functools.wraps(func)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_torchao_available():
            raise MissingDependencyError(f"{func.__name__} needs torchao: pip install 'torchao>=0.6.1'")
        return func(*args, **kwargs)

    return checked
