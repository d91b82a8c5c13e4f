"""DeepSpeed's own configuration file is read before anything starts."""

import json
import os

import pytest

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.errors import ConfigError
from accel_state.launching.deepspeed_file import check_deepspeed_file


def check(path, *flags):
    words = ["--use_deepspeed", "--deepspeed_config_file", str(path), *flags, "train.py"]
    check_deepspeed_file(resolve(None, {}, parse_flags(words, {})))


def write(tmp_path, text):
    path = tmp_path / "ds.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def test_a_file_that_fits(tmp_path):
    path = write(tmp_path, {"bf16": {"enabled": True}, "fp16": {"enabled": False}})
    check(path)
    check(path, "--mixed_precision", "bf16")
    check(write(tmp_path, {"fp16": {"enabled": "auto"}}), "--mixed_precision", "bf16")


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("{", (), "it is not JSON"),
        ("[1]", (), "it holds list; expected a JSON object"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, (), "both enabled"),
        (
            {"fp16": {"enabled": True}},
            ("--mixed_precision", "bf16"),
            "fp16 is enabled in it, which contradicts --mixed_precision bf16",
        ),
    ],
)
def test_a_file_that_does_not(tmp_path, text, flags, message):
    with pytest.raises(ConfigError, match=message):
        check(write(tmp_path, text), *flags)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"ds\.json.*there is no such file"):
        check(tmp_path / "ds.json")


def test_text_in_the_place_of_a_path_is_left_to_the_run():
    check('{"zero_optimization": {"stage": 2}}')


def resolved(path, *flags):
    words = ["--use_deepspeed", "--deepspeed_config_file", str(path), *flags, "train.py"]
    return check_deepspeed_file(resolve(None, {}, parse_flags(words, {})))


ZERO = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "auto"}},
    "gradient_accumulation_steps": 4,
}
BESIDE = [
    ("--zero_stage 3", "deepspeed.zero_stage", None, "zero_optimization.stage 2"),
    ("--zero_stage 2", "deepspeed.zero_stage", 2, None),
    (
        "--zero3_save_16bit_model true",
        "deepspeed.zero3_save_16bit_model",
        None,
        "has no zero_optimization.stage3_gather",
    ),
    ("--zero3_save_16bit_model false", "deepspeed.zero3_save_16bit_model", False, None),
    ("--offload_optimizer_device cpu", "deepspeed.offload_optimizer_device", "cpu", None),
    (
        "--offload_param_device cpu",
        "deepspeed.offload_param_device",
        None,
        "has no zero_optimization.offload_param.device",
    ),
    ("--offload_param_device none", "deepspeed.offload_param_device", "none", None),
    ("--offload_param_nvme_path /x", "deepspeed.offload_param_nvme_path", None, "has no zero_optimization"),
    (
        "--offload_optimizer_nvme_path /x",
        "deepspeed.offload_optimizer_nvme_path",
        None,
        "has no zero_optimization",
    ),
    (
        "--gradient_accumulation_steps 2",
        "gradient_accumulation.num_steps",
        None,
        "gradient_accumulation_steps 4",
    ),
    ("--gradient_clipping 1.0", "deepspeed.gradient_clipping", 1.0, None),
    ("--zero3_init_flag true", "deepspeed.zero3_init_flag", True, None),
]


@pytest.mark.parametrize(("flags", "path", "value", "note"), BESIDE)
@pytest.mark.parametrize("as_text", [False, True])
def test_the_file_counts_beside_flags_and_it_is_said(tmp_path, flags, path, value, note, as_text):
    given = json.dumps(ZERO) if as_text else write(tmp_path, ZERO)
    found = resolved(given, *flags.split())
    assert found.values[path] == value
    assert len(found.notes) == (note is not None)
    if note is not None:
        assert f"{flags.removesuffix(' true')} is not used: --deepspeed_config_file" in found.notes[0]
        assert note in found.notes[0]


def test_a_launch_line_of_accelerate_with_a_file_is_read(tmp_path):
    file = write(tmp_path, {"zero_optimization": {"stage": 3}})
    flags = "--zero_stage 3 --zero3_save_16bit_model true --zero3_init_flag true"
    found = resolved(file, *flags.split())
    assert (found.values["deepspeed.zero_stage"], found.values["deepspeed.zero3_init_flag"]) == (3, True)
    assert len(found.notes) == 1


@pytest.mark.parametrize("place", ["fifo", "/dev/zero", "folder.json"])
def test_what_is_no_file_is_said(tmp_path, monkeypatch, place):
    monkeypatch.setattr("accel_state.whole_files._PATIENCE", 0.2)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match="it cannot be read: "):
        check(place if place.startswith("/") else tmp_path / place)
