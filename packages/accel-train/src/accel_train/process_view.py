"""The part of `Accelerator` that answers for the processes: who this one is, and where code runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel_state.world.process import PartialState

__all__ = ["ProcessView"]


class ProcessView:
    """Facts and decorators of `PartialState`, under the names that `Accelerator` has for them."""

    _process: PartialState

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return self._process.num_processes

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self._process.process_index

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node."""
        return self._process.local_process_index

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._process.device

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self._process.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with an accelerator device."""
        return self._process.use_distributed and self._process.device.type != "cpu"

    @property
    def is_main_process(self) -> bool:
        """True on one process of all."""
        return self._process.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """True on one process of each node."""
        return self._process.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """True on the process with the highest rank."""
        return self._process.is_last_process

    # Where code runs

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: run on the main process only, return None elsewhere."""
        return self._process.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: run on the main process of each node only."""
        return self._process.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: run on the last process only."""
        return self._process.on_last_process(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorator: run on the process with this rank only."""
        return self._process.on_process(function, process_index=process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorator: run on the process with this local rank only, on every node."""
        return self._process.on_local_process(function, local_process_index=local_process_index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Context that the main process enters first; the others follow when it has left."""
        return self._process.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Context that the main process of each node enters first."""
        return self._process.local_main_process_first()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Context with this process's part of a list, tuple, dict, tensor or dataset."""
        return self._process.split_between_processes(inputs, apply_padding=apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node."""
        self._process.print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Wait until every process got here."""
        self._process.wait_for_everyone()
