"""States of divided tensors: what a rank plans, and which files it opens, do not grow with the number of ranks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from accel_ckpt import (
    BackgroundSaver,
    CheckpointError,
    CheckpointSaveError,
    CheckpointVersionError,
    CorruptCheckpointError,
    Part,
    UnsupportedValueError,
    default_coordinator,
    open_training_state,
    save_training_state,
)
from accel_ckpt.coordination.ranks import broadcast, gather, gather_together
from accel_ckpt.format.manifest import Manifest
from accel_state.world.process import PartialState
from testkit import worlds

NAMES = [f"layers.{number}.weight" for number in range(6)]
SHAPE = (24, 4)


def values(name: str) -> torch.Tensor:
    return torch.arange(96.0).view(SHAPE) + 1000 * NAMES.index(name)


def divided(mesh: Any, placements: Any, fill: bool = True) -> dict[str, DTensor]:
    from torch.distributed.tensor import distribute_tensor

    whole = {name: values(name) if fill else torch.zeros(SHAPE) for name in NAMES}
    return {name: distribute_tensor(tensor, mesh, placements) for name, tensor in whole.items()}


MESHES: dict[str, tuple[tuple[int, ...], Any]] = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "copies": ((2, 2), [Replicate(), Shard(0)]),
    "both": ((2, 2), [Shard(0), Shard(1)]),
}


def save(folder: str, kind: str, world: int = 4) -> list[str]:
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    shape, placements = MESHES[kind]
    mesh = init_device_mesh("cpu", shape if world == 4 else (world,))
    model = divided(mesh, placements)
    save_training_state(
        folder, models=[model], shared={"moments": dict(model)}, per_rank={"rng": dist.get_rank()}
    )
    return sorted(path.name for path in Path(folder).iterdir())


def load(folder: str, kind: str, world: int) -> list[str]:
    """Fill tensors that are divided in another way; returns the files of parts that were opened."""
    dist.init_process_group("gloo")
    opened: set[str] = set()

    def note(event: str, args: Any) -> None:
        if event == "open" and isinstance(args[0], str | Path) and folder in str(args[0]):
            opened.add(Path(args[0]).name)

    sys.addaudithook(note)
    shape, placements = MESHES[kind]
    mesh = init_device_mesh("cpu", shape if world == 4 else (world,))
    target = divided(mesh, placements, fill=False)
    state = open_training_state(folder)
    state.load_model(0, target)
    for name, tensor in target.items():
        assert torch.equal(tensor.full_tensor(), values(name)), name
    return sorted(name for name in opened if "-shard-" in name)


@pytest.mark.parametrize("kind", MESHES)
def test_a_rank_of_the_same_layout_opens_its_own_file(tmp_path: Path, kind: str) -> None:
    folder = str(tmp_path / "c")
    worlds.run(save, 4, folder, kind)
    opened = worlds.run(load, 4, folder, kind, 4)
    if kind == "copies":  # ranks 0 and 1, or 2 and 3, have written a tensor
        assert all(len(names) == 2 for names in opened)
    else:
        assert opened == [[f"model-shard-0000{rank}.safetensors"] for rank in range(4)]


@pytest.mark.parametrize("world", [2, 3])
def test_other_worlds_open_what_holds_their_boxes(tmp_path: Path, world: int) -> None:
    folder = str(tmp_path / "c")
    worlds.run(save, 4, folder, "rows")
    opened = worlds.run(load, world, folder, "rows", world)
    assert all(len(names) == 2 for names in opened), opened


def test_the_manifest_names_a_mesh_once_and_no_boxes(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    worlds.run(save, 4, str(folder), "both")
    text = json.loads((folder / "manifest.json").read_text())
    assert text["version"] == 2
    assert len(text["layout"]["divisions"]) == 1
    assert text["layout"]["divisions"][0]["shape"] == [2, 2]
    assert set(text["layout"]["tensors"]) == {"model", "state"}
    assert "offsets" not in (folder / "manifest.json").read_text()


def swapped(folder: str, first: str, second: str) -> str:
    """Two files change places, and the manifest says so: each is whole, and none is where the layout says."""
    one, other = Path(folder, first), Path(folder, second)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    manifest = Manifest.read(Path(folder))
    files = {**manifest.files, first: manifest.files[second], second: manifest.files[first]}
    changed = Manifest(
        manifest.world_size, manifest.ranks, manifest.models, files, manifest.folder, manifest.layout
    )
    Path(folder, "manifest.json").unlink()
    changed.write(Path(folder))
    try:
        open_training_state(folder).load_model(0, {NAMES[0]: torch.zeros(SHAPE)})
    except CorruptCheckpointError as error:
        return str(error)
    return "loaded"


def test_files_that_another_layout_wrote_are_refused_by_name(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    worlds.run(save, 4, folder, "rows")
    [told] = worlds.run(swapped, 1, folder, "model-shard-00000.safetensors", "model-shard-00001.safetensors")
    assert re.search(r"model-shard-0000\d.safetensors is to hold the part", told), told


def test_an_older_reader_is_told_the_version(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save_training_state(folder, models=[{"w": torch.ones(2)}], shared={}, per_rank={})
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 3'))
    with pytest.raises(
        CheckpointVersionError, match="format version 3; this version of accel-ckpt reads up to 2"
    ):
        open_training_state(folder)


def other_on_one_rank(folder: str, what: str) -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (4,))
    model: dict[str, Any] = dict(divided(mesh, [Shard(0)]))
    if rank == 2 and what == "missing":
        del model[NAMES[3]]
    elif rank == 2 and what == "dtype":
        local = model[NAMES[3]].to_local().double()
        model[NAMES[3]] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    elif rank == 2 and what == "more":
        model["late"] = DTensor.from_local(torch.ones(1, 4), mesh, [Shard(0)], run_check=False)
    try:
        save_training_state(folder, models=[model], shared={}, per_rank={})
    except (UnsupportedValueError, CheckpointSaveError) as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("missing", r"rank 2 passes nothing of the tensor 'layers.3.weight'"),
        ("dtype", r"'layers.3.weight' as tensors of another dtype: .*float32 on rank 0, .*float64 on rank 2"),
        ("more", r"rank 0 passes nothing of the tensor 'late'"),
    ],
)
def test_a_rank_whose_layout_differs_is_named_on_all_and_nothing_is_written(
    tmp_path: Path, what: str, told: str
) -> None:
    found = worlds.run(other_on_one_rank, 4, str(tmp_path / "c"), what)
    assert all(re.search(told, message) for message in found), found
    assert list(tmp_path.iterdir()) == []


def later_tensors(folder: str) -> list[list[str]]:
    """A tensor appears, and one vanishes, between saves into the same folder."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model: dict[str, Any] = dict(divided(mesh, [Shard(0)]))
    found = []
    for change in (None, "late", "gone"):
        if change == "late":
            model["late"] = DTensor.from_local(torch.ones(1, 4), mesh, [Shard(0)], run_check=False)
        elif change == "gone":
            del model[NAMES[0]]
        save_training_state(folder, models=[model], shared={}, per_rank={})
        found.append(sorted(open_training_state(folder).weights(0).shapes))
    return found


