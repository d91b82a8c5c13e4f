"""Seeds and RNG states of Python, NumPy, PyTorch and accelerators."""

from __future__ import annotations

import hashlib
import operator
import random
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from accel_state import environment
from accel_state.clusters.topology import detect
from accel_state.enums import RNGType
from accel_state.errors import ConfigError, StateError
from accel_state.host import xla
from accel_state.host.devices import accelerator_module, default_device, device_backend, device_count
from accel_state.messages import first_line, warn
from accel_state.operations.collectives import broadcast
from accel_state.world.process import PartialState, current_state

__all__ = [
    "check_generator_states",
    "check_rng_state",
    "derive_rng_state",
    "get_rng_state",
    "numpy_state",
    "numpy_state_tree",
    "python_state",
    "python_state_tree",
    "set_rng_state",
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]

# left, seeded, next, and whether a normal number is kept, in at::CPUGeneratorImplState of
# https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/CPUGeneratorImpl.cpp
_GENERATOR = struct.Struct("<8xiiQ5028xB3x")
_MAX_SEED = 2**32 - 1  # NumPy's limit, the narrowest of all


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the global generators of ``random``, NumPy, PyTorch and all its devices.

    Args:
        seed: from 0 to 2**32 - 1, NumPy's range.
        device_specific: add the rank, so that every process draws different numbers. Also works before the
            process group exists.
        deterministic: also make PyTorch raise for operations without a deterministic implementation.

    Raises:
        ConfigError: the seed is out of range.
    """
    offset = _rank() if device_specific else 0
    value = seed + offset
    if not 0 <= value <= _MAX_SEED:
        raise ConfigError(
            f"seed {seed}{f' + rank {offset}' if offset else ''} is not between 0 and {_MAX_SEED}"
        )
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)  # seeds every device too, but for XLA's
    if any(device.type == "xla" for device in _devices()):
        xla.manual_seed(value)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _rank() -> int:
    """This process's rank; read from the environment if no process state exists yet."""
    state = current_state()
    return detect(environment.snapshot()).rank if state is None else state.process_index


def synchronize_rng_state(
    rng_type: RNGType | str | None = None, generator: torch.Generator | None = None
) -> None:
    """Copy rank 0's state of one random number generator to all ranks. A collective.

    Args:
        rng_type: ``torch`` (CPU), a device type such as ``cuda``, or ``generator``.
        generator: the generator for type ``generator``; it is set in place.

    Raises:
        ConfigError: the type is unknown, or ``generator`` is required and not given.
        DeviceError: there is no device of this type.
    """
    read, write = _accessors(rng_type, generator)
    if PartialState().use_distributed:
        write(broadcast(read()))


def synchronize_rng_states(
    rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None
) -> None:
    """Copy rank 0's states of several generators to all ranks; see ``synchronize_rng_state``."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def _accessors(
    rng_type: RNGType | str | None, generator: torch.Generator | None
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]:
    if rng_type not in RNGType:
        raise ConfigError(
            f"{rng_type!r} is not a type of random number generator; use one of {RNGType.list()}"
        )
    kind = RNGType(rng_type)
    if kind is RNGType.TORCH:
        return torch.get_rng_state, torch.set_rng_state
    if kind is RNGType.GENERATOR:
        if generator is None:
            raise ConfigError("the type 'generator' needs a torch.Generator; pass it as generator=")
        return generator.get_state, generator.set_state
    module = accelerator_module(kind.value)
    return module.get_rng_state, module.set_rng_state


def get_rng_state() -> dict[str, Any]:
    """The states of all global generators of this process, as a tree of tensors and plain data.

    Returns:
        ``python``, ``numpy`` and ``torch`` (uint8), and if there is an accelerator ``device``: its ``type``
        and ``states``, of all its devices in a world of one, else of this process's device.
    """
    state: dict[str, Any] = {
        "python": python_state_tree(random.getstate()),
        "numpy": numpy_state_tree(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }
    devices = _devices()
    if devices:
        module = accelerator_module(devices[0].type)
        state["device"] = {
            "type": devices[0].type,
            "states": [module.get_rng_state(*_index(device)) for device in devices],
        }
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore, bit for bit, the state that ``get_rng_state`` returned.

    Raises:
        StateError: a part is missing or does not match this machine; nothing is changed.
    """
    _setter(state)()


