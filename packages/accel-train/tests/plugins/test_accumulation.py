"""Options of gradient accumulation."""

import dataclasses

import pytest

from accel_state.environment import patch_environment
from accel_state.errors import ConfigError
from accel_train import GradientAccumulationPlugin
from accel_train.errors import OptionError


def test_the_signature_is_the_documented_one():
    fields = {field.name: field.default for field in dataclasses.fields(GradientAccumulationPlugin)}
    assert list(fields.items()) == [
        ("num_steps", None),
        ("adjust_scheduler", False),
        ("sync_with_dataloader", True),
        ("sync_each_batch", False),
    ]
    plugin = GradientAccumulationPlugin(2, True, False, True)
    assert (plugin.num_steps, plugin.adjust_scheduler) == (2, True)
    assert (plugin.sync_with_dataloader, plugin.sync_each_batch) == (False, True)


def test_what_differs_from_the_defaults_is_passed_on():
    assert GradientAccumulationPlugin().to_kwargs() == {}
    assert GradientAccumulationPlugin(1, sync_each_batch=True).to_kwargs() == {
        "num_steps": 1,
        "sync_each_batch": True,
    }


@pytest.mark.parametrize("steps", [0, -1, 1.5, "4", True])
def test_steps_are_whole_numbers_of_at_least_one(steps):
    with pytest.raises(OptionError, match=f"whole number of at least 1, got {steps!r}"):
        GradientAccumulationPlugin(num_steps=steps)


def test_a_number_of_numpy_becomes_a_plain_one():
    numpy = pytest.importorskip("numpy")
    assert type(GradientAccumulationPlugin(numpy.int64(3)).num_steps) is int


@pytest.mark.parametrize("text", ["four", "0", "1.5"])
def test_a_wrong_variable_is_named(text):
    with (
        patch_environment(accelerate_gradient_accumulation_steps=text),
        pytest.raises(ConfigError, match=f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS is '{text}'"),
    ):
        GradientAccumulationPlugin()
