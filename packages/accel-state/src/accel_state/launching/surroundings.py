"""The world that a scheduler describes, as values of the configuration.

Precedence: defaults < file < scheduler < environment < flags. A file describes a machine in general, the scheduler the
machines of this job, so the scheduler's numbers replace the file's. A variable of the schema or a flag that contradicts
the scheduler about the number of machines is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from accel_state.clusters.alone import check_shell
from accel_state.clusters.containers import MACHINES
from accel_state.clusters.schedulers import Allocation, Described, find_allocation
from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import Origin, Resolved
from accel_state.config.schema import build, flatten, schema_of
from accel_state.config.sources import Source
from accel_state.errors import ConfigError
from accel_state.launching.hardware import Accelerators, find_accelerators
from accel_state.launching.plan import plan_world

__all__ = ["Surroundings", "find_surroundings"]

_WAY_OUT = "remove it, or pass --cluster none to ignore the scheduler"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A configuration merged with the scheduler's values.

    Attributes:
        resolved: the configuration; options from the scheduler have the origin ``SCHEDULER``.
        allocation: the scheduler's description of the job; None without one.
        joins: the launcher is itself a rank of the scheduler's world: it becomes the script.
        notes: messages for the user.
    """

    resolved: Resolved
    allocation: Allocation | None = None
    joins: bool = False
    notes: tuple[str, ...] = ()


def find_surroundings(resolved: Resolved, environ: Mapping[str, str], *, trains: bool = True) -> Surroundings:
    """Merge the configuration with the machines that the scheduler of this launcher describes.

    Nothing is added if another program places the ranks (mpirun, DeepSpeed's launcher, a submitted job, a pod).

    Args:
        resolved: the configuration.
        environ: the environment variables.
        trains: the ranks train, so it is an error if they would leave out machines of the job.

    Raises:
        ConfigError: a variable is missing or wrong, or contradicts a flag or a variable of the schema; the message
            names both. Or this is the shell of a job with several machines.
    """
    config = resolved.config
    if not isinstance(config, LaunchConfig) or _placed_by_others(config):
        if isinstance(config, LaunchConfig) and config.submit and config.cluster == "none":
            raise ConfigError(
                f"{_shown(resolved, 'cluster')}, so the launchers of the job would ignore the machines that "
                f"--submit {config.submit} gets; remove it"
            )
        return Surroundings(resolved)
    # The launcher of this rank was told the scheduler. A launcher in a rank starts a world of its own.
    inherited = "LOCAL_RANK" in environ and resolved.origin("cluster") == Origin.ENVIRONMENT
    found = find_allocation(environ, "none" if inherited else config.cluster)
    if found is None:
        return Surroundings(resolved, notes=_alone(config, environ) if trains else ())
    if found.role == "rank":
        _check_ranks(found, resolved, config)
        notes = (found.summary(),) if found.index == 0 else ()
        return Surroundings(resolved, found, joins=True, notes=notes)
    merged, notes_of_file = _merged(found, resolved, config)
    joins = found.joins and _is_one_rank_of(merged, environ)
    told = () if joins and found.index != 0 else (found.summary(), *notes_of_file)
    return Surroundings(merged, found, joins=joins, notes=told)


