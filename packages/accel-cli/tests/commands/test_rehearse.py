"""``accel rehearse``: what it refuses."""

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
