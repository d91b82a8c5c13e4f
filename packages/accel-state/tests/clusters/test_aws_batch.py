"""The nodes of a multi-node parallel job of AWS Batch."""

from __future__ import annotations

import pytest

from accel_state.clusters.schedulers import find_allocation
from accel_state.errors import ConfigError

# The second of three nodes. AWS Batch, "Environment variables" of multi-node parallel jobs and of jobs.
CHILD = {
    "AWS_BATCH_CE_NAME": "gpus", "AWS_BATCH_JQ_NAME": "queue", "AWS_BATCH_JOB_ATTEMPT": "1",
    "AWS_BATCH_JOB_ID": "6e7fcb3c-2b64-4a2d-8d5a-1c7ad4a0a0a0#1", "AWS_BATCH_JOB_NUM_NODES": "3",
    "AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.246",
}  # fmt: skip
_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
MAIN = {name: text for name, text in CHILD.items() if name != _ADDRESS} | {
    "AWS_BATCH_JOB_ID": "6e7fcb3c-2b64-4a2d-8d5a-1c7ad4a0a0a0#0",
    "AWS_BATCH_JOB_NODE_INDEX": "0",
}


def said(environ):
    return {path: described.value for path, described in find_allocation(environ).options.items()}


def test_the_main_node_has_no_address_but_its_own_name(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "ip-10-0-0-246")
    main, child = said(MAIN), said(CHILD)
    assert (main["machine_rank"], main["main_process_ip"]) == (0, "ip-10-0-0-246")
    assert (child["machine_rank"], child["main_process_ip"]) == (1, "10.0.0.246")
    assert main["num_machines"] == child["num_machines"] == 3
    assert main["main_process_port"] == child["main_process_port"]  # the name of the job has the node's index
    given = said(MAIN | {_ADDRESS: "10.0.0.1"})  # by a script around it
    assert given["main_process_ip"] == "10.0.0.1"


def test_the_main_node_has_rank_0_whatever_its_index():
    second = CHILD | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "1"}
    nodes = [said(second | {"AWS_BATCH_JOB_NODE_INDEX": str(index)}) for index in range(3)]
    assert [node["machine_rank"] for node in nodes] == [1, 0, 2]


def test_other_jobs_are_of_one_machine():
    assert find_allocation(CHILD | {"AWS_BATCH_JOB_NUM_NODES": "1", "AWS_BATCH_JOB_NODE_INDEX": "0"}) is None
    array = {
        "AWS_BATCH_JOB_ID": "6e7fcb3c:3",
        "AWS_BATCH_JOB_ARRAY_INDEX": "3",
        "AWS_BATCH_JOB_ARRAY_SIZE": "9",
    }
    assert find_allocation(array) is None


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"AWS_BATCH_JOB_NODE_INDEX": "3"},
            ["AWS_BATCH_JOB_NODE_INDEX is 3", "AWS_BATCH_JOB_NUM_NODES is 3"],
        ),
        ({"AWS_BATCH_JOB_NODE_INDEX": ""}, ["AWS_BATCH_JOB_NODE_INDEX is not set", "--cluster none"]),
        ({"AWS_BATCH_JOB_MAIN_NODE_INDEX": "5"}, ["AWS_BATCH_JOB_MAIN_NODE_INDEX is 5"]),
        ({"AWS_BATCH_JOB_NUM_NODES": "3.0"}, ["AWS_BATCH_JOB_NUM_NODES", "'3.0'"]),
        ({_ADDRESS: "10.0.0.1; id"}, [_ADDRESS, "'10.0.0.1; id'"]),
    ],
)
def test_a_variable_that_is_not_understood_is_named(changes, parts):
    with pytest.raises(ConfigError) as error:
        find_allocation(CHILD | changes)
    assert all(part in str(error.value) for part in parts), error.value
