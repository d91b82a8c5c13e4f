"""What plugins share: values from a decoded section or from the environment, and the choice of a strategy."""

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from accel_state.config import codec
from accel_state.config.launch import LaunchConfig
from accel_state.config.launched import launched_config
from accel_state.config.option import Section
from accel_state.config.schema import schema_of
from accel_state.environment import patch_environment
from accel_train.plugins import GradientAccumulationPlugin, SectionPlugin, StrategyPlugin, TorchDynamoPlugin
from accel_train.plugins.base import positional

PLUGINS = [GradientAccumulationPlugin, TorchDynamoPlugin]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_declares_no_field_of_its_section_again(plugin):
    section = schema_of(LaunchConfig).sections[plugin.section]
    assert issubclass(plugin, section)
    inherited = {field.name for field in dataclasses.fields(section)}
    assert not inherited & inspect.get_annotations(plugin).keys()
    assert inherited < {field.name for field in dataclasses.fields(plugin)}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_is_frozen(plugin):
    made = plugin()
    for field in dataclasses.fields(made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, None)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_constructor_and_from_section_give_the_same(plugin):
    variables = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": 3, "ACCELERATE_DYNAMO_MODE": "reduce-overhead"}
    for environ in ({}, variables):
        with patch_environment(**environ):
            launched = launched_config()
            built = plugin()
        section = getattr(launched, plugin.section)
        assert plugin.from_section(section) == built
        assert plugin.from_section(built) == built


@pytest.mark.parametrize("plugin", PLUGINS)
def test_from_section_reads_no_environment(plugin, monkeypatch):
    section = getattr(LaunchConfig(), plugin.section)

    def forbidden(*arguments):
        raise AssertionError("decoded")

    monkeypatch.setattr(codec, "decode", forbidden)
    assert isinstance(plugin.from_section(section), plugin)
    with pytest.raises(AssertionError, match="decoded"):
        plugin()


def test_a_constructor_decodes_once_and_only_for_what_is_unset(monkeypatch):
    decoded = []
    decode = codec.decode
    monkeypatch.setattr(codec, "decode", lambda *arguments: decoded.append(1) or decode(*arguments))
    TorchDynamoPlugin()
    assert len(decoded) == 1
    TorchDynamoPlugin("eager", "default", False, False, use_regional_compilation=False)
    GradientAccumulationPlugin(num_steps=2)
    assert len(decoded) == 1


def test_values_are_read_when_a_plugin_is_built_and_stay():
    with patch_environment(accelerate_gradient_accumulation_steps=3):
        plugin = GradientAccumulationPlugin()
    assert plugin.num_steps == 3
    assert GradientAccumulationPlugin().num_steps is None


@dataclass(frozen=True, repr=False, eq=False)
class Listed(SectionPlugin, type(LaunchConfig().gradient_accumulation)):
    """Has a field that is made for each instance."""

    section: ClassVar[str] = "gradient_accumulation"

    names: list[str] = dataclasses.field(default_factory=list)


def test_each_plugin_has_its_own_mutable_values():
    first, second = (Listed.from_section(LaunchConfig().gradient_accumulation) for _ in range(2))
    assert first.names == []
    assert first.names is not second.names


def test_positional_reorders_the_constructor_alone():
    @positional("c", "a", "b")
    @dataclass(frozen=True)
    class Options:
        a: int = 1
        b: int = 2
        c: int = 3

    assert list(inspect.signature(Options).parameters) == ["c", "a", "b"]
    assert Options(30) == Options(c=30)
    assert Options(30, 10, 20) == Options(a=10, b=20, c=30)
    assert dataclasses.replace(Options(30), a=5) == Options(30, 5)
    for arguments, options in [((1, 2, 3, 4), {}), ((1,), {"c": 2}), ((), {"d": 1})]:
        with pytest.raises(TypeError):
            Options(*arguments, **options)


def test_positional_names_every_field():
    with pytest.raises(TypeError, match="must name its fields: a, b; got a"):

        @positional("a")
        @dataclass
        class Options:
            a: int = 1
            b: int = 2


def test_a_plugin_that_selects_no_strategy_is_refused_when_it_is_defined():
    with pytest.raises(TypeError, match="Nothing is a StrategyPlugin without a strategy"):

        class Nothing(StrategyPlugin):
            pass


def test_a_strategy_plugin_may_extend_a_section():
    @dataclass(frozen=True, repr=False, eq=False)
    class Options(StrategyPlugin, Section):
        strategy: ClassVar[str] = "elsewhere"
        size: Any = 2

    assert Options(size=3).strategy == "elsewhere"
    assert "strategy" not in {field.name for field in dataclasses.fields(Options)}
