"""The pods of a Volcano job."""

from __future__ import annotations

import pytest

from accel_state.clusters.schedulers import find_allocation
from accel_state.errors import ConfigError

# Plugins svc and env, for the second pod of `tasks: [{name: worker, replicas: 2}]` of the job ddp
# (pkg/controllers/job/plugins/svc/svc.go and env/env.go).
POD = {"VC_WORKER_HOSTS": "ddp-worker-0.ddp,ddp-worker-1.ddp", "VC_WORKER_NUM": "2", "VC_TASK_INDEX": "1",
       "VK_TASK_INDEX": "1"}  # fmt: skip
# A job with a master too, and what the plugin pytorch adds (distributed-framework/pytorch/pytorch.go).
MASTER = {"VC_MASTER_HOSTS": "ddp-master-0.ddp", "VC_MASTER_NUM": "1"}
PYTORCH = {"MASTER_ADDR": "ddp-master-0.ddp", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}


def said(environ):
    found = find_allocation(environ)
    return found.scheduler, {path: described.value for path, described in found.options.items()}


def test_the_pods_of_one_task_are_machines():
    assert said(POD) == ("Volcano", {"num_machines": 2, "machine_rank": 1, "main_process_ip": "ddp-worker-0.ddp",
                                     "main_process_port": 29500})  # fmt: skip
    assert said(POD | {"MASTER_PORT": "23456"})[1]["main_process_port"] == 23456
    assert (
        find_allocation({"VC_WORKER_HOSTS": "ddp-worker-0.ddp", "VC_WORKER_NUM": "1", "VC_TASK_INDEX": "0"})
        is None
    )


def test_the_plugin_for_pytorch_tells_the_rank_in_a_job_with_several_tasks():
    scheduler, options = said(POD | MASTER | PYTORCH)
    assert scheduler == "the containers' variables"
    assert (options["num_machines"], options["machine_rank"], options["main_process_ip"]) == (
        3,
        2,
        "ddp-master-0.ddp",
    )


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        (POD | MASTER, ["VC_MASTER_HOSTS, VC_WORKER_HOSTS", "plugin pytorch"]),
        (POD | {"VC_WORKER_NUM": "3"}, ["VC_WORKER_NUM is 3", "VC_WORKER_HOSTS lists 2"]),
        (POD | {"VC_TASK_INDEX": "2"}, ["VC_TASK_INDEX is 2", "VC_WORKER_NUM is 2"]),
        (POD | {"VC_TASK_INDEX": ""}, ["VC_TASK_INDEX is not set"]),
        (POD | {"VC_TASK_INDEX": "one"}, ["VC_TASK_INDEX", "'one'"]),
        (POD | {"VC_WORKER_HOSTS": "$(id),b"}, ["VC_WORKER_HOSTS", "'$(id)'"]),
    ],
)
def test_a_variable_that_is_not_understood_is_named(environ, parts):
    with pytest.raises(ConfigError) as error:
        find_allocation(environ)
    assert all(part in str(error.value) for part in parts), error.value
