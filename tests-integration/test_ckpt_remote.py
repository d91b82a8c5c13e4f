"""Checkpoints in object storage: an `Accelerator` with one and two ranks, whose requests fail on one of them."""

from __future__ import annotations

import json

import pytest
import torch

from testkit import worlds
from testkit.object_storage import install, objects, uri

SIZE = 1 << 19  # elements


def project(place, **options):
    from accel_train import Accelerator, ProjectConfiguration

    install()
    configuration = ProjectConfiguration(place, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=configuration, **options)
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(
        torch.arange(64.0 * 32).reshape(32, 64).sin(), batch_size=4, shuffle=True
    )
    return accelerator, *accelerator.prepare(model, optimizer, data)


def train(parts, steps, asynchronous=False):
    accelerator, model, optimizer, loader = parts
    losses = []
    for _, batch in zip(range(steps), loader, strict=False):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.save_state(asynchronous=asynchronous)
    return losses


def names(folder):
    return {name.split("/")[1] for name in objects(folder)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_automatic_names(tmp_path, asynchronous):
    first = project(uri(tmp_path))
    train(first, 4, asynchronous)
    first[0].end_training()
    assert names(tmp_path) == {"checkpoint_2", "checkpoint_3"}
    second = project(uri(tmp_path))
    loaded = second[0].load_state()
    assert str(loaded) == f"{uri(tmp_path)}/checkpoints/checkpoint_3"
    assert torch.equal(second[1].weight, first[1].weight)
    for a, b in zip(first[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(first[2].state[a]["exp_avg_sq"], second[2].state[b]["exp_avg_sq"])
    second[0].save_state()
    assert names(tmp_path) == {"checkpoint_3", "checkpoint_4"}


def test_another_run_in_the_same_place(tmp_path):
    train(project(uri(tmp_path)), 1)
    with pytest.raises(ValueError, match=r"already holds checkpoint_0.*two runs would mix"):
        train(project(uri(tmp_path)), 1)


def test_hooks(tmp_path):
    from pathlib import Path

    accelerator, *_ = project(uri(tmp_path))
    seen = []

    def save(models, weights, folder):
        Path(folder, "hook.txt").write_text("saved by a hook")

    def load(models, folder):
        seen.append(Path(folder, "hook.txt").read_text())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state()
    accelerator.load_state()
    assert seen == ["saved by a hook"]


def test_save_model_and_objects(tmp_path):
    from accel_ckpt import load, load_state_dict

    accelerator, model, *_ = project(uri(tmp_path))
    accelerator.save_model(model, f"{uri(tmp_path)}/model")
    assert torch.equal(load_state_dict(f"{uri(tmp_path)}/model/model.safetensors")["weight"], model.weight)
    accelerator.save({"x": 1}, f"{uri(tmp_path)}/x.pt")
    assert load(f"{uri(tmp_path)}/x.pt") == {"x": 1}


def two_ranks(place, folder):
    import accel_ckpt
    from accel_state import PartialState
    from testkit.object_storage import Objects

    install()
    rank = PartialState().process_index
    whole = torch.arange(2.0 * SIZE).reshape(2, SIZE)
    mine = accel_ckpt.Part(whole[rank : rank + 1].clone(), offsets=(rank, 0), shape=(2, SIZE))
    for _ in range(2):  # the second replaces the first
        accel_ckpt.save_training_state(
            f"{place}/c",
            models=[{"w": mine}],
            shared={"w": mine, "n": 3},
            per_rank={"rng": torch.tensor([rank])},
            before_write=lambda local: (local / f"hook-{rank}").write_text(str(rank)),
        )
    PartialState().wait_for_everyone()
    Objects.read = 0
    checkpoint = accel_ckpt.open_training_state(f"{place}/c")
    other = accel_ckpt.Part(torch.empty(1, SIZE), offsets=(1 - rank, 0), shape=(2, SIZE))
    checkpoint.load_model(0, {"w": other})
    assert torch.equal(other.tensor, whole[1 - rank : 2 - rank])
    assert Objects.read < 1.3 * other.tensor.nbytes + (1 << 22), Objects.read  # not what the other rank holds
    assert checkpoint.per_rank(rank)["rng"].tolist() == [rank]
    assert [(checkpoint.local_folder() / f"hook-{r}").read_text() for r in (0, 1)] == ["0", "1"]
    torch.distributed.barrier()


def test_two_ranks_upload_and_read_their_parts(tmp_path):
    worlds.run(two_ranks, 2, uri(tmp_path), str(tmp_path), timeout=100)
    manifest = json.loads((tmp_path / "bucket/c/manifest.json").read_text())
    assert manifest["ranks"] == [0, 1]
    assert len(objects(tmp_path)) == 1 + len(manifest["files"])  # nothing of the first save


def one_fails(place, victim, kind):
    import accel_ckpt
    from accel_state import PartialState
    from testkit.object_storage import Objects

    install()
    rank = PartialState().process_index

    def save(step, **options):
        return accel_ckpt.save_training_state(
            f"{place}/c", models=[], shared={"step": step}, per_rank={"r": torch.tensor([rank])}, **options
        )

    def refuse(asked, path):
        if asked == kind and (victim != 0 or not path.endswith("manifest.json") or kind == "put"):
            raise PermissionError("Access Denied")

    save(1)
    if rank == victim:
        Objects.watch = refuse
    with pytest.raises(accel_ckpt.CheckpointSaveError, match="Access Denied"):
        save(2)
    Objects.watch = None
    PartialState().wait_for_everyone()
    assert accel_ckpt.open_training_state(f"{place}/c").shared["step"] == 1
    PartialState().wait_for_everyone()
    with pytest.raises(accel_ckpt.CheckpointSaveError, match="ranks save to different folders"):
        accel_ckpt.save_training_state(f"{place}/{rank}", models=[], shared={}, per_rank={})
    save(3)
    assert accel_ckpt.open_training_state(f"{place}/c").shared["step"] == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_is_refused(tmp_path, victim):
    worlds.run(one_fails, 2, uri(tmp_path), victim, "put", timeout=100)


def automatic(place):
    parts = project(place)
    train(parts, 3)
    again = project(place)
    again[0].load_state()
    assert torch.equal(parts[0].unwrap_model(parts[1]).weight, again[0].unwrap_model(again[1]).weight)
    from testkit.object_storage import Objects

    if parts[0].process_index == 1:

        def refuse(kind, path):
            raise PermissionError("Access Denied")

        Objects.watch = refuse
    with pytest.raises(Exception, match="Access Denied"):
        again[0].save_state()  # on both: ranks look for checkpoints together
    Objects.watch = None
    again[0].save_state()


def test_an_accelerator_with_two_ranks(tmp_path):
    worlds.run(automatic, 2, uri(tmp_path), timeout=100)
    assert names(tmp_path) == {"checkpoint_2", "checkpoint_3"}
