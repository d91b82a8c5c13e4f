"""Profiling a part of a training loop."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accel_state.constants import PROFILE_PATTERN_NAME
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
    profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()
    if handler.output_trace_dir is None:
        return
    if profiler.profiler is None:
        warnings.warn(
            f"No trace was written to {handler.output_trace_dir}: the profiler's schedule {handler.schedule_option} "
            f"never got past waiting in {profiler.step_num} steps. Call the profiler's step() once per step of the "
            "loop, or wait for fewer.",
            stacklevel=3,
        )
        return
    folder = Path(handler.output_trace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / PROFILE_PATTERN_NAME.format(suffix=rank)))
    barrier()
