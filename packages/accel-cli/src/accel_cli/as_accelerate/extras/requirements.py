"""Marks of ``accelerate.test_utils`` that skip a test where something is missing."""

from __future__ import annotations

import functools
import importlib
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

import torch

import accel_train
from accel_cli.as_accelerate.extras.backend import device_count, torch_device
from accel_state.environment import parse_flag_from_env

_Test = TypeVar("_Test", bound=Callable[..., Any])


@functools.cache
def __getattr__(name: str) -> Any:
    """``require_<package>``, for each package that accel_train looks for."""
    package = name.removeprefix("require_")
    is_available = getattr(accel_train, f"is_{package}_available", None)
    if name == package or is_available is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return _require(package, is_available)


def _require(needed: str, *conditions: Callable[[], bool]) -> Callable[[Any], Any]:
    """A mark that skips unless all conditions hold; they are asked where it is used."""

    def mark(test_case: Any) -> Any:
        return unittest.skipUnless(all(condition() for condition in conditions), f"needs {needed}")(test_case)

    return mark


def _on(*kinds: str) -> Callable[[], bool]:
    return lambda: torch_device in kinds


def _not(condition: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: not condition()


def _several() -> bool:
    return device_count > 1


def _single() -> bool:
    return torch_device != "cpu" and device_count == 1


def skip(test_case: _Test) -> _Test:
    """A mark that always skips."""
    return unittest.skip("the test asks to be skipped")(test_case)


slow = _require("RUN_SLOW=1", lambda: bool(parse_flag_from_env("RUN_SLOW", False)))

require_cpu = _require("a machine without accelerators", _on("cpu"))
require_non_cpu = _require("an accelerator", _not(_on("cpu")))
require_cuda = _require("a CUDA GPU", _on("cuda"))
require_xpu = _require("an XPU", _on("xpu"))
require_mlu = _require("an MLU", _on("mlu"))
require_sdaa = _require("an SDAA device", _on("sdaa"))
require_musa = _require("a MUSA device", _on("musa"))
require_npu = _require("an NPU", _on("npu"))
require_neuron = _require("a Neuron device", _on("neuron"))
require_mps = _require("MPS", _on("mps"))
require_cuda_or_hpu = _require("a CUDA GPU or an HPU", _on("cuda", "hpu"))
require_cuda_or_xpu = _require("a CUDA GPU or an XPU", _on("cuda", "xpu"))
require_non_xpu = _require("another device than an XPU", _not(_on("xpu")))
require_non_hpu = _require("another device than an HPU", _not(_on("hpu")))
require_single_device = _require("exactly one accelerator", _single)
require_single_gpu = _require("exactly one CUDA GPU", _on("cuda"), _single)
require_single_xpu = _require("exactly one XPU", _on("xpu"), _single)
require_multi_device = _require("several accelerators", _not(_on("cpu")), _several)
require_multi_gpu = _require("several CUDA GPUs", _on("cuda"), _several)
require_multi_xpu = _require("several XPUs", _on("xpu"), _several)
require_multi_gpu_or_xpu = _require("several GPUs or XPUs", _on("cuda", "xpu"), _several)
require_tpu = _require("a TPU", lambda: accel_train.is_torch_xla_available(check_is_tpu=True))
require_non_torch_xla = _require("a process without torch_xla", _not(accel_train.is_torch_xla_available))
require_fp16 = _require("a device that computes in float16", accel_train.is_fp16_available)
require_fp8 = _require("a library for fp8", accel_train.is_fp8_available)

require_huggingface_suite = _require(
    "transformers and datasets", accel_train.is_transformers_available, accel_train.is_datasets_available
)
require_trackers = _require(
    "a tracker that is installed", accel_train.is_wandb_available, accel_train.is_tensorboard_available
)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test unless torch has at least this version; without a test, the mark for one."""
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    known = version is None or accel_train.is_torch_version(">=", version)
    return unittest.skipUnless(known, f"needs torch >= {version}, and this is {torch.__version__}")(test_case)


require_fsdp2 = require_torch_min_version(version="2.6.0")
require_tp = require_torch_min_version(version="2.3.0")


def run_first(test_case: _Test) -> _Test:
    """Mark a test as the first to run, where pytest has the plugin that orders tests."""
    if not accel_train.is_pytest_available():
        return test_case
    mark: Callable[[_Test], _Test] = importlib.import_module("pytest").mark.order(1)
    return mark(test_case)
