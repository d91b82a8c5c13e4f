"""What a launch will run, from configuration alone."""

import dataclasses
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.config.codec import decode, launcher_only_fields
from accel_state.config.flags import parse_flags
from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import resolve
from accel_state.errors import ConfigError, DeviceError
from accel_state.launching.hardware import Accelerators
from accel_state.launching.machines.tpu_pod import ssh_commands, worker_command
from accel_state.launching.plan import Host, World, plan, plan_world
from accel_state.launching.run import describe, parse_tee, policy_of
from accel_state.launching.target import Target

CPU = Host(Accelerators(), physical_cores=8, python="python")


TARGET = Target("train.py", ("--lr", "0.1"))


def gpus(count, visible=None):
    shown = count if visible is None else visible
    return Host(Accelerators("cuda", shown, count, "CUDA_VISIBLE_DEVICES"), physical_cores=8, python="python")


def configured(*flags, environ=None):
    return resolve(environ=environ or {}, flags=parse_flags(flags), use_default_file=False).local()


def planned(*flags, host=CPU, environ=None, port=1234, target=TARGET):
    config = configured(*flags, environ=environ)
    return plan(config, target, plan_world(config, host.accelerators), environ or {}, host, port=port)


def first(*flags, **about):
    return planned(*flags, **about).processes[0]


def watched(*flags):
    """Whether the flags make the launcher start the ranks so that it can watch them; heard in test_monitor."""
    made = planned(*flags)
    return made.style == "ranks" and made.processes[0].argv[1:3] == (
        "-m",
        "accel_state.launching.ranks.worker",
    )


def test_one_process_gets_nothing_that_the_script_does_not_need():
    made = planned(environ={"HOME": "/root"})
    assert made.style == "direct"
    assert [(spec.argv, dict(spec.env)) for spec in made.processes] == [
        (("python", "train.py", "--lr", "0.1"), {"ACCELERATE_MIXED_PRECISION": "no"})
    ]


def test_t14_processes_on_the_cpu_form_one_world():
    made = planned("--cpu", "--num_processes", "3")
    assert [spec.env["RANK"] for spec in made.processes] == ["0", "1", "2"]
    assert [spec.env["LOCAL_RANK"] for spec in made.processes] == ["0", "1", "2"]
    for spec in made.processes:
        assert spec.env["WORLD_SIZE"] == spec.env["LOCAL_WORLD_SIZE"] == "3"
        assert (spec.env["MASTER_ADDR"], spec.env["MASTER_PORT"]) == ("127.0.0.1", "1234")
        assert spec.env["ACCELERATE_USE_CPU"] == "true"


def test_without_accelerators_several_processes_run_on_the_cpu():
    assert len(planned("--num_processes", "2").processes) == 2


def test_multi_cpu_in_a_file_means_the_cpu():
    config = LaunchConfig(distributed_type="MULTI_CPU", num_processes=2)
    made = plan(config, TARGET, plan_world(config, gpus(1).accelerators), {}, gpus(1), port=1)
    assert made.world.cpu
    assert made.processes[0].env["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize(
    ("host", "expected"), [(CPU, 1), (gpus(1), 1), (gpus(4), 4), (gpus(4, visible=2), 2)]
)
def test_as_many_processes_as_accelerators(host, expected):
    assert len(planned(host=host).processes) == expected


def test_more_processes_than_accelerators_names_both_and_the_cpu():
    message = r"3 processes .* need 3 accelerators.* has 2; .*--num_processes 2.*--cpu"
    with pytest.raises(DeviceError, match=message):
        planned("--num_processes", "3", host=gpus(2))


def test_multi_gpu_without_a_gpu_names_the_cpu():
    with pytest.raises(DeviceError, match=r"MULTI_GPU needs accelerators.*--cpu"):
        planned("--multi_gpu", "--num_processes", "2")


def test_multi_gpu_with_one_gpu_is_an_error():
    with pytest.raises(ConfigError, match="at least 2 processes"):
        planned("--multi_gpu", host=gpus(1))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("0,7", r"names accelerator 7, but this machine has 2 \(0 to 1\)"),
        ("0,0", "names accelerator 0 twice"),
        ("0,,1", "is not a list of ids"),
        ("-1", "is not a list of ids"),
        ("0\uff0c1", "with a plain comma"),
        ("0;1", "is not a list of ids"),
    ],
)
def test_gpu_ids_are_checked(ids, message):
    with pytest.raises((ConfigError, DeviceError), match=message):
        planned(f"--gpu_ids={ids}", host=gpus(2))


