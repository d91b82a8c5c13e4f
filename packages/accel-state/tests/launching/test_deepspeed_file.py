"""DeepSpeed's own configuration file is read before anything starts."""

import json

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
