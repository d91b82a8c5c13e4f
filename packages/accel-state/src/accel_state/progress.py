"""A progress bar per node instead of one per process, and a line of it in files and pipes."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

from tqdm.auto import tqdm as _tqdm

from accel_state import environment
from accel_state.constants import BAR_INTERVAL, RANK_PREFIXED
from accel_state.errors import ConfigError
from accel_state.world.process import PartialState

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.auto.tqdm``, shown by the first process of each node only.

    In a file or a pipe a bar is a line when it ends, and one each minute until then.

    Args:
        *args: arguments of ``tqdm``, usually an iterable.
        main_process_only: hide the bar on the other processes.
        **kwargs: keyword arguments of ``tqdm``; ``disable=True`` hides the bar on all processes.

    Raises:
        ConfigError: the first argument is a bool, which was ``main_process_only`` in old scripts.
    """
    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"tqdm({args[0]}, …): pass main_process_only={args[0]} by name; the first argument is the "
            "iterable"
        )
    if main_process_only and not kwargs.get("disable") and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    file = kwargs.get("file") or sys.stderr
    # A launcher that reads this process's output knows whether it ends on a terminal. Notebooks, whose streams are of
    # other classes, redraw.
    logged = isinstance(file, io.TextIOWrapper) and not file.isatty()
    return (_LoggedBar if logged and environment.get(RANK_PREFIXED) is None else _tqdm)(*args, **kwargs)


class _LoggedBar(_tqdm):  # type: ignore[type-arg]  # generic in its stubs only
    _shown_at: float | None = None

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Write a line where tqdm would draw."""
        now = time.monotonic()
        self._shown_at = now if self._shown_at is None else self._shown_at
        if self.disable and msg is None:
            self.fp.write(str(self))  # `close` ends the line
        elif not self.disable and now - self._shown_at >= BAR_INTERVAL:
            self._shown_at = now
            self.fp.write(f"{self}\n")
            self.fp.flush()

    def clear(self, nolock: bool = False) -> None:
        """Do nothing: lines of a file stay."""
