"""No launcher: one process."""

from __future__ import annotations

from collections.abc import Mapping

from accel_state.clusters.base import Cluster, Topology, read_int
from accel_state.errors import ConfigError

__all__ = ["NoLauncher"]


class NoLauncher(Cluster):
    """No other cluster matched. Variables that announce more processes than this one raise instead of being ignored."""

    name = "single"

    def detect(self, environ: Mapping[str, str]) -> Topology | None:
        """See the base class; always returns a topology.

        Raises:
            ConfigError: WORLD_SIZE is above 1 without a RANK, or a rank is above 0 without a WORLD_SIZE.
        """
        world_size = read_int(environ, "WORLD_SIZE", minimum=1)
        if world_size is not None and world_size > 1:
            raise ConfigError(
                f"environment variable WORLD_SIZE is {world_size}, but RANK is not set, so the rank of this "
                "process is unknown; start the script with a launcher (accel launch, torchrun, srun, mpirun), set "
                "RANK as well, or unset WORLD_SIZE"
            )
        for name in ("RANK", "LOCAL_RANK"):
            rank = read_int(environ, name)
            if rank is not None and rank > 0 and world_size is None:
                raise ConfigError(
                    f"environment variable {name} is {rank}, but WORLD_SIZE is not set, so the number of "
                    f"processes is unknown; set WORLD_SIZE as well, or unset {name}"
                )
        return Topology(launcher=self.name)
