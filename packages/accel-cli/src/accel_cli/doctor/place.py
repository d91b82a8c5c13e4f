"""Which world ``accel doctor`` checks, and which of its ranks this doctor starts."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping

from accel_cli.doctor.checks import Finding
from accel_cli.doctor.world import RankPlace
from accel_state.clusters.base import DEFAULT_PORT
from accel_state.clusters.topology import detect
from accel_state.config.flags import ParsedFlags
from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import resolve
from accel_state.errors import ConfigError
from accel_state.launching.engines import check_available
from accel_state.launching.hardware import Accelerators, find_accelerators
from accel_state.launching.plan import World, plan_world
from accel_state.launching.surroundings import find_surroundings

__all__ = ["FoundPlace", "find_place"]


@dataclasses.dataclass(frozen=True)
class FoundPlace:
    """The world to check.

    Attributes:
        config: the resolved configuration.
        place: the ranks of this doctor.
        tells: whether it looks at its machine too; of several ranks that a scheduler starts there, the first does.
        names: findings about host names that do not resolve.
    """

    config: LaunchConfig
    place: RankPlace
    tells: bool
    names: list[Finding]


def find_place(flags: ParsedFlags, environ: Mapping[str, str]) -> FoundPlace | None:
    """The world by flags, configuration file and scheduler; None: there is one process only.

    Raises:
        ConfigError: they contradict each other, or an address is missing.
    """
    resolved = resolve(flags.others.get("config_file"), environ, flags)
    if resolved.config.compute_environment == "AMAZON_SAGEMAKER":
        return None
    check_available(resolved)
    surroundings = find_surroundings(resolved, environ, trains=False)
    config = surroundings.resolved.local()
    accelerators = Accelerators() if config.use_cpu else find_accelerators(environ)
    if surroundings.joins:
        here = detect(environ)
        if here.world_size == 1:
            return None
        cpu = config.use_cpu or accelerators.count == 0
        local = here.local_world_size
        world = World(here.world_size, local, here.num_nodes, here.node_rank, cpu)
        address, port = here.master_addr, here.master_port
        first, count, tells = here.rank, 1, here.local_rank == 0
    else:
        if config.num_processes is None and config.processes_per is None and config.num_machines == 1:
            return None
        world = plan_world(config, accelerators, surroundings.resolved.sources)
        if world.size == 1:
            return None
        address = config.main_process_ip or ("127.0.0.1" if world.machines == 1 else None)
        port = config.main_process_port or (0 if world.machines == 1 else DEFAULT_PORT)
        first, count, tells = world.machine_rank * world.local_size, world.local_size, True
    if address is None:
        raise ConfigError(
            f"{world.machines} machines meet at the first, whose address is not known: pass --main_process_ip, the "
            "same on all machines"
        )
    if port is None:
        raise ConfigError(
            "ranks that a scheduler starts meet at MASTER_PORT, which is not set: set it to a free port"
        )
    place = RankPlace(world, first, count, address, port)
    return FoundPlace(config, place, tells, _unknown_names(address))


def _unknown_names(address: str) -> list[Finding]:
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        advice = "give the address in --main_process_ip, or add the name to /etc/hosts of every machine"
        return [Finding("host names", "problem", f"{address} does not resolve ({error.strerror})", advice)]
    return []
