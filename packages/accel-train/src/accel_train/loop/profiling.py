"""Profiling a part of a training loop."""

from __future__ import annotations

import contextlib
import gzip
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accel_state.constants import PROFILE_PATTERN_NAME
from accel_state.messages import warn
from accel_train.plugins import ProfileKwargs

__all__ = ["profile"]


@contextlib.contextmanager
def profile(handler: ProfileKwargs, rank: int, barrier: Callable[[], None]) -> Iterator[Any]:
    """Run the block under torch's profiler.

    Args:
        handler: options.
        rank: of this process, part of the trace's file name.
        barrier: waited for after the trace is written, so that no rank leaves while others write.

    Yields:
        The profiler; call its `step()` once per step when a schedule is given.
    """
    profiler = handler.build()
    traces = None
    if handler.output_trace_dir is not None:
        traces = _Traces(profiler, Path(handler.output_trace_dir) / PROFILE_PATTERN_NAME.format(suffix=rank))
    profiler.start()
    try:
        yield profiler
    except BaseException:
        if traces is not None:
            traces.close()  # no file says that an interrupted run was profiled
        profiler.stop()
        raise
    profiler.stop()
    if traces is None:
        return
    if not traces.written:
        warn(
            f"No trace was written to {handler.output_trace_dir}: the profiler's schedule {handler.schedule_option} "
            f"never got past waiting in {profiler.step_num} steps. Call the profiler's step() once per step of the "
            "loop, or wait for fewer.",
        )
    barrier()


class _Traces:
    """Writes the trace of each cycle that is done.

    torch saves a trace once. What the script exports besides, in `on_trace_ready` or afterwards, is a copy.

    Args:
        profiler: not started.
        path: of the file, whose folder is made.
    """

    def __init__(self, profiler: Any, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.written = False
        self._path = path
        self._ready = profiler.on_trace_ready
        self._save = profiler.export_chrome_trace
        profiler.on_trace_ready = self._cycle_done
        profiler.export_chrome_trace = self._export
        self._closed = False

    def close(self) -> None:
        """Write nothing more."""
        self._closed = True

    def _cycle_done(self, profiler: Any) -> None:
        if not self._closed:
            self._save(str(self._path))
            self.written = True
        if self._ready is not None:
            self._ready(profiler)

    def _export(self, path: str) -> None:
        if not self.written:
            self._save(path)
        elif str(path).endswith(".gz"):
            with open(self._path, "rb") as source, gzip.open(path, "wb") as target:
                shutil.copyfileobj(source, target)
        else:
            shutil.copyfile(self._path, path)
