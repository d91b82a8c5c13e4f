"""Fine-tuning with TRL, of a small Llama on made texts: ``tuning.py sft|dpo FOLDER``."""

from __future__ import annotations

import json
import os
import sys

from datasets import Dataset
from models import tokenizer
from trainer import history, model, weights
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

OPTIONS = {
    "use_cpu": True, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 4,
    "learning_rate": 1e-2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 4,
    "report_to": [], "disable_tqdm": True, "seed": 1, "bf16": False,
    "activation_checkpointing": False,
}  # fmt: skip


def text(start, length):
    return " ".join(f"w{1 + (start * 7 + index * 3) % 62}" for index in range(length))


def sft(folder):
    rows = Dataset.from_dict({"text": [text(index, 5 + index % 7) for index in range(30)]})
    trained = SFTTrainer(
        model(), SFTConfig(folder, max_length=16, **OPTIONS), processing_class=tokenizer(),
        train_dataset=rows.select(range(23)), eval_dataset=rows.select(range(23, 30)),
    )  # fmt: skip
    trained.train()
    return trained


def dpo(folder):
    columns = {
        "prompt": [text(index, 4) for index in range(30)],
        "chosen": [" " + text(index + 1, 3 + index % 4) for index in range(30)],
        "rejected": [" " + text(index + 2, 2 + index % 5) for index in range(30)],
    }
    rows = Dataset.from_dict(columns)
    place = (
        f"{folder}/model-{os.environ.get('RANK', '0')}"  # the reference model is loaded from there as well
    )
    model().save_pretrained(place)
    trained = DPOTrainer(
        place, args=DPOConfig(folder, **OPTIONS), processing_class=tokenizer(),
        train_dataset=rows.select(range(23)), eval_dataset=rows.select(range(23, 30)),
    )  # fmt: skip
    trained.train()
    return trained


if __name__ == "__main__":
    trained = {"sft": sft, "dpo": dpo}[sys.argv[1]](sys.argv[2])
    extra = ("rewards/margins", "eval_rewards/margins", "mean_token_accuracy", "entropy", "num_tokens")
    found = {
        "history": history(trained, extra),
        "weights": weights(trained),
    }
    from accelerate import PartialState

    if PartialState().is_main_process:
        print("RESULT", json.dumps(found))
