"""PartialState, alone and in real worlds."""

from __future__ import annotations

import builtins
import copy
import os
import pickle
import time
import warnings
from datetime import timedelta

import pytest
import torch

from accel_state.enums import DistributedType
from accel_state.environment import patch_environment
from accel_state.errors import ConfigError, StateError
from accel_state.world.process import PartialState, current_state, wait_for_everyone
from testkit import worlds

MPI_VARIABLES = {
    "open mpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mvapich": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """This process on the CPU, in a world of one, with nothing left of other tests."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_DEBUG_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    PartialState._reset_state()
    yield
    PartialState._reset_state()


# ---- alone


def test_a_script_of_a_job_with_several_machines_needs_a_launcher(monkeypatch):
    for name, text in {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(
        ConfigError, match=r"PET_NNODES=2, PET_NODE_RANK=1\).*accel launch.*ACCEL_CLUSTER=none"
    ):
        PartialState()
    assert current_state() is None, "nothing is half done"
    with patch_environment(ACCEL_CLUSTER="none"):
        assert PartialState().num_processes == 1


def test_ranks_and_process_groups_of_a_job_are_left_alone(monkeypatch):
    monkeypatch.setenv("SLURM_NNODES", "2")  # the shell of a batch job
    with pytest.raises(ConfigError, match="Slurm job has 2 machines"):
        PartialState()
    with patch_environment(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0):  # torchrun --nproc_per_node 1
        assert PartialState().topology.launcher == "torchrun"
    PartialState._reset_state()
    with patch_environment(FORK_LAUNCHED=1):
        assert PartialState().num_processes == 1
    PartialState._reset_state()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert PartialState().backend == "gloo"
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_of_a_job_join_their_world():
    assert worlds.run(lambda: PartialState().num_processes, 2, environ={"SLURM_NNODES": "2"}) == [2, 2]


def test_a_misspelt_variable_is_told_by_the_first_state(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECSION", "bf16")
    monkeypatch.setenv("ACCELERATE_TEAM", "theirs")
    text = "ACCELERATE_MIXED_PRECSION is not read; did you mean ACCELERATE_MIXED_PRECISION"
    with pytest.warns(UserWarning, match=text) as told:
        PartialState()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PartialState()
        PartialState._reset_state()
        monkeypatch.setenv("ACCEL_NAMES_TOLD", "1")  # by a launcher
        PartialState()


def say_misspelt():
    with patch_environment(ACCELERATE_DEBUG_MOD="1"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        PartialState()
    return [str(warning.message) for warning in told if "is not read" in str(warning.message)]


def test_the_main_process_alone_tells_of_misspelt_variables():
    first, second = worlds.run(say_misspelt, 2)
    assert len(first) == 1
    assert second == []


def test_known_variables_search_for_no_installed_strategies(monkeypatch):
    # Searching takes ten milliseconds, and every rank of a launch has variables of ours.
    monkeypatch.setattr("accel_state.config.unknown_variables.complete_root", None)
    PartialState()


def test_alone():
    state = PartialState()
    assert state.device == torch.device("cpu")
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.distributed_type is DistributedType.NO
    assert state.backend is None
    assert state.store is None
    assert not state.use_distributed
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.debug
    assert not state.fork_launched
    assert state.topology.launcher == "single"
    state.wait_for_everyone()
    wait_for_everyone()


def test_instances_share_their_attributes_and_reset_empties_them():
    first, second = PartialState(), PartialState()
    first.extra = "seen by all"
    assert second.extra == "seen by all"
    assert PartialState._shared_state["extra"] == "seen by all"
    assert current_state().extra == "seen by all"
    assert first.initialized
    PartialState.reset()
    assert not first.initialized
    assert current_state() is None
    with pytest.raises(
        AttributeError, match=r"`PartialState._reset_state\(\)` was called, which is reset\(\)"
    ):
        _ = first.num_processes
    with pytest.raises(AttributeError, match="no attribute 'nonsense'") as caught:
        _ = first.nonsense
    assert "reset()" not in str(caught.value)
    first.device = torch.device("meta")
    assert second.device == torch.device("meta")


def test_repr():
    assert repr(PartialState()) == (
        "Distributed environment: DistributedType.NO\n"
        "Num processes: 1\nProcess index: 0\nLocal process index: 0\nDevice: cpu\n"
    )


def test_the_device_can_be_set_by_variable():
    with patch_environment(ACCELERATE_TORCH_DEVICE="meta"):
        assert PartialState().device == torch.device("meta")


def test_debug_mode():
    with patch_environment(ACCELERATE_DEBUG_MODE="yes", FORK_LAUNCHED=1):
        assert PartialState().debug
        assert PartialState().fork_launched


def test_one_device_can_be_asked_for_only(monkeypatch):
    state = PartialState()
    state.device = torch.device("cuda", 0)
    with pytest.raises(StateError, match=r"cpu=True\).*already uses cuda:0"):
        PartialState(cpu=True)
    assert PartialState().device == torch.device("cuda", 0)


@pytest.mark.parametrize("cpu", ["yes", "cpu", 1, None, torch.device("cpu")])
def test_cpu_is_a_bool(cpu):
    with pytest.raises(ConfigError, match="is not a bool; pass cpu=True"):
        PartialState(cpu=cpu)
    assert current_state() is None


def test_a_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "perhaps")
    with pytest.raises(ConfigError, match="environment variable ACCELERATE_USE_CPU is 'perhaps'"):
        PartialState()


def test_unknown_options_are_named():
    with pytest.raises(ConfigError, match=r"no option 'time_out'; its options are cpu, .*timeout"):
        PartialState(time_out=3)
    assert not PartialState._shared_state


def test_an_error_leaves_nothing_behind():
    with patch_environment(WORLD_SIZE=2), pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        PartialState()
    assert not PartialState._shared_state
    assert PartialState().num_processes == 1


def test_copies_are_the_same_state():
    state = PartialState()
    for twin in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert twin.__dict__ is state.__dict__


def test_everything_runs_in_a_world_of_one():
    state = PartialState()
    decorators = [
        state.on_main_process,
        state.on_main_process(),
        state.on_local_main_process,
        state.on_local_main_process(),
        state.on_last_process,
        state.on_process(process_index=3),
        state.on_local_process(local_process_index=3),
        lambda f: state.on_process(f, process_index=3),
    ]

    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    for decorate in decorators:
        decorated = decorate(double)
        assert decorated(4) == 8
        assert decorated.__name__ == "double"
        assert decorated.__doc__ == "Twice."
    with state.main_process_first(), state.local_main_process_first():
        pass


def test_which_process_must_be_said():
    with pytest.raises(ConfigError, match="process_index is missing"):
        PartialState().on_process(print)
    with pytest.raises(ConfigError, match="local_process_index is missing"):
        PartialState().on_local_process(print)


def test_inputs_are_not_touched_in_a_world_of_one():
    inputs = {"a": [1, 2], "b": [1]}
    with PartialState().split_between_processes(inputs, apply_padding=True) as part:
        assert part is inputs


def test_destroying_a_group_that_is_not_there():
    PartialState().destroy_process_group()


@pytest.mark.parametrize(("asked", "pinned"), [("true", [0]), ("false", []), ("", [])])
def test_t15_affinity_is_set_when_it_is_asked_for(monkeypatch, asked, pinned):
    near = []
    monkeypatch.setattr("accel_state.world.process.set_numa_affinity", near.append)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    with patch_environment(accelerate_use_cpu="false", accelerate_cpu_affinity=asked):
        assert PartialState().device == torch.device("cuda", 0)
    assert near == pinned


# ---- in a world


def describe():
    state = PartialState()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return {
        "total": total.item(),
        "type": state.distributed_type,
        "backend": state.backend,
        "device": str(state.device),
        "ranks": (state.process_index, state.num_processes, state.local_process_index),
        "launcher": state.topology.launcher,
        "places": (state.is_main_process, state.is_last_process),
        "distributed": state.use_distributed,
    }


def check_world(seen, launcher):
    assert [rank["ranks"] for rank in seen] == [(0, 2, 0), (1, 2, 1)]
    assert [rank["places"] for rank in seen] == [(True, False), (False, True)]
    for rank in seen:
        assert rank["total"] == 2
        assert rank["type"] is DistributedType.MULTI_CPU
        assert rank["backend"] == "gloo"
        assert rank["device"] == "cpu"
        assert rank["distributed"]
        assert rank["launcher"] == launcher


def test_t14_torchruns_variables_make_one_world_without_a_cpu_flag():
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator, so the CPU would not be chosen by itself")
    check_world(worlds.run(describe, 2, environ={"ACCELERATE_USE_CPU": ""}), "torchrun")


def as_cluster(names, extra):
    """Describe this rank by the variables of another launcher instead of torchrun's, then join."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    os.environ.update(dict(zip(names, (rank, size, rank, size), strict=True)), **extra)
    return describe()


@pytest.mark.parametrize("names", MPI_VARIABLES.values(), ids=MPI_VARIABLES)
def test_t14_mpis_variables_make_one_world(names):
    check_world(worlds.run(as_cluster, 2, names, {}), "mpi")


def test_t14_slurms_variables_make_one_world():
    port = os.environ.pop("MASTER_PORT", None)
    assert port is None
    check_world(worlds.run(as_cluster, 2, SLURM_VARIABLES, {"SLURM_JOB_ID": "1"}), "slurm")


def without(*names):
    for name in names:
        del os.environ[name]
    PartialState()


def test_t14_a_world_that_cannot_be_formed_is_an_error():
    with pytest.raises(
        worlds.RankError, match=r"ConfigError: 2 processes were started by torchrun, but MASTER_ADDR and"
    ):
        worlds.run(without, 2, "MASTER_ADDR", "MASTER_PORT")
    with pytest.raises(worlds.RankError, match=r"ConfigError: .*WORLD_SIZE is 2, but RANK is not set"):
        worlds.run(without, 2, "RANK")


def torchrun_of_one():
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(worlds.free_port()))
    state = PartialState()
    return (
        torch.distributed.is_initialized(),
        state.distributed_type,
        state.use_distributed,
        state.num_processes,
    )


