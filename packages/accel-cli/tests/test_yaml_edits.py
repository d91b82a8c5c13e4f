"""Changes of a mapping inside YAML text, read back by PyYAML."""

import pytest
import yaml

from accel_cli.yaml_edits import edit_mapping
from accel_state.config.fsdp_conversion import Change

TEXT = """\
# a comment at the top
distributed_type: FSDP
fsdp_config:
  fsdp_version: 1  # the old one
  fsdp_sharding_strategy: FULL_SHARD
  # about offloading
  fsdp_offload_params: false
num_processes: 2
"""

CHANGES = [
    Change("fsdp_version", "set", 1, "fsdp_version", 2),
    Change("fsdp_sharding_strategy", "rename", "FULL_SHARD", "fsdp_reshard_after_forward", True),
    Change("fsdp_offload_params", "keep", False, "fsdp_offload_params", False),
    Change("fsdp_state_dict_type", "add", None, "fsdp_state_dict_type", "SHARDED_STATE_DICT"),
]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_values_change_and_everything_else_stays(line_end):
    edited = edit_mapping(TEXT.replace("\n", line_end), "fsdp_config", CHANGES)
    assert yaml.safe_load(edited) == {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "num_processes": 2,
    }
    for kept in ("# a comment at the top", "# the old one", "  # about offloading"):
        assert kept in edited
    assert edited.count("\n") == edited.count(line_end) == TEXT.count("\n") + 1


@pytest.mark.parametrize("key", ["fsdp_version", "fsdp_sharding_strategy", "fsdp_offload_params"])
def test_a_dropped_key_takes_its_line_along(key):
    edited = edit_mapping(TEXT, "fsdp_config", [Change(key, "drop", None, None, None)])
    expected = yaml.safe_load(TEXT)
    del expected["fsdp_config"][key]
    assert yaml.safe_load(edited) == expected
    assert edited.count("\n") == TEXT.count("\n") - 1


def test_the_last_line_needs_no_end():
    text = "outer:\n  a: 1\n  b: 2"
    edited = edit_mapping(text, "outer", [Change("b", "drop", 2, None, None)])
    assert yaml.safe_load(edited) == {"outer": {"a": 1}}


@pytest.mark.parametrize("value", ["yes", "a: b", "", None, 1e-5, [1, 2], "# no comment", "Layer, " * 40])
def test_a_value_is_read_back_as_it_was_given(value):
    edited = edit_mapping("outer:\n  a: 1\n  b: 2\n", "outer", [Change("a", "set", 1, "a", value)])
    assert yaml.safe_load(edited) == {"outer": {"a": value, "b": 2}}


@pytest.mark.parametrize(
    "text",
    [
        "outer: {a: 1}\n",
        "base: &base\n  a: 1\nouter:\n  <<: *base\n  b: 2\n",
        "base: &base\n  a: 1\nouter: *base\n",
    ],
    ids=["in braces", "merged", "anchor elsewhere"],
)
def test_a_mapping_that_is_written_otherwise_is_left_to_the_caller(text):
    changes = [Change("a", "set", 1, "a", 2)]
    assert edit_mapping(text, "outer", changes) is None


def add(name, value):
    return [Change(name, "add", None, name, value)]


@pytest.mark.parametrize(
    "text", [TEXT, TEXT.rstrip("\n"), TEXT + "# the end\n", TEXT + "dynamo_config:\n  a: |\n    b\n"]
)
@pytest.mark.parametrize("key", [None, "fsdp_config", "deepspeed_config"])
def test_a_new_entry_comes_last_and_every_line_stays(text, key):
    edited = edit_mapping(text, key, add("new", [1]))
    expected = yaml.safe_load(text)
    (expected if key is None else expected.setdefault(key, {}))["new"] = [1]
    assert yaml.safe_load(edited) == expected
    table = yaml.safe_load(edited) if key is None else yaml.safe_load(edited)[key]
    assert list(table)[-1] == "new"
    left = iter(edited.splitlines())
    assert all(line in left for line in text.splitlines()), "lines are gone, or in another order"


@pytest.mark.parametrize(
    "nothing", ["fsdp_config:\n", "fsdp_config:  # none\n", "fsdp_config: null\n", "fsdp_config: ~"]
)
def test_a_mapping_without_entries_gets_one(nothing):
    edited = edit_mapping(f"a: 1\n{nothing}", "fsdp_config", add("fsdp_version", 2))
    assert yaml.safe_load(edited) == {"a": 1, "fsdp_config": {"fsdp_version": 2}}
    assert ("# none" in edited) == ("# none" in nothing)
