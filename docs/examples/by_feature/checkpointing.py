"""Save the whole training state every few steps, and go on from the middle of an epoch.

accel launch --num_processes 2 --cpu checkpointing.py --stop_at 12
accel launch --num_processes 2 --cpu checkpointing.py --resume
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed


class Counter:
    """Where the loop stands: finished epochs and steps."""

    def __init__(self):
        self.epoch, self.step = 0, 0

    def state_dict(self):
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state):
        self.epoch, self.step = state["epoch"], state["step"]


def main(args):
    accelerator = Accelerator(
        project_config=ProjectConfiguration(args.output, automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )
    set_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if args.resume:
        accelerator.load_state()
        accelerator.print(f"resumed in epoch {counter.epoch} after step {counter.step}")

    while counter.epoch < 2:
        for x, y in loader:  # after load_state: the rest of the epoch, exactly
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            counter.step += 1
            if counter.step % 6 == 0:
                accelerator.save_state()
            if counter.step == args.stop_at:
                return
        counter.epoch += 1
    accelerator.print(f"finished after step {counter.step}: {model.state_dict()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="checkpointing")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stop_at", type=int)
    main(parser.parse_args())
