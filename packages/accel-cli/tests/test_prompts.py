"""The questions of ``accel config``."""

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from accel_cli.prompts import ask_launch_config, questionary_asker
from accel_state.config.launch import LaunchConfig
from accel_state.config.schema import schema_of
from accel_state.errors import ConfigError


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
