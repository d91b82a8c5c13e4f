"""The machines of a job, and which of them this one is, as a scheduler or an operator describes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from accel_state.clusters.base import Cluster, Topology
from accel_state.registry import Registry

__all__ = ["INSTALLED", "Allocation", "Described", "Scheduler", "TaskScheduler"]


@dataclass(frozen=True, slots=True)
class Described:
    """A value of the configuration, and the variable that it comes from.

    Attributes:
        value: the value.
        source: the variable with its text, such as ``SLURM_NNODES=4``.
        firm: the scheduler has decided it, so another value elsewhere is a mistake; otherwise it is only a default.
    """

    value: Any
    source: str
    firm: bool = True


@dataclass(frozen=True, slots=True)
class Allocation:
    """The world that a scheduler describes to a launcher which it has started.

    Attributes:
        scheduler: name of the scheduler in messages.
        role: ``machine`` if one launcher was started per machine, ``rank`` if one process was started per rank.
        index: index of this machine or rank, from 0; None if a rendezvous assigns it.
        total: number of machines or ranks.
        options: values of the configuration by path.
        processes_per_machine: number of processes on each machine; None if the scheduler does not set it.
        joins: a script that starts without a launcher finds the same world from the scheduler's variables.
    """

    scheduler: str
    role: Literal["machine", "rank"]
    index: int | None
    total: int
    options: Mapping[str, Described] = field(default_factory=dict)
    processes_per_machine: Described | None = None
    joins: bool = False

    def summary(self) -> str:
        """One line about it, with machines counted from 1 as people count them."""
        things = "machines" if self.role == "machine" else "ranks"
        if self.index is None:
            return f"{self.total} {things} from {self.scheduler}; the rendezvous numbers them"
        this = f"machine {self.index + 1}" if self.role == "machine" else f"rank {self.index}"
        return f"{self.total} {things} from {self.scheduler}, this is {this}"


class Scheduler(ABC):
    """A scheduler or an operator, recognised by the variables that it sets for the processes it starts.

    Attributes:
        key: its value of the option ``cluster``.
        name: its name in messages.
        hint: how to start a job so that it is recognised.
    """

    key: ClassVar[str]
    name: ClassVar[str]
    hint: ClassVar[str]

    @abstractmethod
    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """The world that ``environ`` describes, or None.

        None if this scheduler did not start the process, or started only one process.

        Raises:
            ConfigError: it did, but a variable is missing or wrong; the message names it and its value.
        """

    def of_machines(
        self,
        number: tuple[int, str],
        rank: tuple[int, str],
        address: tuple[str | None, str],
        port: tuple[int | None, str],
        *,
        per: Described | None = None,
        joins: bool = False,
    ) -> Allocation:
        """The allocation of a job with one launcher on each machine.

        Args:
            number: number of machines. This and the next three are values, each with its source.
            rank: index of this machine.
            address: of the first machine; None if it is not known.
            port: of the first machine; None if it is not known.
            per: processes on each machine.
            joins: see ``Allocation``.
        """
        options = {"num_machines": Described(*number), "machine_rank": Described(*rank)}
        for path, (value, source) in (("main_process_ip", address), ("main_process_port", port)):
            if value is not None:
                options[path] = Described(value, source, firm=False)
        return Allocation(self.name, "machine", rank[0], number[0], options, per, joins)


INSTALLED: Registry[Scheduler] = Registry("cluster", "accel_state.clusters", {}, base=Scheduler)
"""The schedulers of installed packages; the name of one is its value of the option ``cluster``."""


class TaskScheduler(Scheduler):
    """A scheduler whose tasks have the topology that their own processes read from its variables.

    Several tasks on one machine are ranks; a single one is that machine's launcher.
    """

    #: Reads the topology.
    cluster: ClassVar[Cluster]

    @abstractmethod
    def sources(self, environ: Mapping[str, str], topology: Topology) -> Mapping[str, str]:
        """The variables of ``size``, ``nodes``, ``node`` and, if it is known, ``address``, with their texts."""

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class."""
        topology = self.cluster.detect(environ)
        if topology is None:
            return None
        sources = self.sources(environ, topology)
        if topology.world_size > topology.num_nodes:
            size = {"num_processes": Described(topology.world_size, sources["size"])}
            return Allocation(self.name, "rank", topology.rank, topology.world_size, size, joins=True)
        return self.of_machines(
            (topology.num_nodes, sources["nodes"]),
            (topology.node_rank, sources["node"]),
            (topology.master_addr, sources.get("address", "MASTER_ADDR")),
            (topology.master_port, "the job's number"),
            joins=True,
        )
