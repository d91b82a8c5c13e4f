"""The driver of a job on Ray: one launcher on each machine, started again when the job is preempted or a machine dies.

Ray starts it as a job's entry point on the cluster; ``ray_launcher`` runs the same in a notebook. Each machine is an
actor in a bundle of one placement group, so all machines start together or none does.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from accel_state.constants import PEER_FAILED
from accel_state.environment import snapshot
from accel_state.errors import ConfigError, LaunchError, MissingDependencyError
from accel_state.launching.ranks.processes import CommandProcess, start_command
from accel_state.launching.submission.outcomes import decide
from accel_state.messages import first_line, say

__all__ = ["RayMachine", "RayRun", "main", "ray_launcher", "run_on_ray"]

_TOLD_EVERY = 60.0
_LOOK = 1.0
_LEFT_OUT = ("OMP_NUM_THREADS", "LOCAL_RANK", "RANK", "WORLD_SIZE")
"""Variables of the actor's process that the launcher sets for its ranks; Ray sets the first for every actor."""


@dataclass(frozen=True, slots=True)
class RayRun:
    """A run on Ray.

    Attributes:
        command: the launch command, beginning with ``accel launch``, without numbers of machines and processes.
        per_machine: processes of each machine; None: the launcher decides.
        machines: number of machines, at most.
        resources: what each machine of the run reserves, in Ray's names: CPU, GPU, memory in bytes, others.
        min_machines: number of machines with which the run continues after a loss; None: ``machines``.
        retries: number of restarts after failures; preemptions and lost machines do not count.
        grace: seconds that launchers have to end after one of them has failed, or after a stop signal.
        patience: seconds that a restarted run waits for its missing machines.
        limit: seconds after which the run is stopped; None: no limit.
    """

    command: Sequence[str]
    per_machine: int | None
    machines: int
    resources: Mapping[str, float]
    min_machines: int | None = None
    retries: int = 0
    grace: float = 300.0
    patience: float = 300.0
    limit: float | None = None


class RayMachine:
    """One machine of a run: an actor that starts the launcher and passes its output on."""

    def __init__(self) -> None:
        self._process: CommandProcess | None = None
        self._stopped = False

    def place(self) -> tuple[str, str, int]:
        """Id of the node, its address, and a free port there."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port: int = free.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    def run(
        self, command: Sequence[str], variables: Mapping[str, str], payload: bytes | None = None
    ) -> Iterator[str | int]:
        """Start the launcher; yield the lines of its output, and in the end its exit code.

        Args:
            command: its command line; ``{payload}`` stands for the file with the payload.
            variables: added to the environment.
            payload: a function that the ranks call.
        """
        environ = {name: text for name, text in snapshot().items() if name not in _LEFT_OUT} | dict(variables)
        reading, writing = os.pipe()
        with contextlib.ExitStack() as opened:
            if payload is not None:
                folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="accel-ray-"))
                (Path(folder) / "function").write_bytes(payload)
                command = [word.replace("{payload}", f"{folder}/function") for word in command]
            lines = opened.enter_context(os.fdopen(reading, encoding="utf-8", errors="replace"))
            with os.fdopen(writing, "wb") as output:
                self._process = start_command(
                    0,
                    tuple(command),
                    environ,
                    capture=False,
                    reads_input=False,
                    on_parent_death=signal.SIGTERM,
                    output=output,
                )
            if self._stopped:  # the signal came before the launcher
                self.stop()
            for line in lines:  # noqa: UP028 - Ray sends values into the generator, which a file does not take
                yield line
            while (code := self._process.poll()) is None:
                time.sleep(0.05)
            yield code if code >= 0 else 128 - code

    def stop(self) -> None:
        """Send the launcher the stop signal; its ranks save, and it ends with code 75."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.send(signal.SIGTERM)


@dataclass(slots=True)
class _Attempt:
    """One start of all machines."""

    actors: list[Any]
    nodes: list[str]
    codes: dict[int, int | None] = field(default_factory=dict)


def run_on_ray(run: RayRun, payload: bytes | None = None, write: Callable[[str], None] | None = None) -> int:
    """Start a run on the machines of the cluster that this process is connected to, and wait for its end.

    Args:
        run: the run.
        payload: a function that the ranks call, see ``RayMachine.run``.
        write: receives each line of output; by default it is printed.

    Returns:
        The exit code: 0, or that of the launcher that failed first.
    """
    write = write or (lambda line: print(line, flush=True))
    retries, known = run.retries, _Numbers()
    stop = threading.Event()
    began = time.monotonic()
    with _stopped_by_signals(stop):
        machines = run.machines
        while True:
            with _machines_of(run, machines, stop) as attempt:
                if attempt is None and stop.is_set():
                    return 128 + signal.SIGTERM
                if (
                    attempt is None
                ):  # Ray learns of a death after some seconds, in which it promises the machine
                    machines = _wait_for_machines(run)
                    continue
                attempt.actors, attempt.nodes = known.in_order(attempt.actors, attempt.nodes)
                codes = _watch(run, attempt, payload, stop, write, began)
            decision = decide(codes, retries)
            if decision.action != "again":
                if decision.action == "failed":
                    say(f"accel: the run has failed: {decision.why}")
                return decision.code
            if stop.is_set() or (run.limit is not None and time.monotonic() - began > run.limit):
                say(f"accel: the run was stopped: {decision.why}")
                return decision.code
            retries -= decision.counts
            machines = _wait_for_machines(run)
            say(f"accel: {decision.why}; the run starts again on {machines} of {run.machines} machines")


