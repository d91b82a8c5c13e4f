"""What surrounds the questions: the file as it is shown, the commands to start, what is refused at once."""

import pytest

from accel_cli.app import main
from accel_cli.wizard.interview import BACK
from accel_cli.wizard.outcome import next_steps
from accel_cli.wizard.session import ask_and_write
from accel_state.config.files import default_path, load
from accel_state.config.launch import LaunchConfig
from accel_state.errors import ConfigError


def answering(answers, seen=None):
    def ask(asked):
        if seen is not None:
            seen.append(asked.name)
        return answers.get(asked.name, asked.default)

    return ask


@pytest.mark.parametrize("name", ["c.yaml", "c.json", "new/folder/c.yaml"])
def test_the_file_is_what_was_shown(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "500")
    file = tmp_path / name
    answers = {"distributed_type": "MULTI_CPU", "num_processes": 2}
    assert ask_and_write(
        file, {"XDG_CONFIG_HOME": str(tmp_path), "ACCEL_DEVICE_COUNT": "0"}, answering(answers)
    )
    shown = capsys.readouterr().out
    assert file.read_text() in shown
    assert shown.index(file.read_text()) < shown.index(f"wrote {file}")
    assert f"  accel launch --config_file {file} train.py\n" in shown
    assert load(file).num_processes == 2


def test_no_writes_nothing_and_back_leads_to_the_questions(tmp_path):
    file, seen = tmp_path / "c.yaml", []
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "ACCEL_DEVICE_COUNT": "0"}
    assert not ask_and_write(file, environ, answering({"write": False}))
    replies = iter([BACK, True])

    def ask(asked):
        seen.append(asked.name)
        return next(replies) if asked.name == "write" else asked.default

    assert ask_and_write(file, environ, ask)
    assert seen[-3:] == ["write", "extras", "write"]


def test_files_that_do_not_exist_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    answers = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "deepspeed_file": True,
        "deepspeed.hf_ds_config": str(tmp_path / "zero.json"),
    }
    ask_and_write(tmp_path / "c.yaml", {"XDG_CONFIG_HOME": str(tmp_path)}, answering(answers))
    assert f"note: {tmp_path / 'zero.json'} does not exist on this machine" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["file/c.yaml", "folder"])
def test_a_path_that_cannot_be_written_is_refused_before_the_questions(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    seen = []
    with pytest.raises(ConfigError, match=r"cannot be written: .* is a (file|folder); name another"):
        ask_and_write(tmp_path / name, {"XDG_CONFIG_HOME": str(tmp_path)}, answering({}, seen))
    assert not seen


def test_the_commands_for_several_machines(tmp_path):
    default = default_path({"XDG_CONFIG_HOME": str(tmp_path)})
    two = LaunchConfig(num_machines=2, num_processes=4, machine_rank=0)
    assert next_steps(two, default, default) == [
        "To start a script, on this machine, 1 of 2:",
        "  accel launch train.py",
        "On the others, with a copy of the file:",
        "  accel launch --machine_rank 1 train.py",
    ]
    many = LaunchConfig(num_machines=16, num_processes=16, machine_rank=0)
    assert next_steps(many, tmp_path / "a b.yaml", default)[-1] == "  ... up to --machine_rank 15"
    assert f"--config_file '{tmp_path}/a b.yaml' " in next_steps(many, tmp_path / "a b.yaml", default)[1]


def test_accelerates_own_file_is_never_the_one_to_write(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["config", "--config_file", str(tmp_path / "accelerate/default_config.yaml")]) == 2
    assert "belongs to Accelerate" in capsys.readouterr().err
