"""``write_basic_config`` and the default file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import accel_state
from accel_state import LaunchConfig, load_config_from_file, write_basic_config
from accel_state.config import default_config, default_path
from accel_state.errors import ConfigError, ConfigNotFoundError


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path


def accelerators(monkeypatch, kind, count):
    fake = SimpleNamespace(
        is_available=lambda: count > 0,
        current_accelerator=lambda: SimpleNamespace(type=kind),
        device_count=lambda: count,
    )
    monkeypatch.setattr(torch, "accelerator", fake)


def test_a_cpu_machine(home, monkeypatch):
    accelerators(monkeypatch, "cpu", 0)
    assert write_basic_config() is True
    path = home / "accel" / "default_config.yaml"
    data = yaml.safe_load(path.read_text())
    assert not path.read_text().startswith("{")
    assert (data["distributed_type"], data["use_cpu"], data["num_processes"]) == ("NO", True, 1)
    assert data["mixed_precision"] == "no"
    assert load_config_from_file() == LaunchConfig(
        distributed_type="NO", use_cpu=True, num_processes=1, mixed_precision="no"
    )


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [
        ("cuda", 1, ("NO", 1)),
        ("cuda", 4, ("MULTI_GPU", 4)),
        ("xpu", 2, ("MULTI_XPU", 2)),
        ("mps", 1, ("NO", 1)),
    ],
)
def test_machines_with_accelerators(kind, count, expected, tmp_path, monkeypatch):
    accelerators(monkeypatch, kind, count)
    assert write_basic_config("bf16", tmp_path / "f.yaml") is True
    config = load_config_from_file(tmp_path / "f.yaml")
    assert (config.distributed_type, config.num_processes) == expected
    assert (config.use_cpu, config.mixed_precision) == (False, "bf16")


@pytest.mark.parametrize(
    ("found", "expected"),
    [(("none", 0), ("NO", 1, True)), (("cuda", 1), ("NO", 1, False)), (("rocm", 4), ("MULTI_GPU", 4, False))],
)
def test_accelerators_that_are_known_already(found, expected, tmp_path, monkeypatch):
    accelerators(monkeypatch, "xpu", 7)  # which is not asked
    assert write_basic_config("no", tmp_path / "f.yaml", accelerators=found) is True
    config = load_config_from_file(tmp_path / "f.yaml")
    assert (config.distributed_type, config.num_processes, config.use_cpu) == expected


def test_an_existing_file_is_left_as_it_is(tmp_path, capsys):
    path = tmp_path / "f.yaml"
    path.write_text("mine")
    assert write_basic_config(save_location=str(path)) is False
    assert path.read_text() == "mine"
    assert str(path) in capsys.readouterr().out


def test_a_wrong_precision_writes_nothing(tmp_path):
    with pytest.raises(ConfigError, match="mixed_precision is 'fp17'; expected one of no, fp16, bf16, fp8"):
        write_basic_config("fp17", tmp_path / "f.yaml")
    assert not list(tmp_path.iterdir())


def test_no_file_at_all_is_an_error_that_says_how_to_make_one(home):
    with pytest.raises(ConfigNotFoundError, match="write_basic_config"):
        load_config_from_file()


def test_the_path_of_the_default_file_is_text(home):
    module = importlib.util.module_from_spec(default_config.__spec__)
    default_config.__spec__.loader.exec_module(module)
    assert module.default_config_file == str(default_path({"XDG_CONFIG_HOME": str(home)}))
    assert isinstance(accel_state.default_config_file, str)
    assert Path(accel_state.default_config_file).name == "default_config.yaml"


def test_accelerates_file_is_read_when_ours_is_missing(home):
    theirs = home / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir()
    theirs.write_text("num_processes: 3\n")
    assert load_config_from_file().num_processes == 3
    assert load_config_from_file().to_dict()["num_processes"] == 3
