"""Joining the world: rendezvous, a check that all ranks chose the same setup, and PyTorch's process group."""

from __future__ import annotations

import atexit
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from accel_state import environment
from accel_state.clusters.base import Topology, is_loopback
from accel_state.communication.signed_store import SignedStore, loopback_store, signed
from accel_state.constants import STORE_SECRET
from accel_state.errors import AccelError, ConfigError, LaunchError, StateError
from accel_state.messages import first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["OPTIONS", "Membership", "adopt", "join", "leave_at_exit", "store_client"]

OPTIONS = ("backend", "init_method", "timeout", "group_name", "pg_options", "device_id")
_RELEASE = 0.1  # seconds
_JOIN_TIMEOUT = timedelta(minutes=10)
_MEET_AGAIN = timedelta(seconds=30)  # for rank 0, which leaves a world as other ranks do
_CLONE_TIMEOUT = 60.0
_LOOK = 0.2  # between two looks at a connection that is there
_NAMES = 10.0  # seconds until the host name of rank 0 must resolve
_WIRED = 64  # ranks up to which a second group is made, whose connections grow with their square
_GRACE = 5.0  # seconds after which a connection that ignores its own timeout is abandoned


@dataclass(frozen=True, slots=True)
class Membership:
    """The result of joining a world.

    Attributes:
        topology: ranks, nodes and addresses of the process.
        device: the device of the process.
        backend: PyTorch's backend string.
        store: a separate client of the world's key-value store, so that waiting on it blocks no collective.
        watch_store: another client, for the collective watchdog, which must answer while other clients wait.
        wire: a group of all ranks for the messages of this project alone, where it costs next to nothing.
    """

    topology: Topology
    device: torch.device
    backend: str
    store: Store
    watch_store: Store
    wire: dist.ProcessGroup | None = None


Choice = Callable[[], tuple[torch.device, str]]


def adopt(topology: Topology, choose: Callable[[Topology], torch.device]) -> Membership:
    """Use the default process group that the user's script created."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if topology.world_size != world_size:  # no launcher: for example torch.multiprocessing.spawn on one node
        topology = Topology(rank, world_size, rank, world_size, launcher="user")
    topology = replace(topology, rank=rank)
    store = signed(dist.distributed_c10d._get_default_store(), environment.get(STORE_SECRET))
    device, backend = choose(topology), dist.get_backend()
    return Membership(
        topology, device, backend, store_client(store, "accel/side"), store_client(store, "accel/watch")
    )


def join(topology: Topology, choose: Choice, options: Mapping[str, Any]) -> Membership:
    """Rendezvous with the other ranks, check that all chose the same, and create the default process group.

    Args:
        topology: ranks, nodes and addresses of this process.
        choose: returns the device and the backend. It runs after the rendezvous, so that an error on one rank
            is raised on all.
        options: keyword arguments of ``init_process_group``, all in ``OPTIONS``.

    Raises:
        LaunchError: rendezvous failed, or a rank could not be set up.
        StateError: the ranks chose different devices or backends.
    """
    url = options.get("init_method") or _address(topology)
    if url == "env://":
        url = _address(topology)
    timeout: timedelta = options.get("timeout") or _JOIN_TIMEOUT
    try:
        own, device, backend = _meet_and_agree(url, topology, choose, timeout)
        store = signed(own, environment.get(STORE_SECRET))
        side, watch = store_client(store, "accel/side"), store_client(store, "accel/watch")
        _create_group(own, topology, device, backend, options)
        wire = _create_wire(topology, device, options)
        _wait_until_all_joined(store, topology, timeout)
    except dist.DistError as error:
        raise LaunchError(
            f"rank {topology.rank} of {topology.world_size} lost the other ranks at {url} while joining; the rank "
            f"that failed first shows the cause. ({first_line(error)})"
        ) from error
    return Membership(topology, device, backend, side, watch, wire)


def _meet_and_agree(
    url: str, topology: Topology, choose: Choice, timeout: timedelta
) -> tuple[Store, torch.device, str]:
    """Returns the store of this world, and what `_agree` returns.

    A rank that leaves a world and joins again can meet the store of the world that it left, if rank 0 has not yet
    closed it. It loses that connection, and meets rank 0 again.
    """
    base = _meet(url, topology, timeout)
    try:
        return _agree_at(base, topology, choose, timeout)
    except dist.DistNetworkError as lost:
        if topology.rank == 0:
            raise
        try:
            base = _meet(url, topology, min(timeout, _MEET_AGAIN))
        except LaunchError:  # rank 0 has ended
            raise lost from None
        base.set_timeout(timeout)
        return _agree_at(base, topology, choose, timeout)


def _agree_at(
    base: Store, topology: Topology, choose: Choice, timeout: timedelta
) -> tuple[Store, torch.device, str]:
    # A store can outlive a process group (torchrun's agent hosts it); keys of an earlier group must not be read.
    generation = base.add(f"accel/generation/{topology.rank}", 1)
    store = _prefixed(f"accel/{generation}", base)
    return store, *_agree(signed(store, environment.get(STORE_SECRET)), topology, choose, timeout)


def _create_group(
    store: Store, topology: Topology, device: torch.device, backend: str, options: Mapping[str, Any]
) -> None:
    arguments = {name: value for name, value in options.items() if name not in ("init_method", "backend")}
    if device.index is not None and device.type != "xla":  # gloo sends XLA's values from host memory
        torch.accelerator.set_device_index(device.index)
        arguments.setdefault("device_id", device)
    dist.init_process_group(
        backend,
        store=_prefixed("group", store),
        rank=topology.rank,
        world_size=topology.world_size,
        **arguments,
    )
    leave_at_exit(device)


def _create_wire(
    topology: Topology, device: torch.device, options: Mapping[str, Any]
) -> dist.ProcessGroup | None:
    """A group for this project's messages: gloo ends a process that receives a longer message than it expects."""
    if device.type != "cpu" or dist.get_backend() != "gloo" or not 1 < topology.world_size <= _WIRED:
        return None
    return cast("dist.ProcessGroup", dist.new_group(timeout=options.get("timeout")))


