"""Errors that end a script: those of these packages are shown with the script's own lines."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from accel_state import environment
from accel_state.constants import RANK_PREFIXED
from accel_state.launching.watching.tracebacks import fold_frames, library_of
from accel_state.messages import message

__all__ = ["fold_uncaught"]


def fold_uncaught() -> None:
    """Leave frames of libraries out of what Python prints when an error of these packages, or Ctrl-C, ends a script.

    A hook that the script has set stays. Ranks show all frames: their launcher folds them and logs them whole.
    """
    alone = environment.get(RANK_PREFIXED) is None and environment.get("WORLD_SIZE", "1") == "1"
    if alone and sys.excepthook is sys.__excepthook__ and not sys.flags.dev_mode:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    raised_by = [library_of(frame.filename) for frame in traceback.extract_tb(trace)][-1:]
    text = "".join(traceback.format_exception(kind, error, trace)).rstrip("\n")
    folded = fold_frames(text, keep_last=False)
    if folded == text or not (kind is KeyboardInterrupt or raised_by[0].startswith("accel_")):
        sys.__excepthook__(kind, error, trace)
        return
    hint = "accel: frames of libraries are folded; python -X dev shows all of them"
    sys.stderr.write(f"{hint}\n{message(folded, sys.stderr)}\n")
