"""How weights get from the host to the device: the seam between the streaming engine and hardware."""

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
from accel_bigmodel.streaming.types import Pending, Slot, Sources

__all__ = ["AcceleratorTransfer", "HostTransfer"]

# Buffers through which weights pass that are not pinned: one is filled while the other is sent.
_STAGING_SLOTS = 2


class HostTransfer:
    """Ordinary memory as the device, a thread as its copy queue: the engine without an accelerator, as in tests.

    Args:
        before_copy: called in the copy thread with the name of each group before it is copied; it may sleep, for
            a slow device, or raise, for a broken one.
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

    def copy(self, name: str, sources: Sources, layout: SlotLayout, slot: Slot) -> Pending:
        """Ask the thread for a copy; see ``Transfer``."""
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
        """Nothing: what was asked of the processor is done when the call returns."""

    def seconds(self) -> float:
        """Seconds that finished copies took."""
        return self._seconds

    def close(self) -> None:
        """Wait for what was asked for, and end the thread."""
        self._thread.close()


def _copy_all(sources: Sources, targets: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    with torch.inference_mode():  # which may write tensors of either kind
        for source, target in zip(sources, targets, strict=True):
            if source is not None:
                target.copy_(source, non_blocking=non_blocking)


def _copy_runs(runs: list[Run], slot: Slot, *, non_blocking: bool = False) -> None:
    for source, begin in runs:
        slot.buffer[begin : begin + source.nbytes].copy_(source, non_blocking=non_blocking)


class _Job:
    """Work for the copy thread. An interrupt of the thread that waits leaves it as it is."""

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
    """One thread, started when it is needed, that does one job after the other.

    Not an executor of the standard library: an interrupt from the keyboard can leave the locks of these taken.
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
        del job  # or what it copied would live until the next one


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
    """Copies to an accelerator on a stream of their own, ordered against the computation by events.

    Weights in page-locked memory ("pinned") are sent as they are: those in a host block by one copy per group, or few.
    Others are packed into one of two pinned buffers by a thread, and sent by one copy; meanwhile the next group is
    packed into the other one.

    Args:
        device: of any backend that ``torch.accelerator`` knows.
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

    # What of PyTorch differs from one backend to another; tests put a fake device here.

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
            RuntimeError: the system locks no more.
        """
        with torch.inference_mode(False):
            return self.host_blocks.add(self._pinned(nbytes))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """New memory on the device, of the allocator of the computing stream."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, name: str, sources: Sources, layout: SlotLayout, slot: Slot) -> Pending:
        """Ask for a copy; see ``Transfer``. Packing, which may have to read files, is the thread's work."""
        if self._stream is None:
            self._stream = self._new_stream()
        done = self._new_event(timed=True)
        runs = self.host_blocks.runs(sources, layout)
        job = self._thread.submit(self._send, sources, runs, layout, slot, slot.views(layout), done)
        return _DeviceCopy(job, done, partial(self._follow, done, slot.buffer))

    def _follow(self, done: Any, memory: torch.Tensor) -> None:
        """Let the computation go on behind an event. It may be on another stream than when the memory was allocated."""
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
        # A model may be forgotten while its last copies run; the memory must not go to others before.
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
                count = layout.nbytes
                slot.buffer[:count].copy_(staging.buffer[:count], non_blocking=True)
                staging.sent = done
            done.record(self._stream)
        self._timed.append((begun, done))
        while self._timed and self._timed[0][1].query():
            self._seconds += _seconds_between(*self._timed.popleft())

    def _pack(self, sources: Sources, layout: SlotLayout) -> _Staging:
        """Put a group's tensors into the pinned buffer that was used before the other."""
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
        """An event behind what the computing stream was asked for so far."""
        event = self._new_event() if previous is None else previous
        event.record(self._compute_stream())
        return event

    def seconds(self) -> float:
        """Seconds that finished copies took on the device."""
        # The thread adds up what is finished before its next copy.
        return self._seconds + sum(_seconds_between(*pair) for pair in list(self._timed) if pair[1].query())

    def close(self) -> None:
        """Wait for what was asked for, and free thread, stream and pinned buffers."""
        self._thread.close()
        if self._stream is not None:
            self._stream.synchronize()
            self._stream = None
        self._staging.clear()


def _seconds_between(begun: Any, done: Any) -> float:
    return float(begun.elapsed_time(done)) / 1000


class _Staging:
    """A pinned buffer, and the event behind the last copy from it."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.sent: Any = None


class _DeviceCopy:
    """A copy on the stream: first the thread asks for it, then the device does it."""

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
        # An event that was never recorded, for the copy was cancelled or failed, holds nothing up.
        self._follow()

    def cancel(self) -> None:
        self._job.cancel()
