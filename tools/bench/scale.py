"""What a rank pays for saving and loading a divided state in worlds of 8 to 4,096, and torch's dcp beside it.

Worlds have no processes: the process group is torch's `fake` one, and the other ranks answer what this rank gives, with
their own numbers in it. Each row is a process of its own. Real worlds of up to 16 gloo processes come first, and must
send, write, open and ask for the same. Python bench/scale.py [--ranks 8,64] [--tensors 1200] [--real 2,16]
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_state.communication.serialization import aligned
from testkit import worlds
from testkit.object_storage import Objects, install, uri
from testkit.traffic import GATHERED, TO_FIRST, Meter, agreement, regime_of

ROWS = 4  # of a tensor on each rank
FEW = 8  # ranks that send each other everything


class Ranks:
    """One rank of a world in memory; counts what it would receive through gloo.

    Args:
        rank: this rank.
        world: number of ranks.
        made: makes the file of another rank: its name, and its size.
    """

    def __init__(self, rank: int, world: int, made: Callable[[str, int], None]) -> None:
        self.rank, self.world_size, self.local_rank = rank, world, rank % 8
        self._made = made
        self.received = 0

    def exchange(self, value: Any) -> list[Any]:
        """In a small world each gets the values of all; in a larger one ranks compare hashes, which are equal."""
        self._agree(value if self.world_size <= FEW else None)
        return [value, *(self._of(rank, value) for rank in range(1, self.world_size))]

    def gather(self, value: Any) -> list[Any] | None:
        """The first rank gets what each would give."""
        self._agree(None)
        if self.rank:
            return None
        size = 8 + aligned(len(pickle.dumps(value)))
        self.received += (self.world_size - 1) * (size + TO_FIRST)
        return [value, *(self._of(rank, value) for rank in range(1, self.world_size))]

    def _agree(self, value: Any) -> None:
        self.received += agreement(regime_of(self.world_size), self.world_size, self.rank == 0)
        size = len(pickle.dumps([value]))
        if size > 4096 - 32:
            self.received += (self.world_size - 1) * (size + GATHERED)

    def _of(self, rank: int, value: Any) -> Any:
        """What another rank would give: of what this one has written, its files, under their names."""
        if isinstance(value, tuple):
            return tuple(self._of(rank, item) for item in value)
        if not isinstance(value, dict) or "files" not in value:
            return value
        own = {n.replace("00000", f"{rank:05d}"): r for n, r in value["files"].items() if "00000" in n}
        for name, record in own.items():
            self._made(name, record["size"])
        return {**value, "files": own, "models": []}


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

    from accel_ckpt.saving.draft import StateDraft

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    model, moments = state(world, tensors)
    before = _resident()

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
    figures: dict[str, float] = {"planning, s": sorted(seconds)[2]}
    if rank == 0:
        with tempfile.TemporaryDirectory() as scratch:
            figures |= _saved_in_memory(world, model, moments, Path(scratch))
    return figures | {"memory, MB": (_resident() - before) / 1e6}


def _saved_in_memory(world: int, model: Any, moments: Any, scratch: Path) -> dict[str, float]:
    from accel_ckpt import save_training_state

    folder = scratch / "state"

    def made(name: str, size: int) -> None:
        [draft] = scratch.glob(".state.saving-*")
        _hole(draft / name, size)

    def made_object(name: str, size: int) -> None:
        [files] = scratch.glob("bucket/state/files-*")
        _hole(files / name, size)

    content: Any = {"models": [model], "shared": {"optimizer_0": moments}, "per_rank": {}}
    ranks = Ranks(0, world, made)
    save_training_state(folder, **content, coordinator=ranks)
    figures = {"received by the first, kB": ranks.received / 1e3, **_loaded(folder, model, scratch)}
    saved = _requests(
        lambda: save_training_state(
            uri(scratch, "bucket/state"), **content, coordinator=Ranks(0, world, made_object)
        )
    )
    loaded = _requests(lambda: _load(uri(scratch, "bucket/state"), model))
    return figures | {"requests of the first, save": saved, "requests, load": loaded}


def _hole(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


def _load(folder: Path | str, model: Any) -> None:
    from accel_ckpt import open_training_state

    open_training_state(folder).load_model(0, model)


def _loaded(folder: Path, model: Any, scratch: Path) -> dict[str, float]:
    opened: set[str] = set()
    sys.addaudithook(
        lambda event, args: (
            opened.add(os.fspath(args[0]))
            if event == "open" and isinstance(args[0], str | Path) and str(scratch) in os.fspath(args[0])
            else None
        )
    )
    began = time.process_time()
    _load(folder, model)
    return {
        "manifest, kB": (folder / "manifest.json").stat().st_size / 1e3,
        "load, s": time.process_time() - began,
        "opened": len(opened),
    }


def _requests(action: Callable[[], Any]) -> int:
    """The requests of this process to object storage, which is a folder here."""
    asked: list[str] = []
    install()
    info, ls = Objects.info, Objects.ls

    def asked_info(self: Objects, path: str, **options: Any) -> Any:
        asked.append("head")
        return info(self, path, **options)

    def listed(self: Objects, path: str, **options: Any) -> Any:
        before = len(asked)
        found = ls(self, path, **options)
        del asked[before + 1 :]  # a list has the facts of each object
        return found

    watched: Any = Objects
    watched.watch, watched.info, watched.ls = lambda kind, path: asked.append(kind), asked_info, listed
    try:
        action()
    finally:
        watched.watch, watched.info, watched.ls = None, info, ls
    return len(asked)


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def real_world(scratch: str, tensors: int) -> dict[str, float]:
    """The figures of this rank of a real world of gloo processes."""
    from accel_ckpt import save_training_state
    from accel_state import PartialState

    process = PartialState(cpu=True)
    (Path(scratch) / "met").mkdir(exist_ok=True)
    meter = Meter(process.process_index, process.num_processes, Path(scratch) / "met")
    model, moments = state(process.num_processes, tensors)
    before, folder = _resident(), Path(scratch) / "state"
    content: Any = {"models": [model], "shared": {"optimizer_0": moments}, "per_rank": {}}
    cost = meter(lambda: save_training_state(folder, **content))
    figures = {"received, kB": cost.received / 1e3, **_loaded(folder, model, Path(scratch))}
    place = uri(Path(scratch), "bucket/state")
    figures["requests, save"] = _requests(lambda: save_training_state(place, **content))
    figures["requests, load"] = _requests(lambda: _load(place, model))
    return figures | {"memory, MB": (_resident() - before) / 1e6}


def compared(world: int, tensors: int) -> None:
    """Print a real world beside the same world in memory.

    Raises:
        SystemExit: they differ in what is sent, written, opened or asked for.
    """
    with tempfile.TemporaryDirectory() as scratch:
        first, *_, last = worlds.run(real_world, world, scratch, tensors, timeout=300)
    model = in_a_process("world", 0, world, tensors)
    print(f"{world} processes, {tensors:,} tensors: the first, the last; in memory")
    for name, here in (
        ("received, kB", "received by the first, kB"),
        ("manifest, kB", "manifest, kB"),
        ("opened", "opened"),
        ("requests, save", "requests of the first, save"),
        ("requests, load", "requests, load"),
        ("memory, MB", "memory, MB"),
    ):
        print(f"  {name:35} {first[name]:10.3f} {last[name]:10.3f} {model[here]:10.3f}")
        if first[name] != model[here] and name != "memory, MB":
            raise SystemExit(
                f"{name} is {first[name]} in a real world of {world}, and {model[here]} in memory"
            )


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
    parser.add_argument("--real", default="2,4,8,16", help="real worlds; empty: none")
    parser.add_argument("--tensors", type=int, default=1200)
    parser.add_argument("--dcp-ranks", type=int, default=1024, help="the largest world of which dcp plans")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, *numbers = options.one
        function = {"world": one_world, "dcp": torch_dcp}[what]
        print(json.dumps(function(*map(int, numbers))))  # type: ignore[operator]
        return
    for world in map(int, filter(None, options.real.split(","))):
        compared(world, options.tensors)
    for world in map(int, filter(None, options.ranks.split(","))):
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
