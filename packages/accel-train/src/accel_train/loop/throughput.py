"""Throughput of training: items per second, time per step, memory, model FLOPs utilisation."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from accel_state.log import get_logger
from accel_state.operations.collectives import gather_object
from accel_train.errors import ArgumentTypeError, OptionError
from accel_train.loop.device_peaks import peak_flops
from accel_train.precision.registry import PRECISIONS
from accel_train.ranks import Ranks

__all__ = ["Throughput", "ThroughputMeter"]

_logger = get_logger(__name__)


class _Losses(Protocol):
    @property
    def loss(self) -> Ranks: ...


class _Training(Protocol):
    """What is asked of an `Accelerator`."""

    @property
    def sync_gradients(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def mixed_precision(self) -> str: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def strategy(self) -> _Losses: ...


@dataclass(frozen=True, slots=True)
class Throughput:
    """The readings of a `ThroughputMeter`, of one rank or of all.

    Attributes:
        items: items processed since the meter was created.
        steps: optimizer steps since then.
        items_per_second: over the last steps; None before the first interval between two steps.
        items_per_second_overall: over all steps but those of the warm-up; None before the first of them.
        step_seconds: mean seconds per step over the last steps.
        peak_memory: the most bytes that torch's allocator held on the device; of several ranks the largest. None if
            the device does not count them.
        mfu: model FLOPs utilisation over the last steps, 0 to 1; None if the FLOPs per item or the device's peak are
            not known.
    """

    items: int
    steps: int
    items_per_second: float | None
    items_per_second_overall: float | None
    step_seconds: float | None
    peak_memory: int | None
    mfu: float | None


class ThroughputMeter:
    """Measures items per second, step time, memory and model FLOPs utilisation (MFU) of a training loop.

    Call `update` after each micro-batch. It stores two numbers in a ring buffer: it allocates nothing that stays, and
    waits neither for the device nor for other ranks. Times are those of the host, which runs ahead of a device by a few
    steps at most, so they are right over a window and not for one step.

    Args:
        accelerator: its `sync_gradients` shows which micro-batch ends a step; device and precision select the peak.
        unit: name of an item, such as "tokens"; part of the names in `values()`.
        window: number of steps that the current figures cover.
        warmup: steps at the beginning that the overall figure leaves out, since they compile and allocate.
        flops_per_item: FLOPs of forward and backward for one item, as `flops_per_token` or `measured_flops` count them.
        peak: FLOPs per second of one device; None: from `DEVICE_PEAKS`, by name of the device and precision.
        precision: the precision to take the peak of; None: `accelerator.mixed_precision`. A model whose parameters are
            bfloat16 computes in "bf16" whatever that says.
        clock: seconds, for tests.

    Raises:
        OptionError: the window is below 1, the warm-up is negative, FLOPs or peak are not positive, or the precision is
            unknown.
    """

    def __init__(
        self,
        accelerator: _Training,
        *,
        unit: str = "tokens",
        window: int = 50,
        warmup: int = 1,
        flops_per_item: float | None = None,
        peak: float | None = None,
        precision: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if window < 1 or warmup < 0:
            raise OptionError(
                f"ThroughputMeter(window={window}, warmup={warmup}): window must be at least 1 and warmup at least 0."
            )
        for name, value in (("flops_per_item", flops_per_item), ("peak", peak)):
            if value is not None and not value > 0:
                raise OptionError(
                    f"ThroughputMeter({name}={value!r}): expected a positive number, or None if not known."
                )
        if precision is not None and precision not in PRECISIONS.names():
            raise OptionError(
                f"ThroughputMeter(precision={precision!r}) is none of {', '.join(PRECISIONS.names())}."
            )
        self.unit = unit
        self.flops_per_item = flops_per_item
        self._accelerator = accelerator
        self._warmup = warmup
        self._size = window + 1  # boundaries of so many steps
        self._clock = clock
        self._peak = peak if peak is not None else self._known_peak(precision)
        self._told = False
        self._times = array("d", [0.0]) * self._size
        self._counts = array("q", [0]) * self._size  # items counted on the host until then
        self._items = 0
        self._on_device: _DeviceCount | None = None
        self._paused = 0.0  # seconds
        self._pauses = 0  # how many are entered
        self._pause_began = 0.0
        self.steps = 0
        self._since = clock()  # when the steps that count for the overall figure began
        self._before = 0  # items before that
        self._times[0] = self._since

    def update(self, items: int | Tensor) -> None:
        """Record a finished micro-batch; call it after `optimizer.step()`, inside or after `accumulate()`.

        Args:
            items: how many this rank processed: a number, or a tensor of one whole number, which stays on its device
                until `values` is called. Items are counted as `backward(num_items=…)` counts them: ranks that share
                samples by tensor parallelism all pass the same number, ranks that share a sequence the number of their
                part.

        Raises:
            ArgumentTypeError: `items` is not a whole number.
            OptionError: `items` is negative.
        """
        if isinstance(items, Tensor):
            if self._on_device is None:
                self._on_device = _DeviceCount(self._size, items)
            self._on_device.total.add_(items.detach())
        elif isinstance(items, int):
            if items < 0:
                raise OptionError(
                    f"ThroughputMeter.update(items={items}): the number of items must not be negative."
                )
            self._items += items
        else:
            raise ArgumentTypeError(
                f"ThroughputMeter.update() takes the number of items, an int or a tensor, got {type(items).__name__}."
            )
        if self._accelerator.sync_gradients:
            self._step()

    def _step(self) -> None:
        self.steps = steps = self.steps + 1
        now = self._now()
        slot = steps % self._size
        self._times[slot] = now
        self._counts[slot] = self._items
        if self._on_device is not None:
            self._on_device.mark(slot)
        if steps == self._warmup:
            self._since, self._before = now, self._items
            if self._on_device is not None:
                self._on_device.mark_warm()

    def _now(self) -> float:
        return (self._pause_began if self._pauses else self._clock()) - self._paused

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time does not count: evaluation, saving. On a device, wait for the device before it ends."""
        if not self._pauses:
            self._pause_began = self._clock()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._paused += self._clock() - self._pause_began

    # Reading

    def read(self, *, all_ranks: bool = False) -> Throughput:
        """Return the current readings. Waits for the device if items were passed as tensors.

        Args:
            all_ranks: read all ranks together, by one collective that all ranks must call. Items are summed over ranks
                that have different items, and divided by the time of the slowest rank.
        """
        own = self._own()
        ranks = self._accelerator.strategy.loss
        world = self._accelerator.num_processes
        if not all_ranks or world == 1:
            # Ranks that have the same items compute them together.
            return self._figures(own, devices=world / ranks.size, peaks=self._peak_or_tell() or 0.0)
        rows: list[list[float]] = gather_object([[*own, self._peak_or_tell() or 0.0]])
        first = {ranks.index_of.index(index) for index in range(ranks.size)}
        counted = [row for rank, row in enumerate(rows) if rank in first]
        together = _Own(
            items=sum(row[0] for row in counted),
            window_items=sum(row[1] for row in counted),
            window_seconds=max(row[2] for row in rows),
            window_steps=max(row[3] for row in rows),
            overall_items=sum(row[4] for row in counted),
            overall_seconds=max(row[5] for row in rows),
            memory=max(row[6] for row in rows),
        )
        peaks = [row[7] for row in rows]
        return self._figures(together, devices=1, peaks=sum(peaks) if all(peaks) else 0.0)

    def values(self, *, all_ranks: bool = False) -> dict[str, float]:
        """Return the readings that are known, by name, as `accelerator.log` takes them; see `read`.

        Names are ``tokens``, ``tokens_per_second``, ``tokens_per_second_overall``, ``step_seconds``,
        ``peak_memory_bytes`` and ``mfu``, with the meter's unit in place of ``tokens``.
        """
        read = self.read(all_ranks=all_ranks)
        named = {
            self.unit: read.items,
            f"{self.unit}_per_second": read.items_per_second,
            f"{self.unit}_per_second_overall": read.items_per_second_overall,
            "step_seconds": read.step_seconds,
            "peak_memory_bytes": read.peak_memory,
            "mfu": read.mfu,
        }
        return {name: value for name, value in named.items() if value is not None}

    def _own(self) -> _Own:
        steps, newest = self.steps, self.steps % self._size
        behind = min(steps, self._size - 1)
        oldest = (steps - behind) % self._size
        device = [0, 0, 0, 0] if self._on_device is None else self._on_device.read(newest, oldest)
        total, at_newest, at_oldest, warm = device
        seconds = self._times[newest] - self._times[oldest]
        counted = steps > self._warmup
        return _Own(
            items=self._items + total,
            window_items=self._counts[newest] - self._counts[oldest] + at_newest - at_oldest,
            window_seconds=seconds if behind else 0.0,
            window_steps=behind,
            overall_items=self._counts[newest] + at_newest - self._before - warm if counted else 0,
            overall_seconds=self._times[newest] - self._since if counted else 0.0,
            memory=_peak_memory(self._accelerator.device),
        )

    def _figures(self, own: _Own, *, devices: float, peaks: float) -> Throughput:
        rate = own.window_items / own.window_seconds if own.window_seconds > 0 else None
        mfu = None
        if rate is not None and self.flops_per_item is not None and peaks:
            mfu = rate * self.flops_per_item / (devices * peaks)
        return Throughput(
            items=int(own.items),
            steps=self.steps,
            items_per_second=rate,
            items_per_second_overall=own.overall_items / own.overall_seconds
            if own.overall_seconds > 0
            else None,
            step_seconds=own.window_seconds / own.window_steps if own.window_steps else None,
            peak_memory=int(own.memory) if own.memory >= 0 else None,
            mfu=mfu,
        )

    # The peak

    def _known_peak(self, precision: str | None) -> float | None:
        self._device_name = _name_of(self._accelerator.device)
        self._precision = precision or self._accelerator.mixed_precision
        return peak_flops(self._device_name, self._precision)

    def _peak_or_tell(self) -> float | None:
        if self._peak is None and self.flops_per_item is not None and not self._told:
            self._told = True
            _logger.warning(
                f"No model FLOPs utilisation: the peak of {self._device_name!r} in precision {self._precision!r} is "
                "not known. Pass ThroughputMeter(peak=…), in FLOPs per second of one device."
            )
        return self._peak


