"""The schedulers that can start a launcher, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from accel_state.clusters.allocation import INSTALLED, Allocation, Described, Scheduler
from accel_state.clusters.aws_batch import AWSBatch
from accel_state.clusters.base import is_host
from accel_state.clusters.containers import Containers
from accel_state.clusters.dstack import Dstack
from accel_state.clusters.flux import FluxJobs
from accel_state.clusters.lsf import LSFJobs
from accel_state.clusters.mpi import MPIProcesses
from accel_state.clusters.sagemaker import SageMakerHosts
from accel_state.clusters.skypilot import SkyPilot
from accel_state.clusters.slurm import SlurmSteps
from accel_state.clusters.torchrun_variables import TorchrunVariables
from accel_state.clusters.vertex_ai import VertexAI
from accel_state.clusters.volcano import Volcano
from accel_state.errors import ConfigError

__all__ = ["SCHEDULERS", "Allocation", "Described", "Scheduler", "find_allocation"]

# Variables of one container or task come before those of a whole job: mpirun inside a Slurm or dstack job, PET_* in a
# container. Flux comes before MPI, because its tasks also have the PMI variables of MPI. Systems that start the
# containers themselves (on Kubernetes too, where a pod may have an index of its own) come before the plain variables of
# containers, which a user may also set for another program. Vertex AI, for example, sets WORLD_SIZE and RANK as well.
# Volcano comes last: its plugin pytorch also sets WORLD_SIZE and RANK, which tell the rank in a job with several tasks.
SCHEDULERS: tuple[Scheduler, ...] = (
    TorchrunVariables(),
    FluxJobs(),
    LSFJobs(),
    MPIProcesses(),
    SlurmSteps(),
    SageMakerHosts(),
    SkyPilot(),
    Dstack(),
    AWSBatch(),
    VertexAI(),
    Containers(),
    Volcano(),
)


def find_allocation(environ: Mapping[str, str], wanted: str = "auto") -> Allocation | None:
    """The world that the environment of a launcher describes; None: this machine alone.

    A launcher inside a rank (LOCAL_RANK is set) is a separate world, whatever the scheduler's variables say.

    Args:
        environ: the environment variables.
        wanted: ``auto``, ``none``, or the ``key`` of the only scheduler to ask.

    Raises:
        ConfigError: a variable is missing or wrong, or the wanted scheduler did not start this process, or the address
            of the first machine is none.
    """
    if wanted == "none" or (wanted == "auto" and "LOCAL_RANK" in environ):
        return None
    for key, scheduler in _asked(wanted):
        if wanted in ("auto", key):
            found = scheduler.allocation(environ)
            if found is not None:
                _check_address(found)
                return found
            if wanted == key:
                raise ConfigError(
                    f"--cluster {wanted}: {scheduler.name} does not describe several processes to this launcher; "
                    f"{scheduler.hint}, or leave --cluster (ACCEL_CLUSTER) out"
                )
    return None


def _asked(wanted: str) -> Iterator[tuple[str, Scheduler]]:
    """The schedulers by key; after torchrun's variables, which any launcher may set, those of installed packages."""
    first, *others = ((scheduler.key, scheduler) for scheduler in SCHEDULERS)
    yield first
    if wanted in INSTALLED.installed():
        yield wanted, INSTALLED.get(wanted)
    elif wanted == "auto":
        yield from INSTALLED.usable()
    yield from others


def _check_address(found: Allocation) -> None:
    address = found.options.get("main_process_ip")
    if address is not None and not is_host(str(address.value)):
        raise ConfigError(
            f"{found.scheduler} says that the first machine is {address.value!r} ({address.source}), which is no host "
            "name or address; correct the variable, or pass --main_process_ip with --cluster none"
        )
