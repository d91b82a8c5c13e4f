"""Parsers, configurations and helpers of ``accelerate.commands`` and ``accelerate.utils.launch``."""

import argparse
import sys

import pytest
import yaml

from accel_cli.as_accelerate.extras import (
    arguments,
    checks,
    commands,
    config,
    estimate,
    launch,
    launch_environment,
)
from accel_cli.commands import estimate_memory, tpu_config
from accel_state.environment import patch_environment
from accel_state.errors import ConfigError, UnknownKeyError
from testkit import worlds

# Parsers


def test_values_have_the_type_of_their_option():
    line = "--num-processes 2 --multi_gpu --fsdp_offload_params false --fsdp_min_num_params 1e8 --gpu_ids all"
    line += " x.py --lr 1"
    args = launch.launch_command_parser().parse_args(line.split())
    assert (args.num_processes, args.multi_gpu, args.use_fsdp) == (2, True, False)
    assert (args.fsdp_offload_params, args.fsdp_min_num_params, args.gpu_ids) == (False, 10**8, "all")
    assert (args.training_script, args.training_script_args) == ("x.py", ["--lr", "1"])


def test_a_wrong_value_is_refused_by_argparse(capsys):
    with pytest.raises(SystemExit):
        launch.launch_command_parser().parse_args(["--num_processes", "two", "x.py"])
    assert "--num_processes is 'two'; expected an integer" in capsys.readouterr().err.replace("\n", " ")


def test_help_shows_one_spelling():
    text = launch.launch_command_parser().format_help()
    assert "--mixed_precision" in text
    assert "--mixed-precision" not in text


@pytest.mark.parametrize("value", [True, False, "false"])
def test_a_truth_of_a_namespace_reaches_the_command_line(value):
    args = argparse.Namespace(fsdp_offload_params=value, training_script="x.py")
    assert launch.launch_words(args) == [f"--fsdp_offload_params={str(value).lower()}", "x.py"]


def test_a_namespace_is_filled_from_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("debug: true\nmixed_precision: bf16\nnum_processes: 4\nuse_cpu: true\n")
    parser = launch.launch_command_parser()
    args = parser.parse_args(["--config_file", str(file), "--num_processes", "2", "x.py"])
    filled, defaults, of_file = launch._validate_launch_command(args)
    assert filled is args
    assert (args.debug, args.num_processes, args.mixed_precision, of_file) == (True, 2, "bf16", True)
    assert (defaults.num_processes, defaults.debug) == (4, True)


def test_commands_of_typer_are_parsed_by_argparse():
    args = commands.estimate_command_parser().parse_args(
        ["gpt2", "--dtypes", "float16", "int8", "--batch-size", "3"]
    )
    assert (args.model_name, args.dtypes, args.batch_size) == ("gpt2", ["float16", "int8"], 3)
    parser = argparse.ArgumentParser()
    commands.env_command_parser(parser.add_subparsers())
    assert parser.parse_args(["env"]).func is commands.env_command


def test_a_namespace_runs_the_command(monkeypatch, capsys):
    args = commands.tpu_command_parser().parse_args(
        ["--tpu-name", "pod", "--tpu_zone", "here", "--command", "ls", "pwd", "--debug"]
    )
    assert arguments.run(tpu_config.app, args) == 0
    assert "set -e; cd /usr/share; ls; pwd" in capsys.readouterr().out
    commands.tpu_command_launcher(args)
    shown = capsys.readouterr().out
    assert shown == (
        "Running gcloud compute tpus tpu-vm ssh pod --zone here --command cd /usr/share; ls; pwd --worker all\n"
    )
    with pytest.raises(ConfigError, match="float33"):
        arguments.run(
            estimate_memory.app, commands.estimate_command_parser().parse_args(["m", "--dtypes", "float33"])
        )


def test_nothing_to_run_on_a_pod_is_an_error():
    with pytest.raises(ConfigError, match="--command"):
        commands.tpu_command_launcher(
            commands.tpu_command_parser().parse_args(["--tpu_name", "pod", "--debug"])
        )


@pytest.mark.parametrize("flag", ["--install_accelerate", "--install_accel"])
def test_installing_by_name_is_refused(flag):
    args = commands.tpu_command_parser().parse_args(["--tpu_name", "pod", "--debug", "--command", "ls", flag])
    with pytest.raises(ConfigError, match="on no package index yet"):
        commands.tpu_command_launcher(args)


