"""Gradient accumulation over sequences of different length: the gradient is the mean over all tokens.

accel launch --num_processes 2 --cpu accumulation.py
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accel_train import Accelerator, set_seed

VOCABULARY, PADDING = 20, 0


def collate(sequences):
    return pad_sequence(sequences, batch_first=True, padding_value=PADDING)


def main():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    set_seed(0)
    # Each token is the one before plus one, so the next one can be learned.
    starts, lengths = torch.randint(1, VOCABULARY, (200,)), torch.randint(3, 12, (200,))
    sequences = [
        (start + torch.arange(length)) % (VOCABULARY - 1) + 1
        for start, length in zip(starts, lengths, strict=True)
    ]
    loader = DataLoader(sequences, batch_size=4, shuffle=True, collate_fn=collate)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(3):
        for tokens in loader:
            with accelerator.accumulate(model):
                inputs, targets = tokens[:, :-1], tokens[:, 1:]
                count = (targets != PADDING).sum()
                loss_sum = nn.functional.cross_entropy(
                    model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum"
                )
                # Sum and count: one big batch of all tokens of four micro-batches and all processes.
                accelerator.backward(loss_sum, num_items=count)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(loss_sum.detach(), "sum") / accelerator.reduce(count, "sum")
        accelerator.print(f"epoch {epoch}: loss per token {mean.item():.3f}")


if __name__ == "__main__":
    main()
