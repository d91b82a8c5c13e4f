"""Tasks of SkyPilot and dstack, requests to Ray's job server, and what engines make of exit codes."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import yaml

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.errors import ConfigError, LaunchError
from accel_state.launching.submission import SUBMISSIONS, Job
from accel_state.launching.submission.outcomes import decide
from accel_state.launching.submission.tools import parsed, printable

TWO = ("--num_machines", "2", "--num_processes", "16", "--submit_gpus_per_machine", "H100:8")


def job(*flags, arguments=("--lr", "1 2"), script="folder/train.py"):
    config = resolve(environ={}, flags=parse_flags(flags), use_default_file=False).local()
    return Job(config, ("accel",), script, arguments, "ab12cd")


def made(engine, *flags, **about):
    return SUBMISSIONS.get(engine).script(job(*flags, **about))


def test_a_task_of_skypilot():
    flags = (*TWO, "--mixed_precision", "bf16", "--submit_image", "me/train", "--submit_cpus_per_task", "32")
    flags += (
        "--submit_memory",
        "64Gi",
        "--submit_retries",
        "3",
        "--submit_env",
        "A=b c",
        "--submit_setup",
        "nvidia-smi",
    )
    flags += ("--submit_secrets", "HF_TOKEN", "--submit_volumes", "data:/data", "--resume")
    assert yaml.safe_load(made("skypilot", *flags)) == {
        "name": "train-ab12cd",
        "num_nodes": 2,
        "resources": {
            "accelerators": "H100:8",
            "cpus": "32+",
            "memory": "64+",
            "image_id": "docker:me/train",
            "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]},
        },
        "envs": {"A": "b c"},
        "secrets": {"HF_TOKEN": None},
        "volumes": {"/data": "data"},
        "setup": "nvidia-smi",
        "run": "accel launch --mixed_precision=bf16 --num_machines=2 --num_processes=16 --resume folder/train.py "
        "--lr '1 2'",
    }


def test_a_task_of_dstack():
    flags = (*TWO, "--submit_image", "me/train", "--submit_memory", "64Gi", "--submit_shared_memory", "16Gi")
    flags += ("--submit_secrets", "HF_TOKEN", "--submit_secrets", "KEY=store", "--submit_time", "4:00:00")
    found = yaml.safe_load(made("dstack", *flags))
    loop = found.pop("commands")[0]
    assert "accel launch --num_machines=2 --num_processes=16 folder/train.py --lr '1 2' &" in loop
    assert found == {
        "type": "task",
        "name": "train-ab12cd",
        "nodes": 2,
        "image": "me/train",
        "env": ["HF_TOKEN=${{ secrets.HF_TOKEN }}", "KEY=${{ secrets.store }}"],
        "resources": {"gpu": "H100:8", "memory": "64GB..", "shm_size": "16GB"},
        "max_duration": 14400,
        "stop_duration": 300,
        "retry": {"on_events": ["no-capacity", "interruption"], "duration": "7d"},
    }


def test_a_request_to_rays_job_server(tmp_path):
    flags = (
        *TWO,
        "--submit_memory",
        "1Gi",
        "--submit_workdir",
        str(tmp_path),
        "--submit_env",
        "A=b",
        "--resume",
    )
    found = json.loads(made("ray", *flags, "--nnodes", "1:2"))
    assert found["submission_id"] == "train-ab12cd"
    assert found["runtime_env"] == {"env_vars": {"A": "b"}, "working_dir": str(tmp_path)}
    python, _, module, text = shlex.split(found["entrypoint"])
    assert (python, module) == ("python", "accel_state.launching.submission.ray_machines")
    run = json.loads(text)
    assert run["command"] == ["accel", "launch", "--resume", "folder/train.py", "--lr", "1 2"]
    assert (run["machines"], run["min_machines"], run["per_machine"]) == (2, 1, 8)
    assert run["resources"] == {"CPU": 1, "GPU": 8, "accelerator_type:H100": 0.001, "memory": 2**30}


@pytest.mark.parametrize(
    ("engine", "flags", "match"),
    [
        (
            "skypilot",
            (*TWO, "--submit_time", "60"),
            "--submit_time is '60', and jobs of SkyPilot have no such",
        ),
        (
            "skypilot",
            (*TWO, "--submit_signal_time", "60"),
            "--submit_signal_time is 60, and jobs of SkyPilot",
        ),
        ("skypilot", (*TWO, "--submit_volumes", "data:/data:ro"), "'data:/data:ro' is not a volume"),
        ("skypilot", ("--num_processes", "8"), "8 names no accelerator"),
        (
            "skypilot",
            (*TWO, "--submit_queue", "q"),
            "--submit_queue is 'q', and jobs of SkyPilot have no such option",
        ),
        ("skypilot", (*TWO, "--submit_secrets", "A=s/k"), "'A=s/k' is not the name of a variable"),
        ("dstack", (*TWO, "--submit_secrets", "A=s/k"), "'A=s/k' is not a secret of dstack"),
        ("dstack", (*TWO, "--submit_account", "me"), "--submit_account is 'me', and jobs of dstack"),
        ("ray", (*TWO, "--submit_workdir", "/nowhere/at/all"), "is not a folder here"),
        ("ray", (*TWO, "--submit_image", "x"), "--submit_image is 'x', and jobs of Ray"),
        ("ray", ("--num_machines", "2", "--num_processes", "3"), "3 is not divisible"),
        ("ray", (*TWO, "--spares", "1"), "--spares has no meaning on Ray"),
        ("dstack", (*TWO, "--submit_env", "2A=b"), "'2A=b' is not a variable; expected NAME=value"),
        ("dstack", (*TWO, "--submit_env", "HF_TOKEN=x"), "--submit_env HF_TOKEN looks like a secret"),
        ("dstack", (*TWO, "--submit_memory", "many"), "'many' is not a size"),
        ("dstack", (*TWO, "--submit_volumes", "data"), "'data' is not a volume; expected name:/folder"),
        ("dstack", (*TWO, "--submit_job_name", "My Job"), "'My Job' cannot name a job"),
        (
            "dstack",
            (*TWO, "--submit_gpus_per_machine", "H100:many"),
            "H100:many is not a number of accelerators",
        ),
    ],
)
def test_what_does_not_fit_the_engine_is_named(engine, flags, match):
    with pytest.raises(ConfigError, match=match):
        made(engine, *flags)


@pytest.mark.parametrize("words", [("--hf_token", "hf_x"), ("--api-key=x",)])
@pytest.mark.parametrize("engine", ["slurm", "ray", "skypilot", "dstack"])
def test_secrets_in_arguments_are_refused(engine, words):
    with pytest.raises(ConfigError, match="looks like a secret"):
        made(engine, *TWO, arguments=words)


@pytest.mark.parametrize("engine", ["slurm", "ray", "skypilot", "dstack", "kubernetes"])
@pytest.mark.parametrize(
    ("flags", "arguments", "match"),
    [
        ((), ("hub.token=hf_x",), "argument hub.token looks"),
        ((), ("--db", "postgres://me:pass@host/db"), "with the password of an address looks"),
        (("--submit_env", "DB=https://me:pass@host"), (), "--submit_env with the password of an address"),
        (("--submit_setup", "cd x; export HF_TOKEN='hf_x'"), (), "--submit_setup HF_TOKEN looks"),
        (("--submit_image", "https://me:pass@registry/x"), (), "--submit_image with the password"),
        (("--submit_args=--container-env=HF_TOKEN=hf_x",), (), "--submit_args HF_TOKEN looks"),
    ],
)
def test_secrets_are_refused_wherever_they_are(engine, flags, arguments, match):
    submission = SUBMISSIONS.get(engine)
    option = flags[0].removeprefix("--submit_").partition("=")[0] if flags else ""
    if flags and option not in submission.uses:
        match = "have no such option"
    elif engine == "kubernetes" and option != "image":
        flags = (*flags, "--submit_image", "x")
    with pytest.raises(ConfigError, match=match):
        made(engine, *TWO, *flags, arguments=arguments)


@pytest.mark.parametrize(
    "word",
    ["--num_key_value_heads=8", "--private=true", "--pad_token=<pad>", "--mask_token=[MASK]", "--key_file=/run/s/key",
     "--url=http://host:80/@x", "--url=redis://me:$PASS@host", "token_lr=1e-3", "--auth=none"],
)  # fmt: skip
def test_names_like_those_of_secrets_may_have_other_values(word):
    assert word in shlex.split(yaml.safe_load(made("skypilot", *TWO, arguments=(word,)))["run"])


def test_secrets_of_the_shell_of_the_job_may_be_named_in_its_setup():
    line = 'export HF_TOKEN="$(cat /run/secrets/token)"'
    assert yaml.safe_load(made("skypilot", *TWO, "--submit_setup", line))["setup"] == line


@pytest.mark.parametrize(
    "hostile", ["$(touch stolen)", "a\nrm -rf x", "'; touch stolen; '", "`touch stolen`"]
)
def test_arguments_reach_no_shell_unquoted(hostile, tmp_path):
    accel = tmp_path / "accel"
    accel.write_text('#!/bin/sh\nfor last; do :; done; printf %s "$last" > received\n')
    accel.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/bin:/usr/bin"}
    dstack = yaml.safe_load(made("dstack", *TWO, arguments=(hostile,)))["commands"][0]
    for text in (yaml.safe_load(made("skypilot", *TWO, arguments=(hostile,)))["run"], dstack):
        subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environ, check=True)
        assert (tmp_path / "received").read_text() == hostile
    assert not (tmp_path / "stolen").exists()


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("train.py", "train-ab12cd"),
        ("My_Train 2.py", "my-train-2-ab12cd"),
        ("1.py", "job-1-ab12cd"),
        ("ü.py", "job-ab12cd"),
    ],
)
def test_labels_are_those_of_dns(name, label):
    assert job(script=name).label == label
    assert len(job(script=f"{'long' * 30}.py").label) == 40


SHELLS = [shell for shell in ("bash", "dash") if shutil.which(shell)]  # dstack's is /bin/sh of the image


def loop_with(shell, tmp_path, codes, retries):
    """The exit code of dstack's loop where `accel` ends with one of ``codes`` after the other, and the codes left."""
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    accel = tmp_path / "accel"
    accel.write_text('#!/bin/sh\ncode=$(head -n 1 codes); sed -i 1d codes; exit "$code"\n')
    accel.chmod(0o755)
    text = yaml.safe_load(made("dstack", *TWO, "--submit_retries", str(retries)))["commands"][-1]
    done = subprocess.run(
        [shell, "-c", text], cwd=tmp_path, env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, timeout=30, check=False
    )
    return done.returncode, (tmp_path / "codes").read_text().split()


