"""LoRA with PEFT under transformers' Trainer, merged and loaded again: ``lora.py merge FOLDER``."""

from __future__ import annotations

import json
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from trainer import Tokens, model
from transformers import Trainer, TrainingArguments


def lora(folder):
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


if __name__ == "__main__":
    found = lora(sys.argv[2])
    from accelerate import PartialState

    if PartialState().is_main_process:
        print("RESULT", json.dumps(found))
