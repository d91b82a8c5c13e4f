"""What a script on its own prints when an error ends it."""

import os
import subprocess
import sys

import pytest

BEGINNING = "import torch\nfrom accel_train import Accelerator\n"
OWN = "accelerator = Accelerator(cpu=True)\naccelerator.load_state('nowhere')\n"
OF_A_NAME = "Accelerator(mixed_precison='bf16')\n"
OF_TORCH = "Accelerator(cpu=True).backward(torch.ones(2, requires_grad=True))\n"
OF_THE_SCRIPT = "Accelerator(cpu=True)\nint('x')\n"
CTRL_C = (
    "import signal\naccelerator = Accelerator(cpu=True)\n"
    "def interrupt(module, args): signal.raise_signal(signal.SIGINT)\n"
    "model = torch.nn.Linear(2, 2)\nmodel.register_forward_pre_hook(interrupt)\nmodel(torch.ones(2))\n"
)


@pytest.fixture
def ended(tmp_path):
    def run(script, *flags, **variables):
        (tmp_path / "train.py").write_text(BEGINNING + script)
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
        done = subprocess.run(
            [sys.executable, *flags, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True
        )
        assert done.returncode in (1, -2)
        return done.stderr.splitlines()

    return run


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (OWN, "accel_ckpt.errors.CheckpointNotFoundError: there is no checkpoint folder "),
        (OF_A_NAME, "TypeError: Accelerator() got an unexpected argument 'mixed_precison'. Did you mean "),
        (CTRL_C, "KeyboardInterrupt"),
    ],
)
def test_only_the_lines_of_the_script_are_shown(ended, script, error):
    hint, header, *frames, last = ended(script)
    assert hint == "accel: frames of libraries are folded; python -X dev shows all of them"
    assert header == "Traceback (most recent call last):"
    shown = [line for line in frames if line.startswith("  File ")]
    assert shown
    assert all("train.py" in line for line in shown)
    assert last.startswith(error)


@pytest.mark.parametrize(
    ("script", "flags", "variables"),
    [
        (OWN, ["-X", "dev"], {}),
        (OWN, [], {"ACCEL_RANK_PREFIXED": ""}),  # its launcher folds them, and its log file has all
        (OF_TORCH, [], {}),
        ("import sys\nsys.excepthook = lambda *error: sys.__excepthook__(*error)\n" + OWN, [], {}),
    ],
)
def test_elsewhere_all_frames_are_shown(ended, script, flags, variables):
    lines = ended(script, *flags, **variables)
    assert sum(line.startswith("  File ") for line in lines) > 3
    assert not [line for line in lines if "folded" in line]


def test_an_error_of_the_script_is_shown_as_python_does(ended):
    lines = ended(OF_THE_SCRIPT)
    assert [line.strip() for line in lines if "^" not in line] == [
        "Traceback (most recent call last):",
        lines[1].strip(),
        "int('x')",
        "ValueError: invalid literal for int() with base 10: 'x'",
    ]
