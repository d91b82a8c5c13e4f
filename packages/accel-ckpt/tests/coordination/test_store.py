"""Ranks that meet through a store, here as threads."""

import os
import pickle
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
import torch.distributed as dist

from accel_ckpt import CheckpointSaveError, CorruptCheckpointError, UnsupportedValueError
from accel_ckpt.coordination import store as store_module
from accel_ckpt.coordination.store import StoreCoordinator
from accel_state.host.process_identity import machine_id, start_time_of


class Rank:
    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.local_rank = rank, world_size, rank


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(store_module, "_LOOK", 0.01)
    monkeypatch.setattr(store_module, "_LAST_WORDS", 1.0)


def coordinators(count):
    store = dist.HashStore()
    return store, [StoreCoordinator(store, Rank(rank, count)) for rank in range(count)]


def together(*calls):
    """What each call returned or raised."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@pytest.mark.parametrize("count", [1, 2, 3])
def test_everyone_gets_what_everyone_gave_and_nothing_is_left(count):
    store, ranks = coordinators(count)
    for step in range(3):
        values = [{"rank": rank, "step": step, "more": ("x",) * 1000} for rank in range(count)]
        calls = [lambda r=r, v=v: r.exchange(v) for r, v in zip(ranks, values, strict=True)]
        assert together(*calls) == [values] * count
    assert together(*(rank.leave for rank in ranks)) == [None] * count
    assert store.num_keys() == 0


class Counting:
    """A store that counts what is read from it."""

    def __init__(self, store):
        self._store, self.read = store, 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def multi_get(self, keys):
        self.read += len(keys)
        return self._store.multi_get(keys)


def test_equal_values_are_not_read():
    store = Counting(dist.HashStore())
    ranks = [StoreCoordinator(store, Rank(rank, 3)) for rank in range(3)]
    value = {"same": (1, 2)}
    assert together(*[lambda r=r: r.exchange(dict(value)) for r in ranks]) == [[value] * 3] * 3
    assert store.read == 0
    together(*[lambda r=r: r.exchange({**value, "rank": r.rank}) for r in ranks])
    assert store.read == 9


def test_only_the_first_rank_reads_what_it_gathers():
    store = Counting(dist.HashStore())
    ranks = [StoreCoordinator(store, Rank(rank, 3)) for rank in range(3)]
    found = together(*[lambda r=r: r.gather({"rank": r.rank}) for r in ranks])
    assert found == [[{"rank": rank} for rank in range(3)], None, None]
    assert store.read == 3
    assert together(*(rank.leave for rank in ranks)) == [None] * 3
    assert store.num_keys() == 0


class Code:
    """Runs when it is unpickled."""

    ran: ClassVar[list[int]] = []

    def __reduce__(self):
        return Code.ran.append, (1,)


def intruded(store, ranks, value):
    """Another program overwrites what rank 1 gave, which is not what rank 0 gave, before rank 0 reads it."""

    def wait_for(key):
        store.set("1/1", value)
        store.add("1/different", 1)

    ranks[0]._wait_for = wait_for


@pytest.mark.parametrize(
    "value",
    [
        pickle.dumps((None, Code())),
        pickle.dumps("plain"),
        b"",
        b"\xff",
        b"[",
        b'{"!": "os.system", "v": "true"}',
        b"[" * 100_000,
    ],
    ids=["code", "pickle", "nothing", "bytes", "half", "a tag", "deep"],
)
def test_what_another_program_writes_runs_no_code(value):
    store, ranks = coordinators(2)
    intruded(store, ranks, value)
    with pytest.raises(CorruptCheckpointError):
        ranks[0].exchange("mine")
    assert Code.ran == []


def test_more_than_data_is_not_exchanged():
    _, (alone,) = coordinators(1)
    with pytest.raises(UnsupportedValueError):
        alone.exchange(Code())


def test_a_rank_that_is_stopped_takes_the_others_with_it():
    _, (first, second) = coordinators(2)
    first._stopped = lambda: "the user was impatient"

    def late():
        time.sleep(0.05)
        first._stopped = lambda: None
        return second._wait_for("never")

    one, other = together(lambda: first._wait_for("never"), late)
    assert isinstance(one, CheckpointSaveError)
    assert str(one) == "the user was impatient"
    assert str(other) == "given up by rank 0: the user was impatient"


def test_a_rank_whose_process_has_ended_is_named():
    store, (first,) = coordinators(1)
    first.world_size = 2
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = start_time_of(child.pid)
    machine = machine_id()
    store.set("who/1", f'{{"machine": "{machine}", "pid": {child.pid}, "born": "{born}"}}')
    threading.Timer(0.2, child.kill).start()
    reaper = threading.Thread(target=child.wait)
    reaper.start()
    began = time.monotonic()
    with pytest.raises(CheckpointSaveError, match=rf"rank 1 \(process {child.pid}\) has ended"):
        first.exchange("hello")
    assert time.monotonic() - began < 10
    reaper.join()


def test_a_rank_that_waits_looks_at_the_ranks_of_its_machine_only():
    store, _ = coordinators(1)
    for rank in range(64):
        machine = machine_id() if 8 <= rank < 16 else f"other {rank // 8}"
        store.set(f"who/{rank}", f'{{"machine": "{machine}", "pid": 1, "born": "never"}}')
    mine = StoreCoordinator(store, Rank(9, 64))
    mine.local_rank = 1
    looked_at = []

    class Counted:
        def __getattr__(self, name):
            def call(*arguments):
                looked_at.append(arguments[0])
                return getattr(store, name)(*arguments)

            return call

    mine._store = Counted()
    mine._round = 1
    for rank in range(8, 16):
        store.set(f"1/{rank}", "answered")
    mine._look_around(0.0)  # their processes have ended, after their answers
    assert len(looked_at) < 40
    store.delete_key("1/12")
    with pytest.raises(CheckpointSaveError, match=r"rank 12 \(process 1\) has ended"):
        mine._look_around(0.0)
    assert store.get("given up").decode().startswith("rank 9: rank 12")


def test_a_rank_that_never_answers(monkeypatch):
    monkeypatch.setattr(store_module, "_PATIENCE", 0.1)
    _, (first, _) = coordinators(2)
    with pytest.raises(CheckpointSaveError, match=r"ranks \[1\] did not answer within 0.1 s"):
        first.exchange("hello")


def test_a_store_that_is_gone():
    server = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, 2, False, wait_for_workers=False)
    second = StoreCoordinator(client, Rank(1, 2))
    del server
    with pytest.raises(CheckpointSaveError, match="the store of this world is gone"):
        second.exchange("hello")
    second.leave()


def test_rank_0_does_not_stay_for_ever_for_those_who_are_gone():
    _, (first, _) = coordinators(2)
    began = time.monotonic()
    first.leave()
    assert 0.9 < time.monotonic() - began < 5


def test_the_identity_is_that_of_this_process():
    store, _ = coordinators(1)
    assert str(os.getpid()) in store.get("who/0").decode()
