"""TPU pods: command lines of gcloud, and the place of a machine."""

import shlex
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.config.sections.tpu import TpuSection
from accel_state.errors import ConfigError, LaunchError
from accel_state.launching.machines.tpu_pod import (
    PodPlace,
    in_its_pod,
    pod_place,
    ssh_commands,
    worker_command,
)
from accel_state.launching.target import Target


def launched(text):
    return resolve(environ={}, flags=parse_flags(shlex.split(text)), use_default_file=False).local()


def test_all_machines_of_a_pod():
    tpu = TpuSection(tpu_name="p", tpu_zone="z")
    assert ssh_commands(tpu, ["a b"]) == [
        (
            "gcloud",
            "compute",
            "tpus",
            "tpu-vm",
            "ssh",
            "p",
            "--zone",
            "z",
            "--command",
            "a b",
            "--worker",
            "all",
        )
    ]
    numbers = TpuSection(tpu_name="p", tpu_vm=("0", "2-3"))
    assert ssh_commands(numbers, ["a"], alpha=True) == [
        ("gcloud", "alpha", "compute", "tpus", "tpu-vm", "ssh", "p", "--command", "a", "--worker", "0,2-3")
    ]


def test_machines_by_name():
    config = launched("--tpu --tpu_cluster --vm one --vm two --num_processes 4")
    commands = ssh_commands(config.tpu, worker_command(config, Target("x.py")))
    assert [words[:4] for words in commands] == [
        ("gcloud", "compute", "ssh", "one"),
        ("gcloud", "compute", "ssh", "two"),
    ]
    places = [parse_flags(shlex.split(words[-1])[4:]) for words in commands]
    assert [place.values.get("machine_rank", 0) for place in places] == [0, 1]
    assert {(p.values["num_machines"], p.values["main_process_ip"], p.rest) for p in places} == {
        (2, "one", ("x.py",))
    }


def test_the_command_of_a_machine_launches_with_the_same_options():
    config = launched(
        "--tpu --tpu_cluster --env A='b c' --env D= --tpu_use_sudo --mixed_precision bf16 --downcast_bf16 -m"
        " --num_processes 4 --main_training_function train --dry-run"
    )
    (command,) = worker_command(config, Target("pack.mod", ("--lr", "0.1", "two words", "$HOME"), "module"))
    words = shlex.split(command)
    assert words[:8] == [
        "sudo",
        "env",
        "ACCELERATE_IN_TPU_POD=true",
        "A=b c",
        "D=",
        "python3",
        "-m",
        "accel_cli",
    ]
    flags = parse_flags(words[9:])
    assert flags.rest == ("pack.mod", "--lr", "0.1", "two words", "$HOME")
    there = resolve(environ={}, flags=flags, use_default_file=False).local()
    assert there.use_tpu
    assert there.module
    assert not there.dry_run
    assert not there.tpu.tpu_use_cluster
    assert (there.num_processes, there.mixed_precision) == (4, "bf16")
    assert (there.tpu.downcast_bf16, there.tpu.main_training_function) == (True, "train")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--env 1A", "--env is '1A'; expected NAME=value"),
        ("--vm 0 --vm 1", "a run needs all of them"),
        ("--vm 0 --vm one", "numbers and names"),
    ],
)
def test_what_a_pod_cannot_do(flags, said):
    with pytest.raises(ConfigError, match=said):
        worker_command(launched(f"--tpu --tpu_cluster {flags}"), Target("x.py"))


def test_a_machine_finds_its_place_in_variables():
    environ = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "10.0.0.1, 10.0.0.2"}
    assert pod_place(environ) == PodPlace(1, ("10.0.0.1", "10.0.0.2"))
    config = resolve(
        environ={"ACCELERATE_IN_TPU_POD": "1"}, flags={"--tpu": True}, use_default_file=False
    ).local()
    there = in_its_pod(config, environ)
    assert (there.num_machines, there.machine_rank) == (2, 1)
    assert (there.main_process_ip, there.main_process_port) == ("10.0.0.1", 29500)
    assert in_its_pod(launched("--tpu"), environ).num_machines == 1  # not started by a pod's launcher
    assert in_its_pod(config, {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "h"}).num_machines == 1


@pytest.fixture
def metadata():
    answers = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            known = self.headers["Metadata-Flavor"] == "Google" and name in answers
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(answers.get(name, "").encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()


def test_a_machine_finds_its_place_on_the_metadata_server(metadata):
    host, answers = metadata
    answers |= {
        "agent-worker-number": "1",
        "worker-network-endpoints": "a:b:10.0.0.1,unknown:unknown:10.0.0.2",
    }
    assert pod_place({"GCE_METADATA_HOST": host}) == PodPlace(1, ("10.0.0.1", "10.0.0.2"))
    del answers["agent-worker-number"]
    with pytest.raises(
        LaunchError, match=r"agent-worker-number .*404.*set TPU_WORKER_ID and TPU_WORKER_HOSTNAMES"
    ):
        pod_place({"GCE_METADATA_HOST": host})


@pytest.mark.parametrize("index", ["2", "x", "-1"])
def test_a_place_that_the_pod_does_not_have(index):
    with pytest.raises(LaunchError, match=f"number '{index}' of the TPU pod, which has 2"):
        pod_place({"TPU_WORKER_ID": index, "TPU_WORKER_HOSTNAMES": "a,b"})
