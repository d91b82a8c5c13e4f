"""Loading by device maps on several ranks."""

import itertools
import os
import pathlib

import pytest
import torch
from torch import nn

from testkit import worlds


def build():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.body = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40))
    model.head = nn.Linear(40, 2)
    model.other = nn.Linear(2, 2, bias=False)
    model.other.weight = nn.Parameter(torch.arange(4.0).view(2, 2))
    return model


def load(folder, device_map, **options):
    """Load as this rank, which is told where the files are only if it is rank 0 or all may know."""
    from accel_bigmodel import init_empty_weights, load_checkpoint_in_model
    from accel_state import PartialState

    rank = PartialState(cpu=True).process_index
    with init_empty_weights():
        model = build()
    visible = rank == 0 or not options.get("broadcast_from_rank0")
    own = device_map[rank] if isinstance(device_map, list) else device_map
    load_checkpoint_in_model(model, folder if visible else "/nowhere", own, **options)
    return rank, model


def differing(model, expected):
    return [
        name
        for name, tensor in model.state_dict().items()
        if tensor.device.type == "meta" or not torch.equal(tensor, expected[name].to(tensor.dtype))
    ]


MAPS = [
    None,
    {"": "cpu"},
    {"": "disk"},
    {"body": "cpu", "head": "disk", "other": "cpu"},
    [{"": "disk"}, {"": "cpu"}],
    [{"body": "cpu", "": "disk"}, {"body": "disk", "": "cpu"}],
]


@pytest.mark.parametrize("safe", [True, False])
def test_only_rank_0_needs_the_files(tmp_path, safe):
    from accel_ckpt import save_model

    save_model(build(), tmp_path / "m", max_shard_size="200B", safe_serialization=safe)

    def work(folder, expected):
        from accel_ckpt.format.memory import mapped_file_of
        from accel_state import PartialState

        rank = PartialState(cpu=True).process_index
        for number, (device_map, dtype) in enumerate(itertools.product(MAPS, (None, "bfloat16"))):
            own = device_map[rank] if isinstance(device_map, list) else device_map
            offload = pathlib.Path(folder) / f"o{number}-{rank}"
            for _ in range(2):  # the second finds the cache of the first
                options = {"offload_folder": offload, "dtype": dtype, "broadcast_from_rank0": True}
                _, model = load(f"{folder}/m", device_map, **options)
                assert differing(model, expected) == []
                for name, parameter in model.named_parameters():
                    if own is not None and own.get(name.split(".")[0], own.get("")) == "disk":
                        assert mapped_file_of(parameter) is not None

    worlds.run(work, 2, str(tmp_path), build().state_dict())


