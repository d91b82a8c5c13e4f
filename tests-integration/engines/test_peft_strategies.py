"""Adapters of PEFT under every strategy but fsdp2 (`test_peft.py`), against plain PyTorch on one process.

`hatch run engines:deepspeed` runs the cases of DeepSpeed.
"""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

from testkit import worlds
from testkit.adapters import adapter, adapters_of, base, close, make, optimizer_of, plain, samples, trained

pytest.importorskip(
    "peft", reason="hatch run engines:peft installs it, and with it Accelerate, which it needs"
)
no_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="hatch run engines:deepspeed installs it"
)
STRATEGIES = [
    ("single", 1),
    ("ddp", 2),
    pytest.param("ddp", 4, marks=pytest.mark.full),
    ("tp", 2),  # transformers divides a model among all ranks
    pytest.param("deepspeed2", 2, marks=no_deepspeed),
    pytest.param("deepspeed3", 2, marks=no_deepspeed),
    pytest.param("deepspeed3", 4, marks=[no_deepspeed, pytest.mark.full]),
]
strategies = pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)


class Run:
    """The script on ranks; under "tp" both ranks read the same samples."""

    def __init__(self, strategy, folder, zeroed=False):
        from accel_train import (
            Accelerator,
            DeepSpeedPlugin,
            DistributedDataParallelKwargs,
            TorchTensorParallelPlugin,
        )

        if strategy.startswith("deepspeed"):
            config = {
                "zero_optimization": {"stage": int(strategy[-1])},
                "train_micro_batch_size_per_gpu": "auto",
            }
            self.accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        elif strategy == "tp":
            self.accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
        else:  # four ranks would otherwise add in another order after a resume
            handler = DistributedDataParallelKwargs(find_unused_parameters=True)
            self.accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        model = divided(folder) if strategy == "tp" else make()
        if zeroed:
            for parameter in trained(model):
                torch.nn.init.zeros_(parameter)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer_of(trained(model)))

    def steps(self, count=3, begin=0):
        accelerator, batch = self.accelerator, self.accelerator.strategy.batch
        seen = []
        for step in range(begin, begin + count):
            ids = samples(step).chunk(batch.size)[batch.index]
            loss = self.model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append((accelerator.reduce(loss.detach(), "mean").item(), norm.item()))
        return seen


def divided(folder):
    """The model as transformers divides it by its plan, with an adapter on top."""
    from peft import get_peft_model
    from torch.distributed.tensor import DTensor, distribute_tensor
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    model = LlamaForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2), dtype=torch.float32
    )
    model = get_peft_model(model, adapter(init_lora_weights=False))
    # PEFT divides the halves of an adapter as their layer, and draws other values for what is smaller then.
    values = dict(make().named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                value = distribute_tensor(values[name], parameter.device_mesh, parameter.placements)
                parameter.to_local().copy_(value.to_local())
            else:
                parameter.copy_(values[name])
    return model


def train(strategy, folder):
    run = Run(strategy, folder / "base")
    accelerator = run.accelerator
    seen = run.steps()
    state = accelerator.get_state_dict(run.model)
    mine = accelerator.unwrap_model(run.model)
    mine.save_pretrained(folder / "out", state_dict=state, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    return seen, adapters_of(mine, state), state


@strategies
def test_t37_adapters_train_and_are_saved_complete(tmp_path, strategy, ranks):
    from peft import PeftModel
    from safetensors.torch import load_file

    base().save_pretrained(tmp_path / "base")
    model = make()
    start = copy.deepcopy(model.state_dict())
    wanted = plain(model)
    expected = adapters_of(model)
    for seen, found, state in worlds.run(train, ranks, strategy, tmp_path, timeout=120):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), rtol=1e-5, atol=1e-5)
        close(found, expected, bound=1e-5)
        for name, value in start.items():
            if "lora" not in name:
                assert torch.equal(state[name], value), "frozen"
    close(load_file(tmp_path / "out" / "adapter_model.safetensors"), expected, bound=1e-5)
    again = PeftModel.from_pretrained(base(), tmp_path / "out")
    ids = samples()
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def save(strategy, folder, trainable_only):
    run = Run(strategy, folder / "base")
    run.steps(2)
    run.accelerator.save_state(folder / "state", trainable_only=trainable_only)
    return run.steps(2, begin=2)


def resume(strategy, folder):
    run = Run(strategy, folder / "base", zeroed=True)
    run.accelerator.load_state(folder / "state")
    return run.steps(2, begin=2)


@pytest.mark.parametrize("trainable_only", [False, True])
@strategies
def test_a_run_with_adapters_resumes_bit_for_bit_and_on_one_process(
    tmp_path, strategy, ranks, trainable_only
):
    base().save_pretrained(tmp_path / "base")
    wanted = worlds.run(save, ranks, strategy, tmp_path, trainable_only, timeout=120)
    assert worlds.run(resume, ranks, strategy, tmp_path, timeout=120) == wanted
    [alone] = worlds.run(resume, 1, "single", tmp_path)
    torch.testing.assert_close(torch.tensor(alone), torch.tensor(wanted[0]), rtol=1e-5, atol=1e-5)