# Configurations


def test_a_configuration_has_the_keys_of_its_file(tmp_path):
    made = config.ClusterConfig(
        num_processes=2, distributed_type="FSDP", fsdp_config={"fsdp_version": 2}, mixed_precision="bf16"
    )
    assert (made.num_processes, made.use_cpu, made.deepspeed_config) == (2, False, {})
    made.num_processes = 4
    made.to_yaml_file(tmp_path / "run.yaml")
    data = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert (data["num_processes"], data["fsdp_config"]["fsdp_version"]) == (4, 2)
    read = config.load_config_from_file(tmp_path / "run.yaml")
    assert isinstance(read, config.ClusterConfig)
    assert read.to_dict() == data == config.ClusterConfig.from_yaml_file(tmp_path / "run.yaml").to_dict()


def test_a_configuration_is_strict():
    with pytest.raises(UnknownKeyError, match="num_proceses"):
        config.ClusterConfig(num_proceses=2)
    with pytest.raises(ConfigError, match="mixed_precision"):
        config.BaseConfig(mixed_precision="fp17")


def test_a_job_has_a_configuration_of_its_own(tmp_path):
    job = config.SageMakerConfig(ec2_instance_type="ml.g5.xlarge", iam_role_name="role")
    job.to_json_file(tmp_path / "job.json")
    read = config.load_config_from_file(tmp_path / "job.json")
    assert isinstance(read, config.SageMakerConfig)
    assert (read.iam_role_name, read.compute_environment) == ("role", "AMAZON_SAGEMAKER")


def test_options_of_fsdp_1_become_those_of_2(tmp_path, caplog):
    old = {
        "num_processes": 2,
        "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_use_orig_params": True},
    }
    new = commands.convert_config_to_fsdp2(old)
    assert new == {
        "num_processes": 2,
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
    }
    assert "fsdp_use_orig_params" in old["fsdp_config"]
    assert commands.convert_config_to_fsdp2(new) == new
    assert "already" in caplog.text
    target = tmp_path / "out.yaml"
    target.touch()
    parser = commands.to_fsdp2_command_parser()
    with pytest.raises(FileExistsError, match="--overwrite"):
        commands.to_fsdp2_command(
            parser.parse_args(["--config_file", "x.yaml", "--output_file", str(target)])
        )
    with pytest.raises(FileNotFoundError):
        commands.to_fsdp2_command(parser.parse_args(["--config_file", str(tmp_path / "none.yaml")]))


# Helpers of launches


def test_one_process_is_started_as_a_launch_starts_it(tmp_path):
    script = tmp_path / "x.py"
    script.touch()
    args = launch.launch_command_parser().parse_args(
        ["--cpu", "--mixed_precision", "bf16", str(script), "--lr", "1"]
    )
    command, environment = launch_environment.prepare_simple_launcher_cmd_env(args)
    assert command == [sys.executable, str(script), "--lr", "1"]
    assert (environment["ACCELERATE_USE_CPU"], environment["ACCELERATE_MIXED_PRECISION"]) == ("true", "bf16")


def test_the_namespace_has_what_torchrun_reads():
    args = launch.launch_command_parser().parse_args(
        ["--num_processes", "4", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1",
         "--main_process_port", "1234", "x.py"]
    )  # fmt: skip
    launch_environment.prepare_multi_gpu_env(args)
    found = (args.nproc_per_node, args.nnodes, args.node_rank, args.master_addr, args.master_port)
    assert found == ("2", "2", "1", "10.0.0.1", "1234")
    free = argparse.Namespace(num_processes=2, main_process_port=0, mixed_precision="fp16")
    environment = launch_environment.prepare_multi_gpu_env(free)
    assert int(free.master_port) > 1023
    assert environment["ACCELERATE_MIXED_PRECISION"] == "fp16"


def test_deepspeed_is_started_by_torchrun_unless_it_has_a_hostfile():
    args = argparse.Namespace(use_deepspeed=True, num_processes=2, zero_stage=2)
    command, environment = launch_environment.prepare_deepspeed_cmd_env(args)
    assert command is None
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert args.nproc_per_node == "2"


