"""``notebook_launcher`` and ``debug_launcher``: ranks started from a running Python process.

A forked rank inherits everything that the notebook has defined, so its function need not be in a module. Where
something does not survive a fork, such as an initialised accelerator, the ranks are new processes, which receive the
function by cloudpickle.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Template
from typing import Any, Literal

from accel_state.clusters.base import DEFAULT_PORT
from accel_state.config.launch import LaunchConfig
from accel_state.config.schema import schema_of
from accel_state.environment import patch_environment, snapshot
from accel_state.errors import ConfigError, DeviceError, LaunchError, NotAvailableError, StateError
from accel_state.launching.hardware import find_accelerators, physical_cores
from accel_state.launching.ports import reserve_port
from accel_state.launching.ranks.forks import ForkedRanks
from accel_state.launching.ranks.spawns import SpawnedRanks
from accel_state.launching.ranks.supervisor import Outcome, Policy, SupervisedProcess, supervise
from accel_state.launching.watching.output import Console, TextSink

__all__ = ["debug_launcher", "notebook_launcher"]


# Topology of the process state that a one-process launch created in this process. It does not prevent the next launch,
# whose ranks discard it, because only the launched function used it.
_left_behind: Any = None


def notebook_launcher(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    start_method: Literal["fork", "spawn"] | None = None,
) -> None:
    """Run a training function on several processes from a notebook.

    The function may be defined in a cell. It must create its ``Accelerator`` itself. The processes are forks of this
    one; if an earlier cell has initialised an accelerator device, which does not survive a fork, they are new
    processes, which receive the function and the global names that it uses by cloudpickle. One process on one node
    runs in the notebook itself.

    Args:
        function: called as ``function(*args)`` on every rank; its return value is dropped.
        args: a tuple or list of its arguments.
        num_processes: ranks on this node; by default one per accelerator, or 1 on the CPU.
        mixed_precision: ``no``, ``fp16`` or ``bf16``: the default of an ``Accelerator`` in the function.
        use_port: port of rank 0; by default a free port on one node, 29500 on several.
        master_addr: address of the node with rank 0.
        node_rank: index of this node, from 0.
        num_nodes: number of nodes; each makes the same call with its own ``node_rank``.
        rdzv_backend: ``static``, or a rendezvous of torch's elastic launcher such as ``c10d``.
        rdzv_endpoint: address of that rendezvous; by default ``master_addr`` and ``use_port``.
        rdzv_conf: more settings of that rendezvous.
        rdzv_id: name of the job at that rendezvous.
        max_restarts: how often all ranks are restarted after a failure.
        monitor_interval: seconds between two checks of the ranks.
        log_line_prefix_template: prefix of each line of output, with ``${rank}``, ``${local_rank}``
            and ``${role_name}``; by default ``[rank ${rank}] ``.
        start_method: ``fork`` or ``spawn``; by default a fork where that is safe.

    Raises:
        ConfigError: an argument has an invalid value.
        DeviceError: there are fewer accelerators than processes.
        StateError: this process already has an ``Accelerator``, or a fork was requested but is not safe.
        LaunchError: a rank failed, and the message has its traceback; or the function cannot be sent to new processes.
    """
    arguments = _arguments(args)
    options = schema_of(LaunchConfig).by_path
    precision = options["mixed_precision"].read(mixed_precision, "mixed_precision")
    port = None if use_port is None else options["main_process_port"].read(use_port, "use_port")
    environ = snapshot()
    count = _processes_here(num_processes, environ)
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(
            f"node_rank={node_rank} is not one of num_nodes={num_nodes} nodes; node ranks start at 0"
        )
    variables = {}
    if precision != "no" or "ACCELERATE_MIXED_PRECISION" not in environ:
        variables["ACCELERATE_MIXED_PRECISION"] = precision
    if count * num_nodes == 1:
        # The caller has chosen one process, also in a shell of a job with several machines.
        with patch_environment(**variables, ACCEL_CLUSTER="none"):
            _run_here(function, arguments)
        return
    elastic = rdzv_backend != "static"
    ranks_class = _ranks_class("notebook_launcher", start_method, elastic=elastic)
    ranks = ranks_class(
        function=function,
        args=arguments,
        local_size=count,
        first_rank=node_rank * count,
        world_size=num_nodes * count,
        node_rank=node_rank,
        master_addr=master_addr,
        variables=variables | _threads(environ, count),
        prefix=Template(log_line_prefix_template or "[rank ${rank}] "),
        max_restarts=max_restarts,
    )
    if isinstance(ranks, ForkedRanks) and elastic:
        endpoint = rdzv_endpoint or f"{master_addr}:{port or DEFAULT_PORT}"
        _run_elastic(ranks, num_nodes, rdzv_backend, endpoint, rdzv_conf or {}, rdzv_id, monitor_interval)
        return
    if num_nodes > 1 and not port:
        port = DEFAULT_PORT
    _run(ranks, port, own_port=node_rank == 0, monitor_interval=monitor_interval)


def debug_launcher(function: Callable[..., Any], args: Iterable[Any] = (), num_processes: int = 2) -> None:
    """Run a function on several CPU processes of one world, for tests and debugging.

    Args:
        function: called as ``function(*args)`` on every rank; its return value is dropped.
        args: a tuple or list of its arguments.
        num_processes: number of ranks; one rank gets no process group.

    Raises:
        ConfigError: ``num_processes`` is less than 1.
        StateError: this process already uses an accelerator or a process group.
        LaunchError: a rank failed; the message has its traceback.
    """
    arguments = _arguments(args)
    _check_number(num_processes)
    ranks_class = _ranks_class("debug_launcher", None, elastic=False)
    environ = snapshot()
    variables = {"ACCELERATE_USE_CPU": "yes", "FORK_LAUNCHED": "1"}
    if "GLOO_SOCKET_IFNAME" not in environ and sys.platform.startswith("linux"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # the host name may resolve to an unreachable address
    ranks = ranks_class(
        function=function,
        args=arguments,
        local_size=num_processes,
        world_size=num_processes,
        variables=variables | _threads(environ, num_processes),
    )
    _run(ranks, None, own_port=True, monitor_interval=0.1)


def _arguments(args: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
        raise ConfigError(
            f"args={args!r} is a {type(args).__name__}; expected a tuple or list with one item per argument of the "
            f"function: pass args=({args!r},)"
        )
    return tuple(args)


def _process_state() -> Any | None:
    """The ``PartialState`` of this process, if there is one; loads no torch."""
    process = sys.modules.get("accel_state.world.process")
    return None if process is None else process.current_state()


def _run_here(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Call the function in this process, and remember the process state that it creates."""
    global _left_behind
    before = _process_state()
    try:
        function(*args)
    finally:
        after = _process_state()
        if before is None and after is not None:
            _left_behind = after.topology