@dataclass(frozen=True, slots=True)
class _Own:
    """What one rank has counted, or all together; memory below 0 is not known."""

    items: float
    window_items: float
    window_seconds: float
    window_steps: float
    overall_items: float
    overall_seconds: float
    memory: float

    def __iter__(self) -> Iterator[float]:
        yield from (self.items, self.window_items, self.window_seconds, float(self.window_steps))
        yield from (self.overall_items, self.overall_seconds, self.memory)


class _DeviceCount:
    """Items that are known on a device: their sum, and what it was at the last steps."""

    def __init__(self, size: int, like: Tensor) -> None:
        self.total = torch.zeros((), dtype=torch.int64, device=like.device)
        self._marks = torch.zeros(
            size + 1, dtype=torch.int64, device=like.device
        )  # the last one: after the warm-up
        self._views = list(self._marks.unbind())  # made once, so that a step makes none

    def mark(self, slot: int) -> None:
        self._views[slot].copy_(self.total)

    def mark_warm(self) -> None:
        self._views[-1].copy_(self.total)

    def read(self, newest: int, oldest: int) -> list[int]:
        values: list[int] = torch.cat([self.total.reshape(1), self._marks]).tolist()
        return [values[0], values[1 + newest], values[1 + oldest], values[-1]]


def _name_of(device: torch.device) -> str:
    """The name of a device; the type where torch knows no name."""
    backend = getattr(torch, device.type, None)
    named = getattr(backend, "get_device_name", None)
    return str(named(device)) if callable(named) else device.type


def _peak_memory(device: torch.device) -> float:
    """Bytes that the allocator held at most since its statistics were reset; -1 where it does not count."""
    counts = getattr(getattr(torch, device.type, None), "max_memory_allocated", None)
    return float(counts(device)) if callable(counts) else -1.0
