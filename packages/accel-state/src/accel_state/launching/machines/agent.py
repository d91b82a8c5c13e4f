"""The agent of one machine: torch's elastic agent, in a process of its own.

It differs from torch's in six ways: it exits with the code of the rank that failed first, or with 76 where another
machine failed first; it watches the ranks together with the other machines; it hosts the store of the run itself, for
as long as other machines need it; a machine that does not answer is an error that names host and port; a spare machine
is probed before it may join, and then waits for as long as the run goes on; and a signal ends it at once while it waits
for other machines.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from accel_state import environment
from accel_state.constants import PEER_FAILED
from accel_state.messages import first_line, say

__all__ = ["main", "read_state"]

_MODULE_OF_PROBE = "accel_state.launching.machines.health"
_COUNT = "accel/machines"
_NAMES = "accel/machine/{}"
_LEFT = "accel/left"
_AFTERWARDS = 15.0
"""Seconds that the store stays after the run, so that the other machines learn about its end."""
_ANSWER = 30.0
"""Seconds that the store at the address has to answer; one that runs answers in milliseconds."""
_READ = datetime.timedelta(seconds=20)

_ENDING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)
"""Signals that end an agent which waits for other machines."""


class _UnreachableError(Exception):
    """Machines have not found each other; the message is for the user."""


_NEWER = "--signals-to-handle="
"""A flag that torch 2.9 does not have; its agent forwards SIGTERM, SIGINT, SIGHUP and SIGQUIT."""


def main(arguments: Sequence[str]) -> int:
    """Run the agent: start this machine's ranks, and wait for the end of the run.

    Args:
        arguments: the agent's own flags, ``--``, and those of torchrun.

    Returns:
        the exit code of the rank that failed first; ``PEER_FAILED`` if that is on another machine, 1 under srun; or
        128 + n if signal n ended it or the agent.
    """
    own, words = _split(arguments)
    from torch.distributed import run as torchrun

    known = torchrun.get_args_parser().format_help()
    words = [word for word in words if not word.startswith(_NEWER) or _NEWER.rstrip("=") in known]
    args = torchrun.parse_args(words)  # type: ignore[no-untyped-call]
    with _log_folder(args) as folder, _ended_by_signals(folder):
        try:
            if own.spares and not _healthy(args, own):
                return 1
            with _meeting(args, own) as meeting:
                code = _run(args, own, meeting)
            # The code of a step of Slurm is the highest of its tasks: it has to be that of the rank that failed first.
            return 1 if code == PEER_FAILED and "SLURM_STEP_ID" in environment.snapshot() else code
        except _UnreachableError as error:
            say(f"accel: error: {error}")
            return 1


def _split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    at = list(arguments).index("--")
    parser = argparse.ArgumentParser(prog="accel_state.launching.machines.agent")
    parser.add_argument("--connect-timeout", type=float, required=True)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    for name in ("start", "step", "checkpoint"):
        parser.add_argument(f"--{name}-timeout", type=float)
    for name in ("straggler-report", "all-frames", "program"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(arguments[:at]), list(arguments[at + 1 :])


def _healthy(args: Any, own: argparse.Namespace) -> bool:
    command = [sys.executable, "-m", _MODULE_OF_PROBE, "--processes", str(args.nproc_per_node)]
    probe = subprocess.run([*command, *(["--cpu"] if own.cpu else [])], check=False)
    if probe.returncode:
        say(f"accel: error: {socket.gethostname()} failed the health probe, so it does not join the run")
    return probe.returncode == 0


_RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_STATE_CLASSES = {(_RENDEZVOUS, "_RendezvousState"), (_RENDEZVOUS, "_NodeDesc")} | {
    ("datetime", name) for name in ("datetime", "timedelta", "timezone")
}


class _StateReader(pickle.Unpickler):
    """Reads the state of the rendezvous, which torch's agents exchange as a pickle, without running code from it.

    torch's own agent, which runs beside it, does unpickle that state.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STATE_CLASSES:
            raise pickle.UnpicklingError(
                f"the store of the rendezvous holds {module}.{name}, which is no part of its state: another program "
                "writes there. Let no other program reach the port of --main_process_ip"
            )
        return super().find_class(module, name)


