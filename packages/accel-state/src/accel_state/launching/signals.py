"""Signals of the launcher as events of its main loop."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["EXITED", "SignalQueue", "receive_signals"]

EXITED = 0
"""The event that stands for "a child changed its state"; all other events are signal numbers."""

# SIGHUP: the terminal is gone. SIGTSTP: Ctrl-Z, which ranks in sessions of their own would not notice.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGTSTP", "SIGCHLD")


class SignalQueue:
    """Events in the order in which they came. Handlers may put at any moment."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[int] = queue.SimpleQueue()

    def put(self, event: int) -> None:
        """Add a signal number or ``EXITED``."""
        self._events.put(event)

    def get(self, timeout: float) -> int:
        """The next event, or ``EXITED`` after ``timeout`` seconds, so that the caller looks for itself."""
        try:
            return self._events.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return EXITED


@contextlib.contextmanager
def receive_signals() -> Iterator[SignalQueue]:
    """Route the launcher's signals into an signals for the length of a ``with`` block, then restore the
    handlers.

    A signal that the parent of this process had set to be ignored (``nohup``) stays ignored. Only the main
    thread can set handlers; in another one the signals stays empty.
    """
    signals = SignalQueue()
    before: dict[signal.Signals, object] = {}

    def receive(number: int, frame: FrameType | None) -> None:
        signals.put(EXITED if number == getattr(signal, "SIGCHLD", None) else number)

    if threading.current_thread() is threading.main_thread():
        for name in _NAMES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, receive)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