def check_rng_state(state: Mapping[str, Any]) -> None:
    """Check that ``set_rng_state`` can restore a state; changes nothing.

    Raises:
        StateError: as ``set_rng_state``.
    """
    _setter(state)


def _setter(state: Mapping[str, Any]) -> Callable[[], None]:
    missing = {"python", "numpy", "torch"} - set(state)
    if missing:
        raise StateError(
            f"the RNG state lacks {', '.join(sorted(missing))}; it does not come from get_rng_state()"
        )
    template = np.random.get_state(legacy=False)
    kind = state["numpy"].get("bit_generator") if isinstance(state["numpy"], Mapping) else None
    if kind != template["bit_generator"]:
        raise StateError(
            f"the saved random state of NumPy is of {kind!r}, but the global generator is "
            f"{template['bit_generator']!r}; set that first with numpy.random.set_bit_generator"
        )
    set_devices = _device_setter(state.get("device"))
    for_python, for_numpy = _tried(state, template)

    def write() -> None:
        random.setstate(for_python)
        np.random.set_state(for_numpy)
        torch.set_rng_state(state["torch"])
        set_devices()

    return write


def _tried(state: Mapping[str, Any], template: Mapping[str, Any]) -> tuple[Any, Any]:
    """Try all states on separate generators first; returns the states for Python and NumPy."""
    try:
        for_python, for_numpy = python_state(state["python"]), numpy_state(state["numpy"], template)
        random.Random().setstate(for_python)
        if not 0 <= int(for_numpy["has_gauss"]) <= 1:
            raise ValueError("has_gauss of NumPy is neither 0 nor 1")
        np.random.RandomState(getattr(np.random, template["bit_generator"])()).set_state(for_numpy)
        torch.Generator().set_state(state["torch"])
        check_generator_states(state["torch"])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(
            f"the random state cannot be restored: {first_line(error)}; nothing was changed. It is damaged, or does "
            "not come from get_rng_state()"
        ) from error
    return for_python, for_numpy


