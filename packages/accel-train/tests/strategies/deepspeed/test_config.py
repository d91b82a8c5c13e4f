"""Filling in a DeepSpeed configuration from the script. Needs no DeepSpeed."""

import types

import pytest
import torch
from torch import nn

from accel_state import PartialState
from accel_train import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accel_train.errors import IncompatibleOptionsError, OptionError
from accel_train.strategies.deepspeed.config import Script, check_known, engine_config


def script(**changed):
    model = nn.Linear(2, 2)
    model.config = types.SimpleNamespace(hidden_size=8)
    given = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "scheduler": None,
        "batch_sizes": [4, 8],
        "ranks": 2,
        "precision": "no",
    }
    return Script(**{**given, **changed})


def test_batch_sizes_precision_and_the_owner_of_the_step():
    plugin = DeepSpeedPlugin(zero_stage=1)
    config = engine_config(plugin, script(precision="bf16"))
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert "train_batch_size" not in config, "the engine multiplies"
    assert config["managed_gradient_accumulation"] is False
    assert config["bf16"] == {"enabled": True}
    assert config["gradient_clipping"] == 0.0
    assert plugin.deepspeed_config["train_batch_size"] == "auto", "the plugin is not changed"
    largest = DeepSpeedPlugin(zero_stage=1, is_train_batch_min=False)
    assert engine_config(largest, script())["train_micro_batch_size_per_gpu"] == 8


def test_what_the_model_and_placeholders_tell():
    model = nn.Linear(2, 2)
    model.config = types.SimpleNamespace(text_config=types.SimpleNamespace(hidden_sizes=[4, 10]))
    optimizer = DummyOptim(model.parameters(), lr=0.3, weight_decay=0.2, betas=(0.8, 0.9))
    scheduler = DummyScheduler(optimizer, total_num_steps=50, warmup_num_steps=5)
    plugin = DeepSpeedPlugin(
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
            },
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto"}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_max_lr": "auto", "total_num_steps": "auto", "warmup_num_steps": "auto"},
            },
        }
    )
    config = engine_config(plugin, script(model=model, optimizer=optimizer, scheduler=scheduler))
    zero = config["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (100, 90)
    assert config["optimizer"]["params"] == {"lr": 0.3, "weight_decay": 0.2, "betas": (0.8, 0.9)}
    assert config["scheduler"]["params"] == {
        "warmup_max_lr": 0.3, "total_num_steps": 50, "warmup_num_steps": 5,
    }  # fmt: skip


@pytest.mark.parametrize(("ranks", "total"), [(1, 50), (2, 25), (4, 13)])
def test_a_schedule_is_planned_for_one_process(ranks, total):
    """DeepSpeed refuses a warm-up of 0 steps, the default of the placeholder."""
    optimizer = DummyOptim([nn.Parameter(torch.ones(1))])
    scheduler = DummyScheduler(optimizer, total_num_steps=50)
    section = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}
    plugin = DeepSpeedPlugin({"optimizer": {"type": "AdamW"}, "scheduler": section})
    config = engine_config(plugin, script(optimizer=optimizer, scheduler=scheduler, schedule_steps=ranks))
    assert config["scheduler"]["params"] == {"total_num_steps": total, "warmup_num_steps": 1}


def test_one_scheduler():
    optimizer = DummyOptim([nn.Parameter(torch.ones(1))])
    scheduler = DummyScheduler(optimizer, lr_scheduler_callable=lambda real: None)
    plugin = DeepSpeedPlugin({"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}})
    with pytest.raises(
        IncompatibleOptionsError, match=r"lr_scheduler_callable, but .* 'scheduler' \(WarmupLR\)"
    ):
        engine_config(plugin, script(optimizer=optimizer, scheduler=scheduler))


def test_other_sections_pass_through():
    extra = {
        "tensor_parallel": {"autotp_size": 2},
        "comms_logger": {"enabled": False},
        "new_section": {"x": [1]},
    }
    config = engine_config(DeepSpeedPlugin(extra), script())
    assert {name: config[name] for name in extra} == extra


@pytest.mark.parametrize(
    ("config", "changed", "error", "match"),
    [
        ({"train_batch_size": 100}, {}, IncompatibleOptionsError, r"train_batch_size is 100 .* are 8"),
        (
            {"train_micro_batch_size_per_gpu": 3}, {}, IncompatibleOptionsError,
            r"train_micro_batch_size_per_gpu is 3 .* batches of 4, 8 samples",
        ),
        (
            {"optimizer": {"type": "Adam"}}, {}, IncompatibleOptionsError,
            r"section 'optimizer' \(Adam\), but the script prepares SGD\. Prepare DummyOptim",
        ),
        (
            {}, {"optimizer": DummyOptim([nn.Parameter(torch.ones(1))])}, IncompatibleOptionsError,
            r"prepares DummyOptim, .* has none\. Add the section",
        ),
        (
            {"zero_optimization": {"stage": 3, "sub_group_size": "auto"}}, {}, OptionError,
            r"zero_optimization.sub_group_size is \"auto\" .* the script does not set",
        ),
        ({"fp16": {"enabled": True}}, {"precision": "bf16"}, IncompatibleOptionsError, "contradicts fp16.enabled"),
    ],
)  # fmt: skip
def test_refused(config, changed, error, match):
    with pytest.raises(error, match=match):
        engine_config(DeepSpeedPlugin(config), script(**changed))


def test_names_that_look_misspelt_are_reported(caplog):
    PartialState(cpu=True)  # by which loggers know their rank
    check_known(
        {"zero_optimisation": {}, "gradient_acumulation_steps": 2, "new_section": {}, "bf16": {}}, "ds.json"
    )
    first, second = (record.getMessage() for record in caplog.records)
    assert "'zero_optimisation' in ds.json" in first
    assert "did you mean 'zero_optimization'?" in first
    assert "did you mean 'gradient_accumulation_steps'?" in second


def test_deepcompile_is_refused():
    with pytest.raises(OptionError, match=r"compile\.deepcompile"):
        check_known({"compile": {"deepcompile": True}}, "ds.json")
