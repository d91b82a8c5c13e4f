"""A question after the answers so far: defaults, typed answers, explanations."""

import pytest

from accel_cli.machine import Machine
from accel_cli.wizard.answers import Answers, Situation
from accel_cli.wizard.table import QUESTIONS
from accel_state.errors import AccelError, ConfigError
from accel_state.launching.hardware import Accelerators

ROWS = {row.name: row for row in QUESTIONS}


def ask(name, given=None, existing=None, devices=0):
    kind = Accelerators("cuda", devices, devices, "CUDA_VISIBLE_DEVICES") if devices else Accelerators()
    machine = Machine(cores=16, accelerators=kind)
    return ROWS[name].ask(Answers(Situation(machine, existing or {}), given))


def test_text_and_limits_are_those_of_the_schema():
    rank = ask("machine_rank", {"num_machines": 2})
    assert "machine_rank" in rank.explanation
    assert rank.parse(" 1 ") == 1
    with pytest.raises(ConfigError, match="the answer is '2'; expected an integer from 0 to 1"):
        rank.parse("2")


@pytest.mark.parametrize(
    ("name", "typed", "value"),
    [
        ("deepspeed.gradient_clipping", "", None),
        ("deepspeed.gradient_clipping", "none", None),
        ("deepspeed.gradient_clipping", "auto", None),
        ("deepspeed.gradient_clipping", "1", 1.0),
        ("fsdp.min_num_params", "1e6", 1_000_000),
        ("fsdp.transformer_cls_names_to_wrap", " A, B ,", ("A", "B")),
        ("tpu.commands", "a b; c,d", ("a b", "c,d")),
        ("tpu.tpu_vm", "a, b", ("a", "b")),
        ("fp8.override_linear_precision", "true,false,true", (True, False, True)),
    ],
)
def test_typed_answers(name, typed, value):
    assert ask(name).parse(typed) == value


@pytest.mark.parametrize("typed", ["", "  "])
def test_what_is_needed_is_not_left_out(typed):
    with pytest.raises(ConfigError, match="needed"):
        ask("main_process_ip").parse(typed)


def test_none_removes_a_value_that_exists():
    clipping = ask("deepspeed.gradient_clipping", existing={"deepspeed.gradient_clipping": 1.0})
    assert (clipping.hint, clipping.parse(""), clipping.parse("none")) == ("1.0", 1.0, None)


@pytest.mark.parametrize(
    ("ids", "message"),
    [("0,4", "names accelerator 4, but this machine has 4"), ("1,1", "twice"), ("0,,1", "not a list of ids")],
)
def test_ids_are_checked_as_the_launcher_checks_them(ids, message):
    with pytest.raises(AccelError, match=message):
        ask("gpu_ids", {"devices": "accelerators"}, devices=4).parse(ids)


def test_a_deepspeed_file_is_looked_at(tmp_path):
    question = ask("deepspeed.hf_ds_config")
    (tmp_path / "bad.json").write_text("{'stage': 2}")
    (tmp_path / "good.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"bad.json cannot be read as JSON: Expecting property name"):
        question.parse(str(tmp_path / "bad.json"))
    for name in ("good.json", "later.json"):
        assert question.parse(str(tmp_path / name)) == str(tmp_path / name)


def test_variables_for_a_pod_have_values():
    with pytest.raises(ConfigError, match="the answer has 'B'; expected NAME=value"):
        ask("tpu.tpu_env").parse("A=1, B")


def test_processes_follow_the_devices():
    given = {"place": "here", "devices": "accelerators", "distributed_type": "MULTI_GPU", "gpu_ids": "0,3"}
    assert ask("num_processes", given, devices=4).default == 2
    with pytest.raises(ConfigError, match="from 2 to 2"):
        ask("num_processes", given, devices=4).parse("4")
    several = {"place": "several", "num_machines": 4, "devices": "cpu", "distributed_type": "MULTI_CPU"}
    existing = {"num_machines": 4, "num_processes": 12}
    assert ask("num_processes", several, existing).default == 3
    assert "each machine" in ask("num_processes", several, existing).message


def test_degrees_of_a_mesh_must_make_up_the_processes():
    given = {"num_processes": 8, "parallelism.tp_size": 2, "parallelism.cp_size": 1}
    with pytest.raises(ConfigError, match="does not divide the 4 ranks"):
        ask("parallelism.dp_replicate_size", given).parse("3")
    given["parallelism.dp_replicate_size"] = 2
    shard = ask("parallelism.dp_shard_size", given)
    assert (shard.default, shard.parse("")) == (2, 2)
    with pytest.raises(ConfigError, match="multiply to the 8 processes"):
        shard.parse("4")


def test_what_the_machine_lacks_is_said_in_the_choices():
    assert [choice.value for choice in ask("devices").choices] == ["cpu", "accelerators"]
    assert [choice.value for choice in ask("devices", devices=2).choices] == ["accelerators", "cpu"]
    labels = [choice.label for choice in ask("distributed_type", {"place": "here", "devices": "cpu"}).choices]
    assert any("DeepSpeed" in label and "not installed here" in label for label in labels)


def test_numbers_of_one_machine_without_a_file_are_the_machines():
    assert ask("distributed_type", {"place": "here", "devices": "cpu"}).default == "NO"
    assert (
        ask("distributed_type", {"place": "here", "devices": "accelerators"}, devices=2).default
        == "MULTI_GPU"
    )
    assert ask("distributed_type", {"place": "several", "devices": "cpu"}).default == "MULTI_CPU"
