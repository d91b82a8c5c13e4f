"""Ranks stop after the same boundary, whoever is told, whatever they do at the time, whenever they ask.

Ranks are threads here, which share a store; real worlds are in tests-integration.
"""

import os
import random
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from accel_state.host.process_identity import process_identity
from accel_state.world import stop_consensus
from accel_state.world.stop_consensus import Boundaries, StopConsensus


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(stop_consensus, "_LOOK", 0.02)
    monkeypatch.setattr(stop_consensus, "_POLL", 0.001)


class Rank:
    def __init__(self, rank, size, store):
        self.failures = []
        self.boundaries = Boundaries()
        self.consensus = StopConsensus(
            self.boundaries, rank=rank, size=size, on_failure=lambda: self.failures.append(1)
        )
        self.consensus.start(None if store is None else dist.PrefixStore("stop", store))

    def should_stop(self):
        return self.consensus.pending and self.consensus.should_stop()


def world(size):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    return [Rank(rank, size, store) for rank in range(size)], store


def close(ranks):
    threads = [threading.Thread(target=rank.consensus.close) for rank in ranks]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not any(rank.consensus._thread and rank.consensus._thread.is_alive() for rank in ranks)


def in_threads(function, count):
    results = [None] * count

    def call(index):
        results[index] = function(index)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(count)]
    [thread.start() for thread in threads]
    [thread.join(timeout=30) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_stop_after_the_same_boundary(size, seed):
    """Ranks of uneven speed meet now and then, are told at any moment, and ask as they like."""
    ranks, _ = world(size)
    meeting = threading.Barrier(size)
    plan = random.Random(seed)
    told = {rank: plan.random() * 0.2 for rank in plan.sample(range(size), plan.randint(1, size))}
    meet_every = plan.choice([1, 2, 5])
    limit = 4000

    def train(index):
        own = random.Random(f"{seed} {index}")
        rank, slow = ranks[index], own.choice([0, 0.0005, 0.003])
        asks = own.choice([1, 1, 3])  # some ask several times at one place
        for count in range(1, limit):
            time.sleep(own.random() * slow)
            if count % meet_every == 0:
                meeting.wait(timeout=20)  # as a collective: nobody goes on before all are here
            rank.boundaries.passed += 1
            answers = [rank.should_stop() for _ in range(asks)]
            if any(answers):
                meeting.wait(timeout=20)  # the save: all or nobody
                return count
        return limit

    timers = [
        threading.Timer(delay, ranks[rank].consensus.request, [f"SIGTERM on rank {rank}"])
        for rank, delay in told.items()
        for _ in range(2)  # repeated
    ]
    [timer.start() for timer in timers]
    stops = in_threads(train, size)
    [timer.join() for timer in timers]
    assert len(set(stops)) == 1
    assert stops[0] < limit
    assert {rank.consensus.decision.stop_after for rank in ranks} == {stops[0]}
    [rank.consensus.request("again") for rank in ranks]
    assert all(rank.should_stop() for rank in ranks)
    close(ranks)
    assert not any(rank.failures for rank in ranks)


class Recording:
    """A store that notes the keys of each request."""

    def __init__(self, store, seen):
        self._store, self._seen = store, seen

    def __getattr__(self, name):
        def call(*arguments):
            keys = arguments[0]
            self._seen.append((name, [keys] if isinstance(keys, str) else keys))
            return getattr(self._store, name)(*arguments)

        return call


def test_ranks_that_wait_ask_for_no_more_in_a_larger_world(monkeypatch):
    """A request a moment with a key of every rank, from every rank, is too much for one store."""
    seen = []
    monkeypatch.setattr(
        stop_consensus, "prefixed", lambda store, prefix: Recording(dist.PrefixStore(prefix, store), seen)
    )
    size = 8
    store = dist.HashStore()
    ranks = [Rank(rank, size, store) for rank in range(size - 1)]
    ranks[0].consensus.request("SIGTERM on rank 0")
    time.sleep(0.3)  # fifteen looks
    assert not any(len(keys) > 1 for _, keys in seen)
    assert not [keys[0] for name, keys in list(seen) if keys[0].startswith("passed/") and name == "check"]
    ranks.append(Rank(size - 1, size, store))
    assert {rank.consensus.should_stop() for rank in ranks} == {False}
    assert {rank.consensus.decision.stop_after for rank in ranks} == {1}
    close(ranks)


def test_a_rank_that_ended_before_it_was_counted_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(stop_consensus, "_PATIENCE", 0.1)
    store = dist.HashStore()
    dist.PrefixStore("1", dist.PrefixStore("stop", store)).set("passed/1", "5")
    first = Rank(0, 2, store)
    first.consensus.request("SIGTERM on rank 0")
    assert not first.consensus.should_stop()
    assert first.consensus.decision.stop_after == 6
    close([first])


def test_a_rank_that_stands_in_a_collective_does_not_hold_up_the_verdict():
    ranks, _ = world(2)
    ranks[0].boundaries.passed = 7
    ranks[1].boundaries.passed = 6  # its program is busy elsewhere until rank 0 comes on
    ranks[0].consensus.request("SIGTERM on rank 0")
    assert not ranks[0].consensus.should_stop()
    ranks[0].boundaries.passed += 1
    assert ranks[0].should_stop()
    assert not ranks[1].should_stop()
    ranks[1].boundaries.passed += 2
    assert ranks[1].should_stop()
    assert ranks[1].consensus.decision.reason == "SIGTERM on rank 0"
    close(ranks)


def test_a_boundary_that_is_passed_while_the_count_is_read_changes_nothing():
    """The question that follows waits; so the answers at one place are the same."""
    for slip in (0, 1):
        ranks, _ = world(2)

        class Slipping(Boundaries):
            """Is passed once just after the count was read."""

            __slots__ = ("count", "slips")

            def __init__(self, slips):
                self.count, self.slips = 3, slips

            @property
            def passed(self):
                now = self.count
                self.count, self.slips = self.count + self.slips, 0
                return now

        ranks[0].consensus._boundaries = Slipping(slip)
        ranks[1].boundaries.passed = 3
        ranks[0].consensus.request("x")
        assert ranks[0].consensus.should_stop() is (slip == 1)
        assert ranks[0].consensus.decision.stop_after == 4
        assert not ranks[1].should_stop()
        ranks[1].boundaries.passed = 4
        assert ranks[1].should_stop()
        close(ranks)


def test_one_process_needs_nobody():
    rank = Rank(0, 1, None)
    rank.boundaries.passed = 3
    assert not rank.should_stop()
    rank.consensus.request("SIGTERM on rank 0")
    assert not rank.should_stop()
    rank.boundaries.passed += 1
    assert rank.should_stop()
    rank.consensus.close()


def test_a_rank_that_has_left_is_not_waited_for():
    ranks, _ = world(3)
    ranks[1].boundaries.passed = 9
    close(ranks[1:2])
    for rank in (ranks[0], ranks[2]):
        rank.boundaries.passed = 8
    ranks[2].consensus.request("SIGTERM on rank 2")
    assert not any(rank.consensus.should_stop() for rank in (ranks[0], ranks[2]))
    assert ranks[2].consensus.decision.stop_after == 10
    close([ranks[0], ranks[2]])
    assert not any(rank.failures for rank in ranks)


def test_ranks_refuse_together_when_one_is_gone(monkeypatch, caplog):
    ended = process_identity()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    ranks = [Rank(rank, 3, store) for rank in (0, 1)]
    store.set("stop/1/member/2", f'{{"machine": "{ended["machine"]}", "pid": {pid}, "born": "1"}}')
    ranks[0].consensus.request("SIGTERM on rank 0")
    assert not any(rank.consensus.should_stop() for rank in ranks)
    assert {rank.consensus.decision.reason for rank in ranks} == {"rank 2 is gone"}
    ranks[0].consensus._thread.join()
    assert (ranks[0].failures, ranks[1].failures) == ([1], [])
    assert "SIGTERM on rank 0, but ranks cannot stop together: rank 2 is gone" in caplog.text
    ranks[1].consensus.request("SIGTERM on rank 1")  # it comes later, and finds that nothing can be done
    assert ranks[1].failures == [1]
    close(ranks)


def test_ranks_refuse_together_when_one_does_not_answer(monkeypatch):
    monkeypatch.setattr(stop_consensus, "_PATIENCE", 0.3)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    ranks = [Rank(rank, 4, store) for rank in (0, 3)]
    ranks[1].consensus.request("SIGTERM on rank 3")
    assert not any(rank.consensus.should_stop() for rank in ranks)
    for rank in ranks:
        assert rank.consensus.decision.reason.startswith("ranks [1, 2] have not answered for 0.3 s")
    close(ranks)
    assert ranks[1].failures == [1]


def test_ranks_go_on_when_the_store_is_lost():
    class Broken:
        def __init__(self, store):
            self.store, self.broken = store, False

        def __getattr__(self, name):
            if self.broken:
                raise dist.DistNetworkError("connection reset by peer")
            return getattr(self.store, name)

    store = dist.HashStore()
    rank = Rank(0, 2, None)
    broken = Broken(store)
    original, stop_consensus.prefixed = stop_consensus.prefixed, lambda store, prefix: store
    try:
        rank.consensus.start(broken)
    finally:
        stop_consensus.prefixed = original
    broken.broken = True
    rank.consensus.request("SIGTERM on rank 0")
    assert not rank.consensus.should_stop()
    rank.consensus._thread.join()
    assert rank.failures == [1]
    assert "connection reset by peer" in rank.consensus.decision.reason
    rank.consensus.close()


def test_two_agreements_of_one_world_do_not_meet():
    first, store = world(2)
    second = [Rank(rank, 2, store) for rank in range(2)]
    second[1].consensus.request("x")
    assert not any(rank.consensus.should_stop() for rank in second)
    for rank in (*first, *second):
        rank.boundaries.passed += 1
    assert all(rank.should_stop() for rank in second)
    assert not any(rank.should_stop() for rank in first)
    close([*first, *second])


def test_whoever_waits_when_training_ends_is_let_go():
    ranks, _ = world(2)
    ranks[0].consensus._thread.join(0)
    waiter = threading.Thread(target=ranks[0].consensus.should_stop)
    waiter.start()
    close(ranks)
    waiter.join(timeout=5)
    assert not waiter.is_alive()
    assert not ranks[0].should_stop()


def test_a_forked_child_does_not_speak_for_its_parent():
    ranks, store = world(2)
    pid = os.fork()
    if pid == 0:
        ranks[0].consensus.close()
        os._exit(0 if not store.check(["stop/1/passed/0"]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    close(ranks)
