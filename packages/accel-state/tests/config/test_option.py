"""Sections: frozen, compared by value, and a base for plugins."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from accel_state.config import DynamoSection, FsdpSection, LaunchConfig, MegatronLMSection, Section
from accel_state.config.option_types import option_type_of


@dataclass(frozen=True)
class Plugin(FsdpSection):
    """As plugins of other packages are made: the section's fields, and what cannot be serialised."""

    param_init_fn: Any = None


def test_a_plugin_is_a_section_with_more_fields():
    section = FsdpSection(cpu_offload=True)
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    plugin = Plugin(**values, param_init_fn=print)
    assert (plugin.cpu_offload, plugin.param_init_fn, plugin.fsdp_version) == (True, print, None)
    assert plugin == Plugin(cpu_offload=True, param_init_fn=print)
    assert plugin != section
    assert dataclasses.replace(plugin, fsdp_version=2).fsdp_version == 2


def test_sections_are_frozen_and_compared_by_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LaunchConfig().debug = True
    assert LaunchConfig(num_processes=2) == LaunchConfig(num_processes=2)
    assert LaunchConfig(num_processes=2) != LaunchConfig(num_processes=3)
    assert len({LaunchConfig(), LaunchConfig(), LaunchConfig(debug=True)}) == 2
    assert DynamoSection() != MegatronLMSection()
    assert DynamoSection() != object()


def test_a_section_shows_what_was_set():
    assert repr(LaunchConfig()) == "LaunchConfig()"
    shown = repr(LaunchConfig(num_processes=2, fsdp=FsdpSection(fsdp_version=2)))
    assert shown == "LaunchConfig(num_processes=2, fsdp=FsdpSection(fsdp_version=2))"


@pytest.mark.parametrize(
    ("kind", "active"),
    [
        ("FSDP", "use_fsdp"),
        ("DEEPSPEED", "use_deepspeed"),
        ("MEGATRON_LM", "use_megatron_lm"),
        ("XLA", "use_tpu"),
    ],
)
def test_the_distributed_type_answers_questions(kind, active):
    config = LaunchConfig(distributed_type=kind)
    names = ("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_tpu")
    assert [name for name in names if getattr(config, name)] == [active]
    assert not config.multi_accelerator
    assert LaunchConfig(distributed_type="MULTI_XPU").multi_accelerator
    assert not LaunchConfig(distributed_type="MULTI_CPU").multi_accelerator


def test_a_type_that_no_kind_reads_is_an_error_of_the_schema():
    with pytest.raises(TypeError, match="no option type for the annotation 'complex'"):
        option_type_of("complex")


def test_every_section_is_described():
    for section in (LaunchConfig, *(cls for cls in Section.__subclasses__() if cls is not Plugin)):
        assert section.__doc__
        assert not section.__doc__.startswith(f"{section.__name__}("), section
