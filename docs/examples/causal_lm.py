"""Train a causal language model on packed sequences, without transformers' Trainer, and continue after a stop.

accel launch --num_processes 2 --cpu causal_lm.py
"""

import argparse
import inspect
import math
import textwrap

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accel_train import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed

LENGTH = 64


def load_data():
    """Source code of Python's library as bytes, packed into sequences of one length; a tenth is held out."""
    tokens = torch.frombuffer(bytearray(inspect.getsource(textwrap).encode()), dtype=torch.uint8).long()
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows[len(rows) // 10 :], rows[: len(rows) // 10]


def build_model():
    """LlamaForCausalLM.from_pretrained goes here."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=LENGTH))


def token_losses(model, rows):
    """The loss of each predicted token, one row per sequence."""
    logits = model(input_ids=rows).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
    ).view(len(rows), -1)


@torch.no_grad()
def perplexity(accelerator, model, loader):
    model.eval()
    losses = torch.cat([accelerator.gather_for_metrics(token_losses(model, rows)) for rows in loader])
    model.train()
    return math.exp(losses.mean().item())


def main(args):
    accelerator = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(args.output, automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )
    set_seed(0)
    train_rows, eval_rows = load_data()
    model = build_model()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    train_loader = DataLoader(train_rows, batch_size=8, shuffle=True)
    eval_loader = DataLoader(eval_rows, batch_size=8)
    total = args.epochs * math.ceil(len(train_loader) / 2)  # before prepare: optimizer steps of one process
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=total + 1)
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule
    )
    if args.resume:
        accelerator.load_state()

    for epoch in range(train_loader.iteration, args.epochs):
        for number, rows in enumerate(train_loader):
            with accelerator.accumulate(model):
                losses = token_losses(model, rows)
                # The mean over all tokens of the window and of all processes, whatever their numbers.
                accelerator.backward(losses.sum(), num_items=losses.numel())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if args.stop_after and epoch == 0 and number + 1 == args.stop_after:
                accelerator.save_state()
                return
        shown = perplexity(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch + 1}: perplexity {shown:.4f}")
    accelerator.save_state()
    accelerator.save_model(model, f"{args.output}/model")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stop_after", type=int, help="save and stop after this number of batches")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--output", default="causal_lm")
    main(parser.parse_args())
