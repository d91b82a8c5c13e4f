"""Train on two sources of text whose weights change along the way, stop in the middle, and continue exactly.

accel launch --num_processes 2 --cpu data_mixture.py --stop_at 30
accel launch --num_processes 2 --cpu data_mixture.py --resume
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_train import Accelerator, DataLoaderConfiguration, MixedDataLoader, set_seed

VOCABULARY, LENGTH, STEPS = 40, 12, 80


def sequences(number, stride):  # each token is the one before plus `stride`, so the next one can be learned
    starts = torch.randint(VOCABULARY, (number, 1))
    return list((starts + stride * torch.arange(LENGTH)) % VOCABULARY)


def main(args):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(0)
    loaders = {  # each batch is divided over the processes, so any number of them takes the same steps
        "web": DataLoader(sequences(400, stride=1), 16, shuffle=True),
        "code": DataLoader(sequences(48, stride=3), 16, shuffle=True),  # small, so it is read several times
    }
    mixture = MixedDataLoader(  # "code" grows from a tenth of the batches to a half
        loaders, lambda step: {"web": 9 - 4 * step / STEPS, "code": 1 + 4 * step / STEPS}, steps=STEPS
    )
    model = nn.Sequential(  # the stride is in the last two tokens
        nn.Embedding(VOCABULARY, 16), nn.Flatten(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCABULARY)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, mixture = accelerator.prepare(model, optimizer, mixture)
    if args.resume:
        accelerator.load_state("data_mixture")
    for tokens in mixture:
        pairs, targets = tokens.unfold(1, 2, 1)[:, :-1], tokens[:, 2:]
        loss = nn.functional.cross_entropy(model(pairs.flatten(0, 1)), targets.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step = sum(count.batches for count in mixture.counts.values())
        if step % 20 == 0:
            mean = accelerator.reduce(loss.detach(), "mean")
            drawn = {name: count.samples for name, count in mixture.counts.items()}
            accelerator.print(f"step {step}: loss {mean:.4f} on {mixture.source}; samples {drawn}")
        if step == args.stop_at:
            accelerator.save_state("data_mixture")
            break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop_at", type=int)
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
