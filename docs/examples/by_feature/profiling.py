"""Profile some steps with torch.profiler and write one trace per process.

accel launch --num_processes 2 --cpu profiling.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, ProfileKwargs, set_seed


def main(args):
    profile = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1, "skip_first": 0},
        output_trace_dir=args.output,
    )
    accelerator = Accelerator(kwargs_handlers=[profile])
    set_seed(0)
    data = TensorDataset(torch.randn(256, 32), torch.randn(256, 1))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16))

    with accelerator.profile() as profiler:
        for x, y in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    accelerator.print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=3))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="profiles")
    main(parser.parse_args())
