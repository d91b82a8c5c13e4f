"""What schedulers say to a launcher, from the variables that they set."""

from __future__ import annotations

import pytest

from accel_state.clusters.schedulers import SCHEDULERS, find_allocation
from accel_state.clusters.topology import detect
from accel_state.config import parse_flags
from accel_state.errors import ConfigError
from testkit.plug_ins import install

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_NODELIST": "gpu[007-010]",
}
TRAINER = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0",
           "PET_MASTER_PORT": "29400"}  # fmt: skip
ELASTIC_JOB = {"PET_NNODES": "1:4", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "job-0:23456",
               "PET_RDZV_ID": "job", "PET_MAX_RESTARTS": "100", "PET_NPROC_PER_NODE": "auto"}  # fmt: skip
SKY = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2",
       "SKYPILOT_NUM_GPUS_PER_NODE": "4", "SKYPILOT_TASK_ID": "sky-1"}  # fmt: skip
FLUX = {"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2", "FLUX_TASK_RANK": "3",
        "FLUX_TASK_LOCAL_ID": "1", "MASTER_ADDR": "host1", "PMI_RANK": "3", "PMI_SIZE": "4"}  # fmt: skip
# dstack's runner for the second node of a run of two: runner/internal/runner/executor/executor.go.
DSTACK = {
    "DSTACK_RUN_ID": "5a1d0c2e-5b21-4c61-9f0e-3b8f3d6f2d11", "DSTACK_JOB_ID": "0e6d4f1b-1f57-4d6e-8a4f-7b5f7f3f7d3a",
    "DSTACK_RUN_NAME": "train-distrib", "DSTACK_REPO_ID": "repo", "DSTACK_NODES_IPS": "10.128.0.47\n10.128.0.48",
    "DSTACK_MASTER_NODE_IP": "10.128.0.47", "DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2",
    "DSTACK_GPUS_PER_NODE": "8", "DSTACK_GPUS_NUM": "16", "DSTACK_MPI_HOSTFILE": "/root/.dstack/mpi/hostfile",
}  # fmt: skip
# Kubernetes sets the index alone; the manifest the rest.
INDEXED = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "2", "NNODES": "3",
           "MASTER_ADDR": "train-0.train", "MASTER_PORT": "29500"}  # fmt: skip