def test_torchrun_with_one_process_still_has_a_group():
    assert worlds.run(torchrun_of_one, 1) == [(True, DistributedType.MULTI_CPU, False, 1)]


def run_decorated():
    state = PartialState()
    ran = []

    def note(name):
        ran.append(name)
        return name

    state.on_main_process(note)("main")
    state.on_main_process()(note)("main called")
    state.on_local_main_process(note)("local main")
    state.on_last_process(note)("last")
    state.on_process(process_index=1)(note)("process 1")
    state.on_process(note, process_index=2)("process 2")
    state.on_process(note, process_index=7)("process 7")
    state.on_local_process(local_process_index=1)(note)("local 1")
    returned = state.on_main_process(lambda: "value")()
    return ran, returned


def test_decorated_functions_run_where_they_say():
    assert worlds.run(run_decorated, 3) == [
        (["main", "main called", "local main"], "value"),
        (["process 1", "local 1"], None),
        (["last", "process 2"], None),
    ]


def decorate_before_joining():
    state = PartialState.__new__(PartialState)
    state.__dict__ = PartialState._shared_state
    guarded = state.on_main_process(lambda: "ran")
    PartialState()
    return guarded()


def test_decorators_decide_when_called():
    assert worlds.run(decorate_before_joining, 2) == ["ran", None]


