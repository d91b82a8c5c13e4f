"""Deliver signals to a dedicated thread.

Python runs signal handlers in the main thread only, between bytecode instructions. While the main thread waits inside
a collective, no handler runs. But CPython's C-level handler writes the signal number to the wake-up file descriptor
immediately (``signal.set_wakeup_fd``), where a thread reads it.

Handlers and the wake-up descriptor are per process, so this module keeps one process-wide state while there are
listeners. Previously installed handlers still get every signal, and are restored when the last listener is closed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from accel_state.errors import StateError

__all__ = ["Listener", "listen"]

_END = 0
_FROM_HANDLER = 0x80
"""Marks numbers sent by our own handler, which an earlier owner of the wake-up descriptor has already received."""
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Listener:
    """A registered callback for signals; created by ``listen``."""

    def __init__(self, hub: _SignalHub, numbers: frozenset[int], notify: Callable[[int], None]) -> None:
        self.numbers = numbers
        self.notify = notify
        self._hub = hub

    def close(self) -> None:
        """Stop listening. The last listener closed in the main thread restores the previous handlers.

        If that is not possible (in another thread), signals still have their previous effect.
        """
        self._hub.remove(self)

    def redeliver(self, number: int) -> None:
        """Stop listening, and give a received signal its previous effect.

        A previously installed handler has already been called; a default action is performed now.
        """
        self._hub.remove(self)
        self._hub.repeat(number)


def listen(numbers: Iterable[int], notify: Callable[[int], None]) -> Listener:
    """Call ``notify(number)`` in a dedicated thread whenever one of ``numbers`` is received.

    It may be called twice for one signal. Forked children do not listen.

    Args:
        numbers: the signal numbers.
        notify: the callback; must return quickly and not raise.

    Raises:
        StateError: this is not the main thread, or a signal has a handler that Python cannot restore.
    """
    global _hub
    wanted = frozenset(numbers)
    if threading.current_thread() is not threading.main_thread():
        names = ", ".join(sorted(signal.Signals(number).name for number in wanted))
        raise StateError(
            f"Python allows only the main thread to set signal handlers, but {names} would be handled from "
            f"thread {threading.current_thread().name!r}; create the listening object in the main thread"
        )
    for number in wanted:
        if signal.getsignal(number) is None:
            raise StateError(
                f"{signal.Signals(number).name} has a handler that was not set by Python and cannot be restored; "
                "omit this signal, or remove the handler first"
            )
    if _hub is None:
        _hub = _SignalHub()
    return _hub.add(Listener(_hub, wanted, notify))


class _SignalHub:
    """The handlers, the wake-up descriptor and the thread of this process."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._before: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)  # a signal handler must not wait
        self._descriptor_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="accel-signals", daemon=True)
        self._thread.start()

    @property
    def numbers(self) -> frozenset[int]:
        """The signals whose handler is ours."""
        return frozenset(self._before)

    def add(self, listener: Listener) -> Listener:
        self._listeners.append(listener)
        for number in listener.numbers - self._before.keys():
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._handle)
        return listener

    def remove(self, listener: Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
            if not self._listeners and threading.current_thread() is threading.main_thread():
                self._close()

    def repeat(self, number: int) -> None:
        if self._before.get(number) in _DEFAULTS:
            os.kill(os.getpid(), number)

    def _close(self) -> None:
        global _hub
        _hub = None
        self._restore()
        self._writer.setblocking(True)
        self._writer.send(bytes([_END]))
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._reader.close()
        self._writer.close()

    def _restore(self) -> None:
        """Restore the previous handlers and descriptor, unless other code has replaced ours since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        current = signal.set_wakeup_fd(-1)
        wanted = self._descriptor_before if current == self._writer.fileno() else current
        with contextlib.suppress(OSError, ValueError):  # its owner has closed it since
            signal.set_wakeup_fd(wanted)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The Python handler: runs in the main thread, once that executes Python code again."""
        before = self._before[number]
        if any(number in listener.numbers for listener in self._listeners):
            # In case other code has replaced the wake-up descriptor. A handler must not take locks.
            with contextlib.suppress(BlockingIOError):
                self._writer.send(bytes([number | _FROM_HANDLER]))
        elif before is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        elif before in _DEFAULTS:
            before(number, frame)
        if callable(before) and before not in _DEFAULTS:
            before(number, frame)

    def _run(self) -> None:
        while True:
            numbers = self._reader.recv(4096)
            if _END in numbers:
                return
            for number in numbers:
                self._notify(number)

    def _notify(self, number: int) -> None:
        if self._descriptor_before != -1 and number < _FROM_HANDLER:
            with contextlib.suppress(OSError):  # the reader has closed it, or its buffer is full
                os.write(self._descriptor_before, bytes([number]))
        number &= ~_FROM_HANDLER
        for listener in list(self._listeners):
            if number in listener.numbers:
                listener.notify(number)

    def leave_to_parent(self) -> None:
        """In a forked child: a signal to the child must not be reported to the parent."""
        self._restore()
        self._listeners.clear()
        self._reader.close()
        self._writer.close()


_hub: _SignalHub | None = None
_forking = threading.local()


def _before_fork() -> None:
    # A child that receives a signal before it has released the descriptor would notify its parent.
    numbers = _hub.numbers if _hub is not None else ()
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    global _hub
    parents, _hub = _hub, None
    if parents is not None:
        parents.leave_to_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
