"""Availability of packages and devices."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import accel_state.host.available as available
from accel_state.environment import patch_environment
from accel_state.errors import ConfigError, MissingDependencyError

QUESTIONS = [name for name in available.__all__ if name.startswith("is_")]


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_has_an_answer_and_says_what_it_means(name):
    question = getattr(available, name)
    assert type(question()) is bool
    assert question.__doc__.startswith("Whether ")


def test_packages_that_tests_need_are_there():
    assert available.is_pytest_available()
    assert available.is_tqdm_available()
    assert available.is_numpy_available()
    assert not available.is_numpy_available("999.0")
    assert not available.is_bnb_available("999.0")


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Install a package of a name and version, for this test only."""

    def install(module, version, name=None):
        folder = tmp_path / "site"
        (folder / module).mkdir(parents=True, exist_ok=True)
        (folder / module / "__init__.py").write_text("")
        info = folder / f"{(name or module).replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name or module}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(folder))
        available._found.cache_clear()
        available.installed_version.cache_clear()

    yield install
    available._found.cache_clear()
    available.installed_version.cache_clear()


@pytest.mark.parametrize(
    ("module", "version", "name", "question", "answer"),
    [
        ("wandb", "0.1", None, "is_wandb_available", True),
        ("msamp", "0.1", "ms-amp", "is_msamp_available", True),
        ("mlflow", "3.0", "mlflow-skinny", "is_mlflow_available", True),
        ("tensorboardX", "2.0", None, "is_tensorboard_available", True),
        ("aim", "3.29.0", None, "is_aim_available", True),
        ("aim", "4.0.0", None, "is_aim_available", False),
        ("torchdata", "0.7.1", None, "is_torchdata_available", True),
        ("torchdata", "0.7.1", None, "is_torchdata_stateful_dataloader_available", False),
        ("torchdata", "0.8.0", None, "is_torchdata_stateful_dataloader_available", True),
        ("torchao", "0.6.0", None, "is_torchao_available", False),
        ("torchao", "0.6.1", None, "is_fp8_available", True),
        ("bitsandbytes", "0.38.0", None, "is_8bit_bnb_available", True),
        ("bitsandbytes", "0.38.0", None, "is_4bit_bnb_available", False),
        ("bitsandbytes", "0.39.0", None, "is_4bit_bnb_available", True),
    ],
)
def test_versions_that_will_do(distribution, module, version, name, question, answer):
    distribution(module, version, name)
    assert getattr(available, question)() is answer


def test_a_folder_is_no_package(tmp_path, monkeypatch):
    if available.is_clearml_available():
        pytest.skip("clearml is installed here")
    (tmp_path / "clearml").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    available._found.cache_clear()
    assert not available.is_clearml_available()
    available._found.cache_clear()


def test_rich_must_be_asked_for(distribution):
    distribution("rich", "1.0")
    assert not available.is_rich_available()
    with patch_environment(accelerate_enable_rich="yes"):
        assert available.is_rich_available()


def test_megatron_must_be_asked_for(distribution):
    distribution("megatron", "0.16.1", "megatron-core")
    assert not available.is_megatron_lm_available()
    with patch_environment(accelerate_use_megatron_lm="yes"):
        assert available.is_megatron_lm_available()
    distribution("megatron", "0.15.0", "megatron-core")
    with patch_environment(accelerate_use_megatron_lm="yes"):
        assert not available.is_megatron_lm_available()


def test_xla_can_be_switched_off_and_is_one_thing_at_a_time(distribution):
    distribution("torch_xla", "2.9")
    assert available.is_torch_xla_available()
    with patch_environment(use_torch_xla="0"):
        assert not available.is_torch_xla_available()
    with pytest.raises(ConfigError, match="exclude each other"):
        available.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_devices_agree_with_torch():
    assert available.is_cuda_available() == torch.cuda.is_available()
    assert available.is_xpu_available(check_device=True) == torch.xpu.is_available()
    assert available.is_mps_available() == torch.backends.mps.is_available()
    assert available.is_torch_distributed_available() == torch.distributed.is_available()


def test_a_missing_torchao_is_said_with_the_command():
    @available.torchao_required
    def convert(x):
        return x

    if available.is_torchao_available():
        assert convert(3) == 3
    else:
        with pytest.raises(
            MissingDependencyError, match=r"convert needs torchao: pip install 'torchao>=0\.6\.1'"
        ):
            convert(3)


def test_asking_about_packages_loads_neither_torch_nor_them():
    code = (
        "import sys, accel_state.host.available as a\n"
        "a.is_wandb_available(), a.is_tqdm_available(), a.is_transformers_available(), a.is_fp8_available\n"
        "print(sorted({'torch', 'tqdm', 'wandb', 'transformers'} & sys.modules.keys()))"
    )
    with patch_environment(pythonpath=":".join(sys.path)):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
