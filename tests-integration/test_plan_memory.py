"""What a rank takes at most in a training step, against what ``accel plan`` says, on CPU ranks.

Measured are bytes of live tensors before each call, and resident memory inside it, which a process gives back at once
here. `hatch run engines:deepspeed` runs the cases of DeepSpeed.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from accel_bigmodel import init_empty_weights
from accel_bigmodel.planning.footprints.base import Setting, Workload
from accel_bigmodel.planning.footprints.registry import footprint
from accel_bigmodel.planning.model import shape_of_model
from accel_bigmodel.planning.timelines import text_inputs, timelines_of
from testkit import worlds
from testkit.memory import freed_at_once, growth, tensor_bytes

TOLERANCE = 0.15
BLOCKS = 12
LENGTH = 256
BUCKET = 2_000_000


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Toy(nn.Module):
    def __init__(self, width=640):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(BLOCKS)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Case:
    model: str
    setting: Setting
    precision: str = "no"
    batch_size: int = 2
    micro_batches: int = 1

    @property
    def name(self):
        precision = "" if self.precision == "no" else f"-{self.precision}"
        experts = "" if self.setting.experts == 1 else f"-experts{self.setting.experts}"
        window = "" if self.micro_batches == 1 else f"-window{self.micro_batches}"
        return f"{self.model}-{self.setting.name}-{self.setting.shards}{experts}{precision}{window}"


def build(name):
    if name == "toy":
        return Toy()
    import transformers

    if name == "mixture":
        config = transformers.Qwen3MoeConfig(
            vocab_size=8000, hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
            head_dim=32, moe_intermediate_size=512, num_experts=8, num_experts_per_tok=2, use_cache=False,
        )  # fmt: skip
        return transformers.Qwen3MoeForCausalLM(config)
    config = transformers.LlamaConfig(
        vocab_size=8000, hidden_size=512, num_hidden_layers=8, intermediate_size=1536, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def inputs_of(name, model):
    if name == "toy":
        return lambda samples: {"x": torch.empty(64 * samples, 640, device="meta")}
    return text_inputs(model, LENGTH)


def planned(case):
    with init_empty_weights(include_buffers=False):
        model = build(case.model)
    workload = Workload(
        case.batch_size, precision=case.precision, micro_batches=case.micro_batches, accelerator=False
    )
    timelines = timelines_of(model, inputs_of(case.model, model))
    return footprint(shape_of_model(model), case.setting, workload, timelines)


def accelerator_of(case):
    from accel_train import (
        Accelerator,
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
    )

    options = {
        "cpu": True,
        "mixed_precision": case.precision,
        "gradient_accumulation_steps": case.micro_batches,
    }
    setting = case.setting
    if setting.strategy == "fsdp2":
        options["parallelism_config"] = ParallelismConfig(ep_size=setting.experts)
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            reshard_after_forward=setting.reshard, activation_checkpointing=setting.checkpointing
        )
    if setting.strategy == "pp":
        options["parallelism_config"] = ParallelismConfig(
            pp_size=setting.stages, dp_replicate_size=setting.shards
        )
    if setting.strategy == "pp x fsdp2":
        options["parallelism_config"] = ParallelismConfig(
            pp_size=setting.stages, dp_shard_size=setting.shards
        )
    if setting.strategy == "deepspeed":
        zero = {"stage": setting.stage, "reduce_bucket_size": setting.bucket}
        options["deepspeed_plugin"] = DeepSpeedPlugin(
            hf_ds_config={"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"}
        )
    return Accelerator(**options)


def free_what_was_sent():
    """gloo keeps what ranks sent each other last, which was a weight; plans do not count it."""
    from accel_state.operations.collectives import broadcast

    for _ in range(4):
        broadcast(torch.zeros(1 << 16))


def measure(case):
    """The most that this rank takes in its third step, and what it holds before."""
    freed_at_once()
    accelerator = accelerator_of(case)
    before = tensor_bytes()
    torch.manual_seed(0)
    model = build(case.model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    if case.setting.stages > 1:
        free_what_was_sent()
    found = {}
    for _ in range(3):  # DDP arranges its buckets anew in the second step
        kept = tensor_bytes() - before
        found = {"kept": kept, "forward": 0, "backward": 0}
        for _ in range(case.micro_batches):
            if case.model == "toy":
                batch = {"x": torch.randn(64 * case.batch_size, 640)}
            else:
                ids = torch.randint(0, 8000, (case.batch_size, LENGTH))
                batch = {"input_ids": ids, "labels": ids}
            begun = tensor_bytes() - before
            with accelerator.accumulate(model):
                with growth() as forward:
                    output = model(**batch)
                    loss = output.square().mean() if case.model == "toy" else output.loss
                with growth() as backward:
                    accelerator.backward(loss)
                    del loss, output
                ended = tensor_bytes() - before
                with growth() as step:
                    optimizer.step()
                optimizer.zero_grad()
            found["forward"] = max(found["forward"], begun + forward.peak)
            found["backward"] = max(found["backward"], begun + forward.end + backward.peak)
        found |= {"step": ended + step.peak, "ended": ended}
    return found


def zero(stage):
    return Setting(f"zero{stage}", "deepspeed", 2, stage=stage, bucket=BUCKET)


full = pytest.mark.full
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="hatch run engines:deepspeed installs it"
)
SETTINGS = [
    Setting("single", "single"),
    Setting("ddp", "ddp", 2),
    Setting("fsdp2", "fsdp2", 2),
    Setting("gathered", "fsdp2", 2, reshard=False),
    Setting("recomputed", "fsdp2", 2, checkpointing=True),
    *map(zero, (1, 2, 3)),
]
CASES = [Case(model, setting) for model in ("llama", "toy") for setting in SETTINGS]
CASES += [Case("llama", setting, "bf16") for setting in SETTINGS]
CASES += [
    Case("llama", setting, precision, micro_batches=3)
    for setting in SETTINGS
    if setting.name in ("ddp", "fsdp2", "zero1", "zero2")
    for precision in ("no", "bf16")
]
CASES += [Case("mixture", Setting("experts", "fsdp2", 2, experts=experts)) for experts in (1, 2)]


def marks(case):
    return [needs_deepspeed] if case.setting.strategy == "deepspeed" else [full]


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case), id=case.name) for case in CASES])
def test_the_peak_of_a_step(case):
    pytest.importorskip("transformers")
    said = planned(case)
    for found in worlds.run(measure, case.setting.shards, case, timeout=400):
        most = max(found["forward"], found["backward"], found["step"])
        deviation = said.peak.total / most - 1
        parts = {key: value >> 20 for key, value in found.items()}
        print(json.dumps({"case": case.name, "planned": said.peak.total / 2**20, "when": said.peak.when,
                          "deviation": round(deviation, 3), **parts}))  # fmt: skip
        assert abs(deviation) < TOLERANCE
        assert abs(said.kept / found["kept"] - 1) < TOLERANCE


SHARDED = Setting("pp x fsdp2", "pp x fsdp2", 2, stages=2)
STAGED = [
    Case("llama", Setting("pp", "pp", stages=2), batch_size=8),
    Case("llama", Setting("pp", "pp", stages=2), "bf16", batch_size=8),
    Case("llama", Setting("pp", "pp", stages=4), batch_size=8),
    Case("llama", SHARDED, batch_size=8),
    Case("llama", SHARDED, "bf16", batch_size=8),
]


@full
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{case.name}-{case.setting.stages}") for case in STAGED]
)
def test_the_peak_of_the_stage_with_the_most(case):
    """A call of the model runs forward and backward."""
    pytest.importorskip("transformers")
    said = planned(case)
    ranks = worlds.run(measure, case.setting.stages * case.setting.shards, case, timeout=400)
    most = max(max(found["forward"], found["backward"], found["step"]) for found in ranks)
    kept = max(found["kept"] for found in ranks)
    print(json.dumps({"case": case.name, "planned": said.peak.total / 2**20, "when": said.peak.when,
                      "ranks": [{key: value >> 20 for key, value in found.items()} for found in ranks],
                      "kept": said.kept / 2**20}))  # fmt: skip
    assert abs(said.peak.total / most - 1) < 0.10
    assert abs(said.kept / kept - 1) < 0.10
