"""Small names that clients of Accelerate import from several of its modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel_state import PartialState
from accel_state.clusters.topology import Topology
from accel_state.host.available import is_deepspeed_available
from accel_train.data.loader import PreparedLoader

CPUInformation = Topology
DataLoaderAdapter = PreparedLoader


_Function = TypeVar("_Function", bound=Callable[..., Any])

# Versions of PyTorch that features of Accelerate began with, and the defaults of its jobs on SageMaker.
FSDP_PYTORCH_VERSION = "2.1.0.a0+32f93b1"
FSDP2_PYTORCH_VERSION = "2.6.0"
DTENSOR_PYTORCH_VERSION = "2.5.0"
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"
SAGEMAKER_PYTORCH_VERSION = "1.10.2"
SAGEMAKER_PYTHON_VERSION = "py38"
SAGEMAKER_TRANSFORMERS_VERSION = "4.17.0"
SAGEMAKER_PARALLEL_EC2_INSTANCES = ["ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"]

Backend = Literal["MSAMP", "TE"]
OptLevel = Literal["O1", "O2"]
FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
AmaxComputeAlgorithm = Literal["max", "most_recent"]
ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]

_PYTORCH_DATALOADER_KWARGS = {
    name: parameter.default
    for name, parameter in inspect.signature(DataLoader.__init__).parameters.items()
    if name not in ("self", "dataset")
}
"""Arguments of a `DataLoader` of this PyTorch to their defaults."""

SharedDict = dict
"""The dictionary through which instances share attributes; one per process."""


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, with any arguments."""


def test_launch() -> None:
    """Create a ``PartialState``, as a test of a launcher does."""
    PartialState()


def deepspeed_required(func: _Function) -> _Function:
    """Decorate a function so that it raises an ImportError where DeepSpeed is not installed."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not is_deepspeed_available():
            raise ImportError(f"{func.__name__}() needs DeepSpeed: pip install deepspeed")
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are one; a device without an index is the current one of its type."""
    first, second = map(_with_index, (first_device, second_device))
    return first == second


def _with_index(device: torch.device) -> torch.device:
    device = torch.device(device)
    index: Any = device.index
    if index is None and device.type not in ("cpu", "meta", "mps"):
        return torch.device(device.type, torch.get_device_module(device).current_device())
    return torch.device(device.type) if device.type == "cpu" else device


def get_parameter_device(parameter: Any) -> torch.device:
    """The device of a module's first parameter, or of its first tensor if it has none."""
    found = next(iter(parameter.parameters()), None)
    if found is None:
        found = next(value for value in vars(parameter).values() if isinstance(value, Tensor))
    return found.device


def get_model_tp_size(model: Any) -> int | None:
    """The ranks among which transformers has divided the tensors of a model; None: they are whole."""
    size = getattr(model, "tp_size", None)
    if size is None:
        distributed = getattr(getattr(model, "config", None), "distributed_config", None)
        found = distributed.get if isinstance(distributed, dict) else functools.partial(getattr, distributed)
        size = found("tp_size", None)
    return size
