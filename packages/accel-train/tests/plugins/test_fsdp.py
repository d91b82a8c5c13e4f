"""Options of fully sharded data parallelism: which work, are translated, or are refused."""

import functools
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)

from accel_state.environment import patch_environment
from accel_state.errors import ConfigError
from accel_train import FullyShardedDataParallelPlugin as Plugin
from accel_train.errors import ArgumentTypeError, IncompatibleOptionsError, OptionError


def test_what_nobody_sets():
    plugin = Plugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.auto_wrap_policy is None
    assert plugin.cpu_offload == OffloadPolicy()
    assert plugin.sync_module_states is True
    assert plugin.cpu_ram_efficient_loading is False
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert plugin.mixed_precision_policy is None
    assert type(plugin.offload_policy) is OffloadPolicy
    assert plugin.translations == []


def test_a_launcher_s_variables_fill_what_is_left_unset():
    environment = {
        "fsdp_version": "2",
        "fsdp_reshard_after_forward": "false",
        "fsdp_offload_params": "true",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_cls_to_wrap": "Block,Other",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": "true",
        "fsdp_activation_checkpointing": "true",
        "fsdp_min_num_params": "7",
    }
    with patch_environment(**environment):
        plugin = Plugin(min_num_params=9)
    assert plugin.reshard_after_forward is False
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert plugin.transformer_cls_names_to_wrap == ("Block", "Other")
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    assert plugin.cpu_ram_efficient_loading is True
    assert plugin.activation_checkpointing is True
    assert plugin.min_num_params == 9
    with patch_environment(fsdp_version="3"), pytest.raises(ConfigError, match="FSDP_VERSION"):
        Plugin()


@pytest.mark.parametrize(
    ("given", "reshard", "hybrid"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, True, False),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, False, False),
        ({"sharding_strategy": 2}, False, False),
        ({"sharding_strategy": "hybrid_shard"}, True, True),
        ({"reshard_after_forward": "HYBRID_SHARD_ZERO2"}, False, True),
        ({"reshard_after_forward": "true"}, True, False),
        ({"reshard_after_forward": 4}, 4, False),
        ({"reshard_after_forward": True, "sharding_strategy": "SHARD_GRAD_OP"}, True, False),
    ],
)
def test_sharding_strategies_of_version_1(given, reshard, hybrid):
    plugin = Plugin(fsdp_version=1, **given)
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward == reshard
    assert type(plugin.reshard_after_forward) is type(reshard)
    assert plugin.is_hybrid is hybrid


def test_translations_are_said():
    plugin = Plugin(
        fsdp_version=1,
        sharding_strategy="HYBRID_SHARD",
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        use_orig_params=False,
        limit_all_gathers=False,
    )
    text = "\n".join(plugin.translations)
    for name in (
        "sharding_strategy=HYBRID_SHARD",
        "backward_prefetch",
        "use_orig_params",
        "limit_all_gathers",
    ):
        assert name in text
    assert Plugin(backward_prefetch="BACKWARD_PRE", use_orig_params=True).translations == []
    assert Plugin(sharding_strategy="FULL_SHARD").translations == []  # the launcher's default


@pytest.mark.parametrize(
    "given",
    [
        "bf16",
        torch.bfloat16,
        {"param_dtype": "bfloat16", "reduce_dtype": torch.bfloat16, "output_dtype": "bf16"},
        MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_precision_policy_has_many_forms(given):
    policy = Plugin(mixed_precision_policy=given).mixed_precision_policy
    assert policy == MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)


def test_a_precision_policy_of_version_1():
    policy = Plugin(
        mixed_precision_policy=MixedPrecision(torch.bfloat16, torch.float32)
    ).mixed_precision_policy
    assert policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (True, CPUOffloadPolicy),
        (CPUOffload(offload_params=True), CPUOffloadPolicy),
        (CPUOffload(offload_params=False), OffloadPolicy),
        (CPUOffloadPolicy(pin_memory=True), CPUOffloadPolicy),
    ],
)
def test_offloading(given, kind):
    plugin = Plugin(cpu_offload=given)
    assert type(plugin.offload_policy) is type(plugin.cpu_offload) is kind
    if given is True:
        assert plugin.offload_policy.pin_memory is torch.accelerator.is_available()


