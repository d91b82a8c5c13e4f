"""The launcher's signals as events of its main loop."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

__all__ = ["EXITED", "SignalQueue", "receive_signals"]

EXITED = 0
"""The event for "a child process changed its state"; all other events are signal numbers."""

# SIGHUP: the terminal was closed. SIGQUIT: Ctrl-backslash. SIGTSTP: Ctrl-Z. What a terminal sends does not reach ranks,
# because they have their own sessions.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGTSTP", "SIGCHLD")
_ALWAYS = ("SIGINT", "SIGTERM", "SIGTSTP", "SIGCHLD")
"""Without these the launcher could neither end nor notice the end of a rank."""


class SignalQueue:
    """Events in order of arrival. Safe to use from signal handlers."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[int] = queue.SimpleQueue()

    def put(self, event: int) -> None:
        """Add a signal number or ``EXITED``."""
        self._events.put(event)

    def get(self, timeout: float) -> int:
        """The next event, or ``EXITED`` after ``timeout`` seconds, so that the caller polls the processes."""
        try:
            return self._events.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return EXITED


@contextlib.contextmanager
def receive_signals(names: Sequence[str] = (), *, requests: Sequence[str] = ()) -> Iterator[SignalQueue]:
    """Put the launcher's signals into a queue during a ``with`` block, then restore the handlers.

    A signal that this process inherited as ignored (``nohup``) stays ignored. Only the main thread can set handlers;
    in another thread the queue stays empty.

    Args:
        names: the signals that are passed on to ranks, in addition to SIGINT and SIGTERM; empty: the usual ones.
        requests: further signals, which are for the launcher itself.
    """
    signals = SignalQueue()
    before: dict[signal.Signals, object] = {}

    def receive(number: int, frame: FrameType | None) -> None:
        signals.put(EXITED if number == getattr(signal, "SIGCHLD", None) else number)

    if threading.current_thread() is threading.main_thread():
        for name in dict.fromkeys((*(_ALWAYS if names else _NAMES), *names, *requests)):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, receive)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
