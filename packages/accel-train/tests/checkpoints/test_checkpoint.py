"""Saving and loading through the façade, on one process."""

import json
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_ckpt import CheckpointNotFoundError, CorruptCheckpointError, Manifest, StateMismatchError
from accel_train import Accelerator, GradScalerKwargs, OptionError, ProjectConfiguration
from accel_train.checkpoints import training_state
from accel_train.checkpoints.training_state import read


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


def pretend(accelerator, **shared):
    """Let the process seem to be another rank, or to be in another world."""
    before = dict(accelerator._process._shared_state)
    accelerator._process._shared_state.update(shared)
    return before


def test_t7_a_missing_random_state_is_an_error_unless_allowed(tmp_path, monkeypatch):
    accelerator = Accelerator()
    build(accelerator)
    folder = accelerator.save_state(tmp_path / "state")
    manifest = Manifest.read(folder)  # as if node 1, with rank 1, had saved to a disk of its own
    monkeypatch.setattr(Manifest, "read", lambda folder: replace(manifest, world_size=2))
    before = pretend(accelerator, process_index=1, num_processes=2)
    try:
        with pytest.raises(CheckpointNotFoundError, match="rank 1"):
            read(accelerator._prepared, folder, allow_missing_rng=False, trust_custom_objects=False)
        saved = read(accelerator._prepared, folder, allow_missing_rng=True, trust_custom_objects=False)
        assert saved.rng is None
    finally:
        accelerator._process._shared_state.update(before)


@pytest.mark.parametrize("name", ["rank-00000.json", "rank-00000.safetensors"])
def test_t7_an_unreadable_random_state_is_an_error_even_if_it_may_be_missing(tmp_path, name):
    accelerator = Accelerator()
    build(accelerator)
    folder = accelerator.save_state(tmp_path / "state")
    (folder / name).unlink()
    with pytest.raises(CorruptCheckpointError, match=name):
        accelerator.load_state(folder, allow_missing_rng=True)


def test_t9_a_rank_that_is_new_derives_its_random_state(tmp_path, caplog):
    accelerator = Accelerator()
    build(accelerator)
    folder = accelerator.save_state(tmp_path / "state")
    drawn = []
    for rank in (0, 1, 2, 1):
        before = pretend(accelerator, process_index=rank, num_processes=3)
        try:
            saved = read(accelerator._prepared, folder, allow_missing_rng=False, trust_custom_objects=False)
        finally:
            accelerator._process._shared_state.update(before)
        drawn.append(saved.rng["torch"])
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    assert "rank 1, 2 is new and derives its random state" in caplog.text


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


