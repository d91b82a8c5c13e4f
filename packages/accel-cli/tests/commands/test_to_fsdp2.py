"""``accel to-fsdp2``: what it says, what it writes, and what it refuses."""

import json

import pytest
import yaml

from accel_cli.app import main
from accel_state.config.files import load

OLD = """\
# of the cluster
compute_environment: LOCAL_MACHINE  # here
distributed_type: FSDP
fsdp_config:
  # how modules are grouped
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE  # early
  fsdp_sharding_strategy: SHARD_GRAD_OP   # memory is enough
  fsdp_state_dict_type: "FULL_STATE_DICT"
  fsdp_use_orig_params: true
  fsdp_version: 1

num_processes: 2  # both
"""
NEW = """\
# of the cluster
compute_environment: LOCAL_MACHINE  # here
distributed_type: FSDP
fsdp_config:
  # how modules are grouped
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: false   # memory is enough
  fsdp_state_dict_type: "FULL_STATE_DICT"
  fsdp_version: 2

num_processes: 2  # both
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.fixture
def old(tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text(OLD)
    return file


def convert(*words):
    return main(["to-fsdp2", *map(str, words)])


def test_comments_order_and_quotes_stay(old, tmp_path, capsys):
    new = tmp_path / "new.yaml"
    assert convert("--config_file", old, "--output_file", new) == 0
    assert new.read_text() == NEW
    assert old.read_text() == OLD
    assert load(new).fsdp.reshard_after_forward is False
    out = capsys.readouterr().out
    for line in (
        "kept     fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        "dropped  fsdp_backward_prefetch: BACKWARD_PRE - version 2 always gathers",
        "renamed  fsdp_sharding_strategy: SHARD_GRAD_OP -> fsdp_reshard_after_forward: false",
        "dropped  fsdp_use_orig_params: true - version 2 always has",
        "changed  fsdp_version: 1 -> 2",
        "-  fsdp_version: 1",
        "+  fsdp_version: 2",
        f"wrote {new}",
    ):
        assert line in out


def test_windows_line_ends_stay(old):
    old.write_bytes(OLD.replace("\n", "\r\n").replace("  fsdp_version: 1\r\n", "").encode())
    assert convert("--config_file", old, "--overwrite") == 0
    without = NEW.replace("  fsdp_version: 2\n", "")
    last = [line for line in without.splitlines(keepends=True) if line.startswith("  ")][-1]
    expected = without.replace(last, f"{last}  fsdp_version: 2\n")
    assert old.read_bytes() == expected.replace("\n", "\r\n").encode()


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_json_stays_json(tmp_path, suffix):
    file = tmp_path / f"c.{suffix}"  # Accelerate writes JSON to .yaml as well
    old = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 1, "fsdp_min_num_params": 5}}
    file.write_text(json.dumps(old))
    assert convert("--config_file", file, "--overwrite") == 0
    assert json.loads(file.read_text()) == {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_min_num_params": 5,
        },
    }


def test_the_suffix_of_the_output_decides(old, tmp_path):
    assert convert("--config_file", old, "--output_file", tmp_path / "new.json") == 0
    assert json.loads((tmp_path / "new.json").read_text()) == yaml.safe_load(NEW)
    (tmp_path / "old.json").write_text(json.dumps(yaml.safe_load(OLD)))
    assert convert("--config_file", tmp_path / "old.json", "--output_file", tmp_path / "back.yaml") == 0
    assert yaml.safe_load((tmp_path / "back.yaml").read_text()) == yaml.safe_load(NEW)


@pytest.mark.parametrize(
    "text",
    [
        "a: &old {fsdp_use_orig_params: true}  # shared\nfsdp_config: *old\n",
        "fsdp_config: {fsdp_use_orig_params: true, fsdp_version: 1}  # in one line\n",
        "a: &old\n  fsdp_use_orig_params: true\nfsdp_config:\n  <<: *old  # merged\n  fsdp_version: 1\n",
    ],
    ids=["anchor", "braces", "merge"],
)
def test_other_forms_of_yaml_lose_their_comments_and_say_so(tmp_path, capsys, text):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert convert("--config_file", file, "--overwrite") == 0
    assert yaml.safe_load(file.read_text())["fsdp_config"] == {"fsdp_version": 2}
    assert "comments of the file are not kept" in capsys.readouterr().out


def test_without_a_place_it_only_shows(old, capsys):
    assert convert("--config_file", old) == 0  # as `accel migrate` does
    shown = capsys.readouterr()
    assert "+  fsdp_version: 2" in shown.out
    assert "--output_file" in shown.err
    assert "--overwrite" in shown.err
    assert old.read_text() == OLD


def test_an_existing_output_is_kept(old, tmp_path, capsys):
    there = tmp_path / "there.yaml"
    there.write_text("mine")
    assert convert("--config_file", old, "--output_file", there) == 2
    assert there.read_text() == "mine"
    assert f"{there} exists; name another --output_file, or pass --overwrite" in capsys.readouterr().err
    assert convert("--config_file", old, "--output_file", there, "--overwrite") == 0
    assert there.read_text() == NEW


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("distributed_type: MULTI_GPU\n", "has no fsdp_config"),
        ("fsdp_config: {}\n", "has no fsdp_config"),
        ("fsdp_config: [1]\n", "expected a mapping"),
        ("fsdp_config: {fsdp_version: 2}\n", "version 2 already"),
        (
            "fsdp_config: {fsdp_version: 2, fsdp_use_orig_params: true}\n",
            "fsdp_use_orig_params are of version 1",
        ),
        ("fsdp_config: {fsdp_version: 3}\n", "fsdp_version is 3; expected 1"),
        ("fsdp_config: {fsdp_sharding_strategy: SHARD}\n", "is 'SHARD'; expected one of FULL_SHARD"),
        ("fsdp_config: {sharding_strategy: 1, fsdp_sharding_strategy: 2}\n", "both set the same option"),
        ("- a\n", "holds list; expected a mapping"),
        ("a: [\n", "is not valid YAML"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path, capsys, text, said):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert convert("--config_file", file, "--overwrite") == 2
    assert said in capsys.readouterr().err
    assert file.read_text() == text


def test_a_missing_file(tmp_path, capsys):
    assert convert("--config_file", tmp_path / "no.yaml", "--overwrite") == 2
    assert "does not exist" in capsys.readouterr().err


def test_accelerates_own_file_is_not_changed(tmp_path, capsys):
    theirs = tmp_path / "home" / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text(OLD)
    assert convert("--config_file", theirs, "--overwrite") == 2
    assert theirs.read_text() == OLD
    assert "belongs to Accelerate" in capsys.readouterr().err
    ours = tmp_path / "home" / "accel" / "default_config.yaml"
    assert convert("--config_file", theirs, "--output_file", ours) == 0
    assert load(ours).fsdp.fsdp_version == 2


def test_a_misspelt_key_is_named(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("fsdp_config:\n  fsdp_offload_parms: true\n")
    assert convert("--config_file", file, "--overwrite") == 0
    shown = capsys.readouterr()
    assert "did you mean fsdp_offload_params" in shown.out
    assert "accel launch would refuse the file" in shown.err