class _Numbers:
    """The order of nodes: one that comes back gets the number that it had, so its ranks stay the same."""

    def __init__(self) -> None:
        self._order: list[str] = []

    def in_order(self, actors: Sequence[Any], nodes: Sequence[str]) -> tuple[list[Any], list[str]]:
        fresh = [node for node in nodes if node not in self._order]
        order = []
        for node in self._order:  # a new node takes the number of one that is gone
            if node in nodes:
                order.append(node)
            elif fresh:
                order.append(fresh.pop(0))
        self._order = order + fresh
        pairs = sorted(zip(nodes, actors, strict=True), key=lambda pair: self._order.index(pair[0]))
        return [actor for _, actor in pairs], [node for node, _ in pairs]


@contextlib.contextmanager
def _machines_of(run: RayRun, machines: int, stop: threading.Event) -> Iterator[_Attempt | None]:
    """The actors, each on a node of its own; None if the run is stopped meanwhile, or can do with fewer machines."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([dict(run.resources)] * machines, strategy="STRICT_SPREAD")
    try:
        began = told = time.monotonic()
        while not group.wait(timeout_seconds=_LOOK):
            late = time.monotonic() - began > run.patience
            if stop.is_set() or (late and (run.min_machines or machines) <= _fitting(run) < machines):
                yield None
                return
            if time.monotonic() - told > _TOLD_EVERY:
                told = time.monotonic()
                say(
                    f"accel: the run waits for {machines} machines with {json.dumps(dict(run.resources))} each"
                )
        others = {
            name: amount for name, amount in run.resources.items() if name not in ("CPU", "GPU", "memory")
        }
        actor = ray.remote(RayMachine)
        actors = [
            actor.options(
                num_cpus=run.resources.get("CPU", 0),
                num_gpus=run.resources.get("GPU", 0),
                memory=run.resources.get("memory"),
                resources=others,
                max_concurrency=2,  # `stop` while `run` goes on
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=at),
            ).remote()
            for at in range(machines)
        ]
        yield _Attempt(actors, [place[0] for place in ray.get([one.place.remote() for one in actors])])
        for one in actors:
            ray.kill(one)
    finally:
        remove_placement_group(group)


def _watch(
    run: RayRun,
    attempt: _Attempt,
    payload: bytes | None,
    stop: threading.Event,
    write: Callable[[str], None],
    began: float,
) -> list[int | None]:
    """Start the launchers, pass their output on, and return their exit codes; None for a machine that was lost."""
    import ray

    _, address, port = ray.get(attempt.actors[0].place.remote())
    count = len(attempt.actors)
    events: queue.Queue[tuple[int, str | int | None]] = queue.Queue()

    def follow(at: int) -> None:
        words = _command(run, count)
        variables = {
            "NNODES": str(count),
            "NODE_RANK": str(at),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        try:
            lines = attempt.actors[at].run.options(num_returns="streaming").remote(words, variables, payload)
            for reference in lines:
                event = ray.get(reference)
                events.put((at, event))
                if not isinstance(event, str):
                    return  # the end of the stream may be the end of the actor
        except (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError) as error:
            say(f"accel: machine {at} was lost: {first_line(error)}")
            events.put((at, None))
        except ray.exceptions.RayTaskError as error:
            say(f"accel: the launcher of machine {at} cannot be started: {error}")
            events.put((at, 1))

    for at in range(count):
        threading.Thread(target=follow, args=(at,), daemon=True, name=f"accel-ray-{at}").start()
    ends: float | None = None
    told = False
    looked = 0.0
    while len(attempt.codes) < count and (ends is None or time.monotonic() < ends):
        with contextlib.suppress(queue.Empty):
            at, event = events.get(timeout=_LOOK)
            if isinstance(event, str):
                write(f"[machine {at}] {event.rstrip()}" if count > 1 else event.rstrip())
            else:
                attempt.codes[at] = event
                if event != 0 and ends is None:
                    ends = time.monotonic() + run.grace
        now = time.monotonic()
        if told or now - looked < _LOOK:  # ranks may write without a pause
            continue
        looked = now
        late = run.limit is not None and now - began > run.limit - run.grace
        if stop.is_set() or late or _is_taken_away(attempt.nodes):
            told, ends = True, now + run.grace
            for one in attempt.actors:
                one.stop.remote()
    # A launcher that is still there is ended now: after a stop signal as if its machine was taken away, else because
    # another machine has failed.
    return [attempt.codes.get(at, None if told else PEER_FAILED) for at in range(count)]


def _command(run: RayRun, machines: int) -> list[str]:
    """The launch command of each machine, with this machine's Python."""
    words = list(run.command)
    assert words[:2] == ["accel", "launch"], "a launch command"
    counted = [] if run.per_machine is None else [f"--num_processes={run.per_machine * machines}"]
    return [sys.executable, "-m", "accel_cli", "launch", *counted, *words[2:]]