def _run(
    ranks: ForkedRanks | SpawnedRanks, port: int | None, *, own_port: bool, monitor_interval: float
) -> None:
    console = Console(TextSink(sys.stdout), TextSink(sys.stderr))
    policy = Policy(
        max_restarts=ranks.max_restarts,
        restart_preempted=ranks.max_restarts > 0,
        monitor_interval=monitor_interval,
        interrupt_grace=2.0,
    )

    def start(attempt: int) -> Sequence[SupervisedProcess]:
        if not own_port:
            assert port is not None
            return ranks.start(attempt, port, console)
        with reserve_port(port) as chosen:
            # The forked ranks inherit the reservation; rank 0 can still listen on the port.
            return ranks.start(attempt, chosen, console)

    with ranks:
        outcome = supervise(start, policy, console, guarded=False)
    _raise(outcome, ranks.world_size)


def _raise(outcome: Outcome, size: int) -> None:
    if outcome.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.stopped_by is not None:
        os.kill(os.getpid(), outcome.stopped_by)  # the signal was meant for this process too
    if outcome.code != 0:
        error = f":\n\n{outcome.error}" if outcome.error else ""
        raise LaunchError(f"{outcome.label} of {size} failed ({outcome.how}){error}")


def _processes_here(wanted: int | None, environ: Mapping[str, str]) -> int:
    if environ.get("PJRT_DEVICE") == "TPU" or "TPU_NAME" in environ:
        raise NotAvailableError(
            "this notebook runs on a TPU, whose devices one process uses. Call the function without notebook_launcher; "
            "Accelerator(strategy=XlaPlugin(spmd=True)) in it uses all of them"
        )
    accelerators = find_accelerators(environ)
    cpu = environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on", "t")
    found = 0 if cpu else accelerators.count
    count = max(1, found) if wanted is None else wanted
    _check_number(count)
    if 0 < found < count:
        raise DeviceError(
            f"num_processes={count} needs {count} accelerators, but this machine has {found}; pass "
            f"num_processes={found}, or set ACCELERATE_USE_CPU=true to run on the CPU"
        )
    return count


