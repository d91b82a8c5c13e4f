"""Reading the variables of clusters."""

from __future__ import annotations

import pytest

from accel_state.clusters.topology import Topology, detect


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_minus_one_means_unset(name):
    assert detect({name: "-1"}) == Topology()
