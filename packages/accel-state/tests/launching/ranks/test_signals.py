"""The launcher's signals as events."""

import os
import signal
import threading
import time

import pytest

from accel_state.launching.ranks.signals import EXITED, receive_signals

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX systems")


def test_signals_arrive_in_order_and_handlers_are_restored():
    inherited = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell starts its background jobs without it
    try:
        before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGQUIT, signal.SIGTERM)]
        with receive_signals() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signals.get(1.0) == signal.SIGUSR1
            os.kill(os.getpid(), signal.SIGQUIT)
            assert signals.get(1.0) == signal.SIGQUIT
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.get(1.0) == signal.SIGTERM
        assert [
            signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGQUIT, signal.SIGTERM)
        ] == before
    finally:
        signal.signal(signal.SIGQUIT, inherited)


def test_the_end_of_a_child_is_an_event():
    with receive_signals() as signals:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        started = time.monotonic()
        assert signals.get(5.0) == EXITED
        assert time.monotonic() - started < 4.0
        os.waitpid(pid, 0)


def test_without_an_event_the_caller_polls():
    with receive_signals() as signals:
        assert signals.get(0.01) == EXITED
        assert signals.get(-1.0) == EXITED


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with receive_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_gets_an_empty_queue():
    events = []

    def run():
        with receive_signals() as signals:
            events.append(signals.get(0.01))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert events == [EXITED]
