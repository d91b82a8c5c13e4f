"""Copying weights from the host to the device: to an accelerator, or to ordinary memory in its place."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from accel_bigmodel.streaming.host_blocks import HostBlocks, Run
from accel_bigmodel.streaming.slot_layout import SlotLayout
from accel_bigmodel.streaming.types import PendingCopy, Slot, Sources

__all__ = ["AcceleratorTransfer", "HostTransfer"]

# Staging buffers for weights that are not pinned: one is filled while the other is copied from.
_STAGING_SLOTS = 2


class HostTransfer:
    """Ordinary memory as the device and a thread as its copy queue: streaming without an accelerator, as in tests.

    Args:
        before_copy: called in the copy thread with the name of each group before it is copied; it may sleep, to
            simulate a slow device, or raise, to simulate a failing one.
    """

    def __init__(self, before_copy: Callable[[str], None] | None = None) -> None:
        self.device = torch.device("cpu")
        self.host_blocks = HostBlocks()
        self._before_copy = before_copy
        self._seconds = 0.0
        self._thread = _CopyThread()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._before_copy,)

    def host_block(self, nbytes: int) -> memoryview:
        """New memory."""
        return self.host_blocks.add(self.allocate(nbytes))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """New memory."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, name: str, sources: Sources, layout: SlotLayout, slot: Slot) -> PendingCopy:
        """Request a copy from the thread; see ``Transfer``."""
        runs = self.host_blocks.runs(sources, layout)
        return _HostCopy(self._thread.submit(self._copy, name, sources, runs, layout, slot))

    def _copy(
        self, name: str, sources: Sources, runs: list[Run] | None, layout: SlotLayout, slot: Slot
    ) -> None:
        begin = time.perf_counter()
        if self._before_copy is not None:
            self._before_copy(name)
        if runs is None:
            _copy_all(sources, slot.views(layout))
        else:
            _copy_runs(runs, slot)
        self._seconds += time.perf_counter() - begin

    def mark(self, previous: Any) -> None:
        """Do nothing: computation on the CPU is done when the call returns."""

    def seconds(self) -> float:
        """Seconds that finished copies took."""
        return self._seconds

    def close(self) -> None:
        """Wait for requested copies, and end the thread."""
        self._thread.close()


