"""gen_stubs writes from a table what type checkers read, and sees where the two differ."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gen_stubs

ROOT = Path(__file__).parents[2]
TOP = """
from accel_x.__about__ import __version__ as __version__
from accel_state._lazy import attach
import json

__getattr__, __dir__, __all__ = attach(__name__, {"accel_x.b": ("z", "a"), "accel_below": ["C"]})
"""
STUB = """\
# Generated from __init__.py by tools/gen_stubs.py; do not edit.
from accel_below import C as C
from accel_x.__about__ import __version__ as __version__
from accel_x.b import a as a
from accel_x.b import z as z

__all__: list[str]
"""


@pytest.fixture
def top(tmp_path):
    folder = tmp_path / "packages" / "accel-x" / "src" / "accel_x"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(TOP)
    (folder / "part").mkdir()
    (folder / "part" / "__init__.py").write_text("")
    return folder / "__init__.py"


def test_a_stub_has_the_names_of_the_table_and_what_the_top_shows(top):
    assert gen_stubs.render(top) == STUB


def test_check_writes_nothing_and_a_plain_run_writes(top, tmp_path, capsys):
    stub = top.with_suffix(".pyi")
    assert gen_stubs.main(["--check", "--root", str(tmp_path)]) == 1
    assert "packages/accel-x/src/accel_x/__init__.pyi is out of date; run" in capsys.readouterr().out
    assert not stub.exists()
    assert gen_stubs.main(["--root", str(tmp_path)]) == 0
    assert stub.read_text() == STUB
    assert not (top.parent / "part" / "__init__.pyi").exists()
    assert gen_stubs.main(["--check", "--root", str(tmp_path)]) == 0
    stub.write_text(STUB.replace("a as a", "d as d"))
    assert gen_stubs.main(["--check", "--root", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('attach(__name__, {"h": ("a", "b"), "g": ("a",)})', "lists a twice, from h and from g"),
        ('attach(__name__, {"h": ("a", "a")})', "lists a twice, from h and from h"),
        ("attach(__name__)", "once, found 1 such calls"),
        ("print()", "once, found 0 such calls"),
        ("attach(__name__, {}); attach(__name__, {})", "once, found 2 such calls"),
    ],
)
def test_a_table_that_cannot_be_read(top, table, message):
    top.write_text(table)
    with pytest.raises(ValueError, match=message):
        gen_stubs.read_table(top)


def test_the_stubs_of_the_packages_are_up_to_date():
    command = [sys.executable, "tools/gen_stubs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
