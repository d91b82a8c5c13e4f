"""What a rank receives, and how fast batches come, when rank 0 reads for all: ours and Accelerate's.

Both dispatchers iterate the same batches in the same world, in turn, round after round. Bytes are counted where tensors
enter `torch.distributed`, at the last rank, and given relative to the local batch. The batches that ranks get are
checked to be equal. Numbers are medians with the range in brackets.

    hatch run bench:dispatch
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from measure import flags, installed, ratios, spread, table, turns
from torch.utils.data import DataLoader, IterableDataset

from testkit import worlds

BATCHES = 60  # steps in a round
CASES = {"8 x 3 x 64 x 64 images": (8, (3, 64, 64)), "64 x 512 tokens": (64, (512,))}


class Samples(IterableDataset[Any]):
    """Ready tensors, so that what is measured is the way from rank 0 to the others."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        self.count = count
        self.sample = torch.randn(shape)

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            yield self.sample, index


class Counter:
    """Bytes of the tensors that this rank receives."""

    def __init__(self) -> None:
        self.received = 0

    def add(self, tensor: torch.Tensor, source: int | None) -> None:
        if source != dist.get_rank():
            self.received += tensor.numel() * tensor.itemsize

    def watch(self) -> None:
        from torch.distributed import distributed_c10d

        irecv, broadcast = dist.irecv, dist.broadcast

        def counted_irecv(tensor: torch.Tensor, src: int | None = None, *args: Any, **kwargs: Any) -> Any:
            self.add(tensor, src)
            return irecv(tensor, src, *args, **kwargs)

        def counted_broadcast(tensor: torch.Tensor, src: int | None = None, *args: Any, **kwargs: Any) -> Any:
            self.add(tensor, src)
            return broadcast(tensor, src, *args, **kwargs)

        for module in (dist, distributed_c10d):
            module.irecv, module.broadcast = counted_irecv, counted_broadcast  # type: ignore[attr-defined]


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([sample for sample, _ in samples]), torch.tensor([index for _, index in samples])


def makers() -> dict[str, Callable[[Any], Any]]:
    from accel_state.world.process import PartialState
    from accel_train.data import prepare_data_loader

    device = PartialState(cpu=True).device
    options: dict[str, Any] = {"device": device, "put_on_device": True, "dispatch_batches": True}
    found: dict[str, Callable[[Any], Any]] = {
        "accel-train": lambda loader: prepare_data_loader(loader, **options)
    }
    if installed(["accelerate"]):
        import accelerate

        accelerate.PartialState(cpu=True)
        theirs = accelerate.data_loader.prepare_data_loader
        found["accelerate"] = lambda loader: theirs(loader, **options)
    return found


def world(rounds: int, batch: int, shape: tuple[int, ...]) -> dict[str, list[tuple[float, float]]]:
    """Per contender and round: batches per second, and bytes received relative to the local batch."""
    counter = Counter()
    contenders = makers()
    counter.watch()
    dataset = Samples(batch * dist.get_world_size() * BATCHES, shape)
    loaders = {
        name: make(DataLoader(dataset, batch_size=batch, collate_fn=collate))
        for name, make in contenders.items()
    }
    order: dict[str, list[int]] = {}

    def read(name: str) -> tuple[float, float]:
        counter.received = 0
        dist.barrier()
        began = time.perf_counter()
        indices = []
        for images, labels in loaders[name]:
            indices.append(labels)
            local = images.numel() * images.itemsize + labels.numel() * labels.itemsize
        elapsed = time.perf_counter() - began
        assert len(indices) == BATCHES
        order[name] = torch.cat(indices).tolist()
        return BATCHES / elapsed, counter.received / BATCHES / local

    found = turns({name: lambda name=name: read(name) for name in loaders}, rounds)
    assert all(got == order["accel-train"] for got in order.values()), "the ranks got different samples"
    return found


def main() -> None:
    rounds = flags(__doc__, rounds=9).rounds
    rows = []
    for (case, (batch, shape)), ranks in itertools.product(CASES.items(), (2, 4)):
        found = worlds.run(world, ranks, rounds, batch, shape, timeout=570)[-1]
        speeds = {name: [speed for speed, _ in results] for name, results in found.items()}
        for name, results in found.items():
            received = spread([amount for _, amount in results])
            peer = speeds.get("accelerate")
            over = spread(ratios(speeds[name], peer)) if peer else "-"
            rows.append([case, ranks, name, received, spread(speeds[name]), over])
    table(
        ["local batch", "ranks", "contender", "received / local batch", "batches/s", "speed over the peer"],
        rows,
    )


if __name__ == "__main__":
    main()
