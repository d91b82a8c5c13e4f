"""The conformance suite in a project of somebody else's; `hatch run wheels` runs one of its tests so, installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.fixture
def collected(tmp_path):
    """Let pytest collect a project with a test of its own; the exit code, the names of tests, and what was printed."""
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    (tmp_path / "test_conformance.py").write_text("from testkit.conformance_suite import *\n")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(*words):
        plugin = ["-p", "testkit.pytest_conformance", "--strict-markers"]
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *plugin, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
        tests = [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]
        return done.returncode, tests, done.stdout + done.stderr

    return run


def test_chosen_strategies_and_the_projects_own_tests(collected):
    code, tests, printed = collected("--conformance", "ddp", "--conformance", "tp")
    assert code == 0, printed
    assert {"test_own", "test_training[1-ddp-2]", "test_training[3-tp-4]", "test_mobility[ddp-2]"} < set(
        tests
    )
    assert all("ddp-" in test or "[tp-" in test or "-tp-" in test for test in tests if test != "test_own")


@pytest.mark.wide
@pytest.mark.parametrize("name", ["zero1", "ep"])
def test_an_installed_strategy_with_the_name_of_a_variant_is_tested_itself(name, tmp_path):
    (tmp_path / "outside.py").write_text(
        f"from accel_train.strategies.ddp import DDPStrategy\n\n\nclass Own(DDPStrategy):\n    name = '{name}'\n"
    )
    (tmp_path / "outside-1.dist-info").mkdir()
    points = f"[accel_train.strategies]\n{name} = outside:Own\n"
    (tmp_path / "outside-1.dist-info" / "entry_points.txt").write_text(points)
    (tmp_path / "test_selection.py").write_text(
        "from testkit import worlds\n"
        "from testkit.conformance import Case, make_accelerator\n"
        "from testkit.conformance_suite import CELLS, MEMBERS\n\n\n"
        "def selected(name):\n"
        "    return type(make_accelerator(Case(name)).strategy).__name__\n\n\n"
        "def test_selection():\n"
        f"    assert MEMBERS['{name}'].__name__ == 'Own'\n"
        f"    assert ('{name}', 2) in CELLS\n"
        f"    assert worlds.run(selected, 2, '{name}') == ['Own'] * 2\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_selection.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.wide
def test_a_name_that_nothing_has(collected):
    code, _, printed = collected("--conformance", "dpd")
    assert code == 4
    assert "--conformance dpd: no strategy of this name is registered here, only ddp, " in printed
    assert "accel_train.strategies" in printed
