"""Conversion of FSDP options, and that the plugin reads old and new files alike."""

import pytest

from accel_state.config.fsdp_conversion import convert_fsdp_options, converted
from accel_state.config.launch import LaunchConfig
from accel_state.config.schema import schema_of
from accel_state.config.sections.fsdp import FSDP_RESHARDS, FSDP_SHARDING_STRATEGIES
from accel_state.errors import ConfigError


def new(**options):
    return converted(convert_fsdp_options(options, "c.yaml"))


def test_every_strategy_has_a_translation():
    assert set(FSDP_RESHARDS) == set(FSDP_SHARDING_STRATEGIES)


@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "sharding_strategy", "fsdp_reshard_after_forward"])
@pytest.mark.parametrize("name", FSDP_SHARDING_STRATEGIES)
def test_strategies_by_name_number_and_any_case(key, name):
    number = FSDP_SHARDING_STRATEGIES.index(name) + 1
    for value in (name, name.lower(), number, str(number)):
        assert new(**{key: value}) == {"fsdp_version": 2, "fsdp_reshard_after_forward": FSDP_RESHARDS[name]}


def test_reshard_after_forward_takes_precedence():
    both = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}
    assert new(**both) == {"fsdp_version": 2, "fsdp_reshard_after_forward": False}
    unset = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": None}
    assert new(**unset) == {"fsdp_version": 2, "fsdp_reshard_after_forward": True}


def test_a_boolean_stays():
    assert new(fsdp_reshard_after_forward=True) == {"fsdp_version": 2, "fsdp_reshard_after_forward": True}


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "dp_replicate_size"),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, "MULTI_GPU"),
        ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "no LOCAL_STATE_DICT"),
        ({"fsdp_forward_prefetch": True}, "accel does"),
        ({"fsdp_sync_module_states": False}, "rank 0's weights"),
        ({"fsdp_sync_module_states": True}, None),
        ({"fsdp_forward_prefetch": False}, None),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, None),
    ],
)
def test_what_changes_the_run_is_marked(options, warned):
    (change,) = (change for change in convert_fsdp_options(options) if change.what != "add")
    assert change.warn is (warned is not None)
    assert warned is None or warned in change.why


def test_every_option_of_the_section_is_kept_or_has_a_reason():
    for bound in schema_of(LaunchConfig).options:
        if bound.section != "fsdp" or bound.attribute == "fsdp_version":
            continue
        value = True if "bool" in type(bound.option_type).__name__.lower() else None
        (change,) = (c for c in convert_fsdp_options({bound.keys[0]: value}) if c.what != "add")
        assert change.what == "keep" or change.why or change.what == "rename", bound.path


def test_values_that_version_1_does_not_know():
    with pytest.raises(ConfigError, match=r"c\.yaml: fsdp_sharding_strategy is 'ALL'; expected one of"):
        new(fsdp_sharding_strategy="ALL")
