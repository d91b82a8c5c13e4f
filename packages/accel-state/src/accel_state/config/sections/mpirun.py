"""Launching with ``mpirun``."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option

__all__ = ["MpirunSection"]


@dataclass(frozen=True, repr=False, eq=False)
class MpirunSection(Section):
    """How ``mpirun`` starts the processes."""

    file_key = "mpirun_config"
    prefix = "mpirun_"
    title = "MPI"

    hostfile: str | None = option(
        help="Hostfile of mpirun; if set, mpirun starts the processes.",
        prompt="Where is the hostfile of mpirun?",
    )
