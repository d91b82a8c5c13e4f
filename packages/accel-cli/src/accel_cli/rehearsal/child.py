"""The process of the rehearsed rank: runs the script, and writes its observations as JSON.

``python -m accel_cli.rehearsal.child REPORT KIND NAME ARGUMENTS…``: KIND is ``script`` or ``module``.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_state.launching.ranks.worker import become, script_frames

__all__ = ["main"]

_KIBI = 1 if sys.platform == "darwin" else 1024
"""Unit of ``ru_maxrss``, in bytes."""


def main(words: Sequence[str]) -> int:
    """Run the script.

    Args:
        words: see the module.

    Returns:
        The exit code: 0, whatever the script did; the result is in the report.
    """
    report, kind, name, *arguments = words
    from accel_state.host.tensor_memory import TensorMemory

    memory = TensorMemory()
    started = time.perf_counter()
    with memory:
        ended = _run(kind, name, arguments)
    seconds = time.perf_counter() - started
    found = {
        **ended,
        "seconds": seconds,
        "memory": {"peak of tensors": memory.peak, "host": _resident()},
        **_observed(),
    }
    Path(report).write_text(json.dumps(found))
    return 0


def _resident() -> int:
    """Peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIBI


def _run(kind: str, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """How the script ended."""
    try:
        become(kind, name, arguments)
    except SystemExit as end:
        if type(end).__name__ == "RehearsalEnd":
            return {"ended": "steps", "error": None}
        if end.code in (None, 0):
            return {"ended": "script", "error": None}
        return _failed(end, f"the script exited with {end.code!r}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failed(error, str(error))
    return {"ended": "script", "error": None}


def _failed(error: BaseException, message: str) -> dict[str, Any]:
    here = error.__traceback__
    frames = script_frames(here.tb_next if here else None)
    lines = traceback.format_exception(type(error), error, frames, chain=False)
    shown = "".join(lines)
    kind = type(error)
    return {
        "ended": "failure",
        "error": {"type": kind.__name__, "message": message, "traceback": shown.rstrip()},
    }


def _observed() -> dict[str, Any]:
    from accel_state.world.process import current_state

    state = current_state()
    rehearsal = None if state is None else state.rehearsal
    if rehearsal is None:
        return {"sections": None, "notes": [], "groups": [], "entered": [], "messages": [], "given": {}}
    groups: dict[tuple[int, ...], int] = {}
    entered = [
        [groups.setdefault(item.ranks, len(groups)), item.call, item.shown, item.site]
        for item in rehearsal.entered
    ]
    return {
        "sections": rehearsal.report(),
        "notes": rehearsal.notes,
        "groups": [list(ranks) for ranks in groups],
        "entered": entered,
        "messages": [[item.peer, item.sent, item.shown, item.site] for item in rehearsal.messages],
        "given": rehearsal.bytes_given,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
