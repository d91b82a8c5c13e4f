"""``accel migrate``: the diff first, then the files."""

import os
import subprocess

import pytest

from accel_cli.app import main

OLD = "from accelerate import Accelerator\n\na = Accelerator()\n"
NEW = "from accel_train import Accelerator\n\na = Accelerator()\n"
UNKNOWN = "import accelerate\naccelerate.utils.NoSuchName\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.py").write_text(OLD)
    (tmp_path / "plain.py").write_text("x = 1\n")
    return tmp_path


def test_the_diff_comes_first_and_nothing_is_written(folder, capsys):
    assert main(["migrate", "."]) == 0
    captured = capsys.readouterr()
    assert "-from accelerate import Accelerator\n+from accel_train import Accelerator\n" in captured.out
    assert "2 files read, 1 would change; --write writes them, 0 refused" in captured.err
    assert (folder / "old.py").read_text() == OLD
    (folder / "x.diff").write_text(captured.out)
    subprocess.run(["git", "apply", "x.diff"], check=True, cwd=folder)
    assert (folder / "old.py").read_text() == NEW


def test_write_writes_and_keeps_mode_and_links(folder, capsys):
    os.chmod(folder / "old.py", 0o755)
    (folder / "link.py").symlink_to("old.py")
    assert main(["migrate", "--write", "link.py"]) == 0
    assert (folder / "old.py").read_text() == NEW
    assert (folder / "link.py").is_symlink()
    assert (folder / "old.py").stat().st_mode & 0o777 == 0o755
    assert sorted(os.listdir(folder)) == ["link.py", "old.py", "plain.py"], "no temporary file is left"
    assert main(["migrate", "--write", "."]) == 0
    assert (folder / "old.py").read_text() == NEW


def test_a_refused_file_is_not_written_and_the_others_are(folder, capsys):
    (folder / "unknown.py").write_text(UNKNOWN)
    assert main(["migrate", "--write", "."]) == 1
    assert (
        "unknown.py:2: not understood: accelerate.utils.NoSuchName has no counterpart"
        in capsys.readouterr().err
    )
    assert (folder / "unknown.py").read_text() == UNKNOWN
    assert (folder / "old.py").read_text() == NEW


@pytest.mark.parametrize("words", [["gone.py"], []])
def test_wrong_command_lines(words, folder, capsys):
    assert main(["migrate", *words]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_shell_script_stays_with_the_source_that_is_refused(tmp_path, capsys):
    refused = "import accelerate\nx = accelerate.does_not.exist\n"
    (tmp_path / "train.py").write_text(refused)
    (tmp_path / "fine.py").write_text("from accelerate import Accelerator\naccelerator = Accelerator()\n")
    starts = "set -e\naccelerate launch --num_processes 2 \\\n    train.py --lr 1\n"
    (tmp_path / "run.sh").write_text(starts)
    (tmp_path / "module.sh").write_text("accelerate launch -m train\n")
    (tmp_path / "other.sh").write_text("accelerate launch fine.py\n")
    assert main(["migrate", str(tmp_path), "--write"]) == 1
    assert (tmp_path / "train.py").read_text() == refused
    assert (tmp_path / "run.sh").read_text() == starts
    assert (tmp_path / "module.sh").read_text() == "accelerate launch -m train\n"
    assert (tmp_path / "other.sh").read_text() == "accel launch fine.py\n"
    assert (
        "run.sh:2: note: accelerate stays: it starts train.py, which is not changed"
        in capsys.readouterr().err
    )
