"""Device selection for all backends that PyTorch supports.

Everything uses ``torch.accelerator``; each vendor's differences are one row of ``BACKENDS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

from accel_state.clusters.base import Topology
from accel_state.enums import DistributedType
from accel_state.errors import ConfigError, DeviceError
from accel_state.host import xla

__all__ = [
    "BACKENDS",
    "DeviceBackend",
    "accelerator_module",
    "choose_collectives",
    "choose_device",
    "default_device",
    "device_backend",
    "device_count",
    "empty_cache",
    "get_current_device_type",
    "set_current_device",
]


@dataclass(frozen=True, slots=True)
class DeviceBackend:
    """The properties that differ between device types.

    Attributes:
        type: the name in ``torch.device``.
        distributed_type: distributed type of several processes on such devices.
        collectives: PyTorch's communication backend for such devices; None if there is none.
        has_index: whether a machine can have several, distinguished by an index.
        lazy: operations are recorded and run later, so only strategies that declare such devices train on them;
            processes exchange data through host memory.
    """

    type: str
    distributed_type: DistributedType
    collectives: str | None
    has_index: bool = True
    lazy: bool = False


BACKENDS: dict[str, DeviceBackend] = {
    row.type: row
    for row in (
        DeviceBackend("cpu", DistributedType.MULTI_CPU, "gloo", has_index=False),
        DeviceBackend("cuda", DistributedType.MULTI_GPU, "nccl"),
        DeviceBackend("xpu", DistributedType.MULTI_XPU, "xccl"),
        DeviceBackend("npu", DistributedType.MULTI_NPU, "hccl"),
        DeviceBackend("mlu", DistributedType.MULTI_MLU, "cncl"),
        DeviceBackend("sdaa", DistributedType.MULTI_SDAA, "tccl"),
        DeviceBackend("musa", DistributedType.MULTI_MUSA, "mccl"),
        DeviceBackend("hpu", DistributedType.MULTI_HPU, "hccl"),
        DeviceBackend("neuron", DistributedType.MULTI_NEURON, "neuron"),
        DeviceBackend("mps", DistributedType.NO, None, has_index=False),
        DeviceBackend("tpu", DistributedType.XLA, "tpu_dist"),  # torch_tpu, which torch.accelerator finds
        DeviceBackend("xla", DistributedType.XLA, None, lazy=True),  # torch_xla, which it does not
    )
}


def device_backend(device: torch.device) -> DeviceBackend:
    """The row of ``BACKENDS`` for ``device``.

    A type without a row is one that another package has registered with PyTorch. Its collectives are those that the
    package has registered for it; several processes are ``MULTI_GPU``.

    Raises:
        DeviceError: the device type is unknown, and is not that of this machine's accelerator.
    """
    row = BACKENDS.get(device.type)
    if row is not None:
        return row
    if default_device().type != device.type:
        raise DeviceError(
            f"device type {device.type!r} is unknown, and torch.accelerator finds no such device; known types are "
            f"{', '.join(BACKENDS)}"
        )
    collectives = dist.Backend.default_device_backend_map.get(device.type)
    return DeviceBackend(device.type, DistributedType.MULTI_GPU, collectives)


def default_device() -> torch.device:
    """The accelerator type of this machine, without an index, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type)


def get_current_device_type() -> tuple[str, str]:
    """Accelerator type of this machine and the matching distributed type; CUDA's on a machine without accelerators."""
    kind = default_device()
    row = BACKENDS["cuda"] if kind.type == "cpu" else device_backend(kind)
    return row.type, row.distributed_type.value


def device_count(device_type: str) -> int:
    """Number of visible devices of a type; 1 for ``"cpu"``, 0 for a type that this machine does not have."""
    if device_type == "cpu":
        return 1
    if device_type == "xla":
        return int(
            xla.is_installed()
        )  # of this process; counting those of the machine would start the runtime
    return torch.accelerator.device_count() if default_device().type == device_type else 0


def accelerator_module(device_type: str) -> ModuleType:
    """PyTorch's module for a device type, such as ``torch.cuda``.

    Raises:
        DeviceError: this machine has no such device.
    """
    if device_count(device_type) == 0:
        raise DeviceError(
            f"this machine has no {device_type} device; its accelerator is {default_device().type!r}"
        )
    module: ModuleType = xla if device_type == "xla" else torch.get_device_module(device_type)
    return module