def one_after_the_other(local):
    state = PartialState()
    first = state.local_main_process_first if local else state.main_process_first
    with first():
        if state.is_main_process:
            time.sleep(0.2)
            state.store.set("done", "")
        done = state.store.check(["done"])
    state.wait_for_everyone()
    return done


@pytest.mark.parametrize("local", [False, True])
def test_the_main_process_goes_first(local):
    assert worlds.run(one_after_the_other, 3, local) == [True] * 3


def raise_first():
    state = PartialState()
    try:
        with state.main_process_first():
            if state.is_main_process:
                raise OSError("disk full")
            entered = True
    except OSError as error:
        return str(error)
    return entered


def test_the_others_go_on_when_the_main_process_raises():
    assert worlds.run(raise_first, 3, timeout=20) == ["disk full", True, True]


def wait_and_look():
    state = PartialState()
    if state.process_index == 1:
        time.sleep(0.2)
        state.store.set("late", "")
    state.wait_for_everyone()
    late = state.store.check(["late"])
    state.wait_for_everyone()
    return late


def test_wait_for_everyone():
    assert worlds.run(wait_and_look, 2) == [True, True]


def split_everything():
    state = PartialState()
    inputs = {"a": [1, 2, 3], "b": torch.tensor([1.0, 2.0, 3.0])}
    with (
        state.split_between_processes(inputs) as part,
        state.split_between_processes((1, 2, 3), True) as padded,
    ):
        return part["a"], part["b"].tolist(), padded, inputs["a"]


