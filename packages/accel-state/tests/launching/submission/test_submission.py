"""Batch scripts, and what ``sbatch`` answers."""

from __future__ import annotations

import subprocess

import pytest

from accel_state.config.flags import parse_flags, without_flags
from accel_state.config.merge import resolve
from accel_state.errors import ConfigError, LaunchError
from accel_state.launching.submission import SUBMISSIONS, Job
from testkit.plug_ins import install

SLURM = SUBMISSIONS.get("slurm")


def job(*flags):
    config = resolve(environ={}, flags=parse_flags(flags), use_default_file=False).local()
    return Job(config, ("accel", "launch", "--cpu", "train.py", "a b"), "folder/train.py")


def options(*flags):
    return {
        line.removeprefix("#SBATCH ") for line in SLURM.script(job(*flags)).splitlines() if "#SBATCH" in line
    }


def test_the_script_is_a_shell_script_that_starts_one_launcher_on_each_machine():
    text = SLURM.script(job("--cpu", "--num_machines", "2", "--submit_setup", "module load cuda"))
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --job-name=train"} <= set(lines)
    assert "srun accel launch --cpu train.py 'a b'" in lines
    assert lines.index("module load cuda") < lines.index("srun accel launch --cpu train.py 'a b'")
    assert "gpus" not in text
    assert lines[-1] == 'exit "$code"'


def test_resources_reach_the_scheduler():
    found = options(
        *(
            "--num_machines",
            "2",
            "--num_processes",
            "8",
            "--submit_partition",
            "gpu",
            "--submit_account",
            "me",
        ),
        *("--submit_time", "4:00:00", "--submit_cpus_per_task", "16", "--submit_job_name", "one run"),
        *("--submit_args=--constraint=a100", "--submit_args=--exclusive", "--log_dir", "logs"),
    )
    assert {
        "--gpus-per-node=4",
        "--partition=gpu",
        "--account=me",
        "--time=4:00:00",
        "--cpus-per-task=16",
    } <= found
    assert {"--job-name='one run'", "--constraint=a100", "--exclusive"} <= found
    assert "--output='logs/one run-%j.log'" in found
    assert "--mem=64G" in options("--cpu", "--submit_memory", "64Gi")  # Slurm knows no Gi
    assert "--gpus-per-node=h100:8" in options("--submit_gpus_per_machine", "h100:8")


def test_elastic_sizes_and_spares_ask_for_more_machines():
    assert "--nodes=1-4" in options("--cpu", "--nnodes", "1:4")
    assert "--nodes=3" in options("--cpu", "--num_machines", "2", "--spares", "1")


def test_only_a_job_that_resumes_is_signalled_and_requeued():
    text = SLURM.script(job("--cpu"))
    assert "requeue" not in text
    assert "signal" not in text
    found = options("--cpu", "--resume", "--submit_signal_time", "60")
    assert {"--requeue", "--open-mode=append", "--signal=USR1@60"} <= found
    assert 'if [ "$code" = 75 ]; then scontrol requeue' in SLURM.script(job("--cpu", "--resume"))


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ((), "--num_processes.*--submit_gpus_per_machine.*--cpu"),
        (("--num_processes", "3", "--num_machines", "2"), "--num_processes 3.*--num_machines 2"),
        (("--cpu", "--submit_time", "soon"), "--submit_time soon.*4:00:00"),
        (
            ("--cpu", "--resume", "--submit_time", "5"),
            "--submit_time 5 is not longer than --submit_signal_time 300",
        ),
        (("--cpu", "--resume", "--submit_time", "0:4:59"), "0:4:59 is not longer"),
        (("--cpu", "--submit_args", "constraint"), "'constraint'.*dashes"),
    ],
)
def test_what_cannot_be_submitted_is_named(flags, match):
    with pytest.raises(ConfigError, match=match):
        SLURM.script(job(*flags))


@pytest.mark.parametrize("time", ["6", "5:01", "0:5:1", "1-0", "0-1:0", "UNLIMITED"])
def test_a_limit_longer_than_the_warning_is_accepted(time):
    assert f"--time={time}" in options("--cpu", "--resume", "--submit_time", time)


def sbatch(folder, text):
    tool = folder / "sbatch"
    tool.write_text(f"#!/bin/sh\ncat > {folder}/received\n{text}\n")
    tool.chmod(0o755)
    return {"PATH": f"{folder}:/bin:/usr/bin"}


def test_the_answer_of_sbatch_is_told(tmp_path):
    environ = sbatch(tmp_path, "echo '42;cluster'")
    told = SLURM.submit(job("--cpu", "--log_dir", str(tmp_path / "new")), environ)
    assert told == f"submitted job 42; its output goes to {tmp_path}/new/train-42.log"
    assert (tmp_path / "new").is_dir()
    assert (tmp_path / "received").read_text().startswith("#!/bin/bash\n#SBATCH")


def test_a_refusal_and_a_missing_tool_are_errors(tmp_path):
    with pytest.raises(LaunchError, match=r"exit code 1.*invalid partition"):
        SLURM.submit(job("--cpu"), sbatch(tmp_path, "echo invalid partition >&2; exit 1"))
    with pytest.raises(LaunchError, match=r"sbatch.*login node"):
        SLURM.submit(job("--cpu"), {"PATH": "/nowhere"})


def test_the_job_runs_the_command_without_the_flags_of_the_submission():
    words = ["--submit", "slurm", "--cpu", "--submit-time=10", "--num-processes", "2", "--submit_args", "--x",
             "--no-resume", "--dry_run", "train.py", "--submit", "kept"]  # fmt: skip
    left = without_flags(
        words, None, lambda name: name in ("submit", "dry_run") or name.startswith("submit_")
    )
    assert left == ["--cpu", "--num-processes", "2", "--no-resume", "train.py", "--submit", "kept"]


@pytest.mark.parametrize(
    "flag", ["--submit_partition", "--submit_account", "--submit_job_name", "--submit_output", "--log_dir",
             "--submit_gpus_per_machine", "--submit_args"]
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", "\r", "\x00", "\x1b", "\u2028"])
def test_a_value_with_a_line_break_is_no_line_of_the_script(flag, end):
    """What follows it would be run by the shell."""
    with pytest.raises(ConfigError, match=r"a value in a batch script is one line of printable characters"):
        SLURM.script(job("--cpu", f"{flag}=--x{end}touch stolen"))


def test_arguments_of_the_command_are_quoted():
    made = job("--cpu")
    made = Job(made.config, ("accel", "launch", "train.py", "--note", "a\n$(touch stolen)"), made.script)
    assert subprocess.run(["bash", "-n"], input=SLURM.script(made), text=True, check=False).returncode == 0
    assert "'a\n$(touch stolen)'" in SLURM.script(made)


def test_a_launcher_of_an_installed_package(monkeypatch, tmp_path):
    text = (
        "from accel_state.launching.submission import Submission\n\n\n"
        "class Site(Submission):\n    script = submit = None\n\n\nSITE = Site()\n"
    )
    install(
        monkeypatch,
        tmp_path,
        "outside_launcher",
        text,
        {"accel_state.launchers": {"site": "SITE", "slurm": "SITE"}},
    )
    assert type(SUBMISSIONS.get("site")).__name__ == "Site"
    assert SUBMISSIONS.get("slurm") is SLURM
    assert parse_flags(["--submit", "site"]).values["submit"] == "site"
    with pytest.raises(ConfigError, match=r"--submit is 'sites'; expected one of slurm, .*, site$"):
        parse_flags(["--submit", "sites"])
