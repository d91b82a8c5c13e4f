"""transformers' Trainer on a small Llama: ``trainer.py train|bf16|accumulate|resume|predict FOLDER``."""

from __future__ import annotations

import json
import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY = 64


class Tokens(Dataset):
    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, VOCABULARY, (samples, 16), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip


def trainer(folder, **options):
    arguments = {
        "use_cpu": True, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 6,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3,
        "save_steps": 3, "report_to": [], "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    arguments = TrainingArguments(folder, **{**arguments, **options})
    return Trainer(model(), arguments, train_dataset=Tokens(50, 0), eval_dataset=Tokens(11, 1))


def history(trained):
    logs = trained.state.log_history
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch")
    return [
        {key: float(log[key]) for key in keys if key in log} for log in logs if "train_runtime" not in log
    ]


def weights(trained):
    return {name: value.double().sum().item() for name, value in trained.model.state_dict().items()}


def result(what, folder):
    if what == "bf16":
        trained = trainer(folder, bf16=True)
        trained.train()
    elif what == "accumulate":
        trained = trainer(folder, gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=2)
        trained.train()
    elif what == "resume":
        trainer(folder, max_steps=6).train()
        trained = trainer(folder, max_steps=6)
        trained.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    elif what == "predict":
        trained = trainer(folder, max_steps=2)
        trained.train()
        predicted = trained.predict(Tokens(11, 2))
        return {
            "shape": list(predicted.predictions.shape),
            "sum": float(predicted.predictions.astype("float64").sum()),
            "labels": predicted.label_ids.tolist(),
            "loss": float(predicted.metrics["test_loss"]),
        }
    else:
        trained = trainer(folder)
        trained.train()
    return {"history": history(trained), "weights": weights(trained)}


if __name__ == "__main__":
    found = result(*sys.argv[1:3])
    from accelerate import PartialState

    if PartialState().is_main_process:
        print("RESULT", json.dumps(found))
