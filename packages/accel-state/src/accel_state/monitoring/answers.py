"""A rank's answers to its launcher: the Python stack of its main thread, and the collectives that it waits in.

Nothing here runs until the launcher asks. The stack is written by ``faulthandler``, in a signal handler in C, so that a
rank that is blocked in C code answers too. Other threads are left out: they run on while the handler would follow their
frames, which ends the process with a segmentation fault sooner or later. Collectives are looked up by a thread that
sleeps in the opening of a named pipe.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from accel_state.constants import RUN_FOLDER
from accel_state.messages import first_line
from accel_state.monitoring.heartbeat import Heartbeat, HeartbeatFile
from accel_state.whole_files import write_whole

__all__ = ["STACK_SIGNAL", "attach", "explain_by", "heartbeat", "last_of_groups", "training_heartbeat"]

STACK_SIGNAL: int | None = getattr(signal, "SIGRTMIN", None) and signal.SIGRTMIN + 9
"""Makes a rank write its stack. A real-time signal, which programs hardly ever use; None where there are none."""

_MOST_GROUPS = 16
"""Process groups whose last collective an answer has."""

_logger = logging.getLogger(__name__)
_explanations: list[Callable[[], list[str]]] = []


class _Attachment:
    """The connection of this process to its launcher; it lives as long as the process."""

    def __init__(self, pulse: Heartbeat, timed: bool, stack: IO[bytes]) -> None:
        self.pulse = pulse
        self.timed = timed
        self.stack = stack
        self.pid = os.getpid()


_attachment: _Attachment | None = None


def attach(environ: Mapping[str, str]) -> Heartbeat | None:
    """Connect this rank to the launcher that started it; does nothing without one, or a second time.

    Args:
        environ: the environment, in which the launcher names its folder.

    Returns:
        this rank's record; None without a launcher on this machine that watches.
    """
    global _attachment
    if environ.get(RUN_FOLDER) is None or STACK_SIGNAL is None:
        return None
    if _attachment is None:
        folder, rank = Path(environ[RUN_FOLDER]), int(environ.get("RANK", "0"))
        try:
            file = HeartbeatFile(folder / "heart")
            stack = (folder / f"stack.{rank}").open("ab", buffering=0)
        except OSError as error:  # the launcher has ended, and has removed its folder
            _logger.debug("no launcher in %s: %s", folder, error)
            return None
        # Before the claim: from then on the launcher may send the signal, which ends a process that does not expect it.
        # Ignored outside of the handler, because the interpreter takes that away before the process ends.
        if threading.current_thread() is threading.main_thread():
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        faulthandler.register(STACK_SIGNAL, stack, all_threads=False)
        pulse = file.claim(rank)
        if pulse is None:
            faulthandler.unregister(STACK_SIGNAL)
            stack.close()
            return None
        _attachment = _Attachment(pulse, file.timed, stack)
        threading.Thread(target=_answer, args=(folder, rank), name="accel-answers", daemon=True).start()
    return heartbeat()


def heartbeat() -> Heartbeat | None:
    """This rank's record, if a launcher watches it, else None. Processes that a rank forks have no record."""
    return _attachment.pulse if _attachment is not None and _attachment.pid == os.getpid() else None


def training_heartbeat() -> Heartbeat | None:
    """The heartbeat of this rank if its launcher watches every step; else None, so that steps cost nothing.

    A training loop without ``Accelerator`` calls its ``beat()`` at every step, so that ``accel launch --step_timeout``
    sees progress.
    """
    return heartbeat() if _attachment is not None and _attachment.timed else None


def explain_by(describe: Callable[[], list[str]]) -> None:
    """Register ``describe``, which returns a line for each collective that this rank waits in."""
    _explanations.append(describe)


def _answer(folder: Path, rank: int) -> None:
    """Answer each request of the launcher."""
    while True:
        try:
            with (folder / f"ask.{rank}").open("rb") as questions:
                questions.read()
            # The collectives in progress, from this project's channels, else from torch's flight recorder.
            found = [line for describe in list(_explanations) for line in _lines_of(describe)]
            entries = _flight_recorder()
            waiting = [_described(entry) for entry in entries if not entry.get("retired", True)]
            answer = {"collectives": found or waiting[-1:], "recorded": last_of_groups(entries)}
            write_whole(folder / f"answer.{rank}", json.dumps(answer))
        except OSError as error:
            _logger.debug("the launcher's folder is gone: %s", error)
            return


def _lines_of(describe: Callable[[], list[str]]) -> list[str]:
    try:
        return describe()
    except Exception as error:  # the main thread goes on meanwhile, and the next request needs an answer too
        _logger.debug("collectives could not be described", exc_info=True)
        return [f"unknown: {type(error).__name__}: {first_line(error)}"]


def _flight_recorder() -> list[dict[str, Any]]:
    """The collectives that torch has recorded: those of gloo and other backends of the CPU, then those of NCCL."""
    # Not imported: a rank that has not loaded torch waits in no collective.
    native: Any = sys.modules.get("torch._C._distributed_c10d")
    found: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(AttributeError, RuntimeError):  # a build without that recorder
            found += json.loads(getattr(native, name)(True, False)).get("entries", [])
    return found


def last_of_groups(entries: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, str]]:
    """The last collective that this rank has begun in each process group, as torch's flight recorder has them.

    Args:
        entries: the recorder's list ``entries``, oldest first.

    Returns:
        the group, the number of the collective in it, and its description; of the groups used last.
    """
    found: dict[str, tuple[str, int, str]] = {}
    for entry in entries:
        if entry.get("is_p2p"):  # pairs of ranks count them apart
            continue
        backend = str(entry["profiling_name"]).partition(":")[0]
        group = " ".join([*filter(None, entry["process_group"]), backend])
        found.pop(group, None)  # the order is that of the last use
        found[group] = (group, int(entry["collective_seq_id"]), _operation(entry))
    return list(found.values())[-_MOST_GROUPS:]


def _described(entry: Mapping[str, Any]) -> str:
    backend, _, name = str(entry["profiling_name"]).rpartition(":")
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    return f"{name} (#{number} of {backend or 'its group'}; {_tensors(entry)})"


def _operation(entry: Mapping[str, Any]) -> str:
    return f"{str(entry['profiling_name']).rpartition(':')[2]} ({_tensors(entry)})"


def _tensors(entry: Mapping[str, Any]) -> str:
    sizes = ", ".join("x".join(map(str, size)) or "1" for size in entry.get("input_sizes", []))
    kinds = ", ".join(dict.fromkeys(entry.get("input_dtypes", [])))
    return f"{kinds} {sizes}"
