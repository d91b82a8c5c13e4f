"""What the arguments of `Accelerator` come to, together with what the launcher asks for."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import accel_train
from accel_state import PartialState
from accel_state.config import codec
from accel_state.config.launch import LaunchConfig
from accel_state.config.launched import launched_config
from accel_state.config.option import Section
from accel_state.environment import patch_environment
from accel_state.errors import ConfigError, NotAvailableError
from accel_train import Accelerator, GradientAccumulationPlugin, TorchDynamoPlugin
from accel_train.errors import ArgumentTypeError, IncompatibleOptionsError
from accel_train.plugins import StrategyPlugin
from accel_train.setup import arguments


@dataclass(frozen=True, repr=False, eq=False)
class Sharded(StrategyPlugin, Section):
    """Stands for an outside package's plugin."""

    strategy: ClassVar[str] = "sharded"


@dataclass(frozen=True, repr=False, eq=False)
class Piped(StrategyPlugin, Section):
    """Stands for another one."""

    strategy: ClassVar[str] = "piped"


def launched(**variables):
    with patch_environment(**{f"ACCELERATE_{name}": value for name, value in variables.items()}):
        return launched_config()


def test_the_type_of_a_plugin_selects_the_strategy():
    plugin = Sharded()
    assert arguments.strategy_plugin(fsdp_plugin=None, deepspeed_plugin=None) is None
    assert arguments.strategy_plugin(fsdp_plugin=plugin, deepspeed_plugin=None) is plugin


def test_two_plugins_that_select_a_strategy_are_both_named():
    with pytest.raises(IncompatibleOptionsError) as caught:
        arguments.strategy_plugin(fsdp_plugin=Sharded(), torch_tp_plugin=None, megatron_lm_plugin=Piped())
    for part in ("fsdp_plugin=Sharded", "megatron_lm_plugin=Piped", "'sharded'", "'piped'"):
        assert part in str(caught.value)


def test_an_object_that_selects_none_is_not_available():
    with pytest.raises(NotAvailableError, match=r"Accelerator\(fsdp_plugin=object\(…\)\) is not available"):
        arguments.strategy_plugin(fsdp_plugin=object(), megatron_lm_plugin=Piped())


def test_the_launchers_steps_have_precedence_over_the_plain_argument():
    asked = launched(GRADIENT_ACCUMULATION_STEPS=4)
    assert arguments.accumulation_plugin(1, None, LaunchConfig()).num_steps == 1
    assert arguments.accumulation_plugin(1, None, asked).num_steps == 4
    assert arguments.accumulation_plugin(4, None, asked).num_steps == 4
    with pytest.warns(UserWarning, match=r"asks for 4 .* the script for 2; 4 is used"):
        assert arguments.accumulation_plugin(2, None, asked).num_steps == 4


@pytest.mark.parametrize("steps", [1, 2])
def test_t43_the_steps_of_a_plugin_have_precedence_over_the_launchers(steps):
    plugin = GradientAccumulationPlugin(num_steps=steps)
    with pytest.warns(UserWarning, match=rf"asks for 4 .* the script for {steps}; {steps} is used"):
        assert arguments.accumulation_plugin(1, plugin, launched(GRADIENT_ACCUMULATION_STEPS=4)) is plugin
    assert arguments.accumulation_plugin(1, plugin, LaunchConfig()) is plugin


def test_the_backend_replaces_the_launchers_and_keeps_its_other_options():
    asked = launched(DYNAMO_BACKEND="inductor", DYNAMO_MODE="max-autotune")
    assert arguments.dynamo_plugin(None, None, asked).to_kwargs() == {
        "backend": "inductor",
        "mode": "max-autotune",
    }
    assert arguments.dynamo_plugin("eager", None, asked).to_kwargs() == {
        "backend": "eager",
        "mode": "max-autotune",
    }
    plugin = TorchDynamoPlugin(backend="eager")
    assert arguments.dynamo_plugin(None, plugin, asked) is plugin


def test_an_accelerator_decodes_the_environment_once(monkeypatch):
    PartialState()  # decodes for itself, once per process
    decoded = []
    decode = codec.decode
    monkeypatch.setattr(codec, "decode", lambda environ: decoded.append(1) or decode(environ))
    Accelerator()
    assert len(decoded) == 1


def test_no_source_file_names_a_variable_of_the_schema():
    files = [path for path in Path(accel_train.__file__).parent.rglob("*.py*") if path.suffix != ".pyc"]
    naming = [path.name for path in files if "ACCELERATE_" in path.read_text("utf-8")]
    assert naming == []


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("MIXED_PRECISION", "half"),
        ("GRADIENT_ACCUMULATION_STEPS", "many"),
        ("DYNAMO_BACKEND", "inductr"),
        ("USE_FSDP", "perhaps"),
    ],
)
def test_a_wrong_variable_is_named_before_anything_is_begun(variable, text):
    from accel_state import PartialState

    with patch_environment(**{f"ACCELERATE_{variable}": text}):
        with pytest.raises(ConfigError, match=f"ACCELERATE_{variable} is '{text}'"):
            Accelerator()
        assert PartialState._shared_state == {}


@pytest.mark.parametrize("cpu", ["yes", "", 0, 1, None])
def test_cpu_is_a_truth_value(cpu):
    with pytest.raises(ArgumentTypeError, match=r"Accelerator\(cpu=…\) takes True or False, got"):
        Accelerator(cpu=cpu)


def test_a_section_of_the_launcher_is_not_changed():
    asked = launched(GRADIENT_ACCUMULATION_STEPS=4, DYNAMO_BACKEND="eager")
    before = dataclasses.replace(asked)
    with pytest.warns(UserWarning, match="4 is used"):
        arguments.accumulation_plugin(2, None, asked)
    arguments.dynamo_plugin("inductor", None, asked)
    assert asked == before
