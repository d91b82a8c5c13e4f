"""Signals told to a thread, what was installed before, and children."""

import gc
import hashlib
import os
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from accel_state.errors import StateError
from accel_state.host import signal_listener
from accel_state.host.signal_listener import listen

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX systems")


@pytest.fixture(autouse=True)
def as_before():
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    yield
    left = {number: signal.getsignal(number) for number in numbers}
    hub, signal_listener._hub = signal_listener._hub, None
    for number, handler in handlers.items():  # what one test leaves must not fail the next
        signal.signal(number, handler)
    assert signal.set_wakeup_fd(descriptor) == descriptor
    assert left == handlers
    assert hub is None
    assert not [thread for thread in threading.enumerate() if thread.name == "accel-signals"]


def send(number):
    os.kill(os.getpid(), number)


def run(body):
    script = "import os, signal, sys, threading, time\nfrom accel_state.host.signal_listener import listen\n"
    return subprocess.run(
        [sys.executable, "-c", script + textwrap.dedent(body)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_signals_are_told_while_the_main_thread_runs_no_python_code():
    told = queue.SimpleQueue()
    handled = []
    signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(time.monotonic()))
    listener = listen([signal.SIGUSR1], lambda number: told.put((number, time.monotonic())))
    # A call that lets other threads run, and is not interrupted. Meanwhile another process sends the signal.
    with subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -USR1 {os.getpid()}"]):
        while not handled:
            before = time.monotonic()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)
    number, at = told.get(timeout=5)
    assert number == signal.SIGUSR1
    assert before < at < handled[0]
    listener.close()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_handler_of_before_still_runs_and_is_put_back():
    calls = []

    def before(number, frame):
        calls.append(number)

    signal.signal(signal.SIGTERM, before)
    told = queue.SimpleQueue()
    listener = listen([signal.SIGTERM], told.put)
    for _ in range(3):
        send(signal.SIGTERM)
    assert calls == [signal.SIGTERM] * 3
    assert told.get(timeout=5) == signal.SIGTERM
    listener.close()
    assert signal.getsignal(signal.SIGTERM) is before
    send(signal.SIGTERM)
    assert len(calls) == 4
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_an_ignored_signal_is_told_and_then_ignored_again():
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    told = queue.SimpleQueue()
    listener = listen([signal.SIGUSR2], told.put)
    send(signal.SIGUSR2)
    assert told.get(timeout=5) == signal.SIGUSR2
    listener.close()
    send(signal.SIGUSR2)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_the_owner_of_the_wakeup_descriptor_of_before_hears_everything_once():
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    signal.signal(signal.SIGUSR2, lambda number, frame: None)
    told = queue.SimpleQueue()
    listener = listen([signal.SIGUSR1], told.put)
    send(signal.SIGUSR1)
    send(signal.SIGUSR2)  # nobody listens to it here
    assert told.get(timeout=5) == signal.SIGUSR1
    time.sleep(0.3)
    heard = reader.recv(16)
    assert sorted(heard) == [signal.SIGUSR1, signal.SIGUSR2]
    listener.close()
    assert signal.set_wakeup_fd(-1) == writer.fileno()
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    reader.close()
    writer.close()


def test_a_closed_descriptor_of_before_does_no_harm():
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    told = queue.SimpleQueue()
    listener = listen([signal.SIGUSR1], told.put)
    reader.close()
    writer.close()
    send(signal.SIGUSR1)
    assert told.get(timeout=5) == signal.SIGUSR1
    listener.close()


def test_what_others_install_later_stays_and_the_signal_is_told_all_the_same():
    told = queue.SimpleQueue()
    listener = listen([signal.SIGUSR1, signal.SIGUSR2], told.put)

    def later(number, frame):
        pass

    signal.signal(signal.SIGUSR1, later)
    send(signal.SIGUSR1)
    assert told.get(timeout=5) == signal.SIGUSR1
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    send(signal.SIGUSR2)  # only the handler tells it now
    assert told.get(timeout=5) == signal.SIGUSR2
    listener.close()
    assert signal.getsignal(signal.SIGUSR1) is later
    assert signal.set_wakeup_fd(-1) == writer.fileno()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    reader.close()
    writer.close()