def test_splitting_in_a_world():
    assert worlds.run(split_everything, 2) == [
        ([1, 2], [1.0, 2.0], (1, 2), [1, 2, 3]),
        ([3], [3.0], (3, 3), [1, 2, 3]),
    ]


def print_something():
    lines = []
    builtins.print = lambda *args, **kwargs: lines.append((args, kwargs))
    PartialState().print("a", "b", sep="-")
    return lines


def test_printing_is_once_per_node():
    assert worlds.run(print_something, 2) == [[(("a", "b"), {"sep": "-"})], []]


def ask_again(options):
    PartialState(timeout=timedelta(seconds=30))
    PartialState(timeout=timedelta(seconds=30), backend="gloo")
    try:
        PartialState(**options)
    except StateError as error:
        return str(error)
    return None


def test_other_options_for_the_same_group_are_an_error():
    for message in worlds.run(ask_again, 2, {"timeout": timedelta(seconds=31)}):
        assert "seconds=31" in message
        assert "seconds=30" in message
    for message in worlds.run(ask_again, 2, {"backend": "cpu:gloo"}):
        assert "'cpu:gloo'" in message
        assert "'gloo'" in message
    assert worlds.run(ask_again, 2, {}) == [None, None]


def count_threads():
    del os.environ["OMP_NUM_THREADS"]
    torch.set_num_threads(1)
    import psutil

    psutil.cpu_count = lambda logical=True: 6
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PartialState()
        PartialState()
    return (
        torch.get_num_threads(),
        [str(w.message) for w in caught if "OMP" in str(w.message)],
        caught[-1:] and caught[-1].filename,
    )


def test_cores_are_shared_between_the_processes_of_a_node():
    (threads, said, where), (other_threads, other_said, _) = worlds.run(count_threads, 2)
    assert threads == other_threads == 3
    assert len(said) == 1
    assert "3 threads: 6 physical cores for 2 processes" in said[0]
    assert where.endswith("test_process.py")
    assert other_said == []


def threads_left_alone():
    os.environ["OMP_NUM_THREADS"] = "2"
    torch.set_num_threads(2)
    PartialState()
    return torch.get_num_threads()


def test_the_number_of_threads_that_is_asked_for_is_kept():
    assert worlds.run(threads_left_alone, 2) == [2, 2]


def no_more_devices():
    import torch

    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.device_count = lambda: 1
    torch.accelerator.set_device_index = lambda index: None
    PartialState()


def test_more_processes_than_devices_fails_on_every_rank_at_once():
    start = time.monotonic()
    with pytest.raises(worlds.RankError, match=r"DeviceError: 2 processes were started .* has 1 cuda device"):
        worlds.run(no_more_devices, 2, environ={"ACCELERATE_USE_CPU": "false"})
    assert time.monotonic() - start < 10
