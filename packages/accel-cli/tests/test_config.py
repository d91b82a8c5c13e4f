"""``accel config``: files written with and without questions."""

import io

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from accel_cli.app import main
from accel_cli.prompts import ask_launch_config, questionary_asker
from accel_state.config.files import load
from accel_state.config.launch import LaunchConfig
from accel_state.config.schema import schema_of
from accel_state.errors import ConfigError


@pytest.fixture
def home(tmp_path, monkeypatch):
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


def answering(answers, asked=None):
    def ask(bound, default):
        if asked is not None:
            asked.append(bound.path)
        return answers.get(bound.path, default)

    return ask


def test_plain_enter_describes_the_machine():
    config = ask_launch_config(answering({}), accelerators=4)
    assert (config.num_processes, config.distributed_type, config.use_cpu) == (4, "MULTI_GPU", False)
    config = ask_launch_config(answering({}), accelerators=0)
    assert (config.num_processes, config.distributed_type, config.use_cpu) == (1, "NO", True)


def test_several_machines_are_asked_for_their_address():
    asked = []
    answers = {
        "num_machines": 2,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29501,
        "mixed_precision": "bf16",
    }
    config = ask_launch_config(answering(answers, asked), accelerators=0)
    assert (config.num_processes, config.distributed_type) == (2, "MULTI_CPU")
    assert (config.main_process_ip, config.main_process_port) == ("10.0.0.1", 29501)
    assert "machine_rank" in asked
    asked.clear()
    ask_launch_config(answering({}, asked), accelerators=0)
    assert "machine_rank" not in asked


def test_answers_fit_those_before():
    seen = {}

    def ask(bound, default):
        seen[bound.path] = bound
        return {"num_machines": 2, "num_processes": 3}.get(bound.path, default or "1")

    assert ask_launch_config(ask, accelerators=0).num_processes == 6, "three on each of two machines"
    assert "each machine" in seen["num_processes"].about.prompt
    for path, answer, limits in (("machine_rank", "2", "0 to 1"), ("main_process_port", "0", "1 to 65535")):
        with pytest.raises(ConfigError, match=f"the answer is '{answer}'; .*from {limits}"):
            seen[path].parse(answer, "the answer")


@pytest.mark.parametrize(
    ("typed", "default", "expected"),
    [("2\r", 1, 2), ("\r", 1, 1), (" \r", 4, 4), ("\x03", 1, None), ("0\x083\r", 1, 3), ("\r7\r", None, 7)],
)
def test_what_is_typed_replaces_the_default(typed, default, expected):
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        keyboard.send_text(typed)
        assert questionary_asker()(schema_of(LaunchConfig).by_path["num_machines"], default) == expected


def test_giving_up_writes_nothing():
    assert ask_launch_config(lambda bound, default: None, accelerators=0) is None


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