@pytest.mark.parametrize(
    ("codes", "retries", "end"),
    [
        ([0, 1], 0, (0, ["1"])),
        ([75, 75, 0], 0, (0, [])),
        ([1, 0], 0, (1, ["0"])),
        ([1, 0], 1, (0, [])),
        ([76, 76, 1, 76, 75, 124, 3], 2, (3, [])),
    ],
)
@pytest.mark.parametrize("shell", SHELLS)
def test_dstacks_loop_keeps_the_contract(tmp_path, codes, retries, end, shell):
    assert loop_with(shell, tmp_path, codes, retries) == end


@pytest.mark.parametrize("shell", SHELLS)
def test_dstacks_loop_passes_the_stop_signal_on_and_ends(tmp_path, shell):
    accel = tmp_path / "accel"
    accel.write_text("#!/bin/sh\ntrap 'sleep 0.3; exit 75' TERM\ntouch begun\nwhile :; do sleep 0.05; done\n")
    accel.chmod(0o755)
    text = yaml.safe_load(made("dstack", *TWO))["commands"][-1]
    running = subprocess.Popen([shell, "-c", text], cwd=tmp_path, env={"PATH": f"{tmp_path}:/bin:/usr/bin"})
    until = time.monotonic() + 20
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(20) == 75


@pytest.mark.parametrize(
    ("codes", "retries", "decided"),
    [
        ((0, 0), 0, ("done", False, 0)),
        ((75, 75), 0, ("again", False, 75)),
        ((75, 76), 0, ("again", False, 75)),
        ((1, 76), 0, ("failed", True, 1)),
        ((76, 3), 1, ("again", True, 3)),
        ((75, 3), 0, ("failed", True, 3)),
        ((124, 124), 0, ("failed", True, 124)),
        ((0, None), 0, ("again", False, 1)),
        ((76, None), 0, ("again", False, 1)),
        ((76, 76), 0, ("failed", True, 76)),
        ((0, 1), 0, ("failed", True, 1)),
    ],
)
def test_the_contract_on_exit_codes(codes, retries, decided):
    found = decide(codes, retries)
    assert (found.action, found.counts, found.code) == decided