def _check_number(count: int) -> None:
    if not isinstance(count, int):
        raise ConfigError(f"num_processes is {count!r}; expected an integer")
    if count < 1:
        raise ConfigError(f"num_processes={count} starts nothing; pass at least 1")


def _threads(environ: Mapping[str, str], count: int) -> dict[str, str]:
    if environ.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, physical_cores() // count))}


def _ranks_class(
    launcher: str, start_method: str | None, *, elastic: bool
) -> type[ForkedRanks] | type[SpawnedRanks]:
    """How the ranks are started: by a fork where that is safe, else as new processes.

    Raises:
        ConfigError: there is no such method.
        StateError: an ``Accelerator`` exists, or a fork is requested, or the only way, and is not safe.
    """
    if start_method not in (None, "fork", "spawn"):
        raise ConfigError(f"start_method is {start_method!r}; expected 'fork' or 'spawn'")
    state = _process_state()
    if state is not None and state.topology is not _left_behind:
        raise StateError(
            f"{launcher} starts processes, but an Accelerator or PartialState already exists in this process. "
            "Create it inside the function only, and restart the notebook's kernel"
        )
    reason = "" if start_method == "spawn" else _why_not_to_fork()
    if elastic and (reason or start_method == "spawn"):
        raise StateError(
            f"torch's elastic rendezvous forks processes, but {reason or 'start_method is spawn'}; use "
            'rdzv_backend="static"'
        )
    if start_method == "fork" and reason:
        raise StateError(f"{launcher} was asked to fork processes, but {reason}; leave start_method out")
    return SpawnedRanks if reason or start_method == "spawn" else ForkedRanks


def _why_not_to_fork() -> str:
    """Why a forked process would not work; empty: a fork is safe."""
    if not hasattr(os, "fork"):
        return "this platform cannot"
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "this process already belongs to a process group"
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_initialized():
            return (
                f"{name.upper()}, which does not survive a fork, is already initialised: a cell moved a tensor to the "
                "device or asked for its properties, or a launch of one process computed in this one"
            )
    if "bitsandbytes" in sys.modules and find_accelerators(snapshot()).count:
        return "bitsandbytes, which opens the device, is already imported"
    return ""


def _run_elastic(
    ranks: ForkedRanks,
    num_nodes: int,
    backend: str,
    endpoint: str,
    settings: dict[str, Any],
    run_id: str,
    monitor_interval: float,
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
    from torch.distributed.launcher.api import elastic_launch

    config = ElasticConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=ranks.local_size,
        run_id=run_id,
        rdzv_endpoint=endpoint,
        rdzv_backend=backend,
        rdzv_configs=settings,
        max_restarts=ranks.max_restarts,
        monitor_interval=monitor_interval,
        start_method="fork",
        log_line_prefix_template=ranks.prefix.template,
    )
    try:
        elastic_launch(config, ranks.call)()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise LaunchError(
            f"rank {rank} failed (exit code {failure.exitcode}):\n\n{failure.message}"
        ) from error