CONTAINERS = {"WORLD_SIZE": "3", "RANK": "2", "MASTER_ADDR": "job-master", "MASTER_PORT": "23456"}
NODES = {"NNODES": "2", "NODE_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


def said(environ, wanted="auto"):
    found = find_allocation(environ, wanted)
    return found, {path: described.value for path, described in found.options.items()}


def test_nothing_is_found_without_a_scheduler():
    assert find_allocation({}) is None
    assert (
        find_allocation({"SLURM_JOB_ID": "1", "SLURM_NNODES": "4", "SLURM_NTASKS": "4"}) is None
    )  # salloc's shell


def test_slurm_with_one_task_on_each_machine_starts_launchers():
    found, options = said(SLURM)
    assert (found.role, found.index, found.total) == ("machine", 1, 4)
    assert found.summary() == "4 machines from Slurm, this is machine 2"
    assert (options["num_machines"], options["machine_rank"], options["main_process_ip"]) == (4, 1, "gpu007")
    assert 15000 <= options["main_process_port"] < 32768
    assert found.options["num_machines"].source == "SLURM_STEP_NUM_NODES=4"


def test_slurm_with_several_tasks_on_a_machine_starts_ranks():
    environ = SLURM | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_PROCID": "3"}
    found, options = said(environ | {"SLURM_LOCALID": "1"})
    assert (found.role, found.index, options) == ("rank", 3, {"num_processes": 8})
    assert found.summary() == "8 ranks from Slurm, this is rank 3"


def test_the_variables_of_torchrun_are_those_of_kubeflows_trainer():
    found, options = said(TRAINER)
    assert (options["num_machines"], options["machine_rank"], found.processes_per_machine.value) == (2, 1, 8)
    assert (options["main_process_ip"], options["main_process_port"]) == ("job-0", 29400)


def test_an_elastic_job_has_a_range_of_machines_and_a_rendezvous():
    found, options = said(ELASTIC_JOB)
    assert (options["min_machines"], options["num_machines"], options["max_restarts"]) == (1, 4, 100)
    assert (options["rdzv_backend"], options["rdzv_id"]) == ("c10d", "job")
    assert (options["main_process_ip"], options["main_process_port"]) == ("job-0", 23456)
    assert "machine_rank" not in options
    assert found.processes_per_machine is None  # auto
    assert found.summary().endswith("the rendezvous numbers them")


def test_one_machine_with_a_number_of_processes():
    _, options = said({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"})
    assert options == {"num_processes": 2}


def test_skypilot_lists_the_addresses_of_its_nodes():
    found, options = said(SKY)
    assert (options["num_machines"], options["machine_rank"], options["main_process_ip"]) == (
        2,
        1,
        "10.0.0.1",
    )
    assert found.processes_per_machine.value == 4


def test_dstack_lists_the_addresses_of_its_nodes():
    found, options = said(DSTACK)
    assert (options["num_machines"], options["machine_rank"]) == (2, 1)
    assert options["main_process_ip"] == DSTACK["DSTACK_MASTER_NODE_IP"]
    assert 15000 <= options["main_process_port"] < 32768
    assert (found.scheduler, found.processes_per_machine.value, found.joins) == ("dstack", 8, False)
    another = said(DSTACK | {"DSTACK_RUN_ID": "another"})[1]
    assert another["main_process_port"] != options["main_process_port"]  # two runs of one name
    assert said(DSTACK | {"DSTACK_GPUS_PER_NODE": "0"})[0].processes_per_machine is None
    alone = {"DSTACK_NODES_NUM": "1", "DSTACK_NODE_RANK": "0", "DSTACK_NODES_IPS": "10.128.0.47"}
    assert find_allocation(DSTACK | alone) is None


def test_kubernetes_tells_the_index_of_a_pod():
    found, options = said(INDEXED)
    assert (found.role, options["num_machines"], options["machine_rank"]) == ("machine", 3, 2)
    assert (options["main_process_ip"], options["main_process_port"]) == ("train-0.train", 29500)
    assert found.options["machine_rank"].source == "JOB_COMPLETION_INDEX=2"
    assert said(INDEXED | {"NODE_RANK": "1"})[1]["machine_rank"] == 1  # of a manifest that counts otherwise
    assert find_allocation(INDEXED | {"NNODES": "1", "JOB_COMPLETION_INDEX": "0"}) is None


def test_sagemaker_starts_a_launcher_on_each_host():
    found, options = said({"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"})
    assert (found.role, found.joins, found.scheduler) == ("machine", True, "SageMaker")
    assert (options["num_machines"], options["machine_rank"], options["main_process_ip"]) == (2, 1, "algo-1")


MPIRUN = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "scheduler"),
    [
        (DSTACK | MPIRUN, "MPI"),
        (DSTACK | INDEXED, "dstack"),
        (SKY | INDEXED, "SkyPilot"),
        (INDEXED | TRAINER, "torchrun's variables (PET_*)"),
        (SLURM | INDEXED, "Slurm"),
    ],
)
def test_the_variables_that_know_most_are_read_first(environ, scheduler):
    assert find_allocation(environ).scheduler == scheduler


@pytest.mark.parametrize(
    "address", ["a; rm -rf /", "a b", "$(id)", "-oProxyCommand=id", "a\nb", "é", "x" * 254]
)
def test_an_address_that_is_none_is_refused(address):
    for environ in (CONTAINERS | {"MASTER_ADDR": address}, INDEXED | {"MASTER_ADDR": address},
                    TRAINER | {"PET_MASTER_ADDR": address}, SLURM | {"MASTER_ADDR": address}):  # fmt: skip
        with pytest.raises(ConfigError, match="is no host name or address") as error:
            find_allocation(environ)
        assert repr(address) in str(error.value)


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "fe80::1%eth0", "::1", "my_service", "algo-1", "a.svc.cluster.local"]
)
def test_names_and_addresses_are_kept(address):
    assert said(INDEXED | {"MASTER_ADDR": address})[1]["main_process_ip"] == address


