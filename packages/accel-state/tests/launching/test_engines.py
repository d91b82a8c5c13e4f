"""The one table of engines that do not exist yet, and what derives from it."""

import pytest

from accel_state.config.launch import LaunchConfig
from accel_state.config.schema import schema_of
from accel_state.environment import decode, patch_environment
from accel_state.launching.engines import (
    MISSING_ENGINES,
    MISSING_SECTIONS,
    MISSING_TYPES,
    missing_engine,
    missing_engines,
    variable_of,
)


@pytest.mark.parametrize("engine", MISSING_ENGINES, ids=lambda engine: engine.name)
def test_every_row_names_a_section_and_a_choice_of_the_schema(engine):
    schema = schema_of(LaunchConfig)
    assert engine.section in schema.sections
    bound = schema.by_path[engine.option]
    assert engine.value is True if bound.default is False else engine.value in bound.about.choices


@pytest.mark.parametrize("engine", MISSING_ENGINES, ids=lambda engine: engine.name)
def test_the_variable_of_an_engine_asks_for_it(engine):
    name = variable_of(engine)
    with patch_environment(**{name: "true" if "_USE_" in name else engine.value}):
        assert missing_engines(decode()) == [engine]


def test_what_exists_is_not_missing():
    assert missing_engines(LaunchConfig()) == []
    assert missing_engine("distributed_type", "MULTI_GPU") is None
    assert missing_engine("mixed_precision", "bf16") is None
    assert missing_engine("mixed_precision", "FSDP") is None
    assert missing_engine("distributed_type", "FSDP").section == "fsdp"


def test_the_tables_of_the_launcher_follow_from_the_one():
    assert set(MISSING_SECTIONS) == {engine.section for engine in MISSING_ENGINES}
    assert all(missing_engine("distributed_type", kind).name == name for kind, name in MISSING_TYPES.items())
