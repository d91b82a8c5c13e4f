"""What only clients of Accelerate use."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import nn

from accel_cli.as_accelerate.extras import config, deepspeed, estimate, fsdp, launch
from accel_cli.commands import launch as command
from accel_state.environment import get, patch_environment
from accel_train import Accelerator
from testkit import worlds


@pytest.fixture
def words(monkeypatch):
    """What ``accel launch`` is given."""
    seen = []
    monkeypatch.setattr(launch, "main", lambda arguments, returns: seen.extend(arguments) or 0)
    return seen


@pytest.mark.parametrize(
    "given",
    [
        ["train.py"],
        ["--num_processes", "2", "--cpu", "train.py", "--lr", "0.1", "--num_processes", "7"],
        ["--num-processes", "2", "--mixed-precision", "bf16", "train.py"],
        ["--config_file", "a.yaml", "--use_fsdp", "--fsdp_offload_params", "true", "train.py", "x"],
        ["--multi_gpu", "--gpu_ids", "0,1", "-m", "package.module", "-m"],
    ],
)
def test_argparse_reads_what_accel_launch_reads(given, words):
    launch.launch_command(launch.launch_command_parser().parse_args(given))
    read, expected = (command.LaunchCommand.read(line) for line in (words, given))
    assert (read.values, read.rest, read.others) == (expected.values, expected.rest, expected.others)


def test_a_client_may_change_the_namespace(words):
    args = launch.launch_command_parser().parse_args(["--num_processes", "2", "train.py"])
    args.num_processes = 4
    args.training_script_args = ["--seed", "1"]
    launch.launch_command(args)
    assert words == ["--num_processes=4", "train.py", "--seed", "1"]


def test_it_can_be_a_command_of_another_program(words):
    parser = argparse.ArgumentParser()
    launch.launch_command_parser(parser.add_subparsers())
    args = parser.parse_args(["launch", "--cpu", "train.py"])
    args.func(args)
    assert words == ["--cpu", "train.py"]


def test_a_failed_run_is_an_exit(monkeypatch):
    monkeypatch.setattr(launch, "main", lambda arguments, returns: 3)
    with pytest.raises(SystemExit) as caught:
        launch.launch_command(launch.launch_command_parser().parse_args(["train.py"]))
    assert caught.value.code == 3


def test_unknown_flags_are_refused_by_argparse(capsys):
    with pytest.raises(SystemExit):
        launch.launch_command_parser().parse_args(["--num_proceses", "2", "train.py"])
    assert "--num_proceses" in capsys.readouterr().err


def test_the_default_file_is_where_launch_looks():
    from accel_state import default_config_file

    assert config.default_yaml_config_file == str(default_config_file)
    assert config.default_json_config_file.endswith(".json")


def test_the_plugin_of_a_state():
    class State:
        distributed_type = "MULTI_CPU"
        deepspeed_plugin = "plugin"

    with pytest.raises(ValueError, match="--use_deepspeed"):
        deepspeed.get_active_deepspeed_plugin(State())
    State.distributed_type = "DEEPSPEED"
    assert deepspeed.get_active_deepspeed_plugin(State()) == "plugin"


def test_a_wrapped_engine_steps_with_the_last_micro_batch():
    class Engine:
        def __init__(self):
            self.calls = []

        def set_gradient_accumulation_boundary(self, is_boundary):
            self.calls.append(("boundary", is_boundary))

        def backward(self, loss, **options):
            self.calls.append(("backward", loss, options))

        def step(self):
            self.calls.append(("step",))

        def get_global_grad_norm(self):
            return torch.tensor(2.5)

    engine = Engine()
    wrapper = deepspeed.DeepSpeedEngineWrapper(engine)
    wrapper.backward(1, sync_gradients=False)
    assert engine.calls == [("boundary", False), ("backward", 1, {})]
    wrapper.backward(2, retain_graph=True)
    assert engine.calls[2:] == [("boundary", True), ("backward", 2, {"retain_graph": True}), ("step",)]
    assert wrapper.get_global_grad_norm() == 2.5


def test_a_wrapped_optimizer_leaves_steps_to_its_engine():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapper = deepspeed.DeepSpeedOptimizerWrapper(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    wrapper.step()
    wrapper.zero_grad()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is not None
    assert not wrapper.step_was_skipped
    optimizer.overflow = True
    assert wrapper.step_was_skipped
    assert isinstance(wrapper, deepspeed.DeepSpeedOptimizerWrapper)
    prepared = Accelerator(cpu=True).prepare(optimizer)
    assert not isinstance(prepared, deepspeed.DeepSpeedOptimizerWrapper)


def test_parameters_of_modules_by_pattern_or_object():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    last = set(model[1].parameters())
    assert fsdp.get_parameters_from_modules("1", model, "cpu") == last
    assert fsdp.get_parameters_from_modules([model[1]], model, torch.device("cpu")) == last
    assert fsdp.get_parameters_from_modules(None, model, "cpu") == set()


def divided():
    from torch.distributed.fsdp import fully_shard

    from accel_state import PartialState

    PartialState()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = fsdp.model_has_dtensor(model)
    fully_shard(model[1])
    return before, fsdp.model_has_dtensor(model)


def test_a_model_of_which_a_part_is_divided():
    assert worlds.run(divided, 2) == [(False, True)] * 2


def test_a_module_class_is_found_by_its_name():
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 1)))
    assert fsdp.get_module_class_from_name(model, "Conv1d") is nn.Conv1d
    assert fsdp.get_module_class_from_name(model, "Sequential") is nn.Sequential
    assert fsdp.get_module_class_from_name(model, "LSTM") is None


def test_a_launch_with_one_process_returns(tmp_path):
    """A program has something to do after it, and learns of a failure."""
    script = tmp_path / "work.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    parser = launch.launch_command_parser()
    launch.launch_command(parser.parse_args(["--cpu", "--num_processes", "1", str(script), "0"]))
    with pytest.raises(SystemExit, match="3"):
        launch.launch_command(parser.parse_args(["--cpu", "--num_processes", "1", str(script), "3"]))


def test_a_function_for_a_started_process_finds_its_rank():
    with patch_environment(
        nproc=2, node_rank=1, world_size=4, rank=None, local_rank=None, fork_launched=None
    ):
        seen = []
        launch.PrepareForLaunch(
            lambda *args: seen.append((*args, get("RANK"), get("LOCAL_RANK"))), "MULTI_CPU"
        )(1, "x")
        assert seen == [("x", "3", "1")]
        assert get("FORK_LAUNCHED") == "1"


def test_an_empty_model_is_made_from_a_configuration(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=2).save_pretrained(
        tmp_path
    )
    model = estimate.create_empty_model(str(tmp_path), "transformers")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    with pytest.raises(ValueError, match="HF_TOKEN"):
        estimate.create_empty_model(str(tmp_path), "transformers", access_token="x")
