"""A simulated accelerator that is stricter than a real one, for tests on machines without any.

It is torch's PrivateUse1 device. ``SIMULATED_DEVICE=npu:2`` in the environment gives a process two devices of the type
``npu`` as soon as it imports torch, by the entry point ``simulated_device`` in ``torch.backends``; without the variable
nothing happens. The kernels are the CPU's, so results are equal to the CPU's bit for bit, random numbers excepted.

- Operators are queued on the current stream and run late, in a thread of the stream.
- The host cannot touch device memory, nor pinned memory that a copy still needs.
- New memory is full of NaN.
- Two accesses to the same memory without an order between them are an error, with both places, whether or not they met.
- A collective runs on a stream of its own; ``wait()`` lets the current stream wait, not the host.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from testkit.simulated_device.build import BuildError, built

__all__ = ["COLLECTIVES", "METADATA", "VARIABLE", "BuildError", "check", "install", "prepare", "use"]

VARIABLE = "SIMULATED_DEVICE"
METADATA = Path(__file__).with_name("metadata")
"""A folder for ``PYTHONPATH``: torch finds the entry point in it."""

COLLECTIVES = {"npu": "hccl"}
"""Name of the collectives' backend by the type of the device, where others expect a certain one."""
EXTENSION = "simulated_device_extension"


def use(devices: str) -> None:
    """Give this process, and those that it starts, simulated devices such as ``npu:2``.

    Raises:
        ValueError: this is not a type and a number of devices.
        BuildError: the extension cannot be compiled.
    """
    os.environ[VARIABLE] = devices
    os.environ["ACCELERATE_USE_CPU"] = "false"
    folders = [str(Path(__file__).parents[2]), str(METADATA)]
    paths = [*folders, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    sys.path[:] = dict.fromkeys([*sys.path, *folders])
    install()


def prepare() -> None:
    """Compile the extension, if it is not in the cache; that takes minutes.

    Raises:
        BuildError: there is no C++ compiler, or it failed.
    """
    built(EXTENSION)


def check() -> None:
    """Wait for all devices, and raise what no call has raised: an error of a task, or an unordered access.

    Does nothing in a process that has not used a device.

    Raises:
        RuntimeError: there was one.
    """
    extension = sys.modules.get(EXTENSION)
    if extension is None or not extension.used():
        return
    for device in range(extension.device_count()):
        extension.synchronize(device)
    extension.raise_pending()


def _load() -> Any:
    loaded = sys.modules.get(EXTENSION)
    if loaded is None:
        spec = importlib.util.spec_from_file_location(EXTENSION, built(EXTENSION))
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        sys.modules[EXTENSION] = loaded
    return loaded


def _check_at_exit() -> None:
    try:
        check()
    except RuntimeError as error:
        print(f"simulated device: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def install() -> None:
    """Register the device with torch, as ``SIMULATED_DEVICE`` in the environment says; nothing without it.

    Raises:
        ValueError: the variable is not a type and a number of devices.
        BuildError: the extension cannot be compiled.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    kind, _, number = wanted.partition(":")
    if not kind.isidentifier() or not (number or "2").isdigit():
        raise ValueError(f"{VARIABLE} is {wanted!r}; expected a type and a number of devices, such as npu:2")
    import torch  # which may call this function itself

    if EXTENSION in sys.modules:
        return
    from testkit.simulated_device import device_module

    extension = _load()
    extension.register_backend(int(number or 2))
    torch.utils.rename_privateuse1_backend(kind)
    module = device_module.build(kind, extension)
    torch._register_device_module(kind, module)
    sys.modules[f"torch.{kind}"] = module
    torch.utils.generate_methods_for_privateuse1_backend()
    _register_collectives(kind, extension)
    atexit.register(_check_at_exit)


def _register_collectives(kind: str, extension: ModuleType) -> None:
    import torch.distributed as dist

    name = COLLECTIVES.get(kind, f"{kind}_ccl")

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        options._timeout = timeout
        options.global_ranks_in_group = list(
            range(size)
        )  # by which gloo names those of a part that is split off
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("simulated", store), rank, size, options)
        return extension.collectives(gloo, name, timeout.total_seconds())

    dist.Backend.register_backend(name, create, devices=[kind])
