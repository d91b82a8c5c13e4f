"""What the driver of a job on Ray does with the output and the ends of its launchers, where Ray is a stand-in."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from accel_state.launching.submission import ray_machines
from accel_state.launching.submission.ray_machines import RayRun


class Method:
    """A method of an actor; with Ray it runs elsewhere."""

    def __init__(self, function):
        self.remote = function

    def options(self, **_):
        return self


class Actor:
    """A launcher that writes ``lines`` and ends with ``code``; None: only when it is stopped, with 75."""

    def __init__(self, lines, code):
        self.place = Method(lambda: ("node", "10.0.0.1", 1))
        self.run = Method(self._run)
        self.stop = Method(lambda: self.stopped.set())
        self.stopped = threading.Event()
        self.lines, self.code = lines, code

    def _run(self, *_):
        for line in self.lines:
            if self.stopped.is_set():
                yield 75
                return
            yield line
        if self.code is None:
            self.stopped.wait(60)
        yield 75 if self.code is None else self.code


@pytest.fixture
def draining(monkeypatch):
    """The nodes that Ray takes away."""
    nodes = {}
    state = SimpleNamespace(state=SimpleNamespace(get_draining_nodes=lambda: nodes))
    errors = {
        name: type(name, (Exception,), {}) for name in ("RayActorError", "NodeDiedError", "RayTaskError")
    }
    ray = SimpleNamespace(
        get=lambda found: found, exceptions=SimpleNamespace(**errors), _private=SimpleNamespace(state=state)
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_machines, "_LOOK", 0.05)
    return nodes


def watch(actors, stop=None, grace=0.5):
    run = RayRun(("accel", "launch", "train.py"), 1, len(actors), {"CPU": 1}, grace=grace)
    attempt = ray_machines._Attempt(actors, [f"node{at}" for at in range(len(actors))])
    return ray_machines._watch(
        run, attempt, None, stop or threading.Event(), lambda line: None, time.monotonic()
    )


def without_pause():
    return (f"step {number}\n" for number in itertools.count())


def test_a_stop_reaches_ranks_that_write_without_a_pause(draining):
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    assert watch([Actor(without_pause(), None), Actor([], None)], stop, grace=20.0) == [75, 75]


def test_a_node_that_is_taken_away_is_seen_while_ranks_write_without_a_pause(draining):
    draining["node1"] = 0
    assert watch([Actor(without_pause(), None), Actor([], None)], grace=20.0) == [75, 75]


def test_a_launcher_that_outlives_the_failure_of_another_is_no_lost_machine(draining):
    assert watch([Actor([], 1), Actor([], None)]) == [1, 76]


def test_a_launcher_that_outlives_the_stop_signal_is_lost(draining):
    stop = threading.Event()
    stop.set()
    stuck = Actor([], None)
    stuck.stop = Method(lambda: None)
    assert watch([stuck, Actor([], None)], stop) == [None, 75]
