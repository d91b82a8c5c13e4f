"""The module ``torch.<type>`` of the simulated device."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["build"]

Device = torch.device | str | int | None


def build(kind: str, extension: Any) -> types.ModuleType:
    """The module for a type of device; its functions are those of ``torch.cuda`` that generic code of torch calls."""
    module: Any = types.ModuleType(f"torch.{kind}", f"The simulated device, as ``{kind}``.")

    def index(device: Device = None) -> int:
        if device is None:
            return torch.accelerator.current_device_index()
        if isinstance(device, int):
            return device
        device = torch.device(device)
        if device.type != kind:
            raise ValueError(f"Expected a {kind} device, but got: {device}")
        return torch.accelerator.current_device_index() if device.index is None else device.index

    def everywhere() -> range:
        return range(extension.device_count())

    generators = [extension.default_generator(each) for each in range(8)]

    # availability
    module.is_available = lambda: extension.device_count() > 0
    module.is_initialized = lambda: True
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = extension.in_bad_fork
    module.device_count = extension.device_count
    module.is_bf16_supported = lambda including_emulation=True: True
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]
    # devices
    module.device = lambda device: torch.accelerator.device_index(index(device))
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(index(device))
    module._exchange_device = torch._C._accelerator_exchangeDevice
    module._maybe_exchange_device = torch._C._accelerator_maybeExchangeDevice
    module.synchronize = lambda device=None: torch.accelerator.synchronize(index(device))
    module.get_device_name = lambda device=None: f"simulated {kind}"
    module.get_device_properties = lambda device=None: types.SimpleNamespace(
        name=f"simulated {kind}", total_memory=torch.accelerator.get_memory_info(index(device))[1]
    )
    module.get_device_capability = lambda device=None: (0, 0)
    # streams and events
    module.Stream = torch.Stream
    module.Event = torch.Event
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.current_stream = lambda device=None: torch.accelerator.current_stream(index(device))
    module.set_stream = torch.accelerator.set_stream
    module.is_current_stream_capturing = lambda: False
    # random numbers
    module.default_generators = generators
    module.get_rng_state = lambda device=kind: generators[index(device)].get_state()
    module.set_rng_state = lambda state, device=kind: generators[index(device)].set_state(state)
    module.get_rng_state_all = lambda: [generators[each].get_state() for each in everywhere()]

    def set_rng_state_all(states: Sequence[torch.Tensor]) -> None:
        for each, state in enumerate(states):
            generators[each].set_state(state)

    def manual_seed_all(seed: int) -> None:
        for each in everywhere():
            generators[each].manual_seed(int(seed))

    module.set_rng_state_all = set_rng_state_all
    module.manual_seed = lambda seed: generators[index()].manual_seed(int(seed))
    module.manual_seed_all = manual_seed_all
    module.initial_seed = lambda: generators[index()].initial_seed()
    module.seed = lambda: generators[index()].seed()
    # memory
    memory = torch.accelerator
    module.empty_cache = memory.empty_cache
    module.memory_stats = lambda device=None: memory.memory_stats(index(device))
    module.memory_allocated = lambda device=None: memory.memory_allocated(index(device))
    module.max_memory_allocated = lambda device=None: memory.max_memory_allocated(index(device))
    module.memory_reserved = lambda device=None: memory.memory_reserved(index(device))
    module.max_memory_reserved = lambda device=None: memory.max_memory_reserved(index(device))
    module.reset_peak_memory_stats = lambda device=None: memory.reset_peak_memory_stats(index(device))
    module.reset_accumulated_memory_stats = lambda device=None: memory.reset_accumulated_memory_stats(
        index(device)
    )
    module.mem_get_info = lambda device=None: memory.get_memory_info(index(device))
    module.OutOfMemoryError = torch.OutOfMemoryError
    # what only a simulated device has
    module.races = extension.races
    module.forget_races = extension.forget_races
    module.raise_races = extension.raise_races
    module.counts = extension.counts
    module.waiting_operators = extension.waiting_operators
    module.allow_set_data = extension.allow_set_data
    module.set_lateness = extension.set_lateness
    module.set_capacity = lambda size, device=None: extension.set_capacity(index(device), size)
    return module
