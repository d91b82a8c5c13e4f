"""LoRA with PEFT under transformers' Trainer, merged and loaded again: ``lora.py merge FOLDER``."""

from __future__ import annotations

import json
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset):
    def __init__(self, samples):
        self.ids = torch.randint(0, 64, (samples, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))


def lora(folder):
    torch.manual_seed(1)
    model = get_peft_model(
        base(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4, max_steps=4, learning_rate=1e-2, logging_steps=1,
        save_steps=4, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens(40))
    trainer.train()
    losses = [float(log["loss"]) for log in trainer.state.log_history if "loss" in log]
    trainer.accelerator.wait_for_everyone()
    loaded = PeftModel.from_pretrained(base(), f"{folder}/checkpoint-4", device_map={"": "cpu"})
    merged = loaded.merge_and_unload()
    logits = merged(torch.arange(16)[None]).logits
    return {"losses": losses, "logits": logits.double().sum().item(), "first": logits[0, 0].tolist()}


if __name__ == "__main__":
    found = lora(sys.argv[2])
    from accelerate import PartialState

    if PartialState().is_main_process:
        print("RESULT", json.dumps(found))
