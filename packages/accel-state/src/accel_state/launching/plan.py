"""The plan of a launch: commands and environments, computed without running anything.

``plan`` is a pure function of configuration, target, environment and host. ``accel launch --dry-run`` prints its
result; the supervisor runs it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from accel_state.config.codec import rank_environment
from accel_state.config.launch import LaunchConfig
from accel_state.config.parallel_degrees import degrees_of, misfit
from accel_state.config.sources import Sources
from accel_state.constants import RANK_PREFIXED, RUN_FOLDER
from accel_state.errors import ConfigError, DeviceError
from accel_state.launching.hardware import Accelerators, usable_cpus
from accel_state.launching.machines.deepspeed import deepspeed_argv, uses_deepspeed_launcher
from accel_state.launching.machines.elastic import elastic_argv
from accel_state.launching.machines.mpi import mpi_argv
from accel_state.launching.target import Target

__all__ = [
    "NCCL_DIRECT_OFF",
    "Host",
    "LaunchPlan",
    "ProcessSpec",
    "World",
    "plan",
    "plan_rank",
    "plan_world",
    "watches",
]

NCCL_DIRECT_OFF = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
"""Variables set for NCCL on GPUs whose peer-to-peer transfers fail."""

_LOOPBACK = "127.0.0.1"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]*")  # a number, or a name as drivers give them
_PLACES = frozenset(
    f"{prefix}{name}" for prefix in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")
) | {"NODE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", RANK_PREFIXED, RUN_FOLDER}


@dataclass(frozen=True, slots=True)
class Host:
    """Properties of this machine that a plan depends on.

    Attributes:
        accelerators: the accelerators that processes can use.
        physical_cores: CPU cores; hyperthreads of one core count once.
        python: interpreter that runs scripts.
        open_mpi: whether ``mpirun`` is Open MPI's; other implementations have other flags.
        peer_to_peer: whether peer-to-peer transfers between GPUs work; if not, NCCL must be configured.
        named: whether the host name leads to this machine; if not, gloo must be told which interface to use.
        cpus: the CPU cores of each rank of this machine; empty: any.
    """

    accelerators: Accelerators = field(default_factory=Accelerators)
    physical_cores: int = 1
    python: str = sys.executable
    open_mpi: bool = True
    peer_to_peer: bool = True
    named: bool = True
    cpus: tuple[frozenset[int], ...] = ()


@dataclass(frozen=True, slots=True)
class World:
    """Number and distribution of the processes.

    Attributes:
        size: processes over all machines.
        local_size: processes on each machine.
        machines: number of machines.
        machine_rank: index of this machine.
        cpu: the processes compute on the CPU.
        joined: this process is one of more ranks that a scheduler has started; the other numbers are those of a world
            of one.
    """

    size: int
    local_size: int
    machines: int
    machine_rank: int
    cpu: bool
    joined: bool = False

    def names_one_rank(self, config: LaunchConfig) -> bool:
        """Whether its only process has the variables of a rank, as torchrun sets them: one of a distributed engine."""
        engine = (
            config.distributed_type not in (None, "NO", "MULTI_CPU", "XLA") or config.use_parallelism_config
        )
        return self.size == 1 and not self.joined and engine


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start.

    Attributes:
        rank: global rank; for a command that starts ranks itself, the machine rank.
        argv: command line.
        env: the variables that differ from the launcher's environment.
        drop: variables of the launcher's environment that the process must not inherit.
        log_path: log file for its output, or ``None``.
        cpus: the CPU cores that it may use; empty: any.
    """

    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    drop: frozenset[str] = frozenset()
    log_path: Path | None = None
    cpus: frozenset[int] = frozenset()

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The complete environment of the process, from the launcher's environment."""
        return {name: value for name, value in environ.items() if name not in self.drop} | dict(self.env)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All processes to start on this machine.

    Attributes:
        processes: one per rank, or the one command that starts the ranks.
        style: ``direct``: one process that replaces the launcher; ``ranks``: ranks supervised here; ``agent``:
            a command that starts and supervises ranks itself (torch elastic, mpirun).
        world: number and distribution of the processes.
    """

    processes: tuple[ProcessSpec, ...]
    style: Literal["direct", "ranks", "agent"]
    world: World


def plan_world(config: LaunchConfig, accelerators: Accelerators, sources: Sources | None = None) -> World:
    """Decide how many processes run, and whether they use accelerators or the CPU.

    Args:
        config: the resolved configuration.
        accelerators: those of this machine.
        sources: where the values of ``config`` come from, for messages.

    Raises:
        ConfigError: the numbers contradict each other.
        DeviceError: more accelerators are requested than this machine has.
    """
    words = _Words(config, sources or Sources(root=type(config)))
    machines = config.num_machines
    ids = _gpu_ids(config.gpu_ids)
    found = accelerators.count if ids is None else len(ids)
    # Which TPUs a process uses is torch_xla's decision: like processes on the CPU, they are not counted here.
    cpu = config.use_cpu or config.use_tpu or config.distributed_type == "MULTI_CPU" or found == 0
    if config.multi_accelerator and not config.use_cpu and accelerators.count == 0:
        raise DeviceError(
            f"{words('distributed_type')} needs accelerators, but none are visible on this machine; "
            f"{words.remedy('distributed_type', '--cpu to run the processes on the CPU')}"
        )
    strategy = config.strategy
    if strategy is not None and strategy.devices is not None and accelerators.kind not in strategy.devices:
        raise DeviceError(
            f"{words('distributed_type')} needs {strategy.devices_described}, and none are visible on this machine; "
            f"{words.remedy('distributed_type')}"
        )
    size = config.num_processes or _default_size(config, machines, found, cpu)
    if size % machines:
        raise ConfigError(
            f"{words('num_processes')} is not divisible by {words('num_machines')}; "
            f"it is the total over all machines, so pass --num_processes {size // machines * machines or machines} or "
            f"another multiple of {machines}"
        )
    if config.machine_rank >= machines:
        raise ConfigError(
            f"{words('machine_rank')} is out of range for {machines} machines ({words('num_machines')}); machine "
            f"ranks start at 0, so the largest is {machines - 1}"
        )
    _check_degrees(config, size)
    local = size // machines
    if strategy is not None and strategy.several_processes and size == 1:
        raise ConfigError(
            f"{words('distributed_type')} needs at least 2 processes, and there is 1; pass --num_processes 2, or "
            f"{words.remedy('distributed_type')}"
        )
    if config.multi_accelerator and not config.use_cpu and size == 1 and config.num_processes is None:
        raise ConfigError(
            f"{words('distributed_type')} needs at least 2 processes, but there is 1 accelerator; "
            f"{words.remedy('distributed_type')}"
        )
    if not cpu and local > found:
        source = f"{words('gpu_ids')} names" if ids is not None else "this machine has"
        wanted = "" if config.num_processes is None else f" ({words('num_processes')})"
        raise DeviceError(
            f"{local} processes on this machine{wanted} need {local} accelerators, but {source} {found}; "
            f"pass --num_processes {found * machines}, or --cpu to run on the CPU"
        )
    if ids is not None and not config.use_cpu:
        _check_ids(words("gpu_ids"), ids, accelerators)
    return World(size, local, machines, config.machine_rank, cpu)


def _default_size(config: LaunchConfig, machines: int, found: int, cpu: bool) -> int:
    """Processes where no number is given.

    Raises:
        DeviceError: there are no accelerators to count.
    """
    if config.processes_per == "gpu" and cpu:
        raise DeviceError(
            "--nproc_per_node gpu starts a process for each accelerator, and this machine has none that it may "
            "use; pass a number, or --nproc_per_node cpu"
        )
    if config.processes_per is not None and cpu:
        return machines * usable_cpus()
    return _degrees_product(config, machines if cpu else machines * found, cpu)


def _degrees_product(config: LaunchConfig, found: int, cpu: bool) -> int:
    """Default number of processes: one per accelerator found; on the CPU the number that the degrees of a mesh need."""
    if not cpu or not config.use_parallelism_config:
        return found
    return max(found, math.prod(degrees_of(config.parallelism).values()))


def _check_degrees(config: LaunchConfig, size: int) -> None:
    """Check that the degrees of a mesh multiply to the number of processes.

    Raises:
        ConfigError: they do not; the message names the degrees and values that would fit.
    """
    if not config.use_parallelism_config:
        return
    wrong = misfit(degrees_of(config.parallelism), size)
    if wrong is not None:
        raise ConfigError(f"parallelism configuration: {wrong} (--num_processes, --parallelism_config_…)")


class _Words:
    """Options of a configuration in messages, as the user set them."""

    def __init__(self, config: LaunchConfig, sources: Sources) -> None:
        self._config = config
        self._sources = sources

    def __call__(self, path: str) -> str:
        return self._sources.describe(path, getattr(self._config, path))

    def remedy(self, path: str, *others: str) -> str:
        return self._sources.remedy(path, getattr(self._config, path), *others)


def plan(
    config: LaunchConfig,
    target: Target,
    world: World,
    environ: Mapping[str, str],
    host: Host,
    *,
    port: int | None = None,
    attempt: int = 0,
) -> LaunchPlan:
    """Compute commands and environments.

    Args:
        config: the resolved configuration.
        target: the script, module or program to run.
        world: number and distribution of the processes, from ``plan_world``.
        environ: the launcher's environment.
        host: properties of this machine.
        port: port of rank 0; required if this launch starts several ranks on one machine.
        attempt: number of restarts so far.

    Raises:
        ConfigError: a launch on several machines has no address or port.
    """
    encoded = rank_environment(_for_ranks(config), environ)
    changes = {name: value for name, value in encoded.items() if environ.get(name) != value}
    drop = (frozenset(environ) - frozenset(encoded)) | _outer_world_variables(environ)
    changes |= _devices(config, host.accelerators) | _threads(config, world, environ, host)
    if not host.peer_to_peer:
        changes |= {name: "1" for name in NCCL_DIRECT_OFF if name not in environ}
    watched = watches(config) and world.machines == 1
    python_target = target.watched_argv(host.python) if watched else target.argv(host.python)
    if uses_deepspeed_launcher(config):
        argv = deepspeed_argv(config, target, host.python, changes, port)
        return _agent(argv, changes, drop, world)
    if config.mpirun.hostfile is not None:
        changes |= _rendezvous(config.main_process_ip or _LOOPBACK, _agreed_port(config, port))
        argv = mpi_argv(
            config.mpirun.hostfile, world.size, world.local_size, python_target, changes, host.open_mpi
        )
        return _agent(argv, changes, drop, world)
    if world.machines > 1:
        argv = elastic_argv(config, world.local_size, target, host.python, cpu=world.cpu)
        # torchrun reads PET_* as defaults of flags that this command leaves out on purpose.
        pet = frozenset(name for name in environ if name.startswith("PET_"))
        return _agent(argv, changes, drop | pet, world)
    if world.size == 1:
        if world.names_one_rank(config):
            changes |= _rank(0) | _group(config, world, attempt)
            changes |= {} if port is None else _rendezvous(config.main_process_ip or _LOOPBACK, port)
        if _needs_no_supervisor(config):
            alone = ProcessSpec(0, python_target, changes, drop, cpus=_cpus(host, 0))
            return LaunchPlan((alone,), "direct", world)
        changes |= _attempt(config, attempt) | {RANK_PREFIXED: ""}
        return LaunchPlan(
            (ProcessSpec(0, python_target, changes, drop, _log_path(config, 0), _cpus(host, 0)),),
            "ranks",
            world,
        )
    assert port is not None, "several ranks on one machine need a port"
    common = changes | _rendezvous(config.main_process_ip or _LOOPBACK, port) | _group(config, world, attempt)
    if "PYTHONUNBUFFERED" not in environ:
        common["PYTHONUNBUFFERED"] = "1"  # output to a pipe would be buffered in blocks of 8 KiB
    common[RANK_PREFIXED] = "1"
    if not host.named and "GLOO_SOCKET_IFNAME" not in environ:
        common["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise gloo takes it, too, after a warning of every rank
    specs = tuple(
        ProcessSpec(
            rank,
            python_target,
            common | _rank(rank) | _own_device(config, rank, host.accelerators, environ),
            drop,
            _log_path(config, rank),
            _cpus(host, rank),
        )
        for rank in range(world.size)
    )
    return LaunchPlan(specs, "ranks", world)


def plan_rank(
    config: LaunchConfig, argv: tuple[str, ...], world: World, rank: int, environ: Mapping[str, str]
) -> ProcessSpec:
    """One rank of a world that need not exist, with the environment that it would have on its machine.

    It has no address of rank 0, so that nothing in it waits for one.

    Args:
        config: the resolved configuration.
        argv: command line of the rank.
        world: number and distribution of the processes.
        rank: global rank.
        environ: the environment that it inherits.
    """
    machine, local = divmod(rank, world.local_size)
    encoded = rank_environment(_for_ranks(config), environ)
    changes = {name: value for name, value in encoded.items() if environ.get(name) != value}
    changes |= _group(config, world, 0) | _rank(rank) | {"LOCAL_RANK": str(local)}
    changes |= {"GROUP_RANK": str(machine), "GROUP_WORLD_SIZE": str(world.machines)}
    outer = frozenset(name for name in environ if name in _PLACES or name.startswith("TORCHELASTIC_"))
    drop = (frozenset(environ) - frozenset(encoded)) | outer
    return ProcessSpec(rank, argv, changes, drop)


def _for_ranks(config: LaunchConfig) -> LaunchConfig:
    # OMP_NUM_THREADS is a variable of the schema, but its value depends on the world: see ``_threads``.
    use_cpu = config.use_cpu or config.distributed_type == "MULTI_CPU"
    return dataclasses.replace(config, use_cpu=use_cpu)


def _needs_no_supervisor(config: LaunchConfig) -> bool:
    logged = config.log_dir is not None or config.tee not in (None, "", "0")
    return not (logged or watches(config) or config.spares or config.max_restarts or config.resume)


def watches(config: LaunchConfig) -> bool:
    """Whether ranks report every step to this launcher."""
    limits = (config.start_timeout, config.step_timeout, config.checkpoint_timeout)
    return config.straggler_report or any(limit is not None for limit in limits)


def _log_path(config: LaunchConfig, rank: int) -> Path | None:
    return Path(config.log_dir) / f"rank_{rank}.log" if config.log_dir is not None else None


def _agent(argv: tuple[str, ...], changes: dict[str, str], drop: frozenset[str], world: World) -> LaunchPlan:
    spec = ProcessSpec(world.machine_rank, argv, changes, drop)
    return LaunchPlan((spec,), "agent", world)


def _rendezvous(address: str, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def _agreed_port(config: LaunchConfig, port: int | None) -> int:
    chosen = config.main_process_port or port
    if chosen is None:
        raise ConfigError("processes on several machines need a common port: pass --main_process_port")
    return chosen


def _attempt(config: LaunchConfig, attempt: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
    }


def _group(config: LaunchConfig, world: World, attempt: int) -> dict[str, str]:
    # The variables that torchrun sets for its workers; libraries read all of them.
    return _attempt(config, attempt) | {
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": config.role,
        "ROLE_WORLD_SIZE": str(world.size),
    }


def _outer_world_variables(environ: Mapping[str, str]) -> frozenset[str]:
    """The variables that describe the world of this process, if it is itself a rank of some launcher.

    If inherited, they would make a single process join the world of the outer launcher, and make torch connect to the
    outer launcher's store. Without LOCAL_RANK they come from a scheduler that starts one container per process, and
    apply to the process that replaces the launcher.
    """
    if "LOCAL_RANK" not in environ:
        return frozenset()
    return frozenset(name for name in environ if name in _PLACES or name.startswith("TORCHELASTIC_"))


def _rank(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}


def _own_device(
    config: LaunchConfig, rank: int, accelerators: Accelerators, environ: Mapping[str, str]
) -> dict[str, str]:
    """With virtual local ranks, the only device that a rank sees, as torchrun sets it."""
    if not config.virtual_local_rank:
        return {}
    found = {"LOCAL_RANK": "0"}
    if accelerators.visibility is not None and not config.use_cpu:
        inherited = environ.get(accelerators.visibility)
        ids = _gpu_ids(config.gpu_ids) or (tuple(inherited.split(",")) if inherited else None)
        found[accelerators.visibility] = str(rank) if ids is None else ids[rank].strip()
    return found


def _cpus(host: Host, rank: int) -> frozenset[int]:
    return host.cpus[rank] if rank < len(host.cpus) else frozenset()


def _threads(config: LaunchConfig, world: World, environ: Mapping[str, str], host: Host) -> dict[str, str]:
    """``OMP_NUM_THREADS``: the requested value; else, only if several processes share a machine, a default.

    A single process gets the environment that ``python script.py`` would get. The default is the number of physical
    cores per process on the CPU, and 1 with accelerators, as torchrun sets it.
    """
    if config.num_cpu_threads_per_process is not None:
        return {"OMP_NUM_THREADS": str(config.num_cpu_threads_per_process)}
    if environ.get("OMP_NUM_THREADS") or world.local_size == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, host.physical_cores // world.local_size) if world.cpu else 1)}


def _gpu_ids(text: str | None) -> tuple[str, ...] | None:
    if text is None or text.strip().lower() in ("", "all"):
        return None
    return tuple(part.strip() for part in text.split(","))


def _check_ids(named: str, ids: tuple[str, ...], accelerators: Accelerators) -> None:
    present = accelerators.present
    for name in ids:
        if not _ID.fullmatch(name):
            raise ConfigError(
                f"{named} is not a list of ids; pass --gpu_ids with ids such as 0,1 (with a plain comma between two), "
                "or all"
            )
        if not present:
            raise DeviceError(
                f"{named} names accelerator {name}, but no accelerator was found on this machine; "
                "pass --cpu to run on the CPU"
            )
        if name.isdecimal() and int(name) >= present:
            raise DeviceError(
                f"{named} names accelerator {name}, but this machine has {present} (0 to {present - 1}); pass "
                "--gpu_ids with some of these, or all"
            )
    repeated = sorted({name for name in ids if ids.count(name) > 1})
    if repeated:
        raise ConfigError(f"{named} names accelerator {repeated[0]} twice; name each accelerator once")


def _devices(config: LaunchConfig, accelerators: Accelerators) -> dict[str, str]:
    ids = _gpu_ids(config.gpu_ids)
    if ids is None or accelerators.visibility is None:
        return {}
    return {accelerators.visibility: ",".join(ids)}
