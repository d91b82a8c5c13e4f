"""``accel config get`` and ``set``: one key of a file, and nothing else of it."""

from __future__ import annotations

import json
import os

import pytest

from accel_cli.app import main
from accel_state.config.files import load_config

TEXT = """\
# my run
compute_environment: LOCAL_MACHINE
num_processes: 2  # two
fsdp_config:
  # why
  fsdp_version: 2
mixed_precision: 'no'
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def change(file, *words):
    return main(["config", "set", *words, "--config_file", str(file)])


def shown(file, capsys, *words):
    code = main(["config", "get", *words, "--config_file", str(file)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value", "before", "after"),
    [
        ("num_processes", "4", "num_processes: 2 ", "num_processes: 4 "),
        ("mixed_precision", "BF16", "'no'", "bf16"),
        ("fsdp_config.fsdp_version", "1", "fsdp_version: 2", "fsdp_version: 1"),
        ("fsdp.fsdp_version", "1", "fsdp_version: 2", "fsdp_version: 1"),
        ("num_processes", "", "num_processes: 2  # two\n", ""),
        ("debug", "true", "'no'\n", "'no'\ndebug: true\n"),
        (
            "fsdp_config.fsdp_offload_params",
            "yes",
            "fsdp_version: 2\n",
            "fsdp_version: 2\n  fsdp_offload_params: true\n",
        ),
        (
            "dynamo_config.dynamo_backend",
            "inductor",
            "'no'\n",
            "'no'\ndynamo_config:\n  dynamo_backend: INDUCTOR\n",
        ),
    ],
)
def test_one_key_changes_and_every_other_line_stays(file, key, value, before, after):
    assert change(file, key, value) in (0, None)
    assert file.read_text() == TEXT.replace(before, after)
    load_config(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_procesess", "3", "key num_procesess does not exist; did you mean num_processes?"),
        ("fsdp_config.fsdp_versoin", "2", "did you mean fsdp_config.fsdp_version?"),
        ("fsdp_version", "2", "it belongs at fsdp_config.fsdp_version"),
        ("num_processes", "many", "num_processes is 'many'; expected an integer"),
        ("mixed_precision", "bf17", "expected one of no, fp16, bf16, fp8"),
        ("fsdp_config", "2", "is a section; set one of its keys"),
        ("compute_environment", "AMAZON_SAGEMAKER", "accel config makes another file"),
    ],
)
def test_what_is_wrong_is_refused_and_the_file_stays(file, capsys, key, value, message):
    assert change(file, key, value) == 2
    assert message in capsys.readouterr().err
    assert file.read_text() == TEXT


def test_what_launch_would_refuse_is_told(file, capsys):
    assert change(file, "distributed_type", "MULTI_GPU") in (0, None)
    assert change(file, "use_cpu", "true") in (0, None)
    assert "note: accel launch would refuse the file: " in capsys.readouterr().err


def test_a_file_that_is_not_there_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    assert main(["config", "set", "num_processes", "3"]) in (0, None)
    assert load_config(tmp_path / "home/accel/default_config.yaml").num_processes == 3


def test_a_file_in_its_place_of_before_is_changed_there(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    before = tmp_path / "home/accel/default_config.yaml"
    before.parent.mkdir(parents=True)
    before.write_text("num_processes: 2\n")
    assert main(["config", "set", "num_processes", "3"]) in (0, None)
    assert before.read_text() == "num_processes: 3\n"
    assert not (tmp_path / "config").exists(), "a file there would take the place of all keys"


def test_accelerates_file_is_not_changed(file, tmp_path, capsys):
    theirs = tmp_path / "home/accelerate/default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text(TEXT)
    assert main(["config", "set", "num_processes", "3"]) == 2
    assert f"{theirs} belongs to Accelerate" in capsys.readouterr().err
    assert theirs.read_text() == TEXT
    assert main(["config", "get", "num_processes"]) == 0
    assert capsys.readouterr().out == "2\n"


def test_json_keeps_its_order(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"num_processes": 2, "debug": False, "fsdp_config": {"fsdp_version": 2}}))
    assert change(file, "fsdp_config.fsdp_offload_params", "true") in (0, None)
    assert list(json.loads(file.read_text())["fsdp_config"].items()) == [
        ("fsdp_version", 2),
        ("fsdp_offload_params", True),
    ]


def test_where_lines_cannot_be_edited_the_values_stay(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("# of braces\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n")
    assert change(file, "fsdp_config.fsdp_offload_params", "true") in (0, None)
    assert "comments of" in capsys.readouterr().err
    assert load_config(file).fsdp.fsdp_version == 2
    assert load_config(file).num_processes == 2


def test_a_file_that_cannot_be_written_stays(file, capsys, monkeypatch):
    def fails(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fails)
    assert change(file, "num_processes", "4") == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert file.read_text() == TEXT
    assert os.listdir(file.parent) == ["run.yaml"]


def test_reading(file, capsys):
    assert shown(file, capsys, "num_processes") == (0, "2\n")
    assert shown(file, capsys, "fsdp_config") == (0, "fsdp_version: 2\n")
    assert shown(file, capsys, "fsdp_config.fsdp_version", "--json") == (0, "2\n")
    assert shown(file, capsys, "debug") == (0, "false\n")
    assert shown(file, capsys, "compute_environment") == (0, "LOCAL_MACHINE\n")
    assert shown(file, capsys, "main_process_ip") == (1, "")
    assert shown(file, capsys, "main_proces_ip") == (2, "")
