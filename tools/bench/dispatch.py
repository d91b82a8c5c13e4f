"""What a rank receives, and how fast batches come, when rank 0 reads for all: ours and Accelerate's.

Both dispatchers iterate the same batches in the same world, in turn, round after round. Bytes are counted where tensors
enter `torch.distributed`, at the last rank, and given relative to the local batch. The batches that ranks get are
checked to be equal. Numbers are medians with the range in brackets.

    hatch run bench:dispatch
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

sys.path.insert(0, str(Path(__file__).parent.parent))

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
    if importlib.util.find_spec("accelerate") is not None:
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
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
    order: dict[str, list[int]] = {}
    for turn in range(rounds + 1):
        for name, loader in loaders.items():
            counter.received = 0
            dist.barrier()
            began = time.perf_counter()
            indices = []
            for images, labels in loader:
                indices.append(labels)
                local = images.numel() * images.itemsize + labels.numel() * labels.itemsize
            elapsed = time.perf_counter() - began
            assert len(indices) == BATCHES
            order[name] = torch.cat(indices).tolist()
            if turn:  # the first round warms up
                found[name].append((BATCHES / elapsed, counter.received / BATCHES / local))
    assert all(got == order["accel-train"] for got in order.values()), "the ranks got different samples"
    return found


def _show(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    if importlib.util.find_spec("accelerate") is None:
        print("accelerate: NOT RUN, the package is not installed")
    print("| local batch | ranks | contender | received / local batch | batches/s | speed over the peer |")
    print("|---|---|---|---|---|---|")
    for case, (batch, shape) in CASES.items():
        for ranks in (2, 4):
            answers = worlds.run(world, ranks, rounds, batch, shape, timeout=570)[-1]
            peer = [speed for speed, _ in answers.get("accelerate", [])]
            for name, results in answers.items():
                speeds = [speed for speed, _ in results]
                ratio = _show([a / b for a, b in zip(speeds, peer, strict=True)]) if peer else "-"
                received = _show([amount for _, amount in results])
                print(f"| {case} | {ranks} | {name} | {received} | {_show(speeds)} | {ratio} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
