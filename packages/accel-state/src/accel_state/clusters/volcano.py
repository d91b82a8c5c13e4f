"""Volcano: the pods of one task of a Volcano job with the plugins ``svc`` and ``env``.

Variables: Volcano's user guides of these plugins. ``svc`` sets VC_<TASK>_HOSTS and VC_<TASK>_NUM for each task of the
job, ``env`` sets VC_TASK_INDEX. The plugin ``pytorch`` sets RANK and WORLD_SIZE, which ``Containers`` reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from accel_state.clusters.allocation import Allocation, Scheduler
from accel_state.clusters.base import DEFAULT_PORT, read_int, read_machine_rank, read_port
from accel_state.errors import ConfigError

__all__ = ["Volcano"]


class Volcano(Scheduler):
    """VC_<TASK>_HOSTS lists the pods of a job with one task."""

    key = "volcano"
    name = "Volcano"
    hint = "start it in the pods of a job with the plugins svc and env, or pytorch"

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """See the base class. Which task of several a pod belongs to, its variables do not tell."""
        names = sorted(name for name in environ if re.fullmatch(r"VC_\w+_HOSTS", name))
        hosts = [host for name in names for host in environ[name].split(",") if host]
        if len(hosts) < 2:
            return None
        if len(names) > 1:
            raise ConfigError(
                f"this Volcano job has several tasks ({', '.join(names)}), and Volcano does not tell a pod which is "
                "its own; add the plugin pytorch to the job, or give it one task, or set NNODES, NODE_RANK and "
                "MASTER_ADDR"
            )
        number = names[0].removesuffix("HOSTS") + "NUM"
        counted = read_int(environ, number, minimum=1)
        if counted not in (None, len(hosts)):
            raise ConfigError(
                f"environment variable {number} is {counted}, but {names[0]} lists {len(hosts)} hosts; correct them, "
                "or pass --cluster none and --num_machines"
            )
        rank = read_machine_rank(environ, "VC_TASK_INDEX", (number, len(hosts)))
        return self.of_machines(
            (len(hosts), f"{names[0]} with {len(hosts)} hosts"),
            (rank, f"VC_TASK_INDEX={rank}"),
            (hosts[0], names[0]),
            (read_port(environ) or DEFAULT_PORT, "MASTER_PORT"),
        )