def read_state(raw: bytes) -> Any:
    """The state of a rendezvous that torch's agents exchange.

    Raises:
        UnpicklingError: it holds something else.
    """
    return _StateReader(io.BytesIO(raw)).load()


class _Meeting:
    """The rendezvous as this machine knows it: its address and, for c10d, its store."""

    def __init__(self, args: Any, own: argparse.Namespace, host: str, port: int) -> None:
        self.args = args
        self.patience: float = own.connect_timeout
        self.host = host
        self.port = port
        self.server: Any = None  # kept alive here: the store ends with this object
        self.client: Any = None

    def register(self) -> None:
        """Add this machine to the list of those that arrived, which helps when one is missing."""
        self.client = self._store(False)
        number = self.client.add(_COUNT, 1)
        self.client.set(_NAMES.format(number), socket.gethostname())

    def host_store(self) -> None:
        """Listen, if the address is one of this machine and nobody listens there."""
        if _is_local(self.host) and not _answers(self.host, self.port):
            with contextlib.suppress(RuntimeError):  # another agent of this machine was faster
                self.server = self._store(True)

    def host_static_store(self) -> None:
        """Listen as the first machine of a static rendezvous, which torch's agent then shares.

        Raises:
            _UnreachableError: the address cannot be used.
        """
        from torch.distributed import DistNetworkError

        try:
            self.server = self._store(True)
        except DistNetworkError as error:
            raise _UnreachableError(
                f"{self.host}:{self.port}, where the machines meet, cannot be used: {first_line(error).rstrip('.')}"
            ) from None

    def check_store(self) -> None:
        """Check that a store listens at the address: torch's agent would wait for its answer for long.

        Raises:
            _UnreachableError: something else listens there.
        """
        import torch.distributed as dist

        reasons = [f"no answer within {_ANSWER:g} s"]

        def ask() -> None:
            try:
                self._store(False)
            except dist.DistNetworkError as error:
                reasons[:] = [first_line(error).rstrip(".")]
            else:
                reasons.clear()

        # torch waits without a limit for a program that takes the connection and says nothing.
        asking = threading.Thread(target=ask, daemon=True, name="accel-agent-store")
        asking.start()
        asking.join(_ANSWER)
        if reasons:
            raise _UnreachableError(
                f"something listens at {self.host}:{self.port}, but it does not answer as a launcher ({reasons[0]}). "
                "It is the address of the machine with rank 0 (--main_process_ip and --main_process_port): check that "
                "no other program has this port"
            )

    def came(self) -> str:
        """How many machines arrived, and their names."""
        names: list[str] = []
        with contextlib.suppress(Exception):  # the store may be gone: then the number is unknown
            names = [
                self.client.get(_NAMES.format(number)).decode()
                for number in range(1, int(self.client.add(_COUNT, 0)) + 1)
            ]
        least = str(self.args.nnodes).partition(":")[0]
        return f"{len(names)} of {least} arrived: {', '.join(names)}"

    def is_running(self) -> bool:
        """Whether a run with enough machines is in progress without this one."""
        state = self._state()
        return bool(state is not None and state.complete)

    def has_ended(self) -> bool:
        """Whether the run has ended: its rendezvous is closed."""
        state = self._state()
        return bool(state is not None and state.closed)

    def _state(self) -> Any:
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

        found = C10dRendezvousBackend(self.client, self.args.rdzv_id).get_state()
        return None if found is None else read_state(found[0])

    def leave(self) -> None:
        """Report that this machine is done; the machine with the store waits for the reports of all."""
        if self.client is None:
            return

        def report() -> None:
            with contextlib.suppress(Exception):  # the store ends with the machine that hosts it
                left = self.client.add(_LEFT, 1)
                while self.server is not None and left < self.client.add(_COUNT, 0):
                    time.sleep(0.2)
                    left = self.client.add(_LEFT, 0)

        # torch waits without a limit for a machine that has lost its network.
        reporting = threading.Thread(target=report, daemon=True, name="accel-agent-leave")
        reporting.start()
        reporting.join(_AFTERWARDS)

    def _store(self, server: bool) -> Any:
        import torch.distributed as dist

        return dist.TCPStore(  # type: ignore[attr-defined]
            self.host, self.port, is_master=server, timeout=_READ, wait_for_workers=False, multi_tenant=server
        )