def leave_at_exit(device: torch.device) -> None:
    """End the default process group when the interpreter exits, where its threads could otherwise abort the exit."""
    if device.type in ("cpu", "xla"):
        atexit.register(_leave)


def _leave() -> None:
    """End gloo's threads, or let them finish their work, before the interpreter unloads.

    A thread that has ended a collective still has to release its tensors, for which it needs the interpreter; if that
    is gone, the process aborts ("terminate called without an active exception", torch 2.13). Where a wrapped model
    holds the group, its threads outlive the group's end, so they are given time.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(_RELEASE)


def _wait_until_all_joined(store: Store, topology: Topology, timeout: timedelta) -> None:
    """Keep rank 0, which hosts the store, alive until the other ranks no longer need it to connect."""
    if store.add("joined", 1) == topology.world_size:
        store.set("all joined", "")
    if topology.rank == 0:
        store.wait(["all joined"], timeout)


def _prefixed(prefix: str, store: Store) -> Store:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def store_client(store: Store, prefix: str) -> Store:
    """A separate connection to a store, for keys under ``prefix``.

    Raises:
        LaunchError: the store does not answer.
    """

    def connect() -> Store:
        if isinstance(store, SignedStore):
            return store.client(prefix)
        return _prefixed(prefix, store.clone())  # type: ignore[attr-defined]

    try:
        finished = _within(_CLONE_TIMEOUT, connect, lambda: store.check(["accel/there"]))
    except dist.DistNetworkError as error:
        raise LaunchError(
            f"the store of this world is gone: rank 0, which hosts it, has ended; check its output. {first_line(error)}"
        ) from error
    if finished is None:
        raise LaunchError(
            f"the store of this world did not answer within {_CLONE_TIMEOUT:g} s: rank 0, which hosts it, has ended "
            "or is stuck; check its output"
        )
    return finished


def _within(
    seconds: float, connect: Callable[[], Store], look: Callable[[], object] | None = None
) -> Store | None:
    """Call ``connect``; returns its result, or None after ``seconds``. Its exception is raised here.

    Meanwhile ``look`` is called again and again, through a connection that is there: a new one would be tried for long
    where the other end is gone, which ``look`` says by an exception.

    It runs in a separate thread, because a store client can wait forever, or much longer than its timeout, when
    another program listens on the port or rank 0 has ended.
    """
    result: list[Store | Exception] = []

    done = threading.Event()

    def run() -> None:
        try:
            result.append(connect())
        except Exception as error:  # raised again below, in the calling thread
            result.append(error)
        done.set()

    def watch(look: Callable[[], object]) -> None:
        while not done.wait(_LOOK):
            try:
                look()
            except Exception as error:  # as above
                result.append(error)
                done.set()

    threading.Thread(target=run, name="accel-connect", daemon=True).start()
    if look is not None:
        threading.Thread(target=watch, args=(look,), name="accel-look", daemon=True).start()
    done.wait(seconds)
    done.set()  # nobody looks any more
    if not result:
        return None
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


def _loopback_address(topology: Topology) -> str | None:
    """The address where ranks of one machine meet; None if other machines have ranks or an agent hosts the store."""
    alone = topology.local_world_size == topology.world_size and topology.num_nodes == 1
    hosted = environment.parse_flag_from_env("TORCHELASTIC_USE_AGENT_STORE")
    return _address(topology) if alone and is_loopback(topology.master_addr) and not hosted else None


def _address(topology: Topology) -> str:
    missing = [
        name
        for name, value in (("MASTER_ADDR", topology.master_addr), ("MASTER_PORT", topology.master_port))
        if value is None
    ]
    if missing:
        raise ConfigError(
            f"{topology.world_size} processes were started by {topology.launcher}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; set MASTER_ADDR to the host of rank 0 and MASTER_PORT "
            "to a free port there, the same on all ranks"
        )
    host = topology.master_addr
    assert host is not None
    _wait_until_known(host)
    return f"tcp://{f'[{host}]' if ':' in host else host}:{topology.master_port}"


def _wait_until_known(host: str, seconds: float = _NAMES) -> None:
    """Wait until the name of rank 0's host resolves; the name of a machine that just started may take a moment.

    torch would retry for the timeout of a collective, half an hour by default.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, None)
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"MASTER_ADDR is {host!r}, which this machine cannot resolve ({error}). Set MASTER_ADDR to a "
                    "host name or address of rank 0's machine that all ranks can reach"
                ) from error
            time.sleep(min(0.5, seconds))
        else:
            return


