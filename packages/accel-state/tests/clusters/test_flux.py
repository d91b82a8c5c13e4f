"""Tasks of Flux."""

from accel_state.clusters.topology import detect

TASK = {
    "FLUX_JOB_ID": "f1",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_RANK": "3",
    "FLUX_TASK_LOCAL_ID": "1",
}


def test_a_task_of_flux_is_a_rank(tmp_path):
    tool = tmp_path / "flux"
    tool.write_text('#!/bin/sh\n[ "$*" = "hostlist local" ] && echo "corona[82-83]"\n')
    tool.chmod(0o755)
    found = detect(TASK | {"PATH": f"{tmp_path}:/bin"})
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == ("flux", 3, 4, 1)
    assert (found.node_rank, found.num_nodes, found.local_world_size, found.master_addr) == (
        1,
        2,
        2,
        "corona82",
    )
    assert detect(TASK | {"PATH": f"{tmp_path}:/bin", "FLUX_TASK_RANK": "0"}).master_port == found.master_port


def test_without_the_tool_the_address_is_unknown_or_given():
    assert detect(TASK | {"PATH": "/nowhere"}).master_addr is None
    assert detect(TASK | {"PATH": "/nowhere", "MASTER_ADDR": "h"}).master_addr == "h"
    assert detect(TASK | {"FLUX_JOB_NNODES": "1"}).master_addr == "127.0.0.1"
