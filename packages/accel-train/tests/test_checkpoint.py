"""Saving and loading through the façade, on one process."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_ckpt import CheckpointNotFoundError, CorruptCheckpointError, StateMismatchError
from accel_train import Accelerator, OptionError, ProjectConfiguration


def build(accelerator, seed=0, width=4):
    torch.manual_seed(seed)
    model = nn.Linear(width, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(TensorDataset(torch.randn(8, width)), batch_size=2, shuffle=True)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def train(accelerator, model, optimizer, scheduler, loader):
    for (x,) in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def snapshot(model, optimizer, scheduler):
    return (
        [p.detach().clone() for p in model.parameters()],
        [state["exp_avg"].clone() for state in optimizer.state.values()],
        scheduler.scheduler.last_epoch,
        torch.get_rng_state(),
    )


def test_a_state_comes_back_whole(tmp_path):
    accelerator = Accelerator(mixed_precision="fp16")
    parts = build(accelerator)
    train(accelerator, *parts)
    accelerator.step = 7
    accelerator.save_state(tmp_path / "state")
    before = snapshot(*parts[:3])
    scale = accelerator.scaler.get_scale()
    other = Accelerator(mixed_precision="fp16")
    restored = build(other, seed=5)
    assert other.load_state(tmp_path / "state") == tmp_path / "state"
    after = snapshot(*restored[:3])
    for ours, theirs in zip(
        after[0] + after[1] + [after[3]], before[0] + before[1] + [before[3]], strict=True
    ):
        assert torch.equal(ours, theirs)
    assert after[2] == before[2] > 0
    assert other.step == 7
    assert other.scaler.get_scale() == scale
    assert load_file(tmp_path / "state" / "model.safetensors").keys() == {"weight", "bias"}


def test_automatic_names_a_limit_and_the_newest(tmp_path):
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=config)
    build(accelerator)
    for _ in range(11):
        accelerator.save_state("ignored when names are automatic")
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_10", "checkpoint_9"]
    assert accelerator.load_state().name == "checkpoint_10"
    assert accelerator.save_iteration == 11
    accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_9")
    assert accelerator.save_state().name == "checkpoint_11"


def test_a_run_does_not_mix_its_checkpoints_with_those_of_a_longer_one_before(tmp_path):
    def begin(**options):
        project = ProjectConfiguration(
            str(tmp_path), automatic_checkpoint_naming=True, total_limit=2, **options
        )
        accelerator = Accelerator(project_config=project)
        build(accelerator)
        return accelerator

    first = begin()
    for _ in range(4):
        first.save_state()
    folder = tmp_path / "checkpoints"
    kept = ["checkpoint_2", "checkpoint_3"]
    assert sorted(path.name for path in folder.iterdir()) == kept
    again = begin()  # checkpoint_0 is free, but would be the oldest: removed at once, and never loaded
    with pytest.raises(OptionError, match=r"checkpoint_2, checkpoint_3.*checkpoint_0"):
        again.save_state()
    assert sorted(path.name for path in folder.iterdir()) == kept
    again.load_state()
    assert again.save_state().is_dir()
    assert begin(iteration=5).save_state() == folder / "checkpoint_5"


def test_t6_an_unfinished_checkpoint_is_not_the_newest(tmp_path):
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=config)
    build(accelerator)
    accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_1").mkdir()
    assert accelerator.load_state().name == "checkpoint_0"


def test_hooks_see_weights_before_they_are_written_and_models_before_they_are_loaded(tmp_path):
    accelerator = Accelerator()
    model, *_ = build(accelerator)

    def on_save(models, weights, folder):
        assert models == [model]
        with open(f"{folder}/extra.json", "w") as file:
            json.dump({"kept": True}, file)
        weights[0]["weight"] = torch.zeros_like(weights[0]["weight"])

    seen = []

    def on_load(models, folder):
        seen.append(json.loads(Path(folder, "extra.json").read_text()))

    save_hook = accelerator.register_save_state_pre_hook(on_save)
    load_hook = accelerator.register_load_state_pre_hook(on_load)
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    assert seen == [{"kept": True}]
    assert model.weight.abs().sum() == 0
    save_hook.remove()
    load_hook.remove()
    accelerator.save_state(tmp_path / "other")
    assert not (tmp_path / "other" / "extra.json").exists()


def test_a_load_hook_may_load_a_model_itself(tmp_path):
    accelerator = Accelerator()
    model, *_ = build(accelerator)
    accelerator.save_state(tmp_path / "state")
    with torch.no_grad():
        model.weight.fill_(3.0)
    accelerator.register_load_state_pre_hook(lambda models, folder: models.pop())
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.weight, torch.full_like(model.weight, 3.0))


def test_nothing_is_changed_when_a_part_is_damaged(tmp_path):
    accelerator = Accelerator()
    parts = build(accelerator)
    accelerator.save_state(tmp_path / "state")
    train(accelerator, *parts)
    before = snapshot(*parts[:3])
    path = tmp_path / "state" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors"):
        accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(a, b) for a, b in zip(before[0], snapshot(*parts[:3])[0], strict=True))


def test_t7_a_rank_without_random_state_is_an_error_unless_allowed(tmp_path):
    accelerator = Accelerator()
    build(accelerator)
    accelerator.save_state(tmp_path / "state")
    accelerator._process._shared_state["process_index"] = 1
    try:
        with pytest.raises(CheckpointNotFoundError, match="rank 1"):
            accelerator.load_state(tmp_path / "state")
        accelerator.load_state(tmp_path / "state", allow_missing_rng=True)
    finally:
        accelerator._process._shared_state["process_index"] = 0


def test_other_objects_than_were_saved_are_named(tmp_path):
    accelerator = Accelerator()
    build(accelerator)
    accelerator.save_state(tmp_path / "state")
    other = Accelerator()
    model = nn.Linear(4, 1)
    other.prepare(model)
    with pytest.raises(
        StateMismatchError, match="nothing was prepared or registered for its loader_0, optimizer_0"
    ):
        other.load_state(tmp_path / "state")
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        other.load_state(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="weights_only"):
        other.load_state(tmp_path / "state", load_kwargs={"weights_only": False})
    with pytest.raises(ValueError, match="needs a folder"):
        other.load_state()
    with pytest.raises(ValueError, match="needs a folder"):
        other.save_state()
    with pytest.raises(ValueError, match="needs a place"):
        Accelerator(project_config=ProjectConfiguration(automatic_checkpoint_naming=True)).save_state()


def test_t25_objects_are_saved_as_plain_data_or_not_at_all(tmp_path):
    class Holder:
        def __init__(self, state):
            self.state = state

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    accelerator = Accelerator()
    holder = Holder({"a": (1, 2.5), 3: torch.ones(2), "n": float("inf")})
    accelerator.register_for_checkpointing(holder)
    accelerator.save_state(tmp_path / "state")
    saved, holder.state = holder.state, None
    accelerator.load_state(tmp_path / "state")
    assert holder.state["a"] == saved["a"]
    assert torch.equal(holder.state[3], saved[3])
    holder.state = {"deep": [object()]}
    with pytest.raises(TypeError, match="deep"):
        accelerator.save_state(tmp_path / "state")
    holder.state = None
    accelerator.load_state(tmp_path / "state")
    assert holder.state["a"] == (1, 2.5)


def test_a_run_resumed_by_skipping_can_be_saved_and_resumed_again(tmp_path):
    def build():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(3)
        return accelerator, accelerator.prepare(DataLoader(range(12), batch_size=2, shuffle=True))

    whole = [batch.tolist() for batch in build()[1]]
    accelerator, loader = build()
    for done, _ in enumerate(loader, 1):
        if done == 2:
            accelerator.save_state(tmp_path / "first")
            break
    accelerator, loader = build()
    accelerator.load_state(tmp_path / "first")
    for done, batch in enumerate(accelerator.skip_first_batches(loader, 2), 3):
        assert batch.tolist() == whole[done - 1]
        if done == 4:
            accelerator.save_state(tmp_path / "second")
            break
    accelerator, loader = build()
    accelerator.load_state(tmp_path / "second")
    rest = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 4)]
    assert rest == whole[4:]
