"""Which ranks read weights: what transformers and the plugin find in the environment."""

import pytest

from accel_state import environment
from accel_state.config.launched import launched_config
from accel_train import disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading
from accel_train.plugins.fsdp import FullyShardedDataParallelPlugin


@pytest.fixture(autouse=True)
def restored():
    with environment.patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        yield


@pytest.mark.parametrize(("before", "after"), [(None, "true"), ("1", "1")])
def test_enabling(before, after, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", before or "")
    if before is None:
        monkeypatch.delenv("ACCELERATE_USE_FSDP")
    enable_fsdp_ram_efficient_loading()
    assert environment.get("ACCELERATE_USE_FSDP") == after
    assert environment.parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING")
    assert launched_config().fsdp.cpu_ram_efficient_loading is True


def test_disabling_after_enabling(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    enable_fsdp_ram_efficient_loading()
    disable_fsdp_ram_efficient_loading()
    assert not environment.parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING")
    assert launched_config().fsdp.cpu_ram_efficient_loading is False
    assert FullyShardedDataParallelPlugin().cpu_ram_efficient_loading is False
