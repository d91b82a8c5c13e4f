"""The topology of a process, and the base class of the clusters that detect it from the environment."""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from accel_state.errors import ConfigError

__all__ = [
    "DEFAULT_PORT",
    "Cluster",
    "TaskCluster",
    "Topology",
    "is_host",
    "is_loopback",
    "node_placement",
    "read_first",
    "read_int",
    "read_machine_rank",
    "read_port",
    "read_task",
    "stable_port",
]

DEFAULT_PORT = 29500
"""Of torch.distributed."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks, nodes and addresses of this process within one run.

    Attributes:
        rank: global rank of this process, from 0.
        world_size: number of processes in the world.
        local_rank: rank of this process on its node, from 0.
        local_world_size: number of processes on this node.
        node_rank: index of this node, from 0.
        num_nodes: number of nodes.
        master_addr: host on which rank 0 listens; None when it is not known.
        master_port: TCP port on which rank 0 listens; None when it is not known.
        launcher: name of the cluster that started the process: ``torchrun``, ``flux``, ``lsf``, ``mpi``, ``slurm``,
            ``sagemaker`` or ``single``.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    launcher: str = "single"


class Cluster(ABC):
    """A launcher or scheduler that starts processes; a subclass recognises it by the variables that it sets."""

    name: ClassVar[str]

    @abstractmethod
    def detect(self, environ: Mapping[str, str]) -> Topology | None:
        """The topology that ``environ`` describes, or None if this cluster did not start the process.

        Raises:
            ConfigError: it started the process, but a variable is missing or wrong; the message names it and its value.
        """


class TaskCluster(Cluster):
    """A launcher or scheduler of tasks, which all know their own machine, but not the address of the first."""

    def topology(
        self,
        environ: Mapping[str, str],
        world: tuple[int, int],
        node: tuple[int, int],
        *,
        nodes: tuple[int | None, int | None] = (None, None),
        host: Callable[[], str | None],
        job: str | None,
    ) -> Topology:
        """The topology of a task; MASTER_ADDR and MASTER_PORT are preferred to what the cluster says.

        Args:
            environ: the variables.
            world: its rank, and the number of tasks.
            node: its rank on its node, and the number of tasks there.
            nodes: index of its node, and the number of nodes; None: consecutive ranks share a node.
            host: gives the first node of several; None: it is not known.
            job: name of the job, which the port follows from; None: the default port of torch.distributed.
        """
        node_rank, num_nodes = node_placement(*world, node[1])
        num_nodes = num_nodes if nodes[1] is None else nodes[1]
        return Topology(
            *world,
            *node,
            node_rank=node_rank if nodes[0] is None else nodes[0],
            num_nodes=num_nodes,
            master_addr=environ.get("MASTER_ADDR") or ("127.0.0.1" if num_nodes == 1 else host()),
            master_port=read_port(environ) or (DEFAULT_PORT if job is None else stable_port(job)),
            launcher=self.name,
        )


def read_int(
    environ: Mapping[str, str], name: str, *, minimum: int = 0, below: tuple[str, int] | None = None
) -> int | None:
    """The whole number in variable ``name``; None if it is unset, empty, or -1, an older convention for "unset".

    Args:
        environ: the variables.
        name: the variable to read.
        minimum: smallest number allowed.
        below: name and value of an upper bound (exclusive).

    Raises:
        ConfigError: it is not an integer, or out of range.
    """
    text = environ.get(name, "").strip()
    if text in ("", "-1"):
        return None
    try:
        number = int(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {name} is {text!r}; expected an integer. Correct or unset it."
        ) from None
    if number < minimum:
        raise ConfigError(f"environment variable {name} is {number}; it must be at least {minimum}")
    if below is not None and number >= below[1]:
        raise ConfigError(
            f"environment variable {name} is {number}, but {below[0]} is {below[1]}; "
            f"it must be between 0 and {below[1] - 1}"
        )
    return number


def read_machine_rank(environ: Mapping[str, str], name: str, number: tuple[str, int]) -> int:
    """The index of this machine in variable ``name``.

    Args:
        environ: the variables.
        name: the variable to read.
        number: name and value of the number of machines.

    Raises:
        ConfigError: it is not set, not an integer, or out of range.
    """
    rank = read_int(environ, name, below=number)
    if rank is None:
        raise ConfigError(
            f"{number[0]} is {number[1]}, but {name} is not set, so the rank of this machine is unknown; set it, or "
            "pass --cluster none and --machine_rank"
        )
    return rank


def read_task(
    environ: Mapping[str, str], size: tuple[str, int], rank: str, local_rank: str, advice: str
) -> tuple[int, int]:
    """The ranks of a task in its world and on its node.

    Args:
        environ: the variables.
        size: name and value of the number of tasks.
        rank: the variable of the rank.
        local_rank: the variable of the rank on the node.
        advice: the end of the message if one of them is not set.

    Raises:
        ConfigError: one of them is not set, or out of range.
    """
    found = read_int(environ, rank, below=size), read_int(environ, local_rank)
    if found[0] is None or found[1] is None:
        missing = rank if found[0] is None else local_rank
        raise ConfigError(
            f"environment variable {size[0]} is {size[1]}, but {missing} is not set; start the script with {advice}"
        )
    return found[0], found[1]


def read_first(environ: Mapping[str, str], names: Sequence[str], *, minimum: int = 0) -> int | None:
    """The first of the variables ``names`` that holds a number, or None."""
    for name in names:
        number = read_int(environ, name, minimum=minimum)
        if number is not None:
            return number
    return None


def read_port(environ: Mapping[str, str]) -> int | None:
    """MASTER_PORT, or None if it is not set."""
    port = read_int(environ, "MASTER_PORT", minimum=1)
    if port is not None and port > 65535:
        raise ConfigError(f"environment variable MASTER_PORT is {port}; the largest port is 65535")
    return port


def is_host(text: str) -> bool:
    """Whether ``text`` can be a host name or an address. It has no character that a shell interprets."""
    return re.fullmatch(r"[\w:][\w.:%-]{0,252}", text, re.ASCII) is not None


def is_loopback(host: str | None) -> bool:
    """Whether ``host`` is a loopback address."""
    return host is not None and (host in ("localhost", "::1") or host.startswith("127."))


def node_placement(rank: int, world_size: int, local_world_size: int) -> tuple[int, int]:
    """Node rank and number of nodes when consecutive ranks share a node."""
    return rank // local_world_size, -(-world_size // local_world_size)


def stable_port(job: str) -> int:
    """A port derived from the job name: equal in every process of a job, and rarely shared by two jobs.

    The range 15000 to 31383 is above the commonly used registered services and below Linux's ephemeral ports,
    which start at 32768.
    """
    return 15000 + zlib.crc32(job.encode()) % 16384
