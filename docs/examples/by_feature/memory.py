"""Find a batch size that fits: each attempt that runs out of memory is repeated with a smaller one.

accel launch --num_processes 2 --cpu memory.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, find_executable_batch_size, set_seed

FITS = 40  # simulates the device's memory, so that the example works on any machine


def main():
    accelerator = Accelerator()
    data = TensorDataset(torch.randn(256, 32), torch.randn(256, 1))

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size):
        # Create everything inside this function, so that it is freed before the next attempt.
        accelerator.free_memory()
        accelerator.print(f"trying batches of {batch_size}")
        set_seed(0)
        model = nn.Linear(32, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=batch_size, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            if len(x) > FITS:
                raise RuntimeError("CUDA out of memory.")
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    accelerator.print(f"trained with batches of {train()}")


if __name__ == "__main__":
    main()
