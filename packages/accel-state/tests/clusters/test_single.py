"""A process that no launcher started."""

from __future__ import annotations

from accel_state.clusters.topology import Topology, detect


def test_no_launcher_is_a_world_of_one():
    assert detect({}) == Topology() == Topology(0, 1, 0, 1, 0, 1, None, None, "single")
