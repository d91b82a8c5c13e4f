"""The default configuration file for this machine, written without questions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from accel_state.config.files import default_path, find_default, load, save
from accel_state.config.launch import LaunchConfig
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.config.schema import schema_of
from accel_state.environment import snapshot
from accel_state.errors import ConfigNotFoundError

__all__ = ["DISTRIBUTED_TYPES", "default_config_file", "load_config_from_file", "write_basic_config"]

DISTRIBUTED_TYPES = {
    "cuda": "MULTI_GPU",
    "xpu": "MULTI_XPU",
    "npu": "MULTI_NPU",
    "mlu": "MULTI_MLU",
    "sdaa": "MULTI_SDAA",
    "musa": "MULTI_MUSA",
    "hpu": "MULTI_HPU",
    "neuron": "MULTI_NEURON",
}
"""Device type to the distributed type of several such devices."""

default_config_file: str = str(default_path(snapshot()))
"""Path of our default file, computed when this module was loaded."""


def write_basic_config(
    mixed_precision: str = "no",
    save_location: str | Path | None = None,
    *,
    accelerators: tuple[str, int] | None = None,
) -> bool:
    """Write a configuration file for all accelerators of this machine, or for its CPU.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        save_location: the file; by default the one that ``accel launch`` reads.
        accelerators: device type and count, ``("none", 0)`` without any; None: detect them with PyTorch.

    Returns:
        False, after printing a message, if the file already exists; else True.

    Raises:
        ConfigError: ``mixed_precision`` is none of these.
    """
    bound = schema_of(LaunchConfig).by_path["mixed_precision"]
    precision = bound.read(mixed_precision, "mixed_precision")
    path = default_path(snapshot()) if save_location is None else Path(save_location).expanduser()
    if path.exists():
        print(f"{path} exists and is not changed; remove it or pass another save_location")
        return False
    save(dataclasses.replace(_launch_on(accelerators or _of_torch()), mixed_precision=precision), path)
    return True


def load_config_from_file(config_file: str | Path | None = None) -> LaunchConfig | SageMakerConfig:
    """Read a configuration file; None: the default file, ours or else Accelerate's.

    Raises:
        ConfigNotFoundError: there is no such file.
        ConfigError: it is invalid.
    """
    if config_file is not None:
        return load(config_file)
    environ = snapshot()
    found = find_default(environ)
    if found is None:
        raise ConfigNotFoundError(
            f"there is no configuration file {default_path(environ)}; `accel config` or write_basic_config() creates "
            "one"
        )
    return load(found.path)


def _of_torch() -> tuple[str, int]:
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("none", 0) if device is None else (device.type, torch.accelerator.device_count())


def _launch_on(accelerators: tuple[str, int]) -> LaunchConfig:
    kind, count = accelerators
    if not count:
        return LaunchConfig(distributed_type="NO", use_cpu=True, num_processes=1)
    distributed = DISTRIBUTED_TYPES.get("cuda" if kind == "rocm" else kind, "NO") if count > 1 else "NO"
    return LaunchConfig(distributed_type=distributed, num_processes=count if distributed != "NO" else 1)
