"""``accel config``: files written with and without questions."""

import io
import subprocess
import sys

import pytest

from accel_cli.app import main
from accel_state.config.files import load


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path


def test_default_writes_our_own_file_once(home, capsys):
    file = home / "accel/default_config.yaml"
    assert main(["config", "default", "--mixed_precision", "bf16"]) == 0
    assert load(file).mixed_precision == "bf16"
    before = file.read_bytes()
    assert main(["config", "default"]) == 0
    assert "is not changed; remove it, or give another path with --config_file" in capsys.readouterr().out
    assert file.read_bytes() == before


def test_default_writes_where_it_is_told(home, tmp_path):
    file = tmp_path / "sub/own.json"
    assert main(["config", "default", "--config_file", str(file)]) == 0
    assert load(file).num_processes is not None


def test_a_wrong_precision_is_told_where_a_file_exists(home, capsys):
    assert main(["config", "default"]) == 0
    assert main(["config", "default", "--mixed_precision", "bf17"]) == 2
    assert "--mixed_precision is 'bf17'; expected one of" in capsys.readouterr().err


def test_update_brings_accelerates_file_over_and_leaves_it_alone(home, capsys):
    theirs = home / "accelerate/default_config.yaml"
    theirs.parent.mkdir()
    theirs.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nfp16: true\nnum_processes: 2\n"
    )
    before = theirs.read_bytes()
    assert main(["config", "update"]) == 0
    ours = load(home / "accel/default_config.yaml")
    assert (ours.num_processes, ours.mixed_precision) == (2, "fp16")
    assert theirs.read_bytes() == before


def test_update_rewrites_a_named_file(home, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("distributed_type: 'NO'\nnum_processes: 1\ndynamo_backend: EAGER\n")
    assert main(["config", "update", "--config_file", str(file)]) == 0
    assert "dynamo_config" in file.read_text()
    assert load(file).dynamo.backend == "EAGER"


@pytest.mark.parametrize("command", ["default", "update"])
def test_accelerates_file_is_never_written(home, command, capsys):
    theirs = home / "accelerate/default_config.yaml"
    theirs.parent.mkdir()
    theirs.write_text("num_processes: 1\n")
    assert main(["config", command, "--config_file", str(theirs)]) == 2
    assert "belongs to Accelerate" in capsys.readouterr().err
    assert theirs.read_text() == "num_processes: 1\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["config", "update"], "accel config default makes one"),
        (["config", "update", "--config_file", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["config", "default", "--mixed_precision", "fp17"], "expected one of no, fp16, bf16"),
        (["config", "defualt"], "default"),
        (["config", "--config_file", "x.yaml", "update"], "must come after the subcommand"),
    ],
)
def test_mistakes(home, words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("keyboard", [io.StringIO(), None])  # None: the descriptor is closed
def test_questions_need_a_terminal(home, capsys, monkeypatch, keyboard):
    monkeypatch.setattr("sys.stdin", keyboard)
    assert main(["config"]) == 2
    assert "accel config default" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(home, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["config", "default", "--config_file", str(tmp_path / "file/c.yaml")]) == 2
    assert "c.yaml cannot be written" in capsys.readouterr().err


def test_a_link_stays_a_link(home, tmp_path):
    real, link = tmp_path / "dotfiles.yaml", tmp_path / "c.yaml"
    real.write_text("num_processes: 1\ndynamo_backend: EAGER\n")
    link.symlink_to(real)
    assert main(["config", "update", "--config_file", str(link)]) == 0
    assert link.is_symlink()
    assert "dynamo_config" in real.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"dotfiles.yaml", "c.yaml"}


def test_default_loads_no_torch(tmp_path):
    code = "import sys; from accel_cli.app import main; rc = main(sys.argv[1:]); sys.exit(rc or 'torch' in sys.modules)"
    run = [sys.executable, "-c", code, "config", "default", "--config_file", str(tmp_path / "f.yaml")]
    assert subprocess.run(run, capture_output=True, text=True, timeout=60).returncode == 0
    assert (tmp_path / "f.yaml").exists()