def derive_rng_state(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """A state for a rank without a saved one, such as a new rank in a larger world.

    Equal for equal arguments, and different for every rank. The global generators are not changed.

    Args:
        state: the result of ``get_rng_state`` on another rank.
        rank: the rank that gets the new state.
    """
    digest = hashlib.sha256(state["torch"].cpu().numpy().tobytes() + b"rank %d" % rank).digest()
    now = get_rng_state()
    try:
        set_seed(int.from_bytes(digest[:4], "big"))
        return get_rng_state()
    finally:
        set_rng_state(now)


def _device_setter(saved: Mapping[str, Any] | None) -> Callable[[], None]:
    devices = _devices()
    here = devices[0].type if devices else None
    there = None if saved is None else saved["type"]
    if {here, there} == {"xla", None}:
        return lambda: None  # states move between XLA and the CPU: the device's generator stays as it is
    if here != there:
        raise StateError(
            f"the random state was saved {f'on {there}' if there else 'without an accelerator'}, but this process "
            f"runs {f'on {here}' if here else 'without one'}, so it cannot be continued exactly; resume on the same "
            "kind of device, or leave the random state out"
        )
    if saved is None:
        return lambda: None
    states = saved["states"]
    module = accelerator_module(devices[0].type)
    for device, value in zip(devices, states, strict=False):
        known = module.get_rng_state(*_index(device))
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (known.shape, known.dtype):
            found = (
                f"{tuple(value.shape)} of {value.dtype}"
                if isinstance(value, torch.Tensor)
                else repr(value)[:80]
            )
            raise StateError(
                f"the random state of {device} is {found}, where {tuple(known.shape)} of {known.dtype} was expected; "
                "nothing was changed. It is damaged, or of another kind of device"
            )
    process = current_state()
    # A rank has one device, and the first state is that device's; a single process may have computed on all devices.
    is_alone = process is None or not process.use_distributed

    def write() -> None:
        if is_alone and len(states) > len(devices):
            warn(
                f"The random state is that of {len(states)} {here} devices, but this process has {len(devices)}: the "
                "random numbers of the other devices are not continued.",
            )
        for device, value in zip(devices, states, strict=False):
            module.set_rng_state(value, *_index(device))

    return write


def _devices() -> list[torch.device]:
    """The accelerators whose RNG states belong to this process."""
    state = current_state()
    if state is not None:
        if state.device.type == "cpu" or state.use_distributed:
            return [] if state.device.type == "cpu" else [state.device]
        kind = state.device.type
    else:
        kind = default_device().type
    if kind == "cpu":
        return []
    if not device_backend(torch.device(kind)).has_index:
        return [torch.device(kind)]
    return [torch.device(kind, index) for index in range(device_count(kind))]


def _index(device: torch.device) -> tuple[()] | tuple[torch.device]:
    """The device argument of PyTorch's functions; empty for device types with a single device."""
    return () if device.index is None else (device,)


def python_state_tree(state: tuple[Any, ...]) -> dict[str, Any]:
    """The result of ``random.getstate()`` as a tree of tensors and plain data."""
    version, internal, gauss = state
    return {
        "version": version,
        "internal": torch.tensor(internal, dtype=torch.int64, device="cpu"),
        "gauss": gauss,
    }


def python_state(tree: Mapping[str, Any]) -> tuple[Any, ...]:
    """The inverse of ``python_state_tree``."""
    internal = tuple(map(int, tree["internal"].tolist()))
    return int(tree["version"]), internal, tree["gauss"]


def check_generator_states(tree: Any) -> None:
    """Refuse states of torch's generator on the CPU, anywhere in a tree, that it would not check itself.

    It reads `left` words from `next` on before it makes new ones, wherever that is: from memory behind its own.

    Raises:
        ValueError: a state has numbers that no generator has.
    """
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif (
            isinstance(value, torch.Tensor)
            and value.dtype == torch.uint8
            and value.numel() == _GENERATOR.size
        ):
            left, seeded, following, has_normal = _GENERATOR.unpack(bytes(value.tolist()))
            if not (seeded == 1 and 1 <= left <= 624 and following <= 625 - left and has_normal <= 1):
                raise ValueError(f"torch's generator has {left} words left after number {following} of 624")


def numpy_state_tree(node: Any) -> Any:
    """The state of a NumPy bit generator (a dictionary), as a tree of tensors and plain data."""
    if isinstance(node, dict):
        return {key: numpy_state_tree(value) for key, value in node.items()}
    if isinstance(node, np.ndarray):  # unsigned words; int64 holds the same bits and every file format has it
        wide = node.view(np.int64) if node.dtype.itemsize == 8 else node.astype(np.int64)
        return torch.from_numpy(wide.copy())
    return node.item() if isinstance(node, np.generic) else node


def numpy_state(node: Any, template: Any) -> Any:
    """The inverse of ``numpy_state_tree``; `template` is a state of the same type of bit generator."""
    if isinstance(template, dict):
        found = {key: numpy_state(node[key], value) for key, value in template.items()}
        # NumPy reads the words of a Mersenne twister from this position, wherever it is.
        if "pos" in found and not 0 <= operator.index(found["pos"]) <= len(found["key"]):
            raise ValueError(f"the position {found['pos']} is outside of the {len(found['key'])} words")
        return found
    if isinstance(template, np.ndarray):
        wide = node.numpy()
        if wide.shape != template.shape or wide.dtype != np.int64:
            raise ValueError(
                f"words of shape {wide.shape} and {wide.dtype}, where {template.shape} were expected"
            )
        return wide.view(template.dtype) if template.dtype.itemsize == 8 else wide.astype(template.dtype)
    return node