def choose_device(
    topology: Topology, *, cpu: bool, override: str | None = None, use_xla: bool = False
) -> torch.device:
    """The device for the process at ``topology``.

    Args:
        topology: topology of the process; its local rank is the index of its device.
        cpu: use the CPU even if there is an accelerator.
        override: the device to use regardless, from ACCELERATE_TORCH_DEVICE.
        use_xla: use torch_xla's device, unless ``cpu`` or ``override`` is set or torch_tpu is installed.

    Returns:
        ``cpu`` or ``mps`` without an index, other devices with one.

    Raises:
        DeviceError: this node has fewer devices than processes; the message has both numbers.
        ConfigError: ``override`` is not a device.
        NotAvailableError: ``use_xla``, and torch_xla is not installed.
    """
    if override:
        try:
            return torch.device(override)
        except RuntimeError as error:
            raise ConfigError(
                f"environment variable ACCELERATE_TORCH_DEVICE is {override!r}: {error}"
            ) from None
    if use_xla and not cpu and default_device().type != "tpu":
        return xla.xla_device(topology.local_rank, topology.local_world_size)
    kind = torch.device("cpu") if cpu else default_device()
    if kind.type == "cpu":
        return kind
    row = device_backend(kind)
    if row.collectives is None and topology.world_size > 1:
        raise DeviceError(
            f"{topology.world_size} processes were started, but {kind.type} devices cannot communicate with "
            "each other; start one process, or run on the CPU (--cpu, cpu=True or ACCELERATE_USE_CPU=true)"
        )
    return torch.device(kind.type, _device_index(topology, kind.type)) if row.has_index else kind


def _device_index(topology: Topology, kind: str) -> int:
    count = device_count(kind)
    if topology.local_world_size <= count:
        return topology.local_rank
    if count == 1 and topology.launcher in ("flux", "lsf", "mpi", "slurm"):
        return 0  # these schedulers show each process only its own device
    raise DeviceError(
        f"{topology.local_world_size} processes were started on this node, but it has {count} {kind} "
        f"device{'' if count == 1 else 's'}; start at most {count} (--num_processes {count}), or run on the CPU "
        "(--cpu, cpu=True or ACCELERATE_USE_CPU=true)"
    )


def set_current_device(device: torch.device) -> None:
    """Make ``device`` the current device of its type; does nothing where a process has one such device at most."""
    if device.index is not None and device.type not in ("cpu", "meta", "xla"):
        torch.accelerator.set_device_index(device.index)


def choose_collectives(device: torch.device, requested: str | None = None) -> str:
    """The backend string for ``torch.distributed``.

    The default also supports CPU tensors on every device type: ``"gloo"`` on the CPU, ``"cpu:gloo,cuda:nccl"`` on
    CUDA.

    Args:
        device: the device of the process.
        requested: a backend to use instead, such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.

    Raises:
        ConfigError: the requested backend does not exist, is not part of this build of PyTorch, or does not
            support ``device``; the message names one that does.
    """
    row = device_backend(device)
    on_cpu = device.type == "cpu" or row.collectives is None
    default = "gloo" if on_cpu else f"cpu:gloo,{device.type}:{row.collectives}"
    if requested is None:
        return default
    requested = requested.lower()
    mapping = dict(part.split(":", 1) for part in requested.split(",") if ":" in part) or {
        device.type: requested
    }
    for name in mapping.values():
        if name not in dist.Backend.backend_list or not dist.is_backend_available(name):
            raise ConfigError(
                f"the requested backend {requested!r} is not available: this PyTorch has no {name!r}; use "
                f"{default!r}, or leave out backend="
            )
    served = mapping.get(device.type)
    if served is None or device.type not in dist.Backend.backend_capability.get(served, [device.type]):
        raise ConfigError(
            f"the requested backend {requested!r} is not available on {device.type} devices; "
            f"use {default!r}, or leave out backend="
        )
    return requested


def empty_cache() -> None:
    """Release the accelerator memory that PyTorch caches; does nothing without an accelerator."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
