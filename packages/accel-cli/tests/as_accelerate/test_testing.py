"""What tests of clients use of ``accelerate.test_utils``."""

from __future__ import annotations

import io
import re
import sys
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import accel_train
from accel_cli.as_accelerate.extras import backend, requirements, testing
from accel_train import Accelerator, PartialState
from testkit import worlds


def ran(mark):
    """Whether a test with a mark runs, or why it is skipped."""

    class Case(unittest.TestCase):
        @mark
        def test(self):
            pass

    result = unittest.TestResult()
    Case("test").run(result)
    assert not result.errors
    return result.skipped[0][1] if result.skipped else True


def test_every_mark_decides():
    folder = Path(requirements.__file__).parents[1] / "path" / "accelerate" / "test_utils"
    offered = re.findall(
        r"requirements import (\w+) as", (folder / "testing.pyi").read_text(encoding="utf-8")
    )
    assert len(offered) > 50
    for name in offered:
        mark = getattr(requirements, name)
        if name not in ("run_first", "require_torch_min_version"):
            found = ran(mark)
            assert found is True or found.startswith(("needs ", "the test asks")), name


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="what it asserts is of a machine with the CPU alone"
)
def test_a_machine_with_the_cpu_alone():
    name, count, memory = backend.get_backend()
    assert (name, count, memory()) == ("cpu", 1, 0)
    assert ran(requirements.require_cpu) is True
    assert ran(requirements.require_cuda) == "needs a CUDA GPU"
    assert ran(requirements.require_non_cpu) == "needs an accelerator"
    assert ran(requirements.require_multi_device) == "needs several accelerators"
    assert ran(requirements.require_single_device) == "needs exactly one accelerator"
    assert ran(requirements.require_non_xpu) is True


def test_packages_and_versions(monkeypatch):
    installed = accel_train.is_transformers_available()
    assert ran(requirements.require_transformers) == (installed or "needs transformers")
    assert ran(requirements.require_torch_min_version(version="2.0")) is True
    assert ran(requirements.require_torch_min_version(version="99.0")).startswith("needs torch >= 99.0")
    monkeypatch.delenv("RUN_SLOW", raising=False)
    assert ran(requirements.slow) == "needs RUN_SLOW=1"
    monkeypatch.setenv("RUN_SLOW", "yes")
    assert ran(requirements.slow) is True
    assert ran(requirements.skip) == "the test asks to be skipped"


@pytest.mark.wide
def test_commands(tmp_path):
    script = tmp_path / "who.py"
    script.write_text("import accelerate; print(accelerate.Accelerator().num_processes)")
    command = testing.get_launch_command(num_processes=2, cpu=True, debug=False, main_process_ip=None)
    assert command[1:] == ["-m", "accel_cli", "launch", "--as_accelerate", "--num_processes=2", "--cpu"]
    found = testing.execute_subprocess_async([*command, script], quiet=True, echo=False)
    assert found.returncode == 0
    assert [line.split()[-1] for line in found.stdout] == ["2", "2"]


def test_what_a_program_prints_is_passed_on_and_is_in_the_error(capsys):
    fails = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"]
    with pytest.raises(RuntimeError, match=r"(?s)returncode 3.*err"):
        testing.execute_subprocess_async(fails)
    printed = capsys.readouterr()
    assert (printed.out.splitlines()[-1], printed.err) == ("out", "err\n")
    with pytest.raises(RuntimeError, match=r"was killed after 0.2 s"):
        testing.execute_subprocess_async([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)
    with pytest.raises(testing.SubprocessCallException, match=r"(?s)exit code 3.*out"):
        testing.run_command(fails)
    assert testing.run_command([sys.executable, "-c", "print(5)"], return_stdout=True) == "5\n"
    assert testing.run_command([sys.executable, "-c", "print(5)"]) is None


def test_cases():
    class Case(testing.TempDirTestCase, testing.MockingTestCase):
        found: list = []

        def test_first(self):
            self.add_mocks(mock.patch("sys.stdout", io.StringIO()))
            print("hidden")
            self.found.append(sorted(path.name for path in self.tmpdir.iterdir()))
            (self.tmpdir / "file").write_text("")
            (self.tmpdir / "folder").mkdir()

        test_second = test_first

    before, result = sys.stdout, unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
    assert (result.testsRun, result.errors, sys.stdout) == (2, [], before)
    assert Case.found == [[], []]
    assert not Case.tmpdir.exists()


def test_a_case_forgets_the_state():
    class Case(testing.AccelerateTestCase):
        def test(self):
            Accelerator(cpu=True)
            assert PartialState._shared_state

    result = unittest.TestResult()
    Case("test").run(result)
    assert not result.errors
    assert not PartialState._shared_state


def test_expected_exceptions():
    with testing.assert_exception(ValueError, "part"):
        raise ValueError("a part of it")
    with testing.assert_exception(LookupError):
        raise KeyError("one that derives from it")
    missing = pytest.raises(AssertionError, match="expected ValueError, and nothing was raised")
    with missing, testing.assert_exception(ValueError):
        pass
    other = pytest.raises(AssertionError, match="expected ValueError, and got KeyError")
    with other, testing.assert_exception(ValueError):
        raise KeyError("x")
    text = pytest.raises(AssertionError, match="expected 'other' in 'text'")
    with text, testing.assert_exception(ValueError, "other"):
        raise ValueError("text")


def test_workers_of_xdist(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    assert testing.get_torch_dist_unique_port() == 29503
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert testing.get_torch_dist_unique_port() == 29500


def test_a_regression():
    data = testing.RegressionDataset(length=500, seed=1)
    assert len(data) == 500
    slope, offset = np.polyfit(data.x, data.y, 1)
    assert (slope, offset) == (pytest.approx(2, abs=0.02), pytest.approx(3, abs=0.02))
    assert data[3]["y"].dtype == np.float32
    model = testing.RegressionModel(a=2, b=1, double_output=True)
    printed = testing.capture_call_output(model, torch.tensor([1.0, 2.0]))
    assert printed == "Model dtype: torch.float32, torch.float32. Input dtype: torch.float32\n"
    first, second = model(torch.tensor([1.0, 2.0]))
    assert first.tolist() == second.tolist() == [3.0, 5.0]


def alike():
    Accelerator(cpu=True)
    rank = PartialState().process_index
    return testing.are_the_same_tensors(torch.ones(3)), testing.are_the_same_tensors(torch.full((3,), rank))


def test_tensors_of_ranks():
    assert worlds.run(alike, 2) == [(True, False)] * 2


def test_paths():
    assert testing.path_in_accelerate_package("test_utils", "scripts", "test_script.py").is_file()
