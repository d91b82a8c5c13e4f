"""Options of torch.compile."""

import inspect

import pytest

from accel_state.config.sections.dynamo import DynamoSection
from accel_state.environment import patch_environment
from accel_state.errors import ConfigError
from accel_train import TorchDynamoPlugin
from accel_train.errors import OptionError


def test_the_signature_is_the_documented_one():
    parameters = inspect.signature(TorchDynamoPlugin).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "backend": None,
        "mode": None,
        "fullgraph": None,
        "dynamic": None,
        "options": None,
        "disable": False,
        "use_regional_compilation": None,
    }
    assert list(parameters)[4:] == ["options", "disable", "use_regional_compilation"]
    plugin = TorchDynamoPlugin("inductor", "max-autotune", True, False, {"a": 1}, True, True)
    assert plugin.to_kwargs() == {
        "backend": "inductor",
        "mode": "max-autotune",
        "fullgraph": True,
        "dynamic": False,
        "options": {"a": 1},
        "disable": True,
    }
    assert plugin.use_regional_compilation is True


def test_nothing_is_compiled_by_default():
    plugin = TorchDynamoPlugin()
    assert not plugin.enabled
    assert plugin.to_kwargs() == {}
    assert plugin.to_dict() == {
        "backend": "no",
        "mode": "default",
        "fullgraph": False,
        "dynamic": None,
        "options": None,
        "disable": False,
        "use_regional_compilation": False,
    }


def test_unset_options_come_from_the_environment():
    with patch_environment(
        accelerate_dynamo_backend="INDUCTOR",
        accelerate_dynamo_mode="reduce-overhead",
        accelerate_dynamo_use_fullgraph="yes",
        accelerate_dynamo_use_dynamic="true",
        accelerate_dynamo_use_regional_compilation="1",
    ):
        launched = TorchDynamoPlugin()
        given = TorchDynamoPlugin("eager", fullgraph=False, dynamic=False)
    assert launched.to_kwargs() == {
        "backend": "inductor",
        "mode": "reduce-overhead",
        "fullgraph": True,
        "dynamic": True,
    }
    assert launched.use_regional_compilation is True
    assert (given.compiler, given.fullgraph, given.dynamic) == ("eager", False, False)
    assert given.mode == "reduce-overhead"


def test_a_launcher_that_says_no_dynamic_shapes_leaves_it_to_torch():
    with patch_environment(accelerate_dynamo_use_dynamic="False"):
        assert TorchDynamoPlugin().dynamic is None
    assert TorchDynamoPlugin.from_section(DynamoSection(dynamic=False)).dynamic is None


@pytest.mark.parametrize("backend", ["eager", "EAGER", "Eager"])
def test_backends_are_found_in_any_case(backend):
    assert TorchDynamoPlugin(backend=backend).compiler == "eager"


def test_an_unknown_backend_is_refused():
    with pytest.raises(OptionError, match=r"Unknown dynamo backend 'inductr'; known: .*inductor"):
        TorchDynamoPlugin(backend="inductr")


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("ACCELERATE_DYNAMO_BACKEND", "inductr"),
        ("ACCELERATE_DYNAMO_MODE", "fast"),
        ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "perhaps"),
    ],
)
def test_a_wrong_variable_is_named(variable, text):
    with patch_environment(**{variable: text}), pytest.raises(ConfigError, match=f"{variable} is '{text}'"):
        TorchDynamoPlugin()
