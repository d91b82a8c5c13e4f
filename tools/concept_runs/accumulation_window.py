"""One accumulation window of two ranks in time: forward, backward, all-reduce of gradients, the optimizer's step."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

MICRO_BATCHES = 4
WINDOW = 2  # the windows before it build DDP's buckets
WIDTH = 1024


def record() -> dict[str, Any]:
    """Events of each rank, as kind, micro-batch, begin and end in milliseconds since the first."""
    ranks = worlds.run(trained, 2, timeout=120)
    start = min(event[2] for events in ranks for event in events)
    return {
        "micro_batches": MICRO_BATCHES,
        "ranks": [
            [
                {
                    "kind": kind,
                    "micro_batch": number,
                    "begin_ms": round(1e3 * (begin - start), 2),
                    "end_ms": round(1e3 * (end - start), 2),
                }
                for kind, number, begin, end in sorted(events, key=lambda event: event[2])
            ]
            for events in ranks
        ],
    }


def trained() -> list[tuple[str, int, float, float]]:
    """The events of the window on this rank."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    from accel_train import Accelerator, DistributedDataParallelKwargs

    buckets = DistributedDataParallelKwargs(bucket_cap_mb=10)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES, kwargs_handlers=[buckets])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(2 * 16 * MICRO_BATCHES * (WINDOW + 1), WIDTH))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16))
    events: list[tuple[str, int, float, float]] = []
    number = 0

    def timed_all_reduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        begin, of = time.perf_counter(), number
        future = default_hooks.allreduce_hook(state, bucket)

        def note(done: Any) -> torch.Tensor:
            events.append(("all-reduce", of, begin, time.perf_counter()))
            return done.value()

        return future.then(note)

    model.register_comm_hook(None, timed_all_reduce)
    for number, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            times = [time.perf_counter()]
            loss = model(x).square().mean()
            times.append(time.perf_counter())
            accelerator.backward(loss)
            times.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
        events += [
            (kind, number, *times[at : at + 2]) for at, kind in enumerate(("forward", "backward", "step"))
        ]
    first = WINDOW * MICRO_BATCHES
    return [(kind, of - first, begin, end) for kind, of, begin, end in events if of >= first]
