"""What a rank pays for saving and loading a divided state in worlds of 8 to 4,096, and torch's dcp beside it.

Worlds have no processes: the process group is torch's `fake` one, and the other ranks answer what this rank gives, with
their own numbers in it. Each row is a process of its own. Python bench/scale.py [--ranks 8,64] [--tensors 1200]
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS = 4  # of a tensor on each rank


class Ranks:
    """One rank of a world in memory; counts what it would receive.

    Args:
        rank: this rank.
        world: number of ranks.
        folder: where the checkpoint is saved; the files of other ranks are made there, as holes of their size.
    """

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank, self.world_size, self.local_rank = rank, world, rank % 8
        self._folder = folder
        self.received = 0

    def exchange(self, value: Any) -> list[Any]:
        """Equal values cost the bounds of two hashes."""
        self.received += 64
        return [value] * self.world_size

    def gather(self, value: Any) -> list[Any] | None:
        """The first rank gets what each would give, of which the names have the number of the rank."""
        if self.rank:
            return None
        [scratch] = self._folder.parent.glob(f".{self._folder.name}.saving-*")
        found, text = [value], json.dumps(value)
        for rank in range(1, self.world_size):
            other = json.loads(text)
            own = {n.replace("00000", f"{rank:05d}"): r for n, r in other["files"].items() if "00000" in n}
            found.append({**other, "files": own, "models": []})
            for name, record in own.items():
                with open(scratch / name, "wb") as file:
                    file.truncate(record["size"])
        self.received += sum(len(pickle.dumps(one)) for one in found)
        return found


def state(world: int, tensors: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A third of the tensors as weights, two thirds as an optimizer's moments; each rank has the same of each."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    shape, local = torch.Size((ROWS * world, 8)), torch.zeros(ROWS, 8)

    def named() -> dict[str, Any]:
        return {
            f"model.layers.{number}.self_attn.q_proj.weight": DTensor.from_local(
                local.clone(), mesh, [Shard(0)], run_check=False, shape=shape, stride=(8, 1)
            )
            for number in range(tensors // 3)
        }

    moments = {"exp_avg": named(), "exp_avg_sq": named()}
    return named(), moments


def one_world(rank: int, world: int, tensors: int) -> dict[str, float]:
    """The figures of one rank."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from accel_ckpt import open_training_state, save_training_state
    from accel_ckpt.saving.draft import StateDraft

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    model, moments = state(world, tensors)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def plan() -> None:
        draft = StateDraft.make(
            [model], {"optimizer_0": moments}, {}, rank=rank, leads=rank == 0, replicated=(),
            safe_serialization=True, max_shard_size=10**10,
        )  # fmt: skip
        offer = draft.offer()
        pickle.dumps(offer)  # which is hashed
        draft.plan([offer] * world, rank)

    seconds = []
    for _ in range(5):
        began = time.process_time()
        plan()
        seconds.append(time.process_time() - began)
    figures: dict[str, float] = {
        "planning, s": sorted(seconds)[2],
        "memory, MB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3,
    }
    if rank:
        return figures
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "state")
        ranks = Ranks(rank, world, folder)
        save_training_state(
            folder, models=[model], shared={"optimizer_0": moments}, per_rank={}, coordinator=ranks
        )
        figures["received by the first, kB"] = ranks.received / 1e3
        figures["manifest, kB"] = (folder / "manifest.json").stat().st_size / 1e3
        opened: set[str] = set()
        sys.addaudithook(
            lambda event, args: (
                opened.add(os.fspath(args[0]))
                if event == "open" and isinstance(args[0], str | Path) and scratch in os.fspath(args[0])
                else None
            )
        )
        began = time.process_time()
        checkpoint = open_training_state(folder)
        checkpoint.load_model(0, model)
        figures["load, s"] = time.process_time() - began
        figures["opened"] = len(opened)
    return figures


def torch_dcp(world: int, tensors: int) -> dict[str, float]:
    """Planning on the coordinator of ``torch.distributed.checkpoint``, for the same tensors."""
    import torch
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    def item(rank: int, number: int) -> WriteItem:
        offsets, sizes = torch.Size((ROWS * rank, 0)), torch.Size((ROWS, 8))
        return WriteItem(
            index=MetadataIndex(f"model.layers.{number}.self_attn.q_proj.weight", offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, sizes),
                properties=TensorProperties(dtype=torch.float32),
                size=torch.Size((ROWS * world, 8)),
            ),
        )

    plans = [SavePlan([item(rank, number) for number in range(tensors)]) for rank in range(world)]
    began = time.process_time()
    create_default_global_save_plan(plans)
    return {"dcp's coordinator, s": time.process_time() - began}


def in_a_process(what: str, *numbers: int) -> dict[str, float]:
    """The figures that a process of its own prints last."""
    words = [sys.executable, __file__, "--one", what, *map(str, numbers)]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a row for each world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="8,64,512,1024,4096")
    parser.add_argument("--tensors", type=int, default=1200)
    parser.add_argument("--dcp-ranks", type=int, default=1024, help="the largest world of which dcp plans")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, *numbers = options.one
        function = {"world": one_world, "dcp": torch_dcp}[what]
        print(json.dumps(function(*map(int, numbers))))  # type: ignore[operator]
        return
    for world in map(int, options.ranks.split(",")):
        figures = in_a_process("world", 0, world, options.tensors)
        other = in_a_process("world", world - 1, world, options.tensors)
        figures |= {f"last rank: {name}": value for name, value in other.items()}
        if world <= options.dcp_ranks:
            figures |= in_a_process("dcp", world, options.tensors)
        print(f"{world:,} ranks, {options.tensors:,} tensors")
        for name, value in figures.items():
            print(f"  {name:35} {value:10.3f}")


if __name__ == "__main__":
    main()
