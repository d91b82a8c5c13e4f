"""Functions of scripts as the target of a launch."""

import subprocess
import sys

import pytest

from accel_state.errors import LaunchError
from accel_state.launching.function import calling
from accel_state.launching.target import Target

SCRIPT = """
import sys
from helper import NAME

def main():
    print("main", NAME, sys.argv[0].rpartition("/")[2], sys.argv[1:])

def per_rank(index, flag=1):
    print("rank", index)

async_like = lambda *rest: print("rest", rest)

if __name__ == "__main__":
    print("script")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text("NAME = 'helper'\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def run(target, **more):
    return subprocess.run(target.argv(sys.executable), capture_output=True, text=True, timeout=60, **more)


def test_a_function_runs_with_the_arguments_of_the_script(script):
    done = run(calling("main", Target(str(script), ("--lr", "0.1"))))
    assert done.stdout == "main helper train.py ['--lr', '0.1']\n"


def test_a_function_of_a_module(script):
    done = run(calling("main", Target("train", ("a",), "module")), cwd=script.parent)
    assert done.stdout == "main helper train.py ['a']\n"


def test_a_function_with_a_parameter_gets_the_local_rank(script, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert run(calling("per_rank", Target(str(script)))).stdout == "rank 3\n"
    assert run(calling("async_like", Target(str(script)))).stdout == "rest ()\n"


def test_a_function_that_is_not_there(script):
    done = run(calling("train", Target(str(script))))
    assert done.returncode == 1
    assert "train.py has no function train; its functions are main, per_rank" in done.stderr


def test_a_program_has_no_functions():
    with pytest.raises(LaunchError, match="--no_python"):
        calling("main", Target("ls", (), "program"))