def test_options_of_a_script_are_typed():
    found = launch_environment._convert_nargs_to_dict(
        ["--name", "x", "--train", "False", "--steps", "3", "--lr", "5e-5"]
    )
    assert found == {"name": "x", "train": False, "steps": 3, "lr": 5e-5}
    with pytest.raises(ValueError, match="--train"):
        launch_environment._convert_nargs_to_dict(["--train", "--steps", "3"])


def test_a_path_is_added_to_those_of_a_variable():
    with patch_environment(some_path="/a"):
        assert launch_environment.env_var_path_add("SOME_PATH", "/b") == "/a:/b"


# Scripts of tests


def check(name):
    getattr(checks, name)()


@pytest.mark.parametrize("name", ["check_world", "check_collectives", "check_training", "say_where"])
def test_a_script_checks_its_world(name):
    worlds.run(check, 2, name)


def test_a_script_fails_where_a_check_does(monkeypatch):
    monkeypatch.setattr(
        checks, "run_checks", lambda *given: [{"name": "data", "problems": ["rank 1: sample 3 came twice"]}]
    )
    with pytest.raises(AssertionError, match="sample 3 came twice"):
        checks.check_world()


def test_an_environment_gets_the_variables_of_a_section():
    given = {"HOME": "/root"}
    args = argparse.Namespace(num_processes=4, parallelism_config_tp_size=4, use_parallelism_config=True)
    found = launch_environment.prepare_extend_env_parallelism_config(args, given)
    assert found.items() >= {"HOME": "/root", "PARALLELISM_CONFIG_TP_SIZE": "4"}.items()
    assert found["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert not any(name.startswith("ACCELERATE_MIXED") for name in found)
    args = argparse.Namespace(mixed_precision="fp8", fp8_backend="te", fp8_margin=3)
    found = launch_environment.setup_fp8_env(args, given)
    assert found["ACCELERATE_FP8_MARGIN"] == "3"
    assert given == {"HOME": "/root"}


# Defaults of the launch parser


def test_what_is_not_given_has_accelerates_default_and_decides_nothing(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_version: 2\n"
    )
    args = launch.launch_command_parser().parse_args(["--config_file", str(file), "x.py"])
    assert (args.fsdp_sharding_strategy, args.fsdp_version, args.fsdp_offload_params) == (
        "FULL_SHARD",
        "1",
        "false",
    )
    assert (args.max_restarts, args.monitor_interval, args.use_megatron_lm, args.debug) == (
        0,
        0.1,
        False,
        None,
    )
    assert args.nondefault == {"config_file", "training_script", "training_script_args"}
    assert launch.launch_words(args) == ["--config_file", str(file), "x.py"]
    resolved = launch.resolve_namespace(args).local()
    assert resolved.fsdp.sharding_strategy == "SHARD_GRAD_OP"


@pytest.mark.parametrize("value", ["FULL_SHARD", "HYBRID_SHARD"])
def test_a_value_that_is_given_counts_also_where_it_is_the_default(value):
    parser = argparse.ArgumentParser()
    launch.launch_command_parser(parser.add_subparsers())
    args = parser.parse_args(["launch", "--fsdp_sharding_strategy", value, "--fsdp_version", "1", "x.py"])
    assert set(launch.launch_words(args)) == {
        f"--fsdp_sharding_strategy={value}",
        "--fsdp_version=1",
        "x.py",
    }


def test_a_value_that_a_client_writes_counts():
    args = launch.launch_command_parser().parse_args(["x.py"])
    args.max_restarts, args.num_processes = 2, 4
    assert set(launch.launch_words(args)) == {"--max_restarts=2", "--num_processes=4", "x.py"}


def test_a_model_that_does_not_exist_is_an_os_error(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the environment before
    for name in (str(tmp_path / "absent"), "nobody/has-this-model"):
        with pytest.raises(OSError, match=r"there is no file or folder|does not exist"):
            estimate.create_empty_model(name, "transformers")


def test_the_data_of_a_configuration_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("num_processes: 2\nfsdp_config:\n  fsdp_version: 1\n")
    assert commands.load_config(file) == {"num_processes": 2, "fsdp_config": {"fsdp_version": 1}}