def tool(folder, name, text):
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n{text}\n')
    path.chmod(0o755)
    return {"PATH": f"{folder}:/bin:/usr/bin"}


def test_jobs_of_skypilot(tmp_path):
    listed = [
        {"job_id": 2, "job_name": "b\x1b[2J", "status": "FAILED_SETUP", "failure_reason": "no disk"},
        {"job_id": 1, "job_name": "a", "status": "RECOVERING"},
    ]
    environ = tool(tmp_path, "sky", f"cat <<'END'\n{json.dumps(listed)}\nEND")
    sky, about = SUBMISSIONS.get("skypilot"), job().config.submission
    found = sky.jobs(about, environ)
    assert [(one.id, one.name, one.state, one.why) for one in found] == [
        ("1", "a", "preempted", ""),
        ("2", "b\x1b[2J", "failed", "no disk"),
    ]
    assert sky.cancel("1", about, environ) == "cancelled job 1"
    assert "".join(sky.logs("1", about, environ))
    assert (tmp_path / "asked").read_text().splitlines() == [
        "jobs queue --all --output json", "jobs cancel --yes 1", "jobs logs --no-follow 1"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"'1; rm x' is not a job"):
        sky.cancel("1; rm x", about, environ)


def test_jobs_of_dstack(tmp_path):
    run = {
        "status": "pending",
        "status_message": "retrying",
        "run_spec": {"run_name": "train-a", "configuration": {"type": "task", "nodes": 2}},
    }
    other = {
        "status": "running",
        "run_spec": {"run_name": "ide", "configuration": {"type": "dev-environment"}},
    }
    environ = tool(
        tmp_path, "dstack", f"cat <<'END'\n{json.dumps({'project': 'main', 'runs': [other, run]})}\nEND"
    )
    dstack, about = SUBMISSIONS.get("dstack"), job().config.submission
    assert [(one.id, one.state, one.machines, one.why) for one in dstack.jobs(about, environ)] == [
        ("train-a", "preempted", 2, "retrying")
    ]


