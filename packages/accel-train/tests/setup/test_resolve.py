"""From what was asked for to a plan."""

import sys
import types
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from accel_state.config.option import Section
from accel_state.environment import patch_environment
from accel_state.host.available import is_megatron_lm_available
from accel_train import Accelerator
from accel_train.errors import OptionError
from accel_train.plugins import StrategyPlugin
from accel_train.strategies.base import Strategy
from testkit import plug_ins


class Outside(Strategy):
    """A strategy as another package would write it."""

    name: ClassVar[str] = "outside"


@dataclass(frozen=True, repr=False, eq=False)
class OutsidePlugin(StrategyPlugin, Section):
    """Its options, whose type selects it."""

    strategy: ClassVar[str] = "outside"
    size: int = 2


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed package whose entry point is the strategy."""
    module = types.ModuleType("outside_package")
    module.Outside = Outside
    points = {"accel_train.strategies": {"outside": "Outside"}}
    plug_ins.install(monkeypatch, tmp_path, "outside_package", "", points)
    monkeypatch.setitem(sys.modules, "outside_package", module)


@pytest.mark.usefixtures("installed")
def test_a_strategy_of_an_outside_package_is_selected_by_its_plugin_and_trains():
    plugin = OutsidePlugin(size=3)
    accelerator = Accelerator(fsdp_plugin=plugin)
    assert "strategy='outside'" in repr(accelerator)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    before = model.weight.detach().clone()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.5)
    assert accelerator.strategy.options.config is plugin


def test_a_strategy_that_is_not_installed_is_named():
    with pytest.raises(
        OptionError, match="Unknown strategy 'outside'; known: ddp, deepspeed, fsdp2, megatron, pp, single"
    ):
        Accelerator(fsdp_plugin=OutsidePlugin())


def test_a_script_may_choose_another_precision_than_the_launcher():
    with patch_environment(accelerate_mixed_precision="fp8"):
        assert Accelerator(mixed_precision="bf16").mixed_precision == "bf16"


def test_unknown_names_of_precisions_are_explained():
    with pytest.raises(ValueError, match="Did you mean 'bf16'"):
        Accelerator(mixed_precision="bf17")
    with pytest.raises(ValueError, match="mixed_precision='fp16'"):
        Accelerator(fp16=True)


@pytest.mark.skipif(is_megatron_lm_available(), reason="megatron-core is installed")
def test_an_engine_asked_for_by_the_launcher_is_not_silently_replaced(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(RuntimeError, match="'megatron' needs megatron-core"):
        Accelerator()


def test_a_strategy_of_several_processes_says_how_one_goes_on(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(
        OptionError, match=r"'fsdp2' needs more .* or leave the strategy out \(--use_fsdp, .* too\."
    ):
        Accelerator(cpu=True)