def _is_taken_away(nodes: Sequence[str]) -> bool:
    """Whether Ray drains one of the nodes: its owner takes it away soon."""
    import ray

    draining: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
    return any(node in draining for node in nodes)


def _wait_for_machines(run: RayRun) -> int:
    """The number of machines with which the run starts again."""
    least = run.min_machines or run.machines
    until = time.monotonic() + (run.patience if least < run.machines else 0)
    while (found := _fitting(run)) < run.machines and time.monotonic() < until:
        time.sleep(_LOOK)
    return max(least, min(found, run.machines))


def _fitting(run: RayRun) -> int:
    """The number of living nodes that have what a machine of the run reserves, and are not taken away."""
    import ray

    draining = ray._private.state.state.get_draining_nodes()
    return sum(
        node["Alive"]
        and node["NodeID"] not in draining
        and all(node["Resources"].get(name, 0) >= amount for name, amount in run.resources.items())
        for node in ray.nodes()
    )


@contextlib.contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Context in which SIGTERM, which Ray sends to stop a job, sets ``stop``; only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def receive(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = signal.signal(signal.SIGTERM, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ray_launcher(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    *,
    num_machines: int = 1,
    min_machines: int | None = None,
    max_restarts: int = 0,
    resources: Mapping[str, float] | None = None,
    address: str | None = None,
    use_cpu: bool = False,
) -> None:
    """Run a training function on the machines of a Ray cluster, from a notebook or a script.

    The function may be defined in a cell. It must create its ``Accelerator`` itself. It is sent by cloudpickle with the
    global names that it uses; modules that it imports must be on the machines.

    Args:
        function: called as ``function(*args)`` on every rank; its return value is dropped.
        args: its arguments.
        num_processes: number of ranks over all machines; by default one for each GPU in ``resources``, else one for
            each machine.
        mixed_precision: ``no``, ``fp16`` or ``bf16``.
        num_machines: number of machines, each a node of the cluster.
        min_machines: number of machines with which the run continues after a loss; by default ``num_machines``.
        max_restarts: restarts after failures; lost machines do not count.
        resources: what each machine reserves, in Ray's names; by default ``{"CPU": 1}``.
        address: address of the cluster, if this process is not connected to one; by default that of this machine.
        use_cpu: the ranks compute on the CPU.

    Raises:
        MissingDependencyError: Ray or cloudpickle is not installed.
        ConfigError: the processes cannot be divided over the machines.
        LaunchError: the run has failed.
    """
    try:
        import cloudpickle
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            f"ray_launcher needs {error.name}, which is not installed: pip install ray cloudpickle"
        ) from error
    resources = dict(resources or {"CPU": 1})
    count = num_processes or num_machines * int(resources.get("GPU", 1))
    if count % num_machines:
        raise ConfigError(f"num_processes={count} is not divisible by num_machines={num_machines}")
    words = ["accel", "launch", *(["--cpu"] if use_cpu else []), f"--mixed_precision={mixed_precision}"]
    words += ["-m", "accel_state.launching.submission.ray_function", "{payload}"]
    run = RayRun(
        words, count // num_machines, num_machines, resources, min_machines, max_restarts, grace=30.0
    )
    if not ray.is_initialized():
        ray.init(address=address or "auto", log_to_driver=False)
    code = run_on_ray(run, cloudpickle.dumps((function, tuple(args))))
    if code:
        raise LaunchError(f"the run on Ray has failed with exit code {code}; the output above tells why")


def main(arguments: Sequence[str]) -> int:
    """Run the driver of a job on the cluster of this machine.

    Args:
        arguments: the fields of a ``RayRun`` as JSON.
    """
    import ray

    ray.init(address="auto", log_to_driver=False)
    run = RayRun(**json.loads(arguments[0]))
    try:
        return run_on_ray(run)
    except LaunchError as error:
        say(f"accel: error: {error}")
        return 1
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
