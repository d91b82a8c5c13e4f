"""``accel env``."""

import json

import pytest

from accel_cli.app import main
from accel_cli.commands import env


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_it_names_versions_system_and_configuration(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for word in ("accel-state", "accel-ckpt", "accel-bigmodel", "accel-train", "accel-cli", "torch", "numpy",
                 "platform", "python", "memory", "accelerators", "configuration:"):  # fmt: skip
        assert word in out


def test_json_holds_the_same(capsys):
    import torch

    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"packages", "libraries", "system", "devices", "configuration"}
    assert torch.__version__.startswith(
        facts["libraries"]["torch"]
    )  # what was built for stands below devices
    assert facts["configuration"] == {"file": "none"} | {
        name: value for name, value in facts["configuration"].items() if "from the environment" in str(value)
    }


def test_a_file_is_shown(capsys, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("num_processes: 4\nmixed_precision: bf16\n")
    facts = env.collect(str(file))["configuration"]
    assert (facts["file"], facts["num_processes"], facts["mixed_precision"]) == (str(file), 4, "bf16")


def test_a_missing_file_is_an_error(capsys):
    assert main(["env", "--config_file", "nowhere.yaml"]) == 2
    assert "nowhere.yaml does not exist" in capsys.readouterr().err


def test_an_unknown_flag_is_an_error(capsys):
    assert main(["env", "--jsn"]) == 2
    assert "--json" in capsys.readouterr().err


def test_a_configuration_that_cannot_be_used_is_part_of_the_report(capsys, tmp_path):
    file = tmp_path / "accel/default_config.yaml"
    file.parent.mkdir()
    file.write_text("num_process: 4\n")
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "key num_process does not exist; did you mean num_processes" in facts["configuration"]["error"]
    assert facts["libraries"]["torch"]
