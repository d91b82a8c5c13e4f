"""Meeting, agreeing, and taking over a group that exists."""

from __future__ import annotations

import gc
import os
import socket
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accel_state.clusters.base import Topology
from accel_state.errors import ConfigError, LaunchError, StateError
from accel_state.world import process_group
from accel_state.world.process import PartialState
from accel_state.world.process_group import join, store_client
from testkit import worlds

CPU = (torch.device("cpu"), "gloo")


def outcome(**options):
    try:
        PartialState(**options)
    except Exception as error:
        return type(error), str(error)
    return None


def own_backend():
    return outcome(backend="bogus" if os.environ["RANK"] == "1" else None)


def test_an_error_of_one_rank_is_raised_on_all():
    (first, first_says), (second, second_says) = worlds.run(own_backend, 2, timeout=20)
    assert first is StateError
    assert "rank 1 could not be set up" in first_says
    assert "'bogus'" in first_says
    assert second is ConfigError
    assert "'bogus'" in second_says


def mismatched_backends():
    return outcome(backend=["gloo", "cpu:gloo"][int(os.environ["RANK"])])


def test_ranks_with_other_backends_are_named():
    for kind, says in worlds.run(mismatched_backends, 2, timeout=20):
        assert kind is StateError
        assert "do not agree on the backend: rank 0 has 'gloo', rank 1 has 'cpu:gloo'" in says


