"""The clusters that can start a process, in the order in which they are checked."""

from accel_state.world.clusters.base import Cluster
from accel_state.world.clusters.mpi import MPI
from accel_state.world.clusters.sagemaker import SageMaker
from accel_state.world.clusters.single import NoLauncher
from accel_state.world.clusters.slurm import Slurm
from accel_state.world.clusters.torchrun import Torchrun

__all__ = ["CLUSTERS", "MPI", "Cluster", "NoLauncher", "SageMaker", "Slurm", "Torchrun"]

# torchrun's variables are the most specific: a launcher inside a Slurm or MPI job sets them for its own
# processes. mpirun inside a Slurm allocation comes before Slurm, whose variables then describe the batch script.
CLUSTERS: tuple[Cluster, ...] = (Torchrun(), MPI(), Slurm(), SageMaker(), NoLauncher())