def test_what_appears_or_vanishes_between_saves_is_saved_as_it_is(tmp_path: Path) -> None:
    """Megatron-LM#4378, nvidia-resiliency-ext#359: a plan that was kept hid a key, or kept one that had gone."""
    for first, second, third in worlds.run(later_tensors, 2, str(tmp_path / "c")):
        assert first == NAMES
        assert second == sorted([*NAMES, "late"])
        assert third == sorted([*NAMES[1:], "late"])


def as_in_a_large_world() -> None:
    """In four ranks, the messages of a world of hundreds."""
    from accel_ckpt.coordination import ranks
    from accel_state.communication import blocks

    ranks._FEW, blocks._DIRECT, blocks._TOGETHER = 1, 1, 2


def exchanged() -> list[Any]:
    as_in_a_large_world()
    state = PartialState()
    rank = state.process_index
    ranks = default_coordinator()
    found: list[Any] = [ranks.exchange("same"), ranks.exchange(rank // 2), ranks.exchange(f"rank {rank}")]
    assert found[1][0] is found[1][1]
    found.extend((gather({"rank": rank}, ranks), broadcast(f"from {rank}", ranks)))
    try:
        gather_together(lambda: 1 // (rank - 2), ranks, doing="dividing")
    except (ZeroDivisionError, CheckpointError) as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def test_values_of_ranks_in_a_large_world() -> None:
    for rank, found in enumerate(worlds.run(exchanged, 4)):
        same, pairs, own, gathered, said, failed = found
        assert same == ["same"] * 4
        assert pairs == [0, 0, 1, 1]
        assert own == [f"rank {number}" for number in range(4)]
        assert gathered == (None if rank else [{"rank": number} for number in range(4)])
        assert said == "from 0"
        assert "ZeroDivisionError" in failed
        assert rank == 2 or "dividing failed on another rank" in failed


def saved_and_loaded(folder: str, kind: str, asynchronous: bool) -> bool:
    as_in_a_large_world()
    rank = PartialState().process_index
    shape, placements = MESHES[kind]
    mesh = init_device_mesh("cpu", shape)
    model: dict[str, Any] = dict(divided(mesh, placements))
    stage = torch.full((5,), 7.0)  # whole, on one rank, as a stage of a pipeline has it
    model["stage"] = Part.whole(stage) if rank == 3 else Part.nothing((5,))
    content: dict[str, Any] = {
        "models": [model],
        "shared": {"moments": dict(model)},
        "per_rank": {"rng": rank},
    }
    if asynchronous:
        saver = BackgroundSaver()
        saver.save(folder, **content).result(60)
    else:
        save_training_state(folder, **content)
    state = open_training_state(folder)
    target: dict[str, Any] = {**divided(mesh, placements, fill=False), "stage": torch.zeros(5)}
    state.load_model(0, target)
    own = state.per_rank(rank)
    assert own is not None
    whole = all(torch.equal(target[name].full_tensor(), values(name)) for name in NAMES)
    return whole and torch.equal(target["stage"], stage) and own["rng"] == rank


@pytest.mark.wide(but=["rows-False", "columns-True", "both-True"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", MESHES)
def test_a_state_is_saved_as_in_a_large_world(tmp_path: Path, kind: str, asynchronous: bool) -> None:
    assert worlds.run(saved_and_loaded, 4, str(tmp_path / "c"), kind, asynchronous) == [True] * 4
