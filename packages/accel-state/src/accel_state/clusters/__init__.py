"""The clusters that can start a process, in the order in which they are checked."""

from accel_state.clusters.base import Cluster
from accel_state.clusters.flux import Flux
from accel_state.clusters.lsf import JobStepManager
from accel_state.clusters.mpi import MPI
from accel_state.clusters.sagemaker import SageMaker
from accel_state.clusters.single import NoLauncher
from accel_state.clusters.slurm import Slurm
from accel_state.clusters.torchrun import Torchrun

__all__ = [
    "CLUSTERS", "MPI", "Cluster", "Flux", "JobStepManager", "NoLauncher", "SageMaker", "Slurm", "Torchrun",
]  # fmt: skip

# torchrun's variables are the most specific: a launcher inside a Slurm or MPI job sets them for its own
# processes. mpirun inside a Slurm allocation comes before Slurm, whose variables then describe the batch script. Tasks
# of Flux and jsrun also have variables of MPI, which know less about their hosts.
CLUSTERS: tuple[Cluster, ...] = (
    Torchrun(), Flux(), JobStepManager(), MPI(), Slurm(), SageMaker(), NoLauncher(),
)  # fmt: skip
