"""Flags of the launcher after the script: found, asked about on a terminal, told elsewhere."""

from __future__ import annotations

import sys

import pexpect
import pytest

from accel_cli.misplaced_flags import find_misplaced, moved, notes_on
from accel_state.config.flags import parse_flags

PRINTS = "import os, sys\nprint(sys.argv[1:], os.environ.get('WORLD_SIZE'))\n"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PRINTS)
    return str(path)


def found(*words):
    return find_misplaced(words, parse_flags(words))


def test_all_of_them_are_found_with_their_values(script):
    words = [
        script,
        "--lr",
        "1",
        "--num-processes",
        "2",
        "--use_fsdp",
        "data",
        "--mixed_precision=bf16",
        "--x",
    ]
    misplaced = found("--cpu", *words)
    assert [each.words for each in misplaced] == [
        ("--num-processes", "2"),
        ("--use_fsdp",),
        ("--mixed_precision=bf16",),
    ]
    assert moved(["--cpu", *words], parse_flags(["--cpu", *words]), misplaced) == [
        "--cpu", "--num-processes", "2", "--use_fsdp", "--mixed_precision=bf16", script, "--lr", "1", "data", "--x",
    ]  # fmt: skip
    (note,) = notes_on(misplaced, script)
    assert note.startswith(
        f"--num-processes, --use_fsdp, --mixed_precision come after {script}, so they go to it"[:60]
    )
    assert f"accel launch -- {script} ..." in note


def test_what_belongs_to_the_script_is_left_alone(script, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("parser.add_argument('--num_processes')\n")
    assert not found(str(own), "--num-processes", "2")
    assert not found("--", script, "--num_processes", "2")
    assert not found(script, "--", "--num_processes", "2")
    assert not found("--no_python", script, "--num_processes", "2")
    assert not found(script, "--mixed_precision", "bf16"), "scripts often have this one"
    assert not notes_on([], script)


@pytest.mark.parametrize(
    ("answer", "printed"),
    [
        ("y", r"\['--lr', '1'\] 2"),
        ("n", r"\['--num_processes', '2', '--lr', '1'\] None"),
        ("", r"\['--num_processes', '2', '--lr', '1'\] None"),
    ],
)
def test_on_a_terminal_the_user_is_asked(script, answer, printed):
    words = ["-m", "accel_cli", "launch", "--cpu", script, "--num_processes", "2", "--lr", "1"]
    child = pexpect.spawn(sys.executable, words, encoding="utf-8", timeout=60, dimensions=(24, 200))
    child.expect(
        r"(?s)--num_processes comes\s+after\s.*\bGive\s+it\s+to\s+accel\s+launch\s+instead\? \[y/N\] "
    )
    child.sendline(answer)
    child.expect(printed)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
