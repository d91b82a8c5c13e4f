"""The world that a forked rank is told of, and the exit code and message of what it calls."""

import subprocess
import sys
from string import Template

import pytest

from accel_state.launching.ranks.forks import ForkedRanks, exit_code_of


def ranks(**more):
    return ForkedRanks(print, (), **({"local_size": 2, "world_size": 6} | more))


def test_variables_of_a_rank():
    made = ranks(first_rank=4, node_rank=2, master_addr="node0", max_restarts=3, variables={"A": "1"})
    assert made.world_variables(1, attempt=2, port=29512) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29512",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "ACCEL_RANK_PREFIXED": "1",
        "A": "1",
    }


def test_variables_of_the_launch_go_before_those_of_the_world():
    assert ranks(variables={"MASTER_ADDR": "other"}).world_variables(0, 0, 1)["MASTER_ADDR"] == "other"


@pytest.mark.parametrize(
    ("prefix", "told"), [("", ""), ("out: ", ""), ("${rank}|", "1"), ("[${local_rank}] ", "1")]
)
def test_ranks_know_whether_their_lines_name_them(prefix, told):
    assert ranks(prefix=Template(prefix)).world_variables(0, 0, 1)["ACCEL_RANK_PREFIXED"] == told


@pytest.mark.parametrize(
    ("end", "code", "printed"),
    [
        (None, 0, ""),
        (0, 0, ""),
        (7, 7, ""),
        (True, 1, ""),
        ("no data", 1, "no data\n"),
        ((1, 2), 1, "(1, 2)\n"),
    ],
)
def test_exit_codes_are_those_of_a_script(capsys, end, code, printed):
    def leave():
        raise SystemExit(end)

    assert exit_code_of(leave, ()) == code
    assert capsys.readouterr().err == printed


def test_a_function_that_returns_has_succeeded():
    called = []
    assert exit_code_of(called.append, (3,)) == 0
    assert called == [3]


def test_an_error_is_a_traceback_that_begins_at_the_function(capsys):
    def fail(key):
        return {}[key]

    assert exit_code_of(fail, ("lost",)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith("in fail")
    assert lines[-1] == "KeyError: 'lost'"


def test_an_interrupt_ends_the_process_by_its_signal():
    code = (
        "from accel_state.launching.ranks.forks import exit_code_of\n"
        "def f():\n    raise KeyboardInterrupt\n"
        "exit_code_of(f, ())\nprint('never')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -2
    assert done.stdout == ""
    assert done.stderr.endswith("KeyboardInterrupt\n")
