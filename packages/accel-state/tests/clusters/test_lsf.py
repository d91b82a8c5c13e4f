"""Tasks of jsrun, and LSF's lists of hosts."""

import pytest

from accel_state.clusters.lsf import hosts_of
from accel_state.clusters.topology import detect
from accel_state.errors import ConfigError


def test_a_task_of_jsrun_is_a_rank_and_the_launch_host_has_none():
    found = detect(
        {"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "4", "JSM_NAMESPACE_LOCAL_RANK": "1", "LSB_JOBID": "9",
         "LSB_MCPU_HOSTS": "batch5 1 c1 42 c2 42"}
    )  # fmt: skip
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == ("lsf", 4, 6, 1)
    assert (found.local_world_size, found.node_rank, found.num_nodes, found.master_addr) == (3, 1, 2, "c1")


def test_the_lists_of_hosts(tmp_path):
    (tmp_path / "ranks").write_text("a\na\nb\n")
    assert hosts_of({"LSB_DJOB_RANKFILE": str(tmp_path / "ranks"), "LSB_HOSTS": "x"}) == (
        "LSB_DJOB_RANKFILE",
        ["a", "b"],
    )
    assert hosts_of({"LSB_MCPU_HOSTS": "a 4 b 2"}) == ("LSB_MCPU_HOSTS", ["a", "b"])
    assert hosts_of({"LSB_HOSTS": "a a b"}) == ("LSB_HOSTS", ["a", "b"])
    with pytest.raises(ConfigError, match="LSB_DJOB_RANKFILE is '/nothing'"):
        hosts_of({"LSB_DJOB_RANKFILE": "/nothing"})
