"""``accel doctor`` on real worlds, healthy and with one fault each, which a module at Python's start brings in."""

import json
import os
import re
import subprocess
import sys
import time

import psutil
import pytest

FAULTS = {
    "wrong": """
        import torch.distributed as dist
        right = dist.all_reduce
        def all_reduce(tensor, *args, **kwargs):
            right(tensor, *args, **kwargs)
            tensor[3] += 1
        dist.all_reduce = all_reduce
    """,
    "dies": """
        import os, torch.distributed as dist
        dist.broadcast = lambda *args, **kwargs: os.kill(os.getpid(), 9)
    """,
    "stops": """
        import os, signal, torch.distributed as dist
        dist.broadcast = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGSTOP)
    """,
    "absent": """
        import time
        time.sleep(600)
    """,
    "slow": """
        import time, torch
        right = torch.Tensor.__matmul__
        torch.Tensor.__matmul__ = lambda *args: (time.sleep(0.2), right(*args))[1]
    """,
    "slow link": """
        import time, torch.distributed as dist
        right = dist.send
        dist.send = lambda tensor, dst: (time.sleep(0.1 if dst == 2 else 0), right(tensor, dst))[1]
    """,
    "other version": """
        import torch
        torch.__version__ = "2.12.9"
    """,
}


@pytest.fixture
def doctor(tmp_path):
    def run(*words, fault=None):
        body = "".join(f"{line[4:]}\n" for line in FAULTS[fault].splitlines()) if fault else "    pass\n"
        (tmp_path / "sitecustomize.py").write_text(f"import os\nif os.environ.get('RANK') == '1':\n{body}")
        path = os.pathsep.join([str(tmp_path), *sys.path])
        environ = os.environ | {
            "PYTHONPATH": path,
            "XDG_CONFIG_HOME": str(tmp_path),
            "DOCTOR_TEST": str(tmp_path),
        }
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "accel_cli", "doctor", "--cpu", *words],
            env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        done.seconds = time.monotonic() - began
        return done

    yield run
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline", "environ"])
        if (process.info["environ"] or {}).get("DOCTOR_TEST") == str(tmp_path)
    ]
    assert left == []
    assert {path.name for path in tmp_path.iterdir()} <= {"sitecustomize.py", "__pycache__"}


@pytest.mark.wide
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_healthy_world(doctor, size):
    done = doctor("--num_processes", str(size), "--json")
    report = json.loads(done.stdout)
    found = {finding["topic"]: finding for finding in report["findings"]}
    assert found["collectives"]["found"].startswith("10 are right by gloo"), found
    assert found["versions"]["status"] == "ok"
    # A log gets one line of progress after two seconds, which slow machines need to load torch.
    assert re.fullmatch(r"(accel: [a-z ]+\n)?", done.stderr), done.stderr
    results = report["world"]["results"]
    links = [(link["first"], link["second"]) for result in results.values() for link in result["links"]]
    assert sorted(links) == [(a, b) for a in range(size) for b in range(a + 1, size)]
    for result in results.values():
        assert {one["problem"] for one in result["collectives"].values()} == {""}
        assert all(one["seconds"] > 0 for one in result["collectives"].values())
    problems = any(finding["status"] == "problem" for finding in report["findings"])
    assert done.returncode == int(problems)
    assert not {"world", "collectives"} & {f["topic"] for f in report["findings"] if f["status"] == "problem"}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param("wrong", "all_reduce on rank 1 ({host}) gave [10, 12, 14, 17,", marks=pytest.mark.full),
        ("dies", "rank 1 on {host} ended by SIGKILL, last seen at: broadcast"),
        pytest.param("other version", "torch is 2.", marks=pytest.mark.full),
    ],
)
def test_a_fault_is_named(doctor, fault, expected):
    done = doctor("--num_processes", "2", fault=fault)
    assert done.returncode == 1
    assert expected.format(host=os.uname().nodename) in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.full
def test_a_stopped_rank_is_named_after_the_timeout(doctor):
    done = doctor("--num_processes", "2", "--timeout", "15", fault="stops")
    assert done.returncode == 1
    host = os.uname().nodename
    assert f"rank 1 on {host} is stopped (SIGSTOP), last seen at: broadcast" in done.stdout, done.stdout
    assert done.seconds < 120


@pytest.mark.full
def test_a_rank_that_never_arrives_is_named(doctor):
    done = doctor("--num_processes", "2", "--timeout", "15", fault="absent")
    assert done.returncode == 1
    assert "rank 1 of 2 did not arrive within 15 s" in done.stdout, done.stdout
    assert done.seconds < 90


@pytest.mark.full
def test_a_slow_rank_is_named(doctor):
    done = doctor("--num_processes", "2", fault="slow")
    assert f"rank 1 on {os.uname().nodename} computes" in done.stdout, done.stdout


@pytest.mark.full
def test_a_slow_link_is_named(doctor):
    done = doctor("--num_processes", "4", fault="slow link")
    host = os.uname().nodename
    assert f"the link between rank 1 ({host}) and rank 2 ({host}) is slow" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--num_processes", "2", "--timeout", "soon"), "--timeout soon: expected seconds"),
        (("--num_machines", "2", "--num_processes", "2"), "pass --main_process_ip"),
        (("train.py",), "takes flags only"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(doctor, words, expected):
    done = doctor(*words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stdout == ""


@pytest.mark.full
def test_a_missing_machine_is_named_on_both_sides(doctor):
    words = (
        "--num_machines",
        "2",
        "--num_processes",
        "4",
        "--main_process_ip",
        "127.0.0.1",
        "--timeout",
        "12",
    )
    done = doctor(*words, "--main_process_port", "29871")
    assert done.returncode == 1
    assert "rank 2, 3 of 4 did not arrive within 12 s: machine 1 of 2 is missing" in done.stdout
    done = doctor(*words, "--main_process_port", "29872", "--machine_rank", "1")
    assert done.returncode == 1
    assert "machine 0 did not answer at 127.0.0.1:29872" in done.stdout