def test_names_and_enumerations():
    for given in ("full_state_dict", 1, StateDictType.FULL_STATE_DICT):
        assert Plugin(state_dict_type=given).state_dict_type is StateDictType.FULL_STATE_DICT
    for given in ("HYBRID_SHARD_ZERO2", 5, ShardingStrategy._HYBRID_SHARD_ZERO2):
        assert Plugin(sharding_strategy=given).sharding_strategy is ShardingStrategy._HYBRID_SHARD_ZERO2
    assert Plugin(backward_prefetch="NO_PREFETCH").backward_prefetch is None
    assert Plugin(auto_wrap_policy="transformer_based_wrap").auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    policy = functools.partial(isinstance)
    assert Plugin(auto_wrap_policy=policy).auto_wrap_policy is policy
    assert Plugin(transformer_cls_names_to_wrap="A, B,").transformer_cls_names_to_wrap == ("A", "B")
    linear = nn.Linear(1, 1)
    assert Plugin(ignored_modules=[linear]).ignored_modules == (linear,)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"fsdp_version": 3}, OptionError, "fsdp_version is 3"),
        ({"sharding_strategy": "NO_SHARD"}, OptionError, "train with ddp"),
        ({"sharding_strategy": "SHARD"}, OptionError, "known: FULL_SHARD"),
        ({"reshard_after_forward": 1}, OptionError, "at least 2"),
        ({"backward_prefetch": "later"}, OptionError, "BACKWARD_PRE"),
        ({"auto_wrap_policy": "wrap"}, OptionError, "NO_WRAP"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, OptionError, "SHARDED_STATE_DICT"),
        ({"state_dict_config": FullStateDictConfig()}, OptionError, "Leave it out"),
        ({"optim_state_dict_config": FullStateDictConfig()}, OptionError, "Leave it out"),
        ({"cpu_offload": "yes"}, ArgumentTypeError, "CPUOffloadPolicy"),
        ({"ignored_modules": "("}, OptionError, "regular expression"),
        ({"ignored_modules": ["layer"]}, ArgumentTypeError, "takes modules"),
        ({"forward_prefetch": 1}, ArgumentTypeError, "True or False"),
        ({"min_num_params": -1}, OptionError, "at least 0"),
        ({"dp_replicate_size": 0}, OptionError, "at least 1"),
        ({"mixed_precision_policy": "fp4"}, OptionError, "expected a dtype"),
        ({"mixed_precision_policy": {"buffer_dtype": "bf16"}}, OptionError, "buffer_dtype"),
        ({"mixed_precision_policy": 16}, ArgumentTypeError, "MixedPrecisionPolicy"),
        (
            {"cpu_ram_efficient_loading": True, "sync_module_states": False},
            IncompatibleOptionsError,
            "sync_module_states",
        ),
        (
            {"activation_checkpointing_offload": True},
            IncompatibleOptionsError,
            "activation_checkpointing=True",
        ),
        (
            {"dp_replicate_size": 2, "sharding_strategy": "FULL_SHARD"},
            IncompatibleOptionsError,
            "sharding_strategy=FULL_SHARD",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        Plugin(**given)


def test_positions_are_those_of_accelerate():
    names = [field.name for field in fields(Plugin)]
    plugin = Plugin(1, "SHARD_GRAD_OP", None, "BACKWARD_PRE")
    assert plugin.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert plugin.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    assert len(names) == len(set(names))
    order = list(inspect.signature(Plugin).parameters)
    assert order[16:21] == [
        "activation_checkpointing",
        "activation_checkpointing_offload",
        "cpu_ram_efficient_loading",
        "transformer_cls_names_to_wrap",
        "min_num_params",
    ]
    assert order[21:] == ["dp_replicate_size", "checkpoint"], "this library's own come last"


def test_the_guide_says_of_every_field_whether_it_works():
    page = Path(__file__).parents[4] / "docs" / "guides" / "fsdp-options.md"
    said = dict(re.findall(r"^\| `(\w+)` \| (works|translated|refused) \|", page.read_text(), re.MULTILINE))
    assert said.keys() == {field.name for field in fields(Plugin)}
    for name in (name for name, what in said.items() if what == "refused"):
        with pytest.raises(OptionError, match=f"{name}=.*Leave it out"):
            Plugin(**{name: FullStateDictConfig()})


def test_a_plugin_can_be_written_until_it_is_used():
    plugin = Plugin()
    plugin.auto_wrap_policy = policy = functools.partial(lambda module: False)
    plugin.transformer_cls_names_to_wrap = ["Block"]
    plugin.sharding_strategy = "SHARD_GRAD_OP"
    plugin.activation_checkpointing = True
    assert plugin.auto_wrap_policy is policy
    assert plugin.transformer_cls_names_to_wrap == ("Block",), "in the normal form"
    assert plugin.reshard_after_forward is False, "what follows from a value follows from the new one"
    with pytest.raises(OptionError, match="sharding_strategy is 'SOME'; known: FULL_SHARD"):
        plugin.sharding_strategy = "SOME"
    assert plugin.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP, "a refused value changes nothing"
    with pytest.raises(OptionError, match="has no option sharding_stategy"):
        plugin.sharding_stategy = "FULL_SHARD"
    plugin.mark_used()
    plugin.sharding_strategy = "SHARD_GRAD_OP"
    with pytest.raises(OptionError, match="after a model was prepared"):
        plugin.sharding_strategy = "FULL_SHARD"
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT


def test_methods_that_finish_a_plugin():
    plugin = Plugin(transformer_cls_names_to_wrap=["Linear"])
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16
    plugin.set_mixed_precision(torch.float16)
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16, "there was one"
    plugin.set_mixed_precision(torch.float16, override=True)
    assert plugin.mixed_precision_policy.reduce_dtype is torch.float16
    plugin.validate_mixed_precision_policy()
    plugin.validate_cpu_offload()
    plugin.set_auto_wrap_policy(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    with pytest.raises(
        OptionError, match=r"names 'Linear', and ReLU has no module of that class. It has: ReLU"
    ):
        plugin.set_auto_wrap_policy(torch.nn.ReLU())
    plugin.set_cpu_offload()
    plugin.set_state_dict_type()
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (
            {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "Block"},
            [True, False],
        ),
        ({"transformer_cls_names_to_wrap": ["Linear"]}, [False, True]),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 6}, [True, True]),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 7}, [False, False]),
    ],
)
def test_a_policy_for_a_model_is_a_function_that_version_1_takes(given, chosen):
    plugin = Plugin(**given)
    model = nn.Sequential(Block(), Block())
    for _ in range(2):  # a second model of the same kind
        plugin.set_auto_wrap_policy(model)
    plugin.set_mixed_precision("bf16")
    found = [
        plugin.auto_wrap_policy(module=module, recurse=False, nonwrapped_numel=6)
        for module in (model[0], model[0].inner)
    ]
    assert found == chosen, "and another field that is set afterwards leaves it"


def test_a_policy_without_names_stays_that_of_each_model():
    for given in (None, "NO_WRAP"):
        plugin = Plugin(auto_wrap_policy=given)
        plugin.set_auto_wrap_policy(nn.Sequential(Block()))
        assert plugin.auto_wrap_policy == given


def test_setters_after_a_model_was_prepared():
    plugin = Plugin(transformer_cls_names_to_wrap=["Block"], sharding_strategy="FULL_SHARD")
    plugin.mark_used()
    plugin.set_auto_wrap_policy(nn.Sequential(Block()))
    plugin.set_state_dict_type("FULL_STATE_DICT")
    plugin.sharding_strategy = "FULL_SHARD"
    plugin.sharding_strategy = ShardingStrategy.FULL_SHARD
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    assert callable(plugin.auto_wrap_policy)


def test_a_type_that_a_method_sets_outlives_other_changes():
    plugin = Plugin()
    plugin.set_state_dict_type("FULL_STATE_DICT")
    plugin.set_mixed_precision("bf16")
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