def test_a_rank_reads_only_what_its_map_places(tmp_path):
    from accel_ckpt import save_model

    save_model(build(), tmp_path, max_shard_size="200B")

    def work(folder, expected):
        import json

        index = json.loads((pathlib.Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
        maps = [{"body": "cpu", "": "meta"}, {"head": "disk", "": "meta"}]
        rank, model = load(folder, maps)
        mine = ("body.", "head.")[rank]
        real = {name for name, parameter in model.named_parameters() if parameter.device.type != "meta"}
        assert real == {name for name, _ in model.named_parameters() if name.startswith(mine)}
        assert not any(name.startswith(mine) for name in differing(model, expected))
        mapped = pathlib.Path("/proc/self/maps").read_text()
        touched = {file for file in index.values() if file in mapped}
        assert touched == {file for name, file in index.items() if name.startswith(mine)}
        assert len(touched) < len(set(index.values()))

    worlds.run(work, 2, str(tmp_path), build().state_dict())


def test_what_no_rank_needs_is_not_sent(tmp_path):
    from accel_ckpt import save_model

    save_model(build(), tmp_path)

    def work(folder, expected):
        import accel_state.operations.collectives

        sent = []
        send = accel_state.operations.collectives.broadcast

        def counted(tensors):
            sent.extend(tuple(tensor.shape) for tensor in tensors)
            return send(tensors)

        accel_state.operations.collectives.broadcast = counted
        maps = [{"other": "cpu", "": "meta"}, {"other": "cpu", "head.bias": "disk", "": "meta"}]
        rank, model = load(folder, maps, broadcast_from_rank0=True, offload_folder=f"{folder}/o{rank_of()}")
        accel_state.operations.collectives.broadcast = send
        assert sorted(sent) == [(2,), (2, 2)]
        assert torch.equal(model.other.weight, expected["other.weight"])
        assert (model.head.bias.device.type == "meta") == (rank == 0)

    def rank_of():
        from accel_state import PartialState

        return PartialState(cpu=True).process_index

    worlds.run(work, 2, str(tmp_path), build().state_dict())


@pytest.mark.parametrize("mistake", ["map", "word", "no folder", "file", "full"])
def test_a_mistake_of_one_rank_fails_on_all_and_changes_nothing(tmp_path, mistake):
    from accel_ckpt import save_model

    save_model(build(), tmp_path / "m")

    def work(folder, mistake):
        from accel_bigmodel import (
            DeviceMapError,
            OffloadError,
            init_empty_weights,
            load_checkpoint_and_dispatch,
            load_checkpoint_in_model,
        )
        from accel_ckpt import CheckpointError
        from accel_ckpt.disk import LOCAL
        from accel_state import PartialState

        rank = PartialState(cpu=True).process_index
        with init_empty_weights():
            model = build()
        device_map, offload = {"head": "disk", "": "cpu"}, f"{folder}/o{rank}"
        kind = DeviceMapError if mistake in ("map", "word") else OffloadError
        load = load_checkpoint_and_dispatch if mistake == "word" else load_checkpoint_in_model
        if rank == 1 and mistake == "word":
            device_map = "anywhere"
        elif rank == 1 and mistake == "map":
            device_map = {"head": "disk"}
        elif rank == 1 and mistake == "no folder":
            offload = None
        elif rank == 1 and mistake == "file":
            pathlib.Path(offload).write_text("mine")
        elif rank == 1:
            # Only this rank has to store what it is sent; that a disk is full is known before anything is.
            def reserve(descriptor, size):
                raise OSError(28, "No space left on device")

            LOCAL.reserve = reserve
        wrong = (kind, None) if rank == 1 else (CheckpointError, f"rank 1: {kind.__name__}")
        with pytest.raises(wrong[0], match=wrong[1]):
            load(
                model,
                f"{folder}/m",
                device_map=device_map,
                offload_folder=offload,
                broadcast_from_rank0=True,
            )
        assert all(parameter.device.type == "meta" for parameter in model.parameters())
        if offload is not None and os.path.isdir(offload):
            assert os.listdir(offload) == []

    worlds.run(work, 2, str(tmp_path), mistake)


def test_a_repository_of_a_hub(tmp_path):
    pytest.importorskip("huggingface_hub", reason="the extra accel-ckpt[hub] is not installed")
    from accel_ckpt import save_model
    from testkit import hub

    save_model(build(), tmp_path / "m", max_shard_size="200B")

    def work(expected):
        from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch
        from accel_ckpt.format.memory import mapped_file_of

        for device_map in (None, "auto", {"": "disk"}):
            with init_empty_weights():
                model = build()
            load_checkpoint_and_dispatch(model, "org/net", device_map, revision="main")
            assert differing(model, expected) == []
            assert all(mapped_file_of(parameter) is not None for parameter in model.parameters())

    with hub.serve() as running:
        running.add("org/net", {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()})
        worlds.run(work, 1, build().state_dict(), environ=running.environ(tmp_path / "hf"))
        shards = list((tmp_path / "m").glob("*.safetensors"))
        assert (
            len(running.requests("GET", ".safetensors")) == len(shards) + 1
        )  # the index; then the cache serves