class Held:
    """A registered object whose state is whatever it is given."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_t25_a_trusted_pickle_needs_the_word_twice(tmp_path):
    accelerator = Accelerator()
    plain, rich = Held({"a": 1}), Held({"what": Fraction(1, 3), "tensor": torch.ones(2)})
    accelerator.register_for_checkpointing(plain, rich, trusted=True)
    folder = accelerator.save_state(tmp_path / "state")
    plain.state = rich.state = None
    with pytest.raises(
        ValueError, match=r"object 1 \(Held\) as a pickle.*load_state\(…, trust_custom_objects=True\)"
    ):
        accelerator.load_state(folder)
    assert plain.state is None, "nothing is changed"
    careless = Accelerator()
    careless.register_for_checkpointing(Held(), Held())
    with pytest.raises(ValueError, match=r"register_for_checkpointing\(…, trusted=True\)"):
        careless.load_state(folder, trust_custom_objects=True)
    accelerator.load_state(folder, trust_custom_objects=True)
    assert plain.state == {"a": 1}
    assert rich.state["what"] == Fraction(1, 3)
    assert torch.equal(rich.state["tensor"], torch.ones(2))


def test_t25_nothing_is_unpickled_without_it(tmp_path):
    accelerator = Accelerator()
    held = Held({"bomb": Bomb(tmp_path / "exploded")})
    accelerator.register_for_checkpointing(held, trusted=True)
    folder = accelerator.save_state(tmp_path / "state")
    with pytest.raises(ValueError, match="as a pickle"):
        accelerator.load_state(folder)
    assert not (tmp_path / "exploded").exists()
    accelerator.load_state(folder, trust_custom_objects=True)
    assert (tmp_path / "exploded").exists(), "the test's pickle does run code"


def test_a_skipping_loader_does_not_add_to_the_state(tmp_path):
    accelerator = Accelerator()
    *_, loader = build(accelerator)
    skipping = accelerator.skip_first_batches(loader, 2)
    iterator = iter(skipping)
    next(iterator)
    accelerator.save_state(tmp_path / "state")
    fresh = Accelerator()
    *_, loader = build(fresh)
    fresh.load_state(tmp_path / "state")
    assert loader.state_dict()["batches_yielded"] == 3


def test_the_number_of_the_next_checkpoint_comes_back(tmp_path):
    accelerator = Accelerator()
    build(accelerator)
    for number in range(3):
        accelerator.save_state(tmp_path / str(number))
    fresh = Accelerator()
    build(fresh)
    fresh.load_state(tmp_path / "1")
    assert fresh.save_iteration == 2


def open_window(steps=4, taken=2, seed=0, precision="no"):
    """A training in the middle of a window."""
    accelerator = Accelerator(gradient_accumulation_steps=steps, mixed_precision=precision)
    parts = build(accelerator, seed=seed)
    model = parts[0]
    for number in range(taken):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 4), number + 1.0)).sum(), num_items=3 + number)
    return accelerator, parts


def test_gradients_and_counts_of_an_unfinished_window_come_back(tmp_path):
    accelerator, (model, *_) = open_window()
    folder = accelerator.save_state(tmp_path / "state")
    other, (restored, *_) = open_window(taken=0, seed=9)
    other.load_state(folder)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), restored.parameters(), strict=True)
    )
    assert other.sync_gradients is accelerator.sync_gradients is False
    [window] = other._accumulator.unfinished()
    assert (window.micro_batches, window.items, window.planned, window.weighted) == (2, 7, 4, True)
    for each, net in ((accelerator, model), (other, restored)):
        for _ in range(2):
            with each.accumulate(net):
                each.backward(net(torch.ones(2, 4)).sum(), num_items=2)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), restored.parameters(), strict=True)
    )


def test_gradients_that_were_stepped_with_are_not_saved(tmp_path):
    accelerator, (model, optimizer, *_) = open_window(steps=1, taken=1)
    optimizer.step()
    folder = accelerator.save_state(tmp_path / "state")
    other, (restored, *_) = open_window(steps=1, taken=0)
    other.load_state(folder)
    assert model.weight.grad is not None
    assert restored.weight.grad is None


def test_gradients_of_zeros_come_back_as_zeros(tmp_path):
    accelerator, (_, optimizer, *_) = open_window(steps=1, taken=1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    folder = accelerator.save_state(tmp_path / "state")
    other, (restored, *_) = open_window(steps=1, taken=0)
    other.load_state(folder)
    assert torch.equal(restored.weight.grad, torch.zeros(1, 4))


def test_a_window_of_a_model_that_was_not_prepared_cannot_be_saved(tmp_path):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    build(accelerator)
    stranger = nn.Linear(4, 1)
    with accelerator.accumulate(stranger):
        accelerator.backward(stranger(torch.ones(2, 4)).sum())
    with pytest.raises(RuntimeError, match="no part of a prepared model"):
        accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_an_update_of_the_loss_scale_that_is_due_is_saved_and_stays_due(tmp_path):
    def run(save, fresh):
        scaling = GradScalerKwargs(init_scale=8.0)
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])
        model, optimizer, *_ = build(accelerator)
        scales = []
        for number in range(4):
            if number == 2 and fresh:
                accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])
                model, optimizer, *_ = build(accelerator, seed=3)
                accelerator.load_state(tmp_path / "state")
            huge = 1e30 if number == 1 else 1.0  # overflows: the step is skipped, and the scale shrinks later
            accelerator.backward(model(torch.full((2, 4), 1.0)).sum() * huge)
            optimizer.step()
            scales.append((accelerator.scaler.get_scale(), optimizer.step_was_skipped))
            if number == 1 and save:
                accelerator.save_state(tmp_path / "state")
            optimizer.zero_grad()
        return scales, [p.detach().clone() for p in model.parameters()]

    alone, saving, resumed = run(False, False), run(True, False), run(True, True)
    assert alone[0] == saving[0] == resumed[0]
    assert [skipped for _, skipped in alone[0]] == [False, True, False, False]
    assert alone[0][2][0] < alone[0][1][0]
    for other in (saving, resumed):
        assert all(torch.equal(a, b) for a, b in zip(alone[1], other[1], strict=True))


def test_hooks_that_save_and_load_a_model_themselves(tmp_path):
    """The pattern of scripts that train adapters: the save hook drops the weights, the load hook drops the model."""

    def make(fill):
        accelerator = Accelerator()
        first, second = accelerator.prepare(nn.Linear(2, 2), nn.Linear(3, 3))
        with torch.no_grad():
            first.weight.fill_(fill)
            second.weight.fill_(fill + 1)

        def on_save(models, weights, folder):
            torch.save(weights.pop(0), Path(folder, "mine.pt"))

        def on_load(models, folder):
            models.pop(0).load_state_dict(torch.load(Path(folder, "mine.pt")))

        accelerator.register_save_state_pre_hook(on_save)
        return accelerator, first, second, on_load

    accelerator, *_ = make(1.0)
    accelerator.save_state(tmp_path / "state")
    accelerator, first, second, on_load = make(5.0)
    with pytest.raises(StateMismatchError, match="it holds 1 models, and 2 were prepared"):
        accelerator.load_state(tmp_path / "state")
    accelerator.register_load_state_pre_hook(on_load)
    accelerator.load_state(tmp_path / "state")
    assert (first.weight[0, 0], second.weight[0, 0]) == (1, 2)


@pytest.mark.parametrize("difference", ["shape", "name", "group", "optimizer"])
def test_nothing_is_changed_when_a_model_or_an_optimizer_does_not_fit(tmp_path, difference):
    def make(changed):
        accelerator = Accelerator()
        width = 3 if changed == "shape" else 2
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width, bias=changed != "name"))
        kind = torch.optim.SGD if changed == "optimizer" else torch.optim.AdamW
        optimizer = kind(model[1].parameters() if changed == "group" else model.parameters(), lr=0.1)
        return accelerator, *accelerator.prepare(model, optimizer)

    make(None)[0].save_state(tmp_path / "state")
    accelerator, model, optimizer = make(difference)
    before = [p.clone() for p in model.parameters()], optimizer.state_dict()
    with pytest.raises(StateMismatchError):
        accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(a, b) for a, b in zip(before[0], model.parameters(), strict=True))
    assert optimizer.state_dict() == before[1]


def test_a_used_folder_is_refused_when_training_begins(tmp_path):
    def begin(load=False):
        accelerator = Accelerator(
            project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
        )
        model, *parts = build(accelerator)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if load:
            accelerator.load_state()
        for _ in range(2):
            try:
                train(accelerator, model, *parts)
            except OptionError:
                assert all(map(torch.equal, before, model.parameters())), "nothing was trained"
                raise
        return accelerator

    begin().save_state()
    with pytest.raises(OptionError, match=r"already holds checkpoint_0.*resume\(\) in a script started with"):
        begin()
    begin(load=True).save_state()


@pytest.mark.parametrize(
    "buffer",
    [torch.tensor(2), torch.empty(0, 3), torch.arange(6.0)[1::2][:1], torch.tensor([1 + 2j]).conj()],
    ids=["scalar", "empty", "one element", "conjugate"],
)
def test_fingerprints_of_odd_buffers(buffer):
    assert training_state._fingerprint(buffer) == training_state._fingerprint(buffer.clone())