def _meet(url: str, topology: Topology, timeout: timedelta) -> Store:
    """Connect to the store at ``url``; rank 0 creates it."""
    rank, world_size = topology.rank, topology.world_size
    where = f"rank {rank} of {world_size} could not reach the other ranks at {url}"

    def connect() -> Store:
        if rank == 0 and url == _loopback_address(topology):
            own = loopback_store(
                str(topology.master_addr), int(topology.master_port or 0), world_size, timeout
            )
            if own is not None:
                return own
        store: Store = next(rendezvous(url, rank=rank, world_size=world_size, timeout=timeout))[0]
        return store

    try:
        store = _within(timeout.total_seconds() + _GRACE, connect)
    except Exception as error:  # PyTorch raises several types
        if "EADDRINUSE" in str(error):
            raise LaunchError(
                f"{where}: port {topology.master_port} is in use on this machine, so rank 0 cannot listen on it. "
                "Choose another MASTER_PORT (--main_process_port; 0 takes a free one)"
            ) from error
        raise LaunchError(f"{where}: {error}") from error
    if store is None:
        raise LaunchError(
            f"{where}: no answer within {timeout.total_seconds():g} s. Another program may listen there; choose "
            "another MASTER_PORT (--main_process_port), or check whether rank 0 failed"
        )
    return store


def _agree(store: Store, topology: Topology, choose: Choice, timeout: timedelta) -> tuple[torch.device, str]:
    """Choose device and backend, report them to rank 0, and raise on every rank if one failed or differs."""
    choice: tuple[torch.device, str] | None = None
    failure: AccelError | None = None
    try:
        choice = choose()
        answer = {"backend": choice[1], "device": choice[0].type}
    except AccelError as error:
        failure = error
        answer = {"error": str(error)}
    store.set(f"hello/{topology.rank}", json.dumps(answer))
    if topology.rank == 0:
        store.set("result", _compare_answers(store, topology.world_size, timeout))
    store.wait(["result"], timeout + timedelta(seconds=5))
    result = store.get("result").decode()
    if result:
        _wait_for_readers(store, topology)
    if failure is not None:
        raise failure
    if result:
        raise StateError(result)
    assert choice is not None
    return choice


def _wait_for_readers(store: Store, topology: Topology) -> None:
    """Keep rank 0, which hosts the store, alive until the other ranks have read why they fail."""
    if store.add("read", 1) == topology.world_size:
        store.set("read by all", "")
    if topology.rank == 0:
        with contextlib.suppress(dist.DistStoreError):  # a rank is gone: nothing to wait for
            store.wait(["read by all"], timedelta(seconds=5))


def _compare_answers(store: Store, world_size: int, timeout: timedelta) -> str:
    try:
        store.wait([f"hello/{rank}" for rank in range(world_size)], timeout)
    except dist.DistStoreError:
        absent = [rank for rank in range(world_size) if not store.check([f"hello/{rank}"])]
        return f"ranks {absent} of {world_size} did not arrive within {timeout.total_seconds():g} s"
    answers = [json.loads(store.get(f"hello/{rank}")) for rank in range(world_size)]
    for rank, answer in enumerate(answers):
        if "error" in answer:
            return f"rank {rank} could not be set up: {answer['error']}"
    for rank, answer in enumerate(answers):
        for what in ("device", "backend"):
            if answer[what] != answers[0][what]:
                return (
                    f"ranks do not agree on the {what}: rank 0 has {answers[0][what]!r}, rank {rank} has "
                    f"{answer[what]!r}; pass the same cpu= and backend= on all of them"
                )
    return ""
