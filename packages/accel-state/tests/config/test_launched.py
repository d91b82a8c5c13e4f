"""``accel_state.config.launched``: what a rank reads of its environment."""

import pytest

from accel_state.config.launch import LaunchConfig
from accel_state.config.launched import launched_config
from accel_state.environment import clear_environment, patch_environment
from accel_state.errors import ConfigError


def test_the_environment_is_read_at_each_call():
    with clear_environment():
        assert launched_config() == LaunchConfig()
        with patch_environment(accelerate_mixed_precision="bf16", accelerate_use_cpu="true"):
            assert launched_config() == LaunchConfig(mixed_precision="bf16", use_cpu=True)


def test_a_wrong_variable_is_named():
    with (
        clear_environment(),
        patch_environment(accelerate_mixed_precision="bf17"),
        pytest.raises(ConfigError, match="ACCELERATE_MIXED_PRECISION is 'bf17'"),
    ):
        launched_config()
