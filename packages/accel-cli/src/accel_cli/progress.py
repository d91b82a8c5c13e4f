"""Progress of a command: one line on standard error, which a terminal redraws.

Results go to standard output. A log gets one line of this, and only from a command that takes seconds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["ProgressLine", "progress"]


_LATE = 2.0
"""Seconds after which a log gets a line."""


class ProgressLine:
    """The progress line: the current activity and its seconds so far; made by ``progress``.

    Args:
        bar: rich's progress bar; None: nothing is shown.

    Attributes:
        activity: the current one.
    """

    def __init__(self, bar: Any = None) -> None:
        self.activity = ""
        self._bar = bar
        self._task = None if bar is None else bar.add_task("", total=None)

    def now(self, text: str) -> None:
        """Show a new activity."""
        self.activity = text
        if self._bar is not None:
            self._bar.reset(self._task, description=text)
            self._bar.refresh()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take the line away, to print results or to let another process print."""
        if self._bar is None:
            yield
            return
        self._bar.stop()
        try:
            yield
            sys.stdout.flush()
        finally:
            self._bar.start()


@contextlib.contextmanager
def progress(text: str) -> Iterator[ProgressLine]:
    """Show an activity until the block ends; then the line is removed from a terminal.

    Args:
        text: the first activity.
    """
    if not sys.stderr.isatty():
        logged = ProgressLine()
        logged.now(text)
        timer = threading.Timer(
            _LATE, lambda: print(f"accel: {logged.activity}", file=sys.stderr, flush=True)
        )
        timer.start()
        try:
            yield logged
        finally:
            timer.cancel()
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # What libraries warn of on standard error appears above the line; standard output stays as it is.
    with Bar(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        shown = ProgressLine(bar)
        shown.now(text)
        yield shown
