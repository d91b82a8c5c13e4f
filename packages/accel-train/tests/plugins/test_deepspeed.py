"""Options of DeepSpeed: what fills "auto", what contradicts, what is refused. Needs no DeepSpeed."""

import base64
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from accel_state.environment import patch_environment
from accel_train import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, HfDeepSpeedConfig
from accel_train.errors import ArgumentTypeError, IncompatibleOptionsError, OptionError
from accel_train.plugins import DeepSpeedPlugins


def test_what_nobody_sets():
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 2
    assert plugin.deepspeed_config["zero_optimization"] == {"stage": 2}
    assert (plugin.gradient_accumulation_steps, plugin.gradient_clipping) == ("auto", "auto")
    assert (plugin.offload_optimizer_device, plugin.offload_param_nvme_path) == ("none", "none")
    assert plugin.zero3_save_16bit_model is False
    assert plugin.selected is False
    assert plugin.zero3_init_flag is False
    assert plugin.launched_precision is None
    assert plugin.accumulation_steps is None


def test_a_launcher_s_variables_fill_what_is_left_unset():
    environment = {
        "accelerate_deepspeed_zero_stage": "3",
        "accelerate_deepspeed_offload_optimizer_device": "cpu",
        "accelerate_deepspeed_offload_param_device": "none",
        "accelerate_deepspeed_zero3_init": "true",
        "accelerate_deepspeed_zero3_save_16bit_model": "true",
        "accelerate_gradient_clipping": "0.5",
    }
    with patch_environment(**environment):
        plugin = DeepSpeedPlugin(gradient_clipping=1.0)
    assert (plugin.zero_stage, plugin.gradient_clipping, plugin.zero3_init_flag) == (3, 1.0, True)
    assert plugin.deepspeed_config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }


@pytest.mark.parametrize("kind", ["path", "text", "base64", "mapping", "object"])
def test_every_form_of_a_configuration(tmp_path, kind):
    config = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 4}
    text = json.dumps(config)
    (tmp_path / "ds.json").write_text(text)
    given = {
        "path": str(tmp_path / "ds.json"),
        "text": text,
        "base64": base64.urlsafe_b64encode(text.encode()).decode(),
        "mapping": config,
        "object": HfDeepSpeedConfig(config),
    }[kind]
    plugin = DeepSpeedPlugin(hf_ds_config=given)
    assert plugin.deepspeed_config == config
    assert (plugin.zero_stage, plugin.launched_precision, plugin.accumulation_steps) == (1, "bf16", 4)
    if kind == "object":
        assert plugin.hf_ds_config is given


def test_auto_takes_the_plugin_s_values():
    config = {
        "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}},
        "gradient_clipping": "auto",
    }
    plugin = DeepSpeedPlugin(config, zero_stage=3, gradient_clipping=0.7, offload_optimizer_device="cpu")
    assert plugin.deepspeed_config == {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "gradient_clipping": 0.7,
    }
    assert config["gradient_clipping"] == "auto", "the script's mapping is not changed"


def test_questions_of_clients():
    plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 3}, "train_batch_size": "auto"})
    assert plugin.is_auto("train_batch_size")
    assert plugin.get_value("zero_optimization.stage") == 3
    assert plugin.get_value("a.b", 7) == 7
    assert plugin.hf_ds_config.is_zero3()
    assert not plugin.hf_ds_config.is_zero2()
    assert not plugin.hf_ds_config.is_offload()
    plugin.deepspeed_config_process(train_batch_size=8)
    assert plugin.deepspeed_config["train_batch_size"] == 8
    with pytest.raises(IncompatibleOptionsError, match=r"train_batch_size is 8 there and 16 in the script"):
        plugin.deepspeed_config_process(train_batch_size=16)
    plugin.set_mixed_precision("bf16")
    assert plugin.deepspeed_config["bf16"] == {"enabled": True}
    with pytest.raises(
        IncompatibleOptionsError, match=r"mixed_precision='fp16' contradicts bf16\.enabled=true"
    ):
        plugin.set_mixed_precision("fp16")
    plugin.hf_ds_config.del_config_sub_tree("zero_optimization", must_exist=True)
    with pytest.raises(OptionError, match="has no 'zero_optimization'"):
        plugin.hf_ds_config.del_config_sub_tree("zero_optimization", must_exist=True)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"zero_stage": 4}, OptionError, "stage is 4 in DeepSpeedPlugin; expected 0, 1, 2 or 3"),
        ({"enable_msamp": True}, OptionError, "no longer maintained"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, IncompatibleOptionsError, "needs ZeRO stage 3"),
        (
            {"zero_stage": 0, "offload_optimizer_device": "cpu"},
            IncompatibleOptionsError,
            "needs ZeRO stage 1",
        ),
        ({"zero_stage": 3, "offload_optimizer_device": "disk"}, OptionError, "known: none, cpu, nvme"),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, OptionError, "without nvme_path"),
        (
            {"hf_ds_config": "nowhere.json"},
            OptionError,
            "'nowhere.json' is neither a file that exists nor JSON",
        ),
        ({"hf_ds_config": "{'a': 1}"}, OptionError, "is not JSON: .* in line 1"),
        ({"hf_ds_config": "[1]"}, OptionError, "neither a file"),
        ({"hf_ds_config": 7}, ArgumentTypeError, "got int: 7"),
        (
            {"hf_ds_config": {"zero_optimization": {"stage": 2}}, "zero_stage": 3},
            IncompatibleOptionsError,
            "zero_stage=3 .* contradicts zero_optimization.stage in the dictionary of hf_ds_config, which says 2",
        ),
        (
            {"hf_ds_config": {"zero_optimization": {"stage": 2}}, "gradient_clipping": 1.0},
            IncompatibleOptionsError,
            "gradient_clipping=1.0 .* which does not set it",
        ),
    ],
)
def test_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        DeepSpeedPlugin(**arguments)


