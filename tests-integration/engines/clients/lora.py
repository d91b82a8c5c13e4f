"""LoRA with PEFT: ``lora.py merge|placed|fsdp2 FOLDER``."""

from __future__ import annotations

import json
import sys

import torch
from models import saved
from peft import LoraConfig, PeftModel, get_peft_model
from trainer import OURS, Tokens, model, whole
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def merge(folder):
    """Trained under transformers' Trainer, loaded again and merged."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model(), config)
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4, max_steps=4, learning_rate=1e-2, logging_steps=1,
        save_steps=4, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(adapted, arguments, train_dataset=Tokens(40, 0))
    trainer.train()
    losses = [float(log["loss"]) for log in trainer.state.log_history if "loss" in log]
    trainer.accelerator.wait_for_everyone()
    loaded = PeftModel.from_pretrained(model(), f"{folder}/checkpoint-4", device_map={"": "cpu"})
    merged = loaded.merge_and_unload()
    logits = merged(torch.arange(16)[None]).logits
    return {"losses": losses, "logits": logits.double().sum().item(), "first": logits[0, 0].tolist()}


def fsdp2(folder):
    """The Trainer takes PEFT's policy of units; Accelerate trains this with DDP on CPUs, without a word."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    units = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "FULL_STATE_DICT",
    }
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4, max_steps=4, learning_rate=1e-2, logging_steps=1,
        save_steps=4, report_to=[], disable_tqdm=True, fsdp=True, fsdp_config=units,
    )  # fmt: skip
    trained = Trainer(get_peft_model(model(), config), arguments, train_dataset=Tokens(40, 0))
    trained.train()
    assert trained.accelerator.is_fsdp2 == OURS
    losses = [float(log["loss"]) for log in trained.state.log_history if "loss" in log]
    return {"losses": losses, "weights": whole(trained)}


def placed(folder):
    """An adapter on a model of which a part stays on disk, merged there."""
    base = saved(folder)
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(f"{folder}/adapter")

    def spread():
        return AutoModelForCausalLM.from_pretrained(
            base, device_map="auto", max_memory={"cpu": "60KB"}, offload_folder=f"{folder}/offload"
        )

    model = PeftModel.from_pretrained(
        spread(), f"{folder}/adapter", device_map="auto", max_memory={"cpu": "60KB"},
        offload_folder=f"{folder}/again",
    )  # fmt: skip
    ids = torch.arange(2, 18)[None]
    adapted = model(ids).logits
    with torch.no_grad():
        merged = model.merge_and_unload()
        logits = merged(ids).logits
    places = {str(value) for value in spread().hf_device_map.values()}
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), f"{folder}/adapter")(
        ids
    ).logits
    torch.testing.assert_close(adapted, whole)
    return {
        "places": sorted(places),
        "adapted": adapted.double().sum().item(),
        "merged": logits.double().sum().item(),
        "first": logits[0, 0].tolist(),
    }


if __name__ == "__main__":
    found = {"merge": merge, "placed": placed, "fsdp2": fsdp2}[sys.argv[1]](sys.argv[2])
    from accelerate import PartialState

    if PartialState().is_main_process:
        print("RESULT", json.dumps(found))
