"""Save the whole training state every few steps, and continue from the middle of an epoch.

accel launch --num_processes 2 --cpu checkpointing.py --stop_at 12
accel launch --num_processes 2 --cpu checkpointing.py --resume
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed


class Counter:
    """Steps done. Anything with these two methods can be checkpointed."""

    steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def main(args):
    project = ProjectConfiguration("checkpointing", automatic_checkpoint_naming=True, total_limit=2)
    stateful = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(project_config=project, dataloader_config=stateful)
    set_seed(0)
    data = TensorDataset(torch.randn(1800, 64), torch.randint(10, (1800,)))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 64, shuffle=True))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if args.resume:
        accelerator.load_state()
    for _ in range(loader.iteration, 2):
        for x, y in loader:  # after load_state: the rest of the epoch, exactly
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            counter.steps += 1
            if counter.steps % 6 == 0:
                accelerator.save_state()
            if counter.steps == args.stop_at:
                accelerator.print(f"stopped after step {counter.steps}, to be resumed")
                return
    weights = accelerator.get_state_dict(model)["weight"]
    accelerator.print(f"finished after step {counter.steps}, weights add up to {weights.sum().item()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stop_at", type=int)
    main(parser.parse_args())
