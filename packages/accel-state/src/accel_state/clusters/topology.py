"""Rank, world size and nodes of this process, from its environment. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from accel_state.clusters import CLUSTERS
from accel_state.clusters.allocation import INSTALLED, TaskScheduler
from accel_state.clusters.base import Cluster, Topology

__all__ = ["Topology", "detect"]


def detect(environ: Mapping[str, str]) -> Topology:
    """Detect rank, world size and nodes of this process from environment variables.

    Each cluster type is asked in turn whether it started this process.

    Args:
        environ: the environment variables, as ``accel_state.environment.snapshot()`` gives them.

    Raises:
        ConfigError: a variable is missing or wrong; the message names it and its value.
    """
    for cluster in _asked():
        topology = cluster.detect(environ)
        if topology is not None:
            return topology
    return Topology()


def _asked() -> Iterator[Cluster]:
    """The clusters; after torchrun's variables, which any launcher may set, those of installed packages."""
    first, *others = CLUSTERS
    yield first
    yield from (
        scheduler.cluster for _, scheduler in INSTALLED.usable() if isinstance(scheduler, TaskScheduler)
    )
    yield from others