@contextlib.contextmanager
def _meeting(args: Any, own: argparse.Namespace) -> Iterator[_Meeting]:
    """Connect to the rendezvous host, within ``--connect_timeout`` seconds."""
    host, port = _endpoint(args)
    meeting = _Meeting(args, own, host, port)
    static = args.rdzv_backend == "static"
    _resolve(host, port, own.connect_timeout)
    if static and args.node_rank == 0:
        args.rdzv_conf = _with_default(args.rdzv_conf, "timeout", round(own.connect_timeout))
        meeting.host_static_store()
    elif args.rdzv_backend == "c10d":
        meeting.host_store()
    if not (static and args.node_rank == 0) and args.rdzv_backend in ("static", "c10d"):
        _wait_for(host, port, own.connect_timeout)
        meeting.check_store()
    if args.local_addr is None and not static:
        args.local_addr = _address_towards(host, port)
    if args.rdzv_backend == "c10d":
        args.rdzv_conf = _with_default(args.rdzv_conf, "is_host", "false")
        args.rdzv_conf = _with_default(args.rdzv_conf, "join_timeout", round(own.connect_timeout))
        # Ranks of a machine that joins later count their restarts from 0, so the agents' store must not be shared.
        environment.provide(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    if args.rdzv_backend in ("static", "c10d"):
        meeting.register()
    try:
        yield meeting
    finally:
        meeting.leave()


@contextlib.contextmanager
def _log_folder(args: Any) -> Iterator[str | None]:
    """A folder for the error reports of failing ranks; torch's agent would leave its own behind.

    Yields:
        the folder; None: the user has given one.
    """
    if args.log_dir is not None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="accel-agent-", ignore_cleanup_errors=True) as folder:
        args.log_dir = folder
        yield folder


@contextlib.contextmanager
def _ended_by_signals(folder: str | None) -> Iterator[None]:
    """End this process at once at a signal that comes before torch's agent listens to it, and remove the folder.

    Until all machines have come, the main thread waits in torch's native code, which runs no Python handler: a separate
    thread receives the signal. Once ranks run, torch's agent has set handlers, and they decide.
    """
    if os.name != "posix":
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)

    def ranks_run() -> bool:
        return signal.getsignal(signal.SIGTERM) is not receive

    def receive(number: int, frame: FrameType | None) -> None:
        if ranks_run():  # torch's agent does not listen to this signal: end through its clean-up
            raise SystemExit(128 + number)
        time.sleep(
            _ANSWER
        )  # until the thread ends this process: what is written meanwhile would be left behind

    def listen() -> None:
        while numbers := os.read(heard, 1):
            if numbers[0] in mine and not ranks_run():
                time.sleep(0.05)  # the main thread has come to its handler, unless it waits in native code
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                os._exit(128 + numbers[0])

    # A signal that this process inherited as ignored (nohup) stays ignored.
    mine = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, receive) for number in mine}
    previous = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, daemon=True, name="accel-agent-signals")
    listener.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous)
        os.close(told)  # ends the thread
        listener.join()
        os.close(heard)