def _alone(config: LaunchConfig, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Notes about machines that variables mention although they do not describe a world to this launcher.

    Raises:
        ConfigError: variables say that there are several machines, and not which of them this one is.
    """
    if config.num_machines > 1 or config.cluster == "none":
        return ()
    check_shell(environ)
    # 0: perhaps the only pod. In the others of several this is an error.
    if environ.get("JOB_COMPLETION_INDEX") and not environ.keys() & {"LOCAL_RANK", *MACHINES}:
        return (
            "this pod of an Indexed Job trains alone: JOB_COMPLETION_INDEX is 0, and NNODES is not set; with several "
            "pods set NNODES and MASTER_ADDR",
        )
    return ()


def _placed_by_others(config: LaunchConfig) -> bool:
    deepspeed = config.use_deepspeed and config.deepspeed.deepspeed_multinode_launcher not in (
        None,
        "standard",
    )
    return (
        config.mpirun.hostfile is not None
        or deepspeed
        or config.submit is not None
        or config.tpu.tpu_use_cluster
    )


def _check_ranks(found: Allocation, resolved: Resolved, config: LaunchConfig) -> None:
    for path, described in found.options.items():
        _check(found, resolved, path, described)
    if config.num_machines > 1 and resolved.origin("num_machines") > Origin.SCHEDULER:
        per = f"{found.scheduler} starts every rank itself ({found.options['num_processes'].source})"
        raise ConfigError(
            f"{_shown(resolved, 'num_machines')}, but {per}, so this launcher starts one process; start one task per "
            f"machine (--ntasks-per-node=1), or {_WAY_OUT}"
        )
    restarts = [
        label
        for label, value in (("--max_restarts", config.max_restarts), ("--spares", config.spares))
        if value
    ]
    if restarts:
        raise ConfigError(
            f"{restarts[0]} cannot restart a world whose ranks {found.scheduler} has started one by one; start one "
            "task per machine (--ntasks-per-node=1), so that this launcher starts the ranks"
        )


def _merged(found: Allocation, resolved: Resolved, config: LaunchConfig) -> tuple[Resolved, list[str]]:
    values: dict[str, Any] = flatten(config)
    origins = dict(resolved.origins)
    sources = dict(resolved.sources.by_path)
    notes = []
    options = dict(found.options)
    if config.spares and "num_machines" in options:
        # The spare machines are in the job too; the rendezvous decides which machines are spare, and their ranks.
        total = options["num_machines"]
        options["num_machines"] = Described(max(1, total.value - config.spares), total.source, total.firm)
        options.pop("machine_rank", None)
    per = _per_machine(found, resolved, config)
    machines = options["num_machines"].value if "num_machines" in options else config.num_machines
    if resolved.sources.is_per_machine("num_processes") and config.num_processes is not None:
        values["num_processes"] = config.num_processes // config.num_machines * machines
        resolved = dataclasses.replace(resolved, config=build(type(config), values))
    if per is not None:
        options["num_processes"] = Described(per.value * machines, per.source, per.firm)
    for path, described in options.items():
        _check(found, resolved, path, described)
        origin = resolved.origin(path)
        if origin > Origin.SCHEDULER or (origin == Origin.FILE and not described.firm):
            continue
        if origin == Origin.FILE and values[path] != described.value:
            notes.append(f"{_shown(resolved, path)} is overridden by {described.source}")
        values[path], origins[path] = described.value, Origin.SCHEDULER
        sources[path] = Source(Origin.SCHEDULER, described.source)
    merged = dataclasses.replace(
        resolved,
        config=build(type(config), values),
        origins=MappingProxyType(origins),
        sources=dataclasses.replace(resolved.sources, by_path=sources),
    )
    return merged, notes


def _per_machine(found: Allocation, resolved: Resolved, config: LaunchConfig) -> Described | None:
    """Processes of each machine: the scheduler's, or those of a file, which may be for another number of machines."""
    if found.processes_per_machine is not None:
        cpu = (
            config.use_cpu and not found.processes_per_machine.firm
        )  # a count of GPUs says nothing about the CPU
        return None if cpu else found.processes_per_machine
    if resolved.origin("num_processes") == Origin.FILE and config.num_processes is not None:
        per = max(1, config.num_processes // config.num_machines)
        return Described(per, f"{per} processes on each machine")
    return None


def _check(found: Allocation, resolved: Resolved, path: str, described: Described) -> None:
    given = flatten(resolved.local())[path]
    if described.firm and resolved.origin(path) > Origin.SCHEDULER and given != described.value:
        raise ConfigError(
            f"{_shown(resolved, path)}, but {found.scheduler} says {described.value} ({described.source}); {_WAY_OUT}"
        )


def _shown(resolved: Resolved, path: str) -> str:
    bound = schema_of(LaunchConfig).by_path[path]
    value = flatten(resolved.local())[path]
    match resolved.origin(path):
        case Origin.FILE:
            return f"{bound.file_path}: {value} in {resolved.file}"
        case Origin.ENVIRONMENT:
            return f"{bound.variables[0]}={value} in the environment"
        case _:
            return f"{bound.label} {value}"


def _is_one_rank_of(resolved: Resolved, environ: Mapping[str, str]) -> bool:
    """Whether this machine has one process that needs no supervision, and the script finds the same world by itself."""
    config = resolved.local()
    given = (resolved.origin(path) > Origin.SCHEDULER for path in ("main_process_ip", "main_process_port"))
    supervised = config.max_restarts or config.spares or config.min_machines or config.log_dir is not None
    elastic = config.rdzv_backend != "static" or config.tee not in (None, "", "0")
    if any(given) or supervised or elastic or config.resume:
        return False
    accelerators = Accelerators() if config.use_cpu else find_accelerators(environ)
    return plan_world(config, accelerators, resolved.sources).local_size == 1