def test_flux_comes_before_mpi_whose_variables_it_sets_too():
    found, options = said(FLUX)
    assert (found.scheduler, found.role, found.index, options) == ("Flux", "rank", 3, {"num_processes": 4})
    one_each = FLUX | {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1", "FLUX_TASK_LOCAL_ID": "0"}
    found, options = said(one_each)
    assert (found.role, options["machine_rank"], options["main_process_ip"]) == ("machine", 1, "host1")


def test_blaunch_finds_this_host_in_the_list_of_lsf(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "hostB.cluster")
    environ = {"LSB_JOBID": "7", "LSF_PM_TASKID": "2", "LSB_MCPU_HOSTS": "hostA 4 hostB 4"}
    found, options = said(environ)
    assert (found.index, options["num_machines"], options["main_process_ip"]) == (1, 2, "hostA")
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    with pytest.raises(ConfigError, match=r"elsewhere, is not among.*hostA, hostB"):
        find_allocation(environ)


def test_jsrun_starts_ranks_or_launchers(tmp_path):
    ranks = tmp_path / "ranks"
    ranks.write_text("batch\nnode1\nnode1\nnode2\nnode2\n")
    environ = {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_LOCAL_RANK": "0",
               "LSB_DJOB_RANKFILE": str(ranks), "LSB_JOBID": "7"}  # fmt: skip
    assert (find_allocation(environ).role, find_allocation(environ).total) == ("rank", 4)
    found, options = said(environ | {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1"})
    assert (found.role, options["machine_rank"], options["main_process_ip"]) == ("machine", 1, "node1")


def test_mpirun_starts_ranks():
    environ = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
               "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
    assert (find_allocation(environ).role, find_allocation(SLURM | environ).scheduler) == ("rank", "MPI")


def test_a_container_for_each_machine():
    found, options = said(CONTAINERS)
    assert (options["num_machines"], options["machine_rank"], options["main_process_port"]) == (3, 2, 23456)
    assert found.processes_per_machine is None
    found, options = said(NODES)
    assert (options["num_machines"], options["machine_rank"], found.processes_per_machine.value) == (2, 1, 8)


def test_a_launcher_inside_a_rank_is_a_world_of_its_own():
    for environ in (SLURM, TRAINER, SKY, CONTAINERS):
        assert find_allocation(environ | {"LOCAL_RANK": "0"}) is None
        assert find_allocation(environ, "none") is None


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda scheduler: scheduler.key)
def test_a_wanted_scheduler_must_be_there(scheduler):
    with pytest.raises(ConfigError, match=f"--cluster {scheduler.key}.*{scheduler.hint.split()[0]}"):
        find_allocation({}, scheduler.key)


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        (TRAINER | {"PET_NNODES": "two"}, ["PET_NNODES", "'two'", "1:4"]),
        (TRAINER | {"PET_NNODES": "3:1"}, ["PET_NNODES", "'3:1'"]),
        (TRAINER | {"PET_NODE_RANK": "2"}, ["PET_NODE_RANK is 2"]),
        (TRAINER | {"PET_NPROC_PER_NODE": "many"}, ["PET_NPROC_PER_NODE", "'many'"]),
        ({"PET_NNODES": "2"}, ["PET_NNODES is 2", "PET_NODE_RANK", "--cluster none"]),
        (ELASTIC_JOB | {"PET_RDZV_ENDPOINT": "job:x"}, ["PET_RDZV_ENDPOINT", "'job:x'"]),
        (SKY | {"SKYPILOT_NUM_NODES": "3"}, ["SKYPILOT_NUM_NODES is 3", "lists 2"]),
        (SKY | {"SKYPILOT_NODE_RANK": ""}, ["SKYPILOT_NODE_RANK is not set"]),
        (DSTACK | {"DSTACK_NODES_NUM": "3"}, ["DSTACK_NODES_NUM is 3", "DSTACK_NODES_IPS lists 2"]),
        (DSTACK | {"DSTACK_NODES_NUM": "two"}, ["DSTACK_NODES_NUM", "'two'"]),
        (DSTACK | {"DSTACK_NODE_RANK": "2"}, ["DSTACK_NODE_RANK is 2", "DSTACK_NODES_NUM is 2"]),
        (DSTACK | {"DSTACK_NODE_RANK": ""}, ["DSTACK_NODE_RANK is not set", "--cluster none"]),
        (DSTACK | {"DSTACK_GPUS_PER_NODE": "many"}, ["DSTACK_GPUS_PER_NODE", "'many'"]),
        (INDEXED | {"JOB_COMPLETION_INDEX": "3"}, ["JOB_COMPLETION_INDEX is 3", "NNODES is 3"]),
        (INDEXED | {"JOB_COMPLETION_INDEX": "a"}, ["JOB_COMPLETION_INDEX", "'a'"]),
        (INDEXED | {"NNODES": "0"}, ["NNODES is 0"]),
        (INDEXED | {"WORLD_SIZE": "4"}, ["WORLD_SIZE is 4", "NNODES=3", "JOB_COMPLETION_INDEX"]),
        (INDEXED | {"MASTER_PORT": "70000"}, ["MASTER_PORT is 70000"]),
        (SLURM | {"SLURM_PROCID": "x"}, ["SLURM_PROCID", "'x'"]),
        (FLUX | {"FLUX_TASK_LOCAL_ID": ""}, ["FLUX_TASK_LOCAL_ID is not set"]),
        ({"LSB_JOBID": "1", "LSF_PM_TASKID": "1", "LSB_MCPU_HOSTS": "a b c"}, ["LSB_MCPU_HOSTS", "'a b c'"]),
        (NODES | {"WORLD_SIZE": "5"}, ["WORLD_SIZE is 5", "NNODES=2"]),
        (NODES | {"NODE_RANK": "2"}, ["NODE_RANK is 2", "NNODES is 2"]),
    ],
)  # fmt: skip
def test_a_variable_that_is_not_understood_is_named(environ, parts):
    with pytest.raises(ConfigError) as error:
        find_allocation(environ)
    assert all(part in str(error.value) for part in parts), error.value