@pytest.mark.parametrize("first", [0, 1])
def test_two_listeners_in_any_order(first):
    told = [queue.SimpleQueue(), queue.SimpleQueue()]
    both = [listen([signal.SIGUSR1], told[0].put), listen([signal.SIGUSR1, signal.SIGUSR2], told[1].put)]
    send(signal.SIGUSR1)
    assert [one.get(timeout=5) for one in told] == [signal.SIGUSR1] * 2
    time.sleep(0.2)
    while not (told[0].empty() and told[1].empty()):
        [one.get_nowait() for one in told if not one.empty()]
    both[first].close()
    both[first].close()
    send(signal.SIGUSR1)
    assert told[1 - first].get(timeout=5) == signal.SIGUSR1
    assert told[first].empty()
    both[1 - first].close()


def test_another_thread_cannot_listen_and_is_told_where_one_can():
    errors = []

    def attempt():
        try:
            listen([signal.SIGTERM], print)
        except StateError as error:
            errors.append(str(error))

    thread = threading.Thread(target=attempt, name="helper")
    thread.start()
    thread.join()
    assert "only the main thread" in errors[0]
    assert "SIGTERM would be handled from thread 'helper'" in errors[0]


def test_a_handler_that_python_cannot_put_back_is_refused(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with pytest.raises(StateError, match="SIGTERM has a handler that was not set by Python"):
        listen([signal.SIGTERM], print)
    monkeypatch.undo()


def test_a_declined_signal_has_its_default_action():
    done = run("""
        def notify(number):
            threading.Timer(0.2, listener.redeliver, [number]).start()
        listener = listen([signal.SIGTERM], notify)
        os.kill(os.getpid(), signal.SIGTERM)
        print("told", flush=True)
        time.sleep(30)
    """)
    assert (done.stdout, done.returncode) == ("told\n", -signal.SIGTERM), done.stderr


def test_a_declined_signal_is_not_repeated_for_a_handler_that_had_it():
    done = run("""
        calls = []
        signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
        listener = listen([signal.SIGTERM], lambda number: listener.redeliver(number))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        print(len(calls))
    """)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr


def test_a_signal_has_its_default_action_after_an_end_in_another_thread():
    done = run("""
        listener = listen([signal.SIGTERM], print)
        thread = threading.Thread(target=listener.close)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """)
    assert (done.stdout, done.returncode) == ("", -signal.SIGTERM), done.stderr


def test_a_signal_to_a_forked_child_ends_the_child_and_is_not_told():
    told = queue.SimpleQueue()
    listener = listen([signal.SIGTERM], told.put)
    for delay in (0, 0, 0, 0, 0.001, 0.01, 0.1):
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(delay)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    time.sleep(0.2)
    assert told.empty()
    listener.close()


def test_a_forked_child_can_listen_itself():
    listener = listen([signal.SIGTERM], lambda number: None)
    pid = os.fork()
    if pid == 0:
        told = queue.SimpleQueue()
        own = listen([signal.SIGUSR1], told.put)
        os.kill(os.getpid(), signal.SIGUSR1)
        number = told.get(timeout=10)
        own.close()
        os._exit(number)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == signal.SIGUSR1
    listener.close()


def test_a_started_program_has_default_handlers():
    listener = listen([signal.SIGTERM], lambda number: None)
    with subprocess.Popen(["sleep", "30"]) as process:
        process.terminate()
        assert process.wait(timeout=10) == -signal.SIGTERM
    listener.close()


@pytest.mark.wide
def test_nothing_is_left_open():
    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    before = descriptors()
    for _ in range(3):
        listen([signal.SIGTERM, signal.SIGUSR1], print).close()
    assert descriptors() == before
