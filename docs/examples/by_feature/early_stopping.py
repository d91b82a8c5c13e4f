"""Stop on every process as soon as one process sees a reason to.

accel launch --num_processes 2 --cpu early_stopping.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, set_seed


class Patience:
    """Returns True when the loss has not fallen by ``least`` for ``patience`` calls."""

    def __init__(self, patience=5, least=1e-2):
        self.patience, self.least, self.best, self.calls = patience, least, float("inf"), 0

    def __call__(self, loss):
        self.calls += 1
        if loss < self.best - self.least:
            self.best, self.calls = loss, 0
        return self.calls >= self.patience


def main():
    accelerator = Accelerator()
    set_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    no_longer_improving = Patience()
    steps = 0
    for _ in range(20):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if no_longer_improving(loss.item()):  # this process's own loss
                accelerator.set_trigger()
            if accelerator.check_trigger():  # true on all processes once any has set it
                accelerator.wait_for_everyone()
                accelerator.print(f"stopped after {steps} steps")
                return
    accelerator.print("never stopped")


if __name__ == "__main__":
    main()