def test_a_file_that_contradicts_a_variable_is_named_with_both_values(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    environment = {"accelerate_deepspeed_config_file": str(file), "accelerate_deepspeed_zero_stage": "3"}
    with (
        patch_environment(**environment),
        pytest.raises(
            IncompatibleOptionsError, match=rf"zero_stage=3 .*--zero_stage.*{re.escape(str(file))}.* says 2"
        ),
    ):
        DeepSpeedPlugin()


def test_two_plugins_at_once_are_refused():
    with pytest.raises(
        IncompatibleOptionsError, match=r"deepspeed_plugin=DeepSpeedPlugin.* and fsdp_plugin=Fully"
    ):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin(), fsdp_plugin=FullyShardedDataParallelPlugin())


def test_precision_and_accumulation_of_script_and_configuration():
    plugin = DeepSpeedPlugin({"bf16": {"enabled": True}, "gradient_accumulation_steps": 4})
    with pytest.raises(IncompatibleOptionsError, match=r"asks for mixed_precision='fp16'.*enables bf16"):
        Accelerator(mixed_precision="fp16", deepspeed_plugin=plugin)
    with pytest.raises(IncompatibleOptionsError, match=r"asks for 2 gradient accumulation steps.*says 4"):
        Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=plugin)


def test_names_of_several_plugins():
    from accel_train.plugins import DeepSpeedPlugins

    one, two = DeepSpeedPlugin(zero_stage=1), DeepSpeedPlugin(zero_stage=3)
    plugins = DeepSpeedPlugins({"one": one, "two": two})
    assert plugins.active is one
    plugins.select("two")
    assert plugins.active is two
    with pytest.raises(OptionError, match="no DeepSpeed plugin 'three'; deepspeed_plugins has one, two"):
        plugins.select("three")
    with pytest.raises(OptionError, match="got dict for 'a'"):
        DeepSpeedPlugins({"a": {}})
    with pytest.raises(OptionError, match="got none"):
        DeepSpeedPlugins({})


def test_the_guide_says_of_every_field_whether_it_works():
    page = Path(__file__).parents[4] / "docs" / "guides" / "deepspeed.md"
    said = dict(re.findall(r"^\| `(\w+)` \| (works|refused) \|", page.read_text(), re.MULTILINE))
    assert said.keys() == {field.name for field in fields(DeepSpeedPlugin)}
    assert {name for name, what in said.items() if what == "refused"} == {"enable_msamp", "msamp_opt_level"}


def test_a_configuration_without_values_or_with_auto_reads_as_auto():
    for config in ({}, {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}):
        plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 1}, **config})
        assert (plugin.gradient_accumulation_steps, plugin.gradient_clipping) == ("auto", "auto")
        assert plugin.accumulation_steps is None
    given = DeepSpeedPlugin(gradient_accumulation_steps=3, gradient_clipping=0.5)
    assert (given.gradient_accumulation_steps, given.gradient_clipping, given.accumulation_steps) == (
        3,
        0.5,
        3,
    )


def test_one_of_several_is_selected_by_its_name():
    first, second = DeepSpeedPlugin(), DeepSpeedPlugin(zero_stage=1)
    several = DeepSpeedPlugins({"a": first, "b": second})
    assert (first.selected, second.selected) == (True, False)
    several.select("b")
    assert (first.selected, second.selected) == (False, True)
    with pytest.raises(OptionError, match=r"select_deepspeed_plugin\(name\)"):
        second.select()
