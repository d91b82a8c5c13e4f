"""Fine-tune a causal language model of transformers without its Trainer, and save it its own way.

accel launch --num_processes 2 --cpu transformers_finetuning.py
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

from accel_train import Accelerator, set_seed, tqdm


def main(args):
    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(0)
    # A model and data small enough for a test; from_pretrained and a tokenised dataset go here.
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    starts = torch.randint(0, 64, (128, 1))
    data = [{"input_ids": row, "labels": row} for row in (starts + torch.arange(16)) % 64]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=8, shuffle=True)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # The schedule is left as it is and counts this process's steps: len(loader) is its share.
    total = args.epochs * len(loader)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=total // 10, num_training_steps=total)

    model.train()
    for epoch in range(args.epochs):
        for batch in tqdm(loader, desc=f"epoch {epoch}"):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rate = scheduler.get_last_lr()[0]
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, learning rate {rate:.2e}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output", default="finetuned")
    main(parser.parse_args())