SITE = """
from accel_state.clusters.allocation import Allocation, TaskScheduler
from accel_state.clusters.base import Cluster, Topology

class Tasks(Cluster):
    name = "site"
    def detect(self, environ):
        return Topology(rank=3, world_size=4, launcher="site") if "SITE" in environ else None

class Site(TaskScheduler):
    key, name, hint, cluster = "site", "Site", "use siterun", Tasks()
    def sources(self, environ, topology):
        return {"size": "SITE"}

SITE = Site()
"""
POINTS = {"accel_state.clusters": {"site": "SITE"}}


def test_a_scheduler_of_an_installed_package(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "outside_cluster", SITE, POINTS)
    for environ, wanted in (
        ({"SITE": "1"}, "auto"),
        ({"SITE": "1"} | SLURM, "auto"),
        ({"SITE": "1"}, "site"),
    ):
        found = find_allocation(environ, wanted)
        assert (found.scheduler, found.role, found.index, found.total) == ("Site", "rank", 3, 4)
    assert (
        find_allocation({"SITE": "1"} | TRAINER).scheduler != "Site"
    )  # a launcher inside the job has set these
    assert find_allocation({"SITE": "1"} | SLURM, "slurm").scheduler == "Slurm"
    with pytest.raises(
        ConfigError, match=r"--cluster site: Site does not describe several processes.*use siterun"
    ):
        find_allocation({}, "site")
    assert detect({"SITE": "1"}).launcher == "site"
    assert detect({"SITE": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).launcher == "torchrun"
    assert parse_flags(["--cluster", "site"]).values["cluster"] == "site"
    with pytest.raises(ConfigError, match=r"expected one of auto, none, .*containers, site$"):
        parse_flags(["--cluster", "sites"])


def test_one_that_cannot_be_imported_stops_only_what_asks_for_it(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "outside_cluster", "raise RuntimeError('no driver')", POINTS)
    with pytest.warns(
        UserWarning, match="the cluster site is installed, but outside_cluster:SITE.*no driver; install"
    ):
        assert find_allocation(SLURM).scheduler == "Slurm"
    assert find_allocation(SLURM, "slurm").scheduler == "Slurm"
    with pytest.raises(ConfigError, match="the cluster site is installed, but outside_cluster:SITE"):
        find_allocation(SLURM, "site")
