"""What an update of an inference engine's weights costs: ours against gathering and broadcasting tensor by tensor.

Four ranks train with divided weights, and two receivers hold one half of every weight each, all on gloo in one world.
The other way is what many RL loops do: all trainers gather each whole tensor, the first sends it to the receivers, and
they cut out their halves. Ways take turns, round after round: median seconds, bytes over the wire, and the resident
memory by which the largest rank grows, with the buckets of ours. Bytes of ours are those of its plan. Those of the
other way follow from its collectives: a gathering sends each rank what it lacks, a broadcast one copy per receiver.

    hatch run bench:weights
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import flags, table, turns
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from accel_ckpt import GroupTransport, OfferedWeights, TensorParallelLayout, WeightTransfer
from accel_state.world.process import PartialState
from testkit import worlds
from testkit.memory import freed_at_once, growth

TRAINERS, RECEIVERS = 4, 2


def shapes(width: int, blocks: int) -> dict[str, tuple[int, int]]:
    """The matrices of a transformer's blocks."""
    found = {}
    for block in range(blocks):
        for name in ("q", "k", "v", "o"):
            found[f"{block}.{name}"] = (width, width)
        found |= {f"{block}.up": (4 * width, width), f"{block}.down": (width, 4 * width)}
    return found


class Gathering:
    """Every tensor gathered on all trainers, and sent whole to all receivers."""

    def __init__(self, weights: dict[str, Tensor], sizes: dict[str, tuple[int, int]]) -> None:
        self.weights, self.sizes = weights, sizes
        self.group = dist.new_group([0, *range(TRAINERS, TRAINERS + RECEIVERS)])
        self.rank = dist.get_rank()
        self.halves = {
            name: torch.zeros(rows // RECEIVERS, columns) for name, (rows, columns) in sizes.items()
        }

    def update(self) -> None:
        for name, shape in self.sizes.items():
            if self.rank < TRAINERS:
                whole = self.weights[name].full_tensor()  # type: ignore[attr-defined]
                if self.rank == 0:
                    dist.broadcast(whole, 0, group=self.group)
            else:
                whole = torch.empty(shape)
                dist.broadcast(whole, 0, group=self.group)
                self.halves[name].copy_(whole.chunk(RECEIVERS)[self.rank - TRAINERS])

    def kept(self) -> int:
        return 0

    def sent(self) -> int:
        model = sum(4 * rows * columns for rows, columns in self.sizes.values())
        return model * (TRAINERS - 1) + model * RECEIVERS


class Ours:
    def __init__(
        self, weights: dict[str, Tensor], sizes: dict[str, tuple[int, int]], mesh: DeviceMesh, bucket: int
    ):
        rank = dist.get_rank()
        self.halves = {
            name: torch.zeros(rows // RECEIVERS, columns) for name, (rows, columns) in sizes.items()
        }
        offers, wants = None, None
        if rank < TRAINERS:
            offers = OfferedWeights(lambda: weights, coordinator=GroupTransport(mesh.get_group()))
        else:
            layout = TensorParallelLayout(rank - TRAINERS, RECEIVERS)
            wants = {name: layout.column(tensor) for name, tensor in self.halves.items()}
        self.transfer = WeightTransfer(GroupTransport(), offers=offers, wants=wants, bucket_bytes=bucket)
        self.rank = rank

    def update(self) -> None:
        self.transfer.update()

    def kept(self) -> int:
        """Bytes of its buckets, which stay between updates."""
        return 2 * self.transfer.plan.bucket_bytes

    def sent(self) -> int:
        total = torch.tensor(self.transfer.plan.sent_bytes(self.rank))
        dist.all_reduce(total)
        return int(total)


def measured(width: int, blocks: int, bucket: int, rounds: int) -> dict[str, tuple[float, int, int]]:
    """Seconds, bytes and growth in bytes by way; the first round does not count."""
    PartialState()
    freed_at_once()
    mesh = DeviceMesh("cpu", list(range(TRAINERS)))
    sizes = shapes(width, blocks)
    torch.manual_seed(0)
    weights: dict[str, Tensor] = {}
    if dist.get_rank() < TRAINERS:
        weights = {
            name: distribute_tensor(torch.randn(shape), mesh, [Shard(0)]) for name, shape in sizes.items()
        }
    ways: dict[str, Gathering | Ours] = {
        "gather and broadcast": Gathering(weights, sizes),
        "ours": Ours(weights, sizes, mesh, bucket),
    }

    def update(name: str) -> tuple[float, int]:
        dist.barrier()
        began = time.perf_counter()
        with growth() as grown:
            ways[name].update()
        dist.barrier()
        return time.perf_counter() - began, grown.peak

    found = turns({name: lambda name=name: update(name) for name in ways}, rounds)
    first, second = ways.values()
    assert all(torch.equal(first.halves[name], second.halves[name]) for name in sizes), (
        "both ways give the same"
    )
    answer = {}
    for name, samples in found.items():
        took, peaks = zip(*samples, strict=True)
        answer[name] = (statistics.median(took), ways[name].sent(), _most(max(peaks) + ways[name].kept()))
    return answer


def _most(value: int) -> int:
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def main() -> None:
    given = flags(__doc__, width=1024, blocks=4, bucket=4, rounds=5)
    size = (given.width, given.blocks, given.bucket << 20, given.rounds)  # the buckets are in MiB
    run: Callable[..., list[dict[str, tuple[float, int, int]]]] = worlds.run
    found = run(measured, TRAINERS + RECEIVERS, *size, timeout=3600.0)[0]
    print(f"model {sum(4 * r * c for r, c in shapes(given.width, given.blocks).values()) / 1e6:.1f} MB")
    rows = [
        [name, f"{took:.3f}", f"{sent / 1e6:.1f}", f"{grown / 1e6:.1f}"]
        for name, (took, sent, grown) in found.items()
    ]
    table(["", "s", "MB sent", "MB more memory"], rows)


if __name__ == "__main__":
    main()