@pytest.mark.parametrize("ids", ["0", "GPU-5d5b"])
def test_gpu_ids_on_a_machine_without_any_names_the_cpu(ids):
    with pytest.raises(DeviceError, match="no accelerator was found on this machine; pass --cpu"):
        planned("--gpu_ids", ids)


def test_gpu_ids_choose_devices_and_number_of_processes():
    made = planned("--gpu_ids", "1,3", host=gpus(4))
    assert len(made.processes) == 2
    assert made.processes[0].env["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "CUDA_VISIBLE_DEVICES" not in planned("--gpu_ids", "all", host=gpus(4)).processes[0].env


def test_too_few_gpu_ids_for_the_processes():
    with pytest.raises(DeviceError, match="--gpu_ids 0 names 1"):
        planned("--gpu_ids", "0", "--num_processes", "2", host=gpus(4))


def test_resume_reaches_ranks_of_every_style_by_one_variable():
    there = ("--num_machines", "2", "--main_process_ip", "10.0.0.1", "--main_process_port", "1")
    for flags in ((), ("--num_processes", "2"), ("--num_processes", "4", *there), ("--mpirun_hostfile", "h")):
        plain, resuming = planned("--cpu", *flags), planned("--cpu", *flags, "--resume")
        for before, after in zip(plain.processes, resuming.processes, strict=True):
            assert {name for name in after.env if name not in before.env} - {
                # Of one process, which is watched now.
                "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "ACCEL_RANK_PREFIXED"
            } == {"ACCELERATE_RESUME"}  # fmt: skip
            assert after.env["ACCELERATE_RESUME"] == "true"
    assert "-x" in after.argv
    assert after.argv[after.argv.index("ACCELERATE_RESUME") - 1] == "-x"


def test_one_process_that_can_be_resumed_is_watched():
    assert planned("--cpu", "--resume").style == "ranks"


def test_who_restarts_preempted_ranks():
    cases = {(): False, ("--resume",): True, ("--max_restarts", "1"): True}
    for flags, restarted in cases.items():
        assert policy_of(configured(*flags)).restart_preempted is restarted
        assert policy_of(configured(*flags), agent=True).restart_preempted is False
        assert policy_of(configured(*flags)).resumable is ("--resume" in flags)


def test_an_agent_has_longer_after_ctrl_c_because_it_waits_for_its_ranks():
    assert (policy_of(configured()).interrupt_grace, policy_of(configured(), agent=True).interrupt_grace) == (
        5,
        10,
    )
    assert policy_of(configured("--grace_period", "3"), agent=True).interrupt_grace == 3


def test_threads_are_shared_between_processes_of_a_machine():
    assert planned("--cpu", "--num_processes", "4").processes[0].env["OMP_NUM_THREADS"] == "2"
    assert planned("--cpu", "--num_processes", "9").processes[0].env["OMP_NUM_THREADS"] == "1"
    assert planned(host=gpus(2)).processes[0].env["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in planned("--cpu").processes[0].env
    given_ = planned("--cpu", "--num_processes", "4", "--num_cpu_threads_per_process", "5").processes[0].env
    assert given_["OMP_NUM_THREADS"] == "5"
    kept = planned("--cpu", "--num_processes", "4", environ={"OMP_NUM_THREADS": "3"}).processes[0]
    assert kept.environment({"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_cards_without_direct_traffic_get_it_switched_off():
    host = dataclasses.replace(gpus(2), peer_to_peer=False)
    env = planned(host=host, environ={"NCCL_IB_DISABLE": "0"}).processes[0].env
    assert env["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_IB_DISABLE" not in env, "what the user has set stays"
    assert "NCCL_P2P_DISABLE" not in planned(host=gpus(2)).processes[0].env


def test_gloo_is_told_an_interface_where_the_host_name_leads_nowhere():
    host = dataclasses.replace(CPU, named=False)
    two = ("--cpu", "--num_processes", "2")
    assert first(*two, host=host).env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in first(*two, host=host, environ={"GLOO_SOCKET_IFNAME": "eth0"}).env
    assert "GLOO_SOCKET_IFNAME" not in first(*two).env
    assert "GLOO_SOCKET_IFNAME" not in first("--cpu", host=host).env


def test_numbers_that_do_not_fit_together():
    with pytest.raises(ConfigError, match="--num_processes 3 is not divisible by --num_machines 2"):
        planned("--cpu", "--num_processes", "3", "--num_machines", "2")
    with pytest.raises(ConfigError, match="--machine_rank 2 is out of range for 2 machines"):
        planned("--cpu", "--num_processes", "2", "--num_machines", "2", "--machine_rank", "2")


RANK_OF_TORCHRUN = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
    "MASTER_ADDR": "host", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1", "PATH": "/bin",
}  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
def test_a_launch_inside_a_rank_is_a_world_of_its_own(count):
    spec = planned("--cpu", "--num_processes", str(count), environ=RANK_OF_TORCHRUN).processes[0]
    full = spec.environment(RANK_OF_TORCHRUN)
    assert full.get("WORLD_SIZE") == (None if count == 1 else "2")
    assert full.get("RANK") == (None if count == 1 else "0")
    assert full.get("MASTER_ADDR") == (None if count == 1 else "127.0.0.1")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in full  # torch would look for the store of torchrun's agent
    assert (full["PATH"], full["OMP_NUM_THREADS"]) == ("/bin", "1")


OF_A_RANK = {"RANK": "0", "LOCAL_RANK": "0", "ROLE_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
             "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}  # fmt: skip
ONE_OF_AN_ENGINE = [
    "--use_fsdp", "--use_deepspeed", "--use_megatron_lm", "--use_parallelism_config",
    "--use_fsdp --log_dir logs", "--use_fsdp --resume", "--use_deepspeed --step_timeout 9",
    "--use_fsdp --max_restarts 1",
]  # fmt: skip


@pytest.mark.parametrize("flags", ONE_OF_AN_ENGINE)
@pytest.mark.parametrize("environ", [{}, RANK_OF_TORCHRUN], ids=["alone", "in a rank"])
def test_one_process_of_an_engine_has_the_variables_of_a_rank(flags, environ):
    words = ("--num_processes", "1", *flags.split())
    spec = planned(*words, host=gpus(1), environ=environ).processes[0]
    full = spec.environment(environ)
    assert OF_A_RANK.items() <= full.items()
    other = planned(*words, "--main_process_port", "7", host=gpus(1), environ=environ, port=None).processes[0]
    assert "MASTER_PORT" not in other.env  # nothing was reserved


@pytest.mark.parametrize("flags", ["", "--cpu", "--mixed_precision bf16", "--tpu", "--log_dir logs"])
def test_one_process_of_no_engine_has_none_of_them(flags):
    spec = planned("--num_processes", "1", *flags.split()).processes[0]
    assert spec.env.keys().isdisjoint(OF_A_RANK)


def test_a_rank_that_a_scheduler_has_started_keeps_its_place():
    alone = World(1, 1, 1, 0, True, joined=True)
    config = configured("--cpu", "--use_fsdp")
    environ = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "3"}
    spec = plan(config, TARGET, alone, environ, CPU, port=1234).processes[0]
    assert spec.env.keys().isdisjoint(OF_A_RANK)


def test_a_place_that_a_scheduler_gives_is_kept():
    # Kubeflow: one container per process, without LOCAL_RANK
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "23456"}
    assert first(environ=environ).environment(environ).items() >= environ.items()


def test_stale_variables_of_the_schema_do_not_reach_ranks():
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_VERSION": "2", "PATH": "/bin"}
    made = planned("--mixed_precision", "fp16", environ=environ).processes[0]
    full = made.environment(environ)
    assert full["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert full["PATH"] == "/bin"
    assert decode(full).mixed_precision == "fp16"


@given(
    count=st.integers(1, 8),
    steps=st.integers(1, 9) | st.none(),
    precision=st.sampled_from(["no", "fp16", "bf16"]),
    debug=st.booleans(),
    backend=st.sampled_from([None, "INDUCTOR", "EAGER"]),
)
def test_what_ranks_decode_is_what_was_configured(count, steps, precision, debug, backend):
    config = LaunchConfig(mixed_precision=precision, debug=debug, use_cpu=True, num_processes=count)
    accumulation = dataclasses.replace(config.gradient_accumulation, num_steps=steps)
    dynamo = dataclasses.replace(config.dynamo, backend=backend)
    config = dataclasses.replace(config, gradient_accumulation=accumulation, dynamo=dynamo)
    made = plan(config, TARGET, plan_world(config, CPU.accelerators), {}, CPU, port=1)
    assert len(made.processes) == count
    for spec in made.processes:
        found = decode(spec.environment({}))
        assert (found.mixed_precision, found.debug, found.use_cpu) == (precision, debug, True)
        assert (found.gradient_accumulation.num_steps, found.dynamo.backend) == (steps, backend)


ELASTIC = ("--num_machines", "2", "--num_processes", "4", "--cpu", "--main_process_ip", "10.0.0.1",
           "--main_process_port", "29501", "--machine_rank", "1")  # fmt: skip


ON_GPUS = tuple(word for word in ELASTIC if word != "--cpu")
FUNCTION = ("--main_training_function", "train")


def pod(*flags):
    config = configured("--tpu", "--tpu_cluster", *flags)
    return ssh_commands(config.tpu, worker_command(config, TARGET))[0]


# For every option that no variable carries: flags that set it, and how the launch shows that it was heard.
REACHES = {
    "module": lambda: first("-m", target=Target("a.b", kind="module")).argv == ("python", "-m", "a.b"),
    "no_python": lambda: first("--no_python", target=Target("prog", kind="program")).argv == ("prog",),
    "quiet": lambda: policy_of(configured("--quiet")).quiet,
    "dry_run": lambda: configured("--dry-run").dry_run,  # run for real in test_launching_supervisor
    "tee": lambda: parse_tee(configured("--tee", "2").tee, [0]) == {0: frozenset({"stderr"})},
    "log_dir": lambda: str(first("--log_dir", "logs").log_path) == "logs/rank_0.log",
    "role": lambda: first("--num_processes", "2", "--role", "actor").env["ROLE_NAME"] == "actor",
    "max_restarts": lambda: policy_of(configured("--max_restarts", "3")).max_restarts == 3,
    "monitor_interval": lambda: policy_of(configured("--monitor_interval", "0.5")).monitor_interval == 0.5,
    "grace_period": lambda: policy_of(configured("--grace_period", "7")).grace_period == 7,
    "num_processes": lambda: len(planned("--num_processes", "3").processes) == 3,
    "processes_per": lambda: len(planned("--processes_per", "gpu", host=gpus(3)).processes) == 3,
    "num_machines": lambda: "--nnodes=2" in first(*ELASTIC).argv,
    "machine_rank": lambda: "--node-rank=1" in first(*ELASTIC).argv,
    "main_process_ip": lambda: "--master-addr=10.0.0.1" in first(*ELASTIC).argv,
    "main_process_port": lambda: "--master-port=29501" in first(*ELASTIC).argv,
    "same_network": lambda: (
        "--master-addr=10.0.0.1" in first(*ELASTIC, "--same_network", "--rdzv_backend", "c10d").argv
    ),
    "rdzv_backend": lambda: "--rdzv-backend=etcd" in first(*ELASTIC, "--rdzv_backend", "etcd").argv,
    "rdzv_conf": lambda: "--rdzv-conf=a=1" in first(*ELASTIC, "--rdzv_conf", "a=1").argv,
    "gpu_ids": lambda: first("--gpu_ids", "1", host=gpus(2)).env["CUDA_VISIBLE_DEVICES"] == "1",
    "min_machines": lambda: "--nnodes=1:2" in first(*ELASTIC, "--min_machines", "1").argv,
    "spares": lambda: "--spares=1" in first(*ELASTIC, "--spares", "1").argv,
    "connect_timeout": lambda: "--connect-timeout=9" in first(*ELASTIC, "--connect_timeout", "9").argv,
    "rdzv_id": lambda: "--rdzv-id=x" in first(*ELASTIC, "--rdzv_backend", "c10d", "--rdzv_id", "x").argv,
    "start_timeout": lambda: watched("--start_timeout", "5"),
    "step_timeout": lambda: watched("--step_timeout", "5"),
    "checkpoint_timeout": lambda: watched("--checkpoint_timeout", "5"),
    "straggler_report": lambda: watched("--straggler_report"),
    "signals_to_handle": lambda: (
        policy_of(configured("--signals_to_handle", "SIGUSR2")).signals == ("SIGUSR2",)
    ),
    "numa_binding": lambda: (
        "--numa-binding=node" in first(*ON_GPUS, "--numa_binding", "node", host=gpus(2)).argv
    ),
    "virtual_local_rank": lambda: (
        [
            (spec.env["LOCAL_RANK"], spec.env["CUDA_VISIBLE_DEVICES"])
            for spec in planned("--num_processes", "2", "--virtual_local_rank", host=gpus(2)).processes
        ]
        == [("0", "0"), ("0", "1")]
    ),
    "submit": lambda: configured("--submit", "slurm").submit == "slurm",  # heard in test_submission
    "tpu.tpu_name": lambda: "one" in pod("--tpu_name", "one"),
    "tpu.tpu_zone": lambda: pod("--tpu_name", "one", "--tpu_zone", "here")[6:8] == ("--zone", "here"),
    "tpu.tpu_use_cluster": lambda: configured("--tpu", "--tpu_cluster").tpu.tpu_use_cluster,
    "tpu.tpu_use_sudo": lambda: "sudo env" in " ".join(pod("--tpu_name", "one", "--tpu_use_sudo")),
    "tpu.command_file": lambda: configured("--command_file", "f.sh").tpu.command_file,  # for accel tpu-config
    "tpu.commands": lambda: configured("--command", "ls").tpu.commands,  # for accel tpu-config
    "tpu.tpu_vm": lambda: pod("--vm", "two")[:4] == ("gcloud", "compute", "ssh", "two"),
    "tpu.tpu_env": lambda: "A=1" in " ".join(pod("--tpu_name", "one", "--env", "A=1")),
    "tpu.main_training_function": lambda: "=train" in " ".join(pod("--tpu_name", "one", *FUNCTION)),
    "mpirun.hostfile": lambda: first("--mpirun_hostfile", "hosts").argv[0] == "mpirun",
}


def test_words_of_torchrun_count_what_there_is(monkeypatch):
    monkeypatch.setattr("accel_state.launching.plan.usable_cpus", lambda: 5)
    assert len(planned("--nproc_per_node", "gpu", host=gpus(3)).processes) == 3
    assert len(planned("--nproc_per_node", "auto", host=gpus(3)).processes) == 3
    assert len(planned("--nproc_per_node", "auto").processes) == 5
    on_cpu = planned("--nproc_per_node", "cpu", host=gpus(3)).processes
    assert len(on_cpu) == 5
    assert on_cpu[0].env["ACCELERATE_USE_CPU"] == "true"
    with pytest.raises(DeviceError, match=r"--nproc_per_node gpu .* this machine has none"):
        planned("--nproc_per_node", "gpu")


READY = [
    path
    for path in launcher_only_fields()
    # Options of a section whose part has its own tests: DeepSpeed's launcher, the submission of jobs.
    if path.partition(".")[0] not in {"deepspeed", "submission"}
]


@pytest.mark.parametrize("path", READY)
def test_t15_options_that_no_variable_carries_reach_the_command(path):
    assert REACHES[path]()


def test_the_table_above_is_complete():
    assert set(REACHES) == set(READY)


@pytest.mark.parametrize("text", ["4", "0:5", "x:1", "7:3", "0"])
def test_tee_is_checked(text):
    if text == "0":
        assert parse_tee(text, [0, 1]) == {0: frozenset(), 1: frozenset()}
    else:
        with pytest.raises(ConfigError, match="--tee"):
            parse_tee(text, [0, 1])


def test_description_names_what_is_removed_from_the_environment():
    made = planned(environ={"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_LOG_LEVEL": "info"})
    assert "train.py --lr 0.1" in describe(made)


def test_default_interpreter_is_this_one():
    assert planned(host=Host(), port=None).processes[0].argv[0] == sys.executable


def test_world_counts_over_machines():
    shape = plan_world(configured(*ELASTIC), Accelerators())
    assert (shape.size, shape.local_size, shape.machines, shape.machine_rank, shape.cpu) == (4, 2, 2, 1, True)
