"""Wrong command lines and configurations of ``accel launch``: one error each, exit code 2, before anything starts."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from accel_cli.app import main
from accel_state.errors import TargetError
from accel_state.launching.target import Target, check_target


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    (tmp_path / "train.ipynb").write_text("{}")
    (tmp_path / "folder").mkdir()
    files = {
        "gpu.yaml": "num_machines: 1\ndistributed_type: MULTI_GPU\nnum_processes: 4\n",
        "eight.yaml": "num_processes: 8\n",
        "rank.yaml": "num_machines: 2\nmachine_rank: 5\nnum_processes: 2\n",
        "megatron.yaml": "distributed_type: MEGATRON_LM\n",
        "msamp.yaml": "mixed_precision: fp8\nfp8_config:\n  backend: MSAMP\n",
        "cloud.yaml": "compute_environment: AMAZON_SAGEMAKER\n",
        "both.yaml": "use_cpu: true\ndistributed_type: MULTI_GPU\n",
        "typo.yaml": "fsdp_config:\n  fsdp_offload_parms: true\n",
        "broken.yaml": "a: [\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("trian.py", ["the script 'trian.py' does not exist", "did you mean 'train.py'?"]),
        ("folder", ["'folder' is a folder without a __main__.py"]),
        ("train.ipynb", ["is a notebook", "notebook_launcher", "jupyter nbconvert --to script train.ipynb"]),
        ("-m no.such.module", ["no module named 'no.such.module'"]),
        ("--no_python train.py", ["'train.py' is not executable", "chmod +x train.py"]),
        ("--no_python folder", ["'folder' is a folder"]),
        ("", ["there is no script to launch"]),
        ("--multi_gpu train.py", ["--multi_gpu needs accelerators", "leave --multi_gpu out, or pass --cpu"]),
        ("--config_file gpu.yaml train.py",
         ["distributed_type: MULTI_GPU in gpu.yaml, line 2 needs accelerators", "pass --distributed_type NO",
          "--cpu", "edit that line"]),
        ("--use_megatron_lm train.py", ["--use_megatron_lm needs megatron-core", "pip install 'megatron-core"]),
        ("--config_file megatron.yaml train.py", ["in megatron.yaml, line 1", "needs megatron-core, which"]),
        ("--mixed-precision fp8 --fp8_backend msamp train.py", ["--fp8_backend MSAMP", "--fp8_backend ao (torchao)"]),
        ("--config_file msamp.yaml train.py", ["msamp.yaml, line 3", "--fp8_backend te (TransformerEngine)"]),
        ("--use_deepspeed --mixed_precision fp8 train.py", ["does not run with DeepSpeed", "--mixed_precision bf16"]),
        ("--config_file cloud.yaml train.py", ["ec2_instance_type"]),
        ("--cpu --multi_gpu train.py", ["--cpu contradicts --multi_gpu"]),
        ("--config_file both.yaml train.py", ["both.yaml, line 1 contradicts", "both.yaml, line 2"]),
        ("--use_fsdp --use_deepspeed train.py", ["--use_fsdp and --use_deepspeed exclude each other"]),
        ("--num_machines 2 --machine_rank 2 --num_processes 2 train.py", ["--machine_rank 2 is out of range"]),
        ("--config_file rank.yaml train.py", ["machine_rank: 5 in rank.yaml, line 2 is out of range"]),
        ("--ipex train.py", ["flag --ipex does not exist: IPEX is part of PyTorch now; leave it out"]),
        ("--tpu_cluster train.py", ["--tpu_cluster is for TPUs", "leave --tpu_cluster out"]),
        ("--gpu_ids 0,1 train.py", ["--gpu_ids 0,1 names accelerator 0", "pass --cpu"]),
        ("--num_proceses 2 train.py", ["flag --num_proceses does not exist; did you mean --num_processes?"]),
        ("--config_file typo.yaml train.py", ["typo.yaml, line 2", "did you mean fsdp_config.fsdp_offload_params"]),
        ("--config_file broken.yaml train.py", ["broken.yaml is not valid YAML"]),
        ("--config_file folder train.py", ["folder cannot be read"]),
        ("--config_file nowhere.yaml train.py", ["nowhere.yaml does not exist"]),
        ("--mpirun_hostfile nowhere train.py", ["'nowhere' does not exist"]),
        ("--cpu --num_processes 2 --tee 7 train.py", ["--tee is '7'"]),
    ],
)  # fmt: skip
def test_each_mistake_is_one_error_with_code_2(words, messages, capsys, place):
    assert main(["launch", *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    error = printed.err.splitlines()[-1] if "broken" not in words else printed.err
    assert error.startswith("accel launch: error: ")
    for message in messages:
        assert message in error
    assert not (place / "started").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tpu", "--tpu needs torch_xla, which is not installed; pip install 'torch_xla[tpu]"),
        ("--use_deepspeed", "--use_deepspeed needs DeepSpeed, which is not installed; pip install deepspeed"),
        (
            "--mixed_precision fp8 --fp8_backend te",
            "--mixed_precision fp8 needs transformer-engine, which is not",
        ),
    ],
)
def test_a_package_that_is_not_installed_ends_the_launch(words, message, capsys, place, monkeypatch):
    for name in ("torch_xla", "deepspeed"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("accel_state.host.available.is_transformer_engine_available", lambda: False)
    assert main(["launch", *words.split(), "train.py"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"accel launch: error: {message}")
    assert not (place / "started").exists()
    # Another machine may have it: a dry run only says so. A program has an interpreter of its own.
    assert main(["launch", *words.split(), "--dry_run", "train.py"]) == 0
    assert main(["launch", *words.split(), "--dry_run", "--no_python", "true"]) == 0


def test_a_file_for_a_bigger_machine_says_where_the_number_is(capsys, monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE_COUNT", "2")
    assert main(["launch", "--config_file", "eight.yaml", "train.py"]) == 2
    assert (
        "8 processes on this machine (num_processes: 8 in eight.yaml, line 1) need 8 accelerators, but this machine "
        "has 2; pass --num_processes 2"
    ) in capsys.readouterr().err


def test_a_variable_is_named(capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    assert main(["launch", "train.py"]) == 2
    error = capsys.readouterr().err
    assert (
        "ACCELERATE_USE_MEGATRON_LM=true in the environment needs megatron-core, which is not installed"
        in error
    )


def test_a_port_in_use(capsys, place):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = ["--cpu", "--num_processes", "2", "--main_process_port", str(port), "train.py"]
        assert main(["launch", *words]) == 2
    assert f"port {port} cannot be used on this host" in capsys.readouterr().err
    assert not (place / "started").exists()


def _check_as_nobody(name, answers):
    if os.geteuid() == 0:
        os.setuid(65534)  # root may read every file
    try:
        check_target(Target(name), {})
    except TargetError as error:
        answers.send((str(error), error.exit_code))
    else:
        answers.send(("", 0))


def test_a_script_that_cannot_be_read():
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:  # the folders of tmp_path are closed to other users
        os.chmod(folder, 0o755)
        script = Path(folder) / "train.py"
        script.touch(0o200)
        child = context.Process(target=_check_as_nobody, args=(str(script), there))
        child.start()
        message, code = here.recv()
        child.join()
    assert "cannot be read: permission denied; chmod u+r" in message
    assert code == 2


def test_a_dry_run_of_a_submission_is_what_is_submitted(capsys):
    words = "--cpu --submit dstack --submit_secrets HF_TOKEN --submit_secrets WANDB_API_KEY=team --dry_run train.py"
    assert main(["launch", *words.split()]) == 0
    task = yaml.safe_load(capsys.readouterr().out)
    assert task["env"] == ["HF_TOKEN=${{ secrets.HF_TOKEN }}", "WANDB_API_KEY=${{ secrets.team }}"]
    assert main(["launch", *words.split(), "--token=hf_x"]) == 2
    assert "hf_x" not in "".join(capsys.readouterr())
