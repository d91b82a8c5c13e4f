"""The replicas of a custom training job of Vertex AI."""

from __future__ import annotations

import json

import pytest

from accel_state.clusters.schedulers import find_allocation
from accel_state.clusters.topology import detect
from accel_state.errors import ConfigError

HOST = "cmle-training-workerpool{}-4c1d6d97d0-{}:2222"
SPEC = {  # of a job with one primary replica and three workers, as its containers print it
    "cluster": {
        "workerpool0": [HOST.format(0, 0)],
        "workerpool1": [HOST.format(1, index) for index in range(3)],
    },
    "environment": "cloud",
    "task": {"type": "workerpool1", "index": 2, "trial": "1"},
    "job": json.dumps({"python_module": "", "package_uris": [], "job_args": ["--token=s3cret"]}),
    "open_ports": [3333],
}


def spec(**changes):
    return json.dumps(SPEC | changes)


def environ(**changes):
    return {"CLUSTER_SPEC": spec(**changes)}


def of_pool(*replicas):
    return spec(cluster={"workerpool0": replicas}, task={"type": "workerpool0", "index": 0})


def said(variables):
    return {path: described.value for path, described in find_allocation(variables).options.items()}


@pytest.mark.parametrize(
    ("kind", "index", "rank"), [("workerpool0", 0, 0), ("workerpool1", 0, 1), ("workerpool1", 2, 3)]
)
def test_workers_come_after_the_primary_replica(kind, index, rank):
    assert said(environ(task={"type": kind, "index": index})) == {
        "num_machines": 4, "machine_rank": rank, "main_process_ip": "cmle-training-workerpool0-4c1d6d97d0-0",
        "main_process_port": 2222,
    }  # fmt: skip


def test_parameter_servers_and_evaluators_do_not_train():
    cluster = SPEC["cluster"] | {"workerpool2": [HOST.format(2, 0)], "workerpool3": [HOST.format(3, 0)]}
    assert said(environ(cluster=cluster))["num_machines"] == 4
    for pool in ("workerpool2", "workerpool3"):
        with pytest.raises(ConfigError, match=f"task.type is '{pool}'.*evaluators"):
            find_allocation(environ(cluster=cluster, task={"type": pool, "index": 0}))


def test_one_replica_is_one_machine():
    alone = {"workerpool0": [HOST.format(0, 0)]}
    assert find_allocation(environ(cluster=alone, task={"type": "workerpool0", "index": 0})) is None


def test_variables_of_containers_for_pytorch_agree_and_give_the_address():
    given = {"MASTER_ADDR": "primary", "MASTER_PORT": "3333", "WORLD_SIZE": "4", "RANK": "3"}
    found = said(environ() | given)
    assert (found["num_machines"], found["machine_rank"]) == (4, 3)
    assert (found["main_process_ip"], found["main_process_port"]) == ("primary", 3333)
    here = detect(environ() | given)  # a script without a launcher: one process in each container
    assert (here.rank, here.world_size, here.num_nodes, here.local_rank) == (3, 4, 4, 0)


def test_the_variable_of_another_program_is_left_alone():
    for text in ("", "{}", "not JSON", '{"cluster": {"worker": ["a:1", "b:1"]}}'):
        assert find_allocation({"CLUSTER_SPEC": text}) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (json.dumps(SPEC)[:200], "it is not JSON"),
        ('["workerpool0"]', "it is a list; expected a JSON object"),
        ("[" * 60_000 + "workerpool0", "nested too deeply"),
        ('{"workerpool0": "' + "x" * 200_000 + '"}', "has 200019 characters; at most 131072"),
        (spec(cluster=None), "cluster is None; expected an object"),
        (spec(cluster=[HOST]), "cluster is ["),
        (spec(cluster={"workerpool0": "a:1"}), "cluster.workerpool0 is 'a:1'; expected a list"),
        (of_pool(1, 2), "cluster.workerpool0 is [1, 2]"),
        (of_pool("a", "b:1"), "replica is 'a'; expected HOST:PORT"),
        (of_pool("a:x", "b:1"), "replica is 'a:x'"),
        (of_pool("a:70000", "b:1"), "replica is 'a:70000'"),
        (of_pool("a;id:1", "b:1"), "'a;id'"),
        (spec(task="workerpool1"), "task is 'workerpool1'; expected an object"),
        (spec(task={"index": 0}), "task.type is None"),
        (spec(task={"type": "__class__", "index": 0}), "task.type is '__class__'"),
        (spec(task={"type": "workerpool1", "index": 3}), "task.index is 3, but cluster.workerpool1 has 3"),
        (spec(task={"type": "workerpool1", "index": -1}), "task.index is -1"),
        (spec(task={"type": "workerpool1", "index": True}), "task.index is True; expected an integer"),
        (spec(task={"type": "workerpool1", "index": "0"}), "task.index is '0'"),
    ],
)  # fmt: skip
def test_each_bad_form_is_named(text, reason):
    with pytest.raises(ConfigError) as error:
        find_allocation({"CLUSTER_SPEC": text})
    assert reason in str(error.value)
    assert "CLUSTER_SPEC" in str(error.value)
    assert "--cluster none" in str(error.value)
    assert len(str(error.value)) < 400
    assert "s3cret" not in str(error.value)  # of the script's arguments
