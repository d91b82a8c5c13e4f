"""``accel rehearse``: what it refuses, and the world of a job."""

import subprocess
import sys

import pytest

from accel_cli.app import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--use_megatron_lm"], "Megatron-LM cannot be rehearsed: the rank runs on the CPU"),
        (["--no_python"], "--no_python cannot be rehearsed"),
    ],
)
def test_what_runs_on_no_cpu_is_refused(capsys, flags, message):
    assert main(["rehearse", *flags, "--num_processes", "4", "train.py"]) == 2
    assert message in capsys.readouterr().err


def test_the_accelerators_of_a_job_are_its_world(tmp_path):
    (tmp_path / "job.yaml").write_text(
        "num_machines: 2\nsubmit_config:\n  engine: ray\n  gpus_per_machine: H100:8\n"
    )
    (tmp_path / "train.py").write_text("from accel_state import PartialState\nPartialState()\n")
    words = [sys.executable, "-m", "accel_cli", "rehearse", "--config_file", "job.yaml", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank  0 of 16, on machine 0 of 2" in done.stdout