def _copy_all(sources: Sources, targets: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    with torch.inference_mode():  # may write inference tensors and others
        for source, target in zip(sources, targets, strict=True):
            if source is not None:
                target.copy_(source, non_blocking=non_blocking)


def _copy_runs(runs: list[Run], slot: Slot, *, non_blocking: bool = False) -> None:
    for source, begin in runs:
        slot.buffer[begin : begin + source.nbytes].copy_(source, non_blocking=non_blocking)


class _Job:
    """Work for the copy thread. An interrupt of a waiting thread does not affect it."""

    def __init__(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._work: Callable[[], None] | None = partial(work, *args)
        self._unfinished = threading.Lock()
        self._unfinished.acquire()
        self.done = False
        self.failure: BaseException | None = None

    def run(self) -> None:
        work, self._work = self._work, None
        try:
            if work is not None:
                work()
        except BaseException as error:
            self.failure = error
        finally:
            self.done = True
            self._unfinished.release()

    def cancel(self) -> None:
        self._work = None

    def settle(self) -> None:
        while not self.done:
            with self._unfinished:
                pass

    def wait(self) -> None:
        self.settle()
        if self.failure is not None:
            raise self.failure


class _CopyThread:
    """One thread, started when needed, that runs one job after another.

    Not an executor of the standard library: a keyboard interrupt can leave the locks of those held.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[..., None], *args: Any) -> _Job:
        if (
            self._jobs is None or self._thread is None or not self._thread.is_alive()
        ):  # forked processes have none
            jobs: SimpleQueue[_Job | None] = SimpleQueue()
            self._thread = threading.Thread(target=_work_off, args=(jobs,), name="weights", daemon=True)
            self._thread.start()
            weakref.finalize(self, jobs.put, None)
            self._jobs = jobs
        job = _Job(work, args)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        if self._jobs is not None and self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._jobs = self._thread = None


def _work_off(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # otherwise its tensors would live until the next job


class _HostCopy:
    """A copy in the thread."""

    __slots__ = ("_job",)

    def __init__(self, job: _Job) -> None:
        self._job = job

    def ready(self) -> bool:
        return self._job.done

    def wait(self) -> None:
        self._job.wait()

    def settle(self) -> None:
        self._job.settle()

    def cancel(self) -> None:
        self._job.cancel()


class AcceleratorTransfer:
    """Copies to an accelerator on a separate stream, ordered relative to the computation by events.

    Weights in page-locked ("pinned") memory are copied directly: those in a host block with one copy per group, or a
    few. Others are packed by a thread into one of two pinned buffers and sent with one copy, while the next group is
    packed into the other buffer.

    Args:
        device: of any backend that ``torch.accelerator`` supports.
    """

    def __init__(self, device: torch.device | str | int) -> None:
        self.device = torch.device(device)
        self.host_blocks = HostBlocks()
        self._stream: Any = None
        self._thread = _CopyThread()
        self._staging: deque[_Staging] = deque()
        self._timed: deque[tuple[Any, Any]] = deque()
        self._seconds = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.device,)

    # The PyTorch calls that need an accelerator; tests override them with a fake device.

    def _new_stream(self) -> Any:
        return torch.Stream(device=self.device)

    def _new_event(self, *, timed: bool = False) -> Any:
        return torch.Event(device=self.device, enable_timing=timed)

    def _compute_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def _pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def _keep_for(self, stream: Any, memory: torch.Tensor) -> None:
        memory.record_stream(stream)

    def host_block(self, nbytes: int) -> memoryview:
        """New page-locked memory.

        Raises:
            RuntimeError: the system cannot lock more memory.
        """
        with torch.inference_mode(False):
            return self.host_blocks.add(self._pinned(nbytes))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """New memory on the device, from the allocator of the compute stream."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, name: str, sources: Sources, layout: SlotLayout, slot: Slot) -> PendingCopy:
        """Request a copy; see ``Transfer``. Packing, which may have to read files, runs in the thread."""
        if self._stream is None:
            self._stream = self._new_stream()
        done = self._new_event(timed=True)
        runs = self.host_blocks.runs(sources, layout)
        job = self._thread.submit(self._send, sources, runs, layout, slot, slot.views(layout), done)
        return _DeviceCopy(job, done, partial(self._follow, done, slot.buffer))

    def _follow(self, done: Any, memory: torch.Tensor) -> None:
        """Make the computation wait for an event. Its stream may not be the one on which the memory was allocated."""
        stream = self._compute_stream()
        stream.wait_event(done)
        self._keep_for(stream, memory)

    def _send(
        self,
        sources: Sources,
        runs: list[Run] | None,
        layout: SlotLayout,
        slot: Slot,
        targets: list[torch.Tensor],
        done: Any,
    ) -> None:
        begun = self._new_event(timed=True)
        pinned = runs is not None or all(source is None or self._is_pinned(source) for source in sources)
        staging = None if pinned else self._pack(sources, layout)
        # A model may be freed while its last copies run; the memory must not be reused before they end.
        self._keep_for(self._stream, slot.buffer)
        with self._stream:
            if slot.used_until is not None:
                self._stream.wait_event(slot.used_until)
            begun.record(self._stream)
            if runs is not None:
                _copy_runs(runs, slot, non_blocking=True)
            elif staging is None:
                _copy_all(sources, targets, non_blocking=True)
            else:
                # A slot may end with its last tensor, without the padding after it.
                count = min(layout.nbytes, slot.buffer.nbytes)
                slot.buffer[:count].copy_(staging.buffer[:count], non_blocking=True)
                staging.sent = done
            done.record(self._stream)
        self._timed.append((begun, done))
        while self._timed and self._timed[0][1].query():
            self._seconds += _seconds_between(*self._timed.popleft())

    def _pack(self, sources: Sources, layout: SlotLayout) -> _Staging:
        """Put a group's tensors into the pinned buffer that was used least recently."""
        if len(self._staging) < _STAGING_SLOTS:
            self._staging.append(_Staging())
        else:
            self._staging.rotate(-1)
        staging = self._staging[-1]
        if staging.sent is not None:
            staging.sent.synchronize()
        if staging.buffer.nbytes < layout.nbytes:
            staging.buffer = self._pinned(layout.nbytes)
        _copy_all(sources, layout.views(staging.buffer))
        return staging

    def mark(self, previous: Any) -> Any:
        """An event after the work queued on the compute stream so far."""
        event = self._new_event() if previous is None else previous
        event.record(self._compute_stream())
        return event

    def seconds(self) -> float:
        """Seconds that finished copies took on the device."""
        # The thread sums up finished copies before its next one.
        return self._seconds + sum(_seconds_between(*pair) for pair in list(self._timed) if pair[1].query())

    def close(self) -> None:
        """Wait for requested copies, and free thread, stream and pinned buffers."""
        self._thread.close()
        if self._stream is not None:
            self._stream.synchronize()
            self._stream = None
        self._staging.clear()


def _seconds_between(begun: Any, done: Any) -> float:
    return float(begun.elapsed_time(done)) / 1000


class _Staging:
    """A pinned buffer, and the event after the last copy from it."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.sent: Any = None


class _DeviceCopy:
    """A copy on the stream: the thread queues it, then the device executes it."""

    __slots__ = ("_done", "_follow", "_job")

    def __init__(self, job: _Job, done: Any, follow: Callable[[], None]) -> None:
        self._job = job
        self._done = done
        self._follow = follow

    def ready(self) -> bool:
        return self._job.done and bool(self._done.query())

    def wait(self) -> None:
        self._job.wait()
        self._follow()

    def settle(self) -> None:
        self._job.settle()
        # An event that was never recorded, because the copy was cancelled or failed, delays nothing.
        self._follow()

    def cancel(self) -> None:
        self._job.cancel()
