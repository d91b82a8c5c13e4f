"""``accel config show`` and ``accel config validate``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from accel_cli.app import main
from accel_state.config import complete_root, schema_of
from testkit.schema import example

FILE = "num_processes: 4\n# a comment\nfsdp_config:\n  fsdp_version: 2\ndistributed_type: FSDP\n"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # it beats the number of threads in a file
    (tmp_path / "f.yaml").write_text(FILE)
    return tmp_path


def test_show_names_every_value_and_its_place(capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    assert main(["config", "show", "--origin", "--config-file", "f.yaml", "--nproc-per-node=8"]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    shown = {line[0]: tuple(line[1:]) for line in lines}
    assert shown["#"] == ("f.yaml",)
    assert shown["num_processes"] == ("8", "flag --nproc-per-node")
    assert shown["distributed_type"] == ("FSDP", "f.yaml, line 5: distributed_type")
    assert shown["fsdp_config.fsdp_version"] == ("2", "f.yaml, line 4: fsdp_config.fsdp_version")
    assert shown["fsdp_config.fsdp_reshard_after_forward"] == ("true", "default")
    assert shown["dynamo_config.dynamo_backend"] == (
        "EAGER",
        "environment variable ACCELERATE_DYNAMO_BACKEND",
    )
    assert shown["num_machines"] == ("1", "default")
    assert not any(name.startswith("deepspeed_config") for name in shown)


def test_show_without_origins_is_what_a_launch_uses(capsys):
    assert main(["config", "show", "--config_file", "f.yaml", "--no-use_fsdp", "train.py", "--lr", "1"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["distributed_type"] == "(unset)"
    assert shown["num_processes"] == "4"


def test_show_as_json_with_and_without_origins(capsys):
    assert main(["config", "show", "--json", "--config_file", "f.yaml"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["values"]["num_processes"] == 4
    assert data["file"] == "f.yaml"
    assert main(["config", "show", "--json", "--origin", "--config_file", "f.yaml", "--cpu"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert values["num_processes"] == {
        "value": 4, "origin": "file", "file": "f.yaml", "line": 1, "name": "num_processes",
    }  # fmt: skip
    assert values["use_cpu"] == {"value": True, "origin": "flag", "name": "--cpu"}
    assert values["debug"] == {"value": False, "origin": "default"}


@pytest.mark.wide(only=["deepspeed.*", "tpu.*", "dynamo.*", "megatron_lm.*", "parallelism.*", "submission.*"])
@pytest.mark.parametrize(
    "option",
    [bound for bound in schema_of(complete_root()).options if bound.keys],
    ids=lambda bound: bound.path,
)
def test_show_names_the_origin_of_every_option_of_a_file(option, capsys):
    value = example(option)
    data = {option.keys[0]: option.option_type.dump(value)}
    with open("one.json", "w") as file:
        json.dump({option.file_key: data} if option.file_key else data, file, indent=0)
    code = main(["config", "show", "--json", "--origin", "--config_file", "one.json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    found = json.loads(printed.out)["values"][option.file_path]
    assert (found["origin"], found["line"]) == ("file", 3 if option.file_key else 2)


def test_show_reports_mistakes_like_launch(capsys):
    assert main(["config", "show", "--num_proceses", "2"]) == 2
    assert "did you mean --num_processes?" in capsys.readouterr().err
    assert main(["config", "show", "--config_file", "nowhere.yaml"]) == 2
    assert main(["config", "show", "--cpu", "--multi_gpu"]) == 2


def test_show_has_help(capsys):
    assert main(["config", "show", "--help"]) == 0
    assert "--origin" in capsys.readouterr().out


def test_secrets_are_hidden(capsys, place):
    (place / "s.yaml").write_text("compute_environment: AMAZON_SAGEMAKER\n")
    words = ["config", "show", "--json", "--origin", "--config_file", "s.yaml"]
    assert main([*words, "--aws_secret_access_key", "hush"]) == 0
    assert "hush" not in capsys.readouterr().out


def test_validate_says_what_a_right_file_is(capsys, monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE_COUNT", "4")
    assert main(["config", "validate", "f.yaml"]) == 0
    assert capsys.readouterr().out == "f.yaml is valid: a local run, 3 options set\n"
    assert main(["config", "validate", "--config_file", "f.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "f.yaml", "valid": True, "errors": [], "notes": []}


def test_validate_notes_that_a_file_is_for_another_machine(capsys, place, monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE_COUNT", "2")
    (place / "g.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    assert main(["config", "validate", "g.yaml"]) == 0
    assert (
        "(num_processes: 8 in g.yaml, line 2) need 8 accelerators, but this machine has 2"
        in capsys.readouterr().out
    )


def test_validate_reports_everything_that_is_wrong(capsys, place):
    (place / "bad.yaml").write_text(
        "num_proceses: 2\nmixed_precision: fp17\nuse_cpu: true\ndistributed_type: MULTI_GPU\n"
        "module: true\nno_python: true\nfsdp_config:\n  fsdp_offload_parms: 1\n"
        "debug: true\ndebug: false\n"
    )
    assert main(["config", "validate", "bad.yaml"]) == 2
    errors = capsys.readouterr().err
    for expected in (
        "bad.yaml, line 1: key num_proceses does not exist; did you mean num_processes?",
        "bad.yaml, line 2: mixed_precision is 'fp17'",
        "bad.yaml, line 8: key fsdp_config.fsdp_offload_parms",
        "bad.yaml, line 10: key debug is in line 9 already; keep one of them",
        "use_cpu: true in bad.yaml, line 3 contradicts distributed_type: MULTI_GPU in bad.yaml, line 4",
    ):
        assert expected in errors
    assert main(["config", "validate", "bad.yaml", "--json"]) == 2
    data = json.loads(capsys.readouterr().out)
    assert data["valid"] is False
    assert len(data["errors"]) == errors.count("error:")


def test_validate_names_what_this_version_cannot_run(capsys, place):
    options = "megatron_lm_config:\n  megatron_lm_use_custom_fsdp: true\n"
    (place / "m.yaml").write_text("distributed_type: MEGATRON_LM\n" + options)
    assert main(["config", "validate", "m.yaml"]) == 2
    assert "m.yaml, line 3 is not available" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["- 1\n", "a: [\n", None])
def test_validate_of_what_is_no_configuration(text, capsys, place):
    if text is not None:
        (place / "x.yaml").write_text(text)
    assert main(["config", "validate", "x.yaml"]) == 2
    assert "x.yaml" in capsys.readouterr().err


def test_validate_without_a_file_checks_the_default_one(capsys, place):
    assert main(["config", "validate"]) == 2
    assert "there is no configuration file" in capsys.readouterr().err
    default = place / "home/accel/default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("num_processes: 2\n")
    assert main(["config", "validate"]) == 0
    assert str(default) in capsys.readouterr().out


@pytest.mark.parametrize("words", [["show", "--origin"], ["validate", "f.yaml"]])
def test_neither_imports_torch(words):
    code = f"import sys; from accel_cli.app import main; main(['config', *{words}]); print('torch' in sys.modules)"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