@pytest.mark.parametrize("name", ["skypilot", "dstack"])
@pytest.mark.parametrize("text", ["[1, 2", "[1]", "null", "{}", "echo", '[[[["'])
def test_answers_that_are_cut_or_hostile_are_refused(tmp_path, name, text):
    environ = tool(tmp_path, {"skypilot": "sky"}.get(name, name), f"cat <<'END'\n{text}\nEND")
    with pytest.raises(LaunchError):
        SUBMISSIONS.get(name).jobs(job().config.submission, environ)


def test_a_deep_answer_is_refused():
    with pytest.raises(LaunchError, match="something else than JSON"):
        parsed("[" * 100_000, "sky")
    assert printable("a\x1b]0;title\x07\nb") == "a\\x1b]0;title\\x07\nb"


@pytest.mark.parametrize("name", ["skypilot", "dstack"])
def test_a_missing_tool_and_a_refusal_are_told(tmp_path, name):
    submission = SUBMISSIONS.get(name)
    with pytest.raises(LaunchError, match=f"was not found on PATH; install .*pip install {name}.*--dry_run"):
        submission.submit(job(*TWO), {"PATH": str(tmp_path)})
    environ = tool(tmp_path, {"skypilot": "sky"}.get(name, name), "echo no quota >&2; exit 3")
    with pytest.raises(LaunchError, match="failed with exit code 3: no quota"):
        submission.submit(job(*TWO), environ)