def _run(args: Any, own: argparse.Namespace, meeting: _Meeting) -> int:
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousTimeoutError,
    )
    from torch.distributed.launcher import api

    from accel_state.launching.machines.watched_agent import RunEndedError, WatchedAgent

    agents: list[WatchedAgent] = []

    def make(**kwargs: Any) -> WatchedAgent:
        agents.append(WatchedAgent(own, **kwargs))
        return agents[-1]

    # Where torch's launcher takes its agent from; it has no other way to name one.
    api.LocalElasticAgent = make  # type: ignore[assignment, attr-defined]

    def lost(error: Exception, otherwise: _UnreachableError) -> int:
        """The exit code where the machines do not meet; an error if they have not met before."""
        if not agents or not agents[-1].started:
            raise otherwise from error
        say(f"accel: another machine failed first (exit code {PEER_FAILED}): {otherwise}")
        return PEER_FAILED

    def run() -> int:
        try:
            torchrun.run(args)  # type: ignore[no-untyped-call]
        except ChildFailedError:
            end = agents[-1].settle()
            say(f"accel: {end.why}{f' (exit code {PEER_FAILED})' if end.code == PEER_FAILED else ''}")
            return end.code
        except RunEndedError as error:
            code = error.end.code
            say(f"accel: all ranks of {socket.gethostname()} are ended, with exit code {code}: {error}")
            return code
        return 0

    while True:
        try:
            return run()
        except SignalException as error:
            return agents[-1].interrupted(int(error.sigval)) if agents else 128 + int(error.sigval)
        except RendezvousTimeoutError as error:
            if own.spares and meeting.is_running():
                continue  # a spare: the run goes on without it
            return lost(error, _not_all(meeting, meeting.came()))
        except (RendezvousClosedError, AttributeError) as error:
            # When the rendezvous closes, torch's agent returns None, which its launcher (2.13) takes for a result.
            if agents and agents[-1].started and meeting.has_ended():
                return lost(error, _UnreachableError("the run has ended"))
            if not own.spares or not meeting.has_ended():
                raise
            say(f"accel: the run has ended; {socket.gethostname()} was a spare machine")
            return 0
        except RendezvousConnectionError as error:
            return lost(
                error,
                _UnreachableError(
                    f"the connection to {meeting.host}:{meeting.port}, where the machines meet, was lost: the machine "
                    f"there has ended or its network has failed ({error})"
                ),
            )
        except DistStoreError as error:
            return lost(error, _not_all(meeting, str(error).rstrip(".")))
        except DistNetworkError as error:
            reason = first_line(error).rstrip(".")
            return lost(
                error,
                _UnreachableError(
                    f"{meeting.host}:{meeting.port}, where the machines meet, cannot be used: {reason}"
                ),
            )
        finally:
            for agent in agents:
                agent.close()


def _not_all(meeting: _Meeting, came: str) -> _UnreachableError:
    return _UnreachableError(
        f"not all machines reached {meeting.host}:{meeting.port} within {meeting.patience:g} s ({came}). Start this "
        "command on every machine with the same --main_process_ip, --main_process_port and --num_machines, or raise "
        "--connect_timeout"
    )


def _resolve(host: str, port: int, patience: float) -> None:
    """Wait until the name of the host has an address: in a cluster of containers it may come after the container."""
    until = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except socket.gaierror as error:
            if time.monotonic() >= until:
                raise _UnreachableError(
                    f"{host}, the host of --main_process_ip for {host}:{port}, has no address on this machine after "
                    f"{patience:g} s ({error.strerror}); pass its address with --main_process_ip"
                ) from None
        time.sleep(0.5)


def _wait_for(host: str, port: int, patience: float) -> None:
    until = time.monotonic() + patience
    reason = ""
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(5.0, until - time.monotonic()))):
                return
        except OSError as error:
            reason = str(error)
        if time.monotonic() >= until:
            raise _UnreachableError(
                f"{host}:{port} did not answer within {patience:g} s ({reason}). It is the address of the machine "
                "with rank 0 (--main_process_ip and --main_process_port): check that its launcher runs and that no "
                "firewall closes the port, or raise --connect_timeout"
            )
        time.sleep(0.2)


def _endpoint(args: Any) -> tuple[str, int]:
    if args.rdzv_backend != "static" and args.rdzv_endpoint:
        host, _, port = args.rdzv_endpoint.rpartition(":")
        return host.strip("[]"), int(port)
    return args.master_addr, int(args.master_port)


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2.0):
        return True
    return False


def _is_local(host: str) -> bool:
    """Whether ``host`` is an address of this machine: only such an address can be bound."""
    for family, kind, number, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, number) as probe:
            probe.bind(address)
            return True
    return False


def _address_towards(host: str, port: int) -> str:
    """This machine's address in the network of the rendezvous, at which the other machines can reach it."""
    family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, number) as probe:
        probe.connect(address)  # sends nothing: a datagram socket only chooses its route
        return str(probe.getsockname()[0])


def _with_default(conf: str, key: str, value: object) -> str:
    given = {pair.partition("=")[0].strip() for pair in conf.split(",")}
    return conf if key in given else ",".join([*filter(None, [conf]), f"{key}={value}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
