"""Fine-tuning with TRL, of a small Llama on made texts.

``tuning.py sft|dpo|dpo_fsdp2|kto_fsdp2|grpo_fsdp2|rloo_fsdp2 FOLDER``
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial

from datasets import Dataset
from models import tokenizer
from torch.distributed.tensor import DTensor
from trainer import OURS, history, model, weights, whole
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

OPTIONS = {
    "use_cpu": True, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 4,
    "learning_rate": 1e-2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 4,
    "report_to": [], "disable_tqdm": True, "seed": 1, "bf16": False,
    "activation_checkpointing": False,
}  # fmt: skip
EXTRA = (
    "rewards/margins",
    "eval_rewards/margins",
    "mean_token_accuracy",
    "entropy",
    "num_tokens",
    "reward",
    "kl",
)


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


def dpo(folder, **options):
    columns = {
        "prompt": [text(index, 4) for index in range(30)],
        "chosen": [" " + text(index + 1, 3 + index % 4) for index in range(30)],
        "rejected": [" " + text(index + 2, 2 + index % 5) for index in range(30)],
    }
    rows = Dataset.from_dict(columns)
    trained = DPOTrainer(
        saved_model(folder), args=DPOConfig(folder, **OPTIONS | options), processing_class=tokenizer(),
        train_dataset=rows.select(range(23)), eval_dataset=rows.select(range(23, 30)),
    )  # fmt: skip
    trained.train()
    return trained


def saved_model(folder):
    """A folder of each rank, from which the trainers load the reference model as well."""
    place = f"{folder}/model-{os.environ.get('RANK', '0')}"
    model().save_pretrained(place)
    return place


def kto(folder, **options):
    columns = {
        "prompt": [text(index, 4) for index in range(30)],
        "completion": [" " + text(index + 1, 3 + index % 4) for index in range(30)],
        "label": [index % 3 > 0 for index in range(30)],
    }
    trained = KTOTrainer(
        saved_model(folder), args=KTOConfig(folder, **OPTIONS | options), processing_class=tokenizer(),
        train_dataset=Dataset.from_dict(columns),
    )  # fmt: skip
    trained.train()
    return trained


def rewarded(trainer, config, folder, **options):
    """Completions are drawn, rewarded by their number of different words, and held near the reference model."""

    def variety(completions, **_):
        return [float(len(set(completion.split()))) for completion in completions]

    options = OPTIONS | {"max_completion_length": 8, "num_generations": 2, "beta": 0.1} | options
    rows = Dataset.from_dict({"prompt": [text(index, 4) for index in range(30)]})
    trained = trainer(
        saved_model(folder), reward_funcs=variety, args=config(folder, **options), train_dataset=rows,
        processing_class=tokenizer(),
    )  # fmt: skip
    trained.train()
    return trained


# TRL divides a reference model itself, with ``fully_shard`` on the mesh of the Accelerator.
FSDP2 = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    "eval_strategy": "no",
    "save_strategy": "no",
}
WITH_A_REFERENCE = {
    "dpo": dpo,
    "kto": kto,
    "grpo": partial(rewarded, GRPOTrainer, GRPOConfig),
    "rloo": partial(rewarded, RLOOTrainer, RLOOConfig),
}


def result(what, folder):
    method, _, sharded = what.partition("_")
    if sharded:
        trained = WITH_A_REFERENCE[method](folder, **FSDP2)
        assert trained.accelerator.is_fsdp2 == OURS  # Accelerate trains with DDP on CPUs
        assert not OURS or any(isinstance(value, DTensor) for value in trained.ref_model.parameters())
        return {"history": history(trained, EXTRA), "weights": whole(trained)}
    trained = {"sft": sft, "dpo": dpo}[what](folder)
    return {"history": history(trained, EXTRA), "weights": weights(trained)}


if __name__ == "__main__":
    found = result(sys.argv[1], sys.argv[2])
    from accelerate import PartialState

    if PartialState().is_main_process:
        print("RESULT", json.dumps(found))
