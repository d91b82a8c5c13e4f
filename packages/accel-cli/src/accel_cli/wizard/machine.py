"""Facts about this machine for the questions, found without torch."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from accel_state.config.strategies import installed_strategies
from accel_state.errors import DeviceError
from accel_state.host.nvidia import describe_gpus
from accel_state.launching.hardware import Accelerators, find_accelerators, physical_cores

__all__ = ["ENGINES", "Machine", "describe", "describe_accelerators", "detect"]

ENGINES: Mapping[str, tuple[str, ...]] = {
    "DeepSpeed": ("deepspeed",),
    **{
        each.title: tuple(package.name for package in each.packages)
        for each in installed_strategies()
        if each.packages
    },
    "TransformerEngine": ("transformer-engine", "transformer_engine"),
    "torchao": ("torchao",),
    "torch_xla": ("torch_xla",),
    "SageMaker SDK": ("sagemaker",),
}
"""Optional engines, and the distributions that they come from."""

_KINDS = {
    "cuda": "NVIDIA GPU",
    "rocm": "AMD GPU",
    "xpu": "Intel GPU",
    "npu": "Ascend NPU",
    "hpu": "Gaudi HPU",
}
"""Kinds of accelerators, as people call them."""


@dataclass(frozen=True)
class Machine:
    """This machine.

    Attributes:
        host: its name.
        cores: physical CPU cores that processes may use.
        numa_nodes: memory nodes of the CPU.
        accelerators: kind and number of its accelerators.
        devices: name and memory in bytes of each accelerator, as far as a tool reports them.
        unknown: why names are unknown; empty if they are known.
        engines: installed engine to its version.
        torch: version of torch.
    """

    host: str = "localhost"
    cores: int = 1
    numa_nodes: int = 1
    accelerators: Accelerators = field(default_factory=Accelerators)
    devices: tuple[tuple[str, int], ...] = ()
    unknown: str = ""
    engines: Mapping[str, str] = field(default_factory=dict)
    torch: str = ""


def detect(environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Look at this machine.

    Args:
        environ: the environment of the processes that will run.
        root: root of the file system; other than ``/`` in tests only.

    Raises:
        ConfigError: a variable that counts devices has an invalid value.
    """
    from accel_state.host.versions import installed_version, torch_version

    accelerators = find_accelerators(environ, root)
    devices: tuple[tuple[str, int], ...] = ()
    unknown = ""
    if accelerators.kind == "cuda":
        try:
            devices = tuple(describe_gpus())
        except DeviceError as error:
            unknown = f"names unknown: {str(error).partition(';')[0]}"
    versions = {name: installed_version(*places) for name, places in ENGINES.items()}
    return Machine(
        host=platform.node() or "localhost",
        cores=physical_cores(root),
        numa_nodes=_numa_nodes(root),
        accelerators=accelerators,
        devices=devices,
        unknown=unknown,
        engines={name: str(version) for name, version in versions.items() if version is not None},
        torch=str(torch_version),
    )


def describe(machine: Machine) -> list[str]:
    """The machine in two lines: hardware, and engines."""
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    nodes = f"{machine.numa_nodes} NUMA nodes" if machine.numa_nodes > 1 else "1 NUMA node"
    installed = ["torch " + machine.torch, *(f"{name} {found}" for name, found in machine.engines.items())]
    missing = [name for name in ENGINES if name not in machine.engines]
    return [
        f"{machine.host}: {cores}, {nodes}, {describe_accelerators(machine)}",
        ", ".join(installed) + (f"; not installed: {', '.join(missing)}" if missing else ""),
    ]


def describe_accelerators(machine: Machine) -> str:
    """Number, name and memory of the accelerators, such as ``2 x NVIDIA H100 (80 GB each)``."""
    found = machine.accelerators
    if not found.present:
        return "no accelerator"
    names = dict.fromkeys(machine.devices)
    if names:
        text = ", ".join(
            f"{machine.devices.count(device)} x {device[0]}"
            + _memory(device[1], machine.devices.count(device))
            for device in names
        )
    else:
        text = f"{found.present} {_KINDS.get(found.kind, found.kind + ' device')}{'s' if found.present > 1 else ''}"
        text += f" ({machine.unknown})" if machine.unknown else ""
    hidden = found.count < found.present
    return f"{text}, of which {found.visibility} leaves {found.count} visible" if hidden else text


def _memory(size: int, devices: int) -> str:
    each = " each" if devices > 1 else ""
    return f" ({size / 1e9:.0f} GB{each})" if size else ""


def _numa_nodes(root: Path) -> int:
    folder = root / "sys/devices/system/node"
    if not folder.exists():
        return 1
    return max(1, sum(1 for entry in folder.iterdir() if re.fullmatch(r"node\d+", entry.name)))
