"""transformers' Trainer on a small Llama.

``trainer.py train|bf16|accumulate|resume|predict|evaluate|search|fsdp2|zero2 FOLDER``
"""

from __future__ import annotations

import json
import os
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY = 64
OURS = Accelerator.__module__.startswith("accel_train")


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


def trainer(folder, model_init=None, **options):
    arguments = {
        "use_cpu": True, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 6,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3,
        "save_steps": 3, "report_to": [], "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    arguments = TrainingArguments(folder, **{**arguments, **options})
    data = {"train_dataset": Tokens(50, 0), "eval_dataset": Tokens(11, 1)}
    return Trainer(None if model_init else model(), arguments, model_init=model_init, **data)


def history(trained, extra=()):
    logs = trained.state.log_history
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", *extra)
    return [
        {key: float(log[key]) for key in keys if key in log} for log in logs if "train_runtime" not in log
    ]


def weights(trained):
    return {name: value.double().sum().item() for name, value in trained.model.state_dict().items()}


def evaluate(folder):
    """A trainer that never trains, and one after training, whose weights are saved and loaded again."""
    fresh = trainer(folder).evaluate()
    trained = trainer(folder, max_steps=2)
    trained.train()
    after = trained.evaluate(Tokens(13, 2), metric_key_prefix="test")
    trained.save_model(f"{folder}/saved")
    trained.accelerator.wait_for_everyone()
    loaded = LlamaForCausalLM.from_pretrained(f"{folder}/saved")
    logits = loaded(torch.arange(16)[None]).logits
    return {
        "fresh": fresh["eval_loss"],
        "after": after["test_loss"],
        "files": sorted(name for name in os.listdir(f"{folder}/saved") if not name.endswith(".md")),
        "logits": logits.double().sum().item(),
    }


def search(folder):
    """Optuna's trials, for each of which the Trainer makes its accelerator anew."""
    import optuna

    def space(trial):
        return {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
            "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 4]),
        }

    searched = trainer(folder, model_init=model, max_steps=3)
    objectives, sums = [], []

    def objective(metrics):
        objectives.append(metrics["eval_loss"])
        sums.append(weights(searched))
        return metrics["eval_loss"]

    found = searched.hyperparameter_search(
        space, n_trials=3, direction="minimize", backend="optuna", sampler=optuna.samplers.RandomSampler(seed=0),
        compute_objective=objective,
    )  # fmt: skip
    best = None if found is None else [found.run_id, found.objective, found.hyperparameters]  # on rank 0
    return {"best": best, "objectives": objectives, "weights": sums}


def whole(trained):
    """Sums of the weights of a model that may be divided among ranks."""
    state = trained.accelerator.get_state_dict(trained.model_wrapped)
    return {name: value.double().sum().item() for name, value in state.items()}


def fsdp2(folder):
    """Accelerate trains this with DDP on CPUs, without a word, and this library divides the parameters."""
    config = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "FULL_STATE_DICT",
    }
    trained = trainer(folder, fsdp=True, fsdp_config=config)
    trained.train()
    assert trained.accelerator.is_fsdp2 == OURS
    return {"history": history(trained), "weights": whole(trained)}


def zero2(folder):
    """With DeepSpeed, Accelerate counts one process where there are no GPUs; of two, its side trains with DDP."""
    if not OURS and int(os.environ["WORLD_SIZE"]) > 1:
        trained = trainer(folder, gradient_accumulation_steps=2)
        trained.train()
        return {"stage": 2, "history": history(trained), "weights": weights(trained)}
    config = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
    }
    from accelerate.utils import DeepSpeedOptimizerWrapper

    trained = trainer(folder, gradient_accumulation_steps=2, deepspeed=config)
    trained.train()
    assert isinstance(trained.optimizer, DeepSpeedOptimizerWrapper)
    stage = trained.accelerator.state.deepspeed_plugin.zero_stage
    return {"stage": stage, "history": history(trained), "weights": whole(trained)}


def result(what, folder):
    named = {"evaluate": evaluate, "search": search, "fsdp2": fsdp2, "zero2": zero2}
    if what in named:
        return named[what](folder)
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
