"""The command of torch's elastic agent."""

import pytest

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.errors import ConfigError
from accel_state.launching.hardware import Accelerators
from accel_state.launching.plan import Host, plan, plan_world
from accel_state.launching.target import Target

CPU = Host(Accelerators(), physical_cores=8, python="python")


TARGET = Target("train.py", ("--lr", "0.1"))


def configured(*flags, environ=None):
    return resolve(environ=environ or {}, flags=parse_flags(flags), use_default_file=False).local()


def planned(*flags, host=CPU, environ=None, port=1234, target=TARGET):
    config = configured(*flags, environ=environ)
    return plan(config, target, plan_world(config, host.accelerators), environ or {}, host, port=port)


def first(*flags, **about):
    return planned(*flags, **about).processes[0]


def test_the_agent_passes_on_the_signal_of_slurm():
    argv = first(
        "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "h", "--main_process_port", "1"
    ).argv
    assert "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" in argv


ELASTIC = ("--num_machines", "2", "--num_processes", "4", "--cpu", "--main_process_ip", "10.0.0.1",
           "--main_process_port", "29501", "--machine_rank", "1")  # fmt: skip


def test_several_machines_are_started_by_an_agent():
    made = planned(*ELASTIC)
    assert made.style == "agent"
    argv = made.processes[0].argv
    assert argv[:3] == ("python", "-m", "accel_state.launching.machines.agent")
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=2"} <= {*argv}
    assert {"--master-addr=10.0.0.1", "--master-port=29501"} <= {*argv}
    # A rank leaves its error where the agent reads it, so the worker of this project starts the script.
    module = ("--module", "accel_state.launching.ranks.worker", "script")
    assert argv[-6:] == (*module, "train.py", "--lr", "0.1")


def test_a_program_runs_as_it_is():
    argv = first(*ELASTIC, target=Target("bash", ("-c", "true"), "program")).argv
    assert argv[-4:] == ("--no-python", "bash", "-c", "true")
    assert argv.index("--program") < argv.index("--")


def test_the_agent_gets_what_it_watches():
    flags = (
        "--start_timeout",
        "9",
        "--step_timeout",
        "600",
        "--checkpoint_timeout",
        "1800.5",
        "--straggler_report",
    )
    argv = first(*ELASTIC, *flags, "--debug").argv
    own = argv[3 : argv.index("--")]
    wanted = {"--start-timeout=9", "--step-timeout=600", "--checkpoint-timeout=1800.5", "--straggler-report"}
    assert wanted | {"--all-frames"} <= {*own}
    assert not any("timeout=" in word for word in first(*ELASTIC).argv[4:])


def test_other_rendezvous_backends_number_the_machines_themselves():
    argv = planned(*ELASTIC, "--rdzv_backend", "c10d", "--rdzv_conf", "join_timeout=60").processes[0].argv
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29501", "--rdzv-conf=join_timeout=60"} <= {*argv}
    assert not any(word.startswith("--node-rank") for word in argv)


def test_several_machines_need_an_address():
    with pytest.raises(ConfigError, match="--main_process_ip and --main_process_port"):
        planned("--cpu", "--num_machines", "2", "--num_processes", "2")


def test_a_range_of_machines_needs_a_rendezvous_that_lets_them_come_and_go():
    argv = planned(*ELASTIC, "--min_machines", "1", "--rdzv_id", "run").processes[0].argv
    assert {"--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29501", "--rdzv-id=run"} <= {
        *argv
    }
    assert planned(*ELASTIC, "--nnodes", "1:2", "--rdzv_id", "run").processes[0].argv == argv
    with pytest.raises(ConfigError, match="--min_machines 3 is more than --num_machines 2"):
        planned(*ELASTIC, "--min_machines", "3")


def test_spares_imply_as_many_restarts():
    argv = planned(*ELASTIC, "--spares", "2").processes[0].argv
    assert {"--max-restarts=2", "--rdzv-backend=c10d", "--spares=2", "--cpu"} <= {*argv}
    assert argv.index("--spares=2") < argv.index("--") < argv.index("--max-restarts=2")


def test_newer_options_of_torchrun_reach_the_agent():
    gpus = Host(Accelerators("cuda", 2, 2, "CUDA_VISIBLE_DEVICES"), physical_cores=8, python="python")
    flags = ("--numa_binding", "socket", "--virtual_local_rank", "--signals_to_handle", "SIGTERM,SIGUSR2",
             "--shutdown_timeout", "9")  # fmt: skip
    words = [word for word in ELASTIC if word != "--cpu"]
    argv = planned(*words, *flags, host=gpus).processes[0].argv
    wanted = {"--numa-binding=socket", "--virtual-local-rank", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR2"}
    assert wanted | {"--shutdown-timeout=9"} <= {*argv}
    with pytest.raises(ConfigError, match="--numa_binding socket on several machines"):
        planned(*ELASTIC, "--numa_binding", "socket")


def test_the_defaults_of_torchruns_flags_do_not_reach_the_agent():
    spec = first(*ELASTIC, environ={"PET_STANDALONE": "1", "PATH": "/bin"})
    assert spec.environment({"PET_STANDALONE": "1", "PATH": "/bin"}).keys() >= {"PATH"}
    assert "PET_STANDALONE" not in spec.environment({"PET_STANDALONE": "1"})