def test_a_port_in_use_is_an_error_in_seconds():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        start = time.monotonic()
        place = Topology(0, 2, 0, 2, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(LaunchError, match=rf"rank 0 of 2 .*port {port} is in use") as caught:
            join(place, lambda: CPU, {})
        assert time.monotonic() - start < 5
        assert "MASTER_PORT" in str(caught.value)
        assert "--main_process_port" in str(caught.value)


def test_another_program_at_the_port_does_not_hold_a_rank_for_ever(monkeypatch):
    monkeypatch.setattr("accel_state.world.process_group._GRACE", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        place = Topology(1, 2, 1, 2, master_addr="127.0.0.1", master_port=listener.getsockname()[1])
        with pytest.raises(LaunchError, match=r"rank 1 of 2 .*no answer within 0.3 s.*MASTER_PORT"):
            join(place, lambda: CPU, {"timeout": timedelta(seconds=0.3)})


def absent_rank():
    if os.environ["RANK"] == "1":
        return None
    return outcome(timeout=timedelta(seconds=1))


@pytest.mark.wide
def test_a_rank_that_does_not_come_ends_the_wait_of_the_others():
    (first, first_says), _, (third, third_says) = worlds.run(absent_rank, 3, timeout=30)
    assert first is LaunchError
    assert "2/3 clients joined" in first_says
    assert third is LaunchError
    assert "rank 2 of 3 lost the other ranks" in third_says


@pytest.mark.parametrize(
    ("place", "missing"),
    [
        (Topology(0, 2, launcher="mpi"), "MASTER_ADDR and MASTER_PORT are"),
        (Topology(0, 2, master_addr="a", launcher="mpi"), "MASTER_PORT is"),
    ],
)
def test_an_address_that_is_missing_is_named(place, missing):
    with pytest.raises(ConfigError, match=rf"started by mpi, but {missing} not set"):
        join(place, lambda: CPU, {})


def by_file(path):
    del os.environ["MASTER_ADDR"]
    state = PartialState(init_method=f"file://{path}/meet")
    total = torch.ones(1)
    dist.all_reduce(total)
    state.store.set(f"rank {state.process_index}", "here")
    state.store.wait([f"rank {rank}" for rank in range(2)])
    return total.item()


def test_a_host_that_cannot_be_looked_up_is_named_in_seconds(monkeypatch):
    def unknown(host, port):
        tried.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    tried = []
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(LaunchError, match=r"MASTER_ADDR is 'node7'.*Name or service not known"):
        process_group._wait_until_known("node7", 0.05)
    assert len(tried) > 1


def test_ranks_can_meet_through_a_file(tmp_path):
    assert worlds.run(by_file, 2, tmp_path) == [2.0, 2.0]


def take_over(options):
    dist.init_process_group("gloo")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind = outcome(**options)
    if kind is not None:
        return kind
    state = PartialState()
    state.store.set(f"k{state.process_index}", "v")
    state.store.wait(["k0", "k1"])
    state.wait_for_everyone()
    said = [str(warning.message) for warning in caught if "no effect" in str(warning.message)]
    return state.num_processes, state.process_index, state.backend, state.distributed_type.value, said


def test_a_group_that_the_script_made_is_taken_over():
    assert worlds.run(take_over, 2, {}) == [(2, rank, "gloo", "MULTI_CPU", []) for rank in (0, 1)]


def test_options_that_come_too_late_are_told():
    for *_, said in worlds.run(take_over, 2, {"timeout": timedelta(seconds=9)}):
        assert len(said) == 1
        assert said[0].startswith("timeout")
    for kind, says in worlds.run(take_over, 2, {"backend": "cpu:gloo"}):
        assert kind is StateError
        assert "'cpu:gloo'" in says


def spawned():
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    state = PartialState()
    state.wait_for_everyone()
    return state.topology


def test_a_group_without_a_launcher_is_on_one_node():
    for rank, topology in enumerate(worlds.run(spawned, 2)):
        assert topology == Topology(rank, 2, rank, 2, launcher="user")


def join_again():
    totals = []
    for _ in range(3):
        state = PartialState()
        total = torch.ones(1)
        dist.all_reduce(total)
        totals.append(total.item())
        state.wait_for_everyone()
        state.destroy_process_group()
        assert state.store is None
        PartialState._reset_state()
    return totals


def test_a_world_can_be_left_and_joined_again():
    assert worlds.run(join_again, 2) == [[2.0] * 3] * 2


def join_before_rank_0_leaves():
    """Rank 1 joins again while rank 0 still hosts the store of the world that both left."""
    state = PartialState()
    state.wait_for_everyone()
    left = dist.distributed_c10d._get_default_store()
    while isinstance(left, dist.PrefixStore):
        left = left.underlying_store
    first = state.is_main_process
    state.destroy_process_group()
    PartialState._reset_state()
    if first:
        left.wait(["accel/2/hello/1"], timedelta(seconds=30))
    del left, state
    gc.collect()
    PartialState()
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_a_rank_that_joins_again_before_rank_0_has_left():
    assert worlds.run(join_before_rank_0_leaves, 2) == [2.0, 2.0]


def keep_the_group():
    state = PartialState()
    state.destroy_process_group()
    return dist.is_initialized()


def test_a_forked_process_leaves_the_group_to_its_launcher():
    assert worlds.run(keep_the_group, 2, environ={"FORK_LAUNCHED": "1"}) == [True, True]
    assert worlds.run(keep_the_group, 2) == [False, False]


def side_by_side():
    """Wait on the store in a thread while collectives go on."""
    import threading

    state = PartialState()
    waiting = threading.Thread(target=lambda: state.store.wait(["go"], timedelta(seconds=20)), daemon=True)
    waiting.start()
    for _ in range(5):
        dist.barrier()
    busy = waiting.is_alive()
    if state.is_main_process:
        dist.distributed_c10d._get_default_store()
        PartialState().store.clone().set("go", "")
    waiting.join(20)
    return busy, waiting.is_alive()


def test_waiting_on_the_store_does_not_stop_collectives():
    assert worlds.run(side_by_side, 2, timeout=40) == [(True, False)] * 2


def _host(port, pipe):
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(60)


def test_a_connection_to_a_store_whose_host_has_ended_is_not_waited_for():
    context = worlds.context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_host, args=(0, theirs))
    process.start()
    store = dist.TCPStore("127.0.0.1", ours.recv(), None, False, wait_for_workers=False)
    assert store_client(store, "a").check(["x"]) is False
    process.kill()
    process.join()
    began = time.monotonic()
    with pytest.raises(LaunchError, match="rank 0, which hosts it, has ended"):
        store_client(store, "b")
    assert time.monotonic() - began < 20
