"""The module ``torch.<type>`` of the simulated device."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["build"]

Device = torch.device | str | int | None


def build(kind: str, extension: Any) -> types.ModuleType:
    """The module for a type of device; its functions are those of ``torch.cuda`` that generic code of torch calls."""
    module = types.ModuleType(f"torch.{kind}", f"The simulated device, as ``{kind}``.")
    for name, value in vars(_DeviceModule(kind, extension)).items():
        setattr(module, name, value)
    return module


class _DeviceModule:
    def __init__(self, kind: str, extension: Any) -> None:
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

        class DeviceContext:
            def __init__(self, device: Any) -> None:
                self.index = index(device)
                self.before = -1

            def __enter__(self) -> None:
                self.before = torch.accelerator.current_device_index()
                torch.accelerator.set_device_index(self.index)

            def __exit__(self, *exc_info: object) -> None:
                torch.accelerator.set_device_index(self.before)

        class StreamContext:
            def __init__(self, stream: torch.Stream | None) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                if self.stream is not None:
                    self.stream.__enter__()

            def __exit__(self, *exc_info: Any) -> None:
                if self.stream is not None:
                    self.stream.__exit__(*exc_info)

        generators = [extension.default_generator(each) for each in range(8)]

        # availability
        self.is_available = lambda: extension.device_count() > 0
        self.is_initialized = lambda: True
        self.init = self._lazy_init = lambda: None
        self._is_in_bad_fork = extension.in_bad_fork
        self.device_count = extension.device_count
        self.is_bf16_supported = lambda including_emulation=True: True
        self.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]
        # devices
        self.device = DeviceContext
        self.current_device = torch.accelerator.current_device_index
        self.set_device = lambda device: torch.accelerator.set_device_index(index(device))
        self._exchange_device = torch._C._accelerator_exchangeDevice
        self._maybe_exchange_device = torch._C._accelerator_maybeExchangeDevice
        self.synchronize = lambda device=None: torch.accelerator.synchronize(index(device))
        self.get_device_name = lambda device=None: f"simulated {kind}"
        self.get_device_properties = lambda device=None: types.SimpleNamespace(
            name=f"simulated {kind}", total_memory=torch.accelerator.get_memory_info(index(device))[1]
        )
        self.get_device_capability = lambda device=None: (0, 0)
        # streams and events
        self.Stream = torch.Stream
        self.Event = torch.Event
        self.stream = StreamContext
        self.current_stream = lambda device=None: torch.accelerator.current_stream(index(device))
        self.set_stream = torch.accelerator.set_stream
        self.is_current_stream_capturing = lambda: False
        # random numbers
        self.default_generators = generators
        self.get_rng_state = lambda device=kind: generators[index(device)].get_state()
        self.set_rng_state = lambda state, device=kind: generators[index(device)].set_state(state)
        self.get_rng_state_all = lambda: [generators[each].get_state() for each in everywhere()]

        def set_rng_state_all(states: Sequence[torch.Tensor]) -> None:
            for each, state in enumerate(states):
                generators[each].set_state(state)

        def manual_seed_all(seed: int) -> None:
            for each in everywhere():
                generators[each].manual_seed(int(seed))

        self.set_rng_state_all = set_rng_state_all
        self.manual_seed = lambda seed: generators[index()].manual_seed(int(seed))
        self.manual_seed_all = manual_seed_all
        self.initial_seed = lambda: generators[index()].initial_seed()
        self.seed = lambda: generators[index()].seed()
        # memory
        memory = torch.accelerator
        self.empty_cache = memory.empty_cache
        self.memory_stats = lambda device=None: memory.memory_stats(index(device))
        self.memory_allocated = lambda device=None: memory.memory_allocated(index(device))
        self.max_memory_allocated = lambda device=None: memory.max_memory_allocated(index(device))
        self.memory_reserved = lambda device=None: memory.memory_reserved(index(device))
        self.max_memory_reserved = lambda device=None: memory.max_memory_reserved(index(device))
        self.reset_peak_memory_stats = lambda device=None: memory.reset_peak_memory_stats(index(device))
        self.reset_accumulated_memory_stats = lambda device=None: memory.reset_accumulated_memory_stats(
            index(device)
        )
        self.mem_get_info = lambda device=None: memory.get_memory_info(index(device))
        self.OutOfMemoryError = torch.OutOfMemoryError
        # what only a simulated device has
        self.races = extension.races
        self.forget_races = extension.forget_races
        self.raise_races = extension.raise_races
        self.counts = extension.counts
        self.waiting_operators = extension.waiting_operators
        self.allow_set_data = extension.allow_set_data
        self.set_lateness = extension.set_lateness
        self.set_capacity = lambda size, device=None: extension.set_capacity(index(device), size)
