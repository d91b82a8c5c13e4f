"""Train a small model, save the state or continue from one, and write the weights.

accel launch --cpu --num_processes 2 --use_zero_redundancy train.py --save state
accel launch --cpu --num_processes 3 --use_zero_redundancy train.py --load state
accel launch --cpu --num_processes 2 --use_fsdp train.py --load state
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, DataLoaderConfiguration


def objects():
    """The model, its optimizer, a schedule and a loader of four batches; the same everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1)
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    data = TensorDataset(torch.randn(48, 6).double(), torch.randn(48, 1).double())
    return model, optimizer, scheduler, DataLoader(data, batch_size=12)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", help="folder to save the state to, after the training")
    parser.add_argument("--load", help="folder to load a state from, before the training")
    parser.add_argument("--weights", help="file to write the weights to")
    arguments = parser.parse_args()

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    model, optimizer, scheduler, loader = accelerator.prepare(*objects())
    if arguments.load:
        accelerator.load_state(arguments.load)
    for inputs, targets in loader:
        loss = ((model(inputs) - targets) ** 2).mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f}, learning rate {scheduler.get_last_lr()[0]}")
    if arguments.save:
        accelerator.save_state(arguments.save)
    weights = accelerator.get_state_dict(model)
    if arguments.weights and accelerator.is_main_process:
        torch.save(weights, arguments.weights)


if __name__ == "__main__":
    main()