def test_a_secret_of_this_shell_is_never_an_argument(tmp_path):
    environ = tool(tmp_path, "sky", "true") | {"HF_TOKEN": "hf_secret"}
    told = SUBMISSIONS.get("skypilot").submit(job(*TWO, "--submit_secrets", "HF_TOKEN"), environ)
    assert told.startswith("submitted train-ab12cd")
    asked = (tmp_path / "asked").read_text()
    assert "--secret HF_TOKEN" in asked
    assert "hf_secret" not in asked
    with pytest.raises(ConfigError, match="no variable has that name"):
        SUBMISSIONS.get("skypilot").submit(job(*TWO, "--submit_secrets", "OTHER"), environ)


def test_a_line_that_is_being_written_is_shown_when_it_is_whole(monkeypatch, tmp_path):
    ray, texts = importlib.import_module("accel_state.launching.submission.ray"), ["one\ntw", "one\ntwo\nend"]
    states = iter(["RUNNING", "SUCCEEDED"])
    client = SimpleNamespace(
        get_job_status=lambda job: next(states), get_job_logs=lambda job: texts.pop(0), list_jobs=None
    )
    monkeypatch.setattr(ray, "_client", lambda about, environ: client)
    monkeypatch.setattr(ray, "_LOOK", 0)
    about = job().config.submission
    assert list(SUBMISSIONS.get("ray").logs("train", about, {}, follow=True)) == ["one", "two", "end"]

    def refuse():
        raise RuntimeError("Request failed with status code 500")

    client.list_jobs = refuse
    with pytest.raises(LaunchError, match=r"job server of Ray has refused: .* 500"):
        SUBMISSIONS.get("ray").jobs(about, {})


def test_a_line_of_slurms_output_is_shown_when_it_is_whole(monkeypatch, tmp_path):
    output = tmp_path / "out"
    output.write_text("one\ntw")
    environ = tool(tmp_path, "scontrol", f'echo "JobState=$(cat {tmp_path}/state) StdOut={output}"')
    (tmp_path / "state").write_text("RUNNING")
    slurm = importlib.import_module("accel_state.launching.submission.slurm")

    def sleep(seconds):
        output.write_text("one\ntwo\nend")
        (tmp_path / "state").write_text("COMPLETED")

    monkeypatch.setattr(slurm.time, "sleep", sleep)
    lines = list(SUBMISSIONS.get("slurm").logs("1", job().config.submission, environ, follow=True))
    assert lines == ["one\n", "two\n", "end"]


@pytest.mark.parametrize(
    "run", [1, {}, {"run_spec": 3}, {"run_spec": {"run_name": "a", "configuration": [1]}}]
)
def test_a_run_of_dstack_that_is_none_is_refused(tmp_path, run):
    environ = tool(tmp_path, "dstack", f"cat <<'END'\n{json.dumps({'runs': [run]})}\nEND")
    with pytest.raises(LaunchError, match="which is not a run"):
        SUBMISSIONS.get("dstack").jobs(job().config.submission, environ)


@pytest.mark.parametrize("kind", [ConnectionError, OSError, RuntimeError])
def test_a_job_server_that_does_not_answer_is_told_without_its_password(monkeypatch, kind):
    class Client:
        def __init__(self, address):
            raise kind(f"500 at {address}\x1b[2J")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.job_submission", SimpleNamespace(JobSubmissionClient=Client))
    with pytest.raises(LaunchError) as raised:
        SUBMISSIONS.get("ray").jobs(job("--submit_address", "http://me:pass@host:1").config.submission, {})
    assert str(raised.value).startswith(
        r"no job server of Ray answers at http://host:1 (500 at http://host:1\x1b[2J)"
    )
    assert raised.value.__suppress_context__
