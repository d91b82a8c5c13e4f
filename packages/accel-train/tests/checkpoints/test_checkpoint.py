"""Saving and loading through the façade, on one process."""

import json
import pickle
import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_ckpt import (
    CheckpointNotFoundError,
    CheckpointSaveError,
    SaveHandle,
    SaveInProgressError,
    StateMismatchError,
)
from accel_ckpt.disk import LOCAL, Disk
from accel_train import Accelerator, DataLoaderConfiguration, OptionError, ProjectConfiguration
from testkit.samples import inputs, make
from testkit.small_run import build, snapshot, train


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


@pytest.mark.parametrize("resumes", [False, True])
def test_a_newest_checkpoint_that_is_cut_off_is_passed_over_aloud(tmp_path, resumes, monkeypatch):
    monkeypatch.setenv("ACCELERATE_RESUME", str(resumes).lower())
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=config)
    build(accelerator)
    for _ in range(3):
        accelerator.save_state()
    with (tmp_path / "checkpoints" / "checkpoint_2" / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    load = accelerator.resume if resumes else accelerator.load_state
    with pytest.warns(UserWarning, match=r"checkpoint_1 is loaded and not checkpoint_2.*another size"):
        load()
    assert accelerator.save_state().name == "checkpoint_3"


@pytest.mark.parametrize("way", ["again", "skip", "stateful", "next epoch", "saved at the end"])
def test_batches_that_are_read_again_are_told_of(tmp_path, way):
    def begin():
        config = DataLoaderConfiguration(use_stateful_dataloader=way == "stateful")
        accelerator = Accelerator(dataloader_config=config)
        return accelerator, accelerator.prepare(DataLoader(torch.arange(8), batch_size=2, shuffle=True))

    accelerator, loader = begin()
    for number, _ in enumerate(loader):
        if number == (3 if way == "saved at the end" else 1):
            accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator, loader = begin()
    accelerator.load_state(tmp_path / "state")
    if way == "next epoch":
        loader.set_epoch(1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        batches = list(accelerator.skip_first_batches(loader, 2) if way == "skip" else loader)
        list(loader)
    told = [str(each.message) for each in seen if "trained on again" in str(each.message)]
    assert len(told) == (way == "again")
    assert len(batches) == (2 if way in ("skip", "stateful") else 4)
    assert all("after 2 batches" in each and "skip_first_batches(loader, 2)" in each for each in told)


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


def test_other_objects_than_were_saved_are_named(tmp_path):
    accelerator = Accelerator()
    build(accelerator)
    accelerator.save_state(tmp_path / "state")
    other = Accelerator()
    model = nn.Linear(4, 1)
    other.prepare(model, torch.optim.AdamW(model.parameters()))  # a model alone would get the weights
    with pytest.raises(
        StateMismatchError, match="nothing was prepared or registered for its loader_0, scheduler_0"
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
    with pytest.raises(
        ValueError, match=r"save_state\('checkpoints/step_100'\).*project_dir='run', automatic"
    ):
        Accelerator(project_dir="run").save_state()
    with pytest.raises(ValueError, match="needs a folder"):
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


def test_the_number_of_the_next_checkpoint_comes_back(tmp_path):
    accelerator = Accelerator()
    build(accelerator)
    for number in range(3):
        accelerator.save_state(tmp_path / str(number))
    fresh = Accelerator()
    build(fresh)
    fresh.load_state(tmp_path / "1")
    assert fresh.save_iteration == 2


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


@pytest.mark.parametrize("function", [False, True])
def test_a_checkpoint_saved_while_a_loader_skips_can_be_loaded(tmp_path, function):
    from accel_train import skip_first_batches

    def begin():
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration())
        loader = DataLoader(TensorDataset(inputs()), batch_size=2, shuffle=True)
        return accelerator, *accelerator.prepare(*make(), loader)

    accelerator, *_, loader = begin()
    for number, _ in enumerate(loader):
        if number == 1:
            accelerator.save_state(tmp_path / "first")
            break
    accelerator, *_, loader = begin()
    accelerator.load_state(tmp_path / "first")
    if function:
        skipping = accelerator.prepare(skip_first_batches(loader, 2))
    else:
        skipping = accelerator.skip_first_batches(loader, 2)
    assert len(list(skipping)) == 4
    accelerator.save_state(tmp_path / "second")
    expected = [x.tolist() for (x,) in loader]
    accelerator, *_, loader = begin()
    accelerator.load_state(tmp_path / "second")
    assert [x.tolist() for (x,) in loader] == expected


# In the background: `save_state(asynchronous=True)`; what happens there is tested in accel-ckpt


def build_norm(accelerator, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4, shuffle=True)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def train_steps(accelerator, model, optimizer, scheduler, loader, each_step=lambda number: None):
    number = 0
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            each_step(number)
            number += 1
    return [p.detach().clone() for p in model.state_dict().values()]


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Failing(Disk):
    def write(self, descriptor, data):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_saving_at_every_step_changes_nothing_and_saves_the_same(tmp_path, accumulated, precision):
    def options():
        return {"gradient_accumulation_steps": accumulated, "mixed_precision": precision}

    plain = Accelerator(**options())
    expected = train_steps(plain, *build_norm(plain))

    synchronous = Accelerator(**options())
    train_steps(
        synchronous,
        *build_norm(synchronous),
        lambda number: synchronous.save_state(tmp_path / f"sync {number}"),
    )
    accelerator = Accelerator(**options())
    found = train_steps(
        accelerator,
        *build_norm(accelerator),
        lambda number: accelerator.save_state(tmp_path / f"async {number}", asynchronous=True),
    )
    accelerator.end_training()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for number in range(12):
        assert content(tmp_path / f"sync {number}") == content(tmp_path / f"async {number}"), number


def test_the_kinds_of_answer(tmp_path):
    accelerator = Accelerator()
    build_norm(accelerator)
    assert accelerator.save_state(tmp_path / "a") == tmp_path / "a"
    handle = accelerator.save_state(tmp_path / "b", asynchronous=True)
    assert isinstance(handle, SaveHandle)
    assert handle.result() == tmp_path / "b"


def test_automatic_names_count_at_the_call_and_pruning_follows(tmp_path):
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=config)
    build_norm(accelerator)
    for number in range(4):
        assert accelerator.save_iteration == number
        handle = accelerator.save_state(asynchronous=True)
        assert accelerator.save_iteration == number + 1
    handle.result()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]
    accelerator.save_state(asynchronous=True)
    assert accelerator.load_state().name == "checkpoint_4"  # waits for it


class Gated(Disk):
    def __init__(self):
        self.gate = threading.Event()

    def write(self, descriptor, data):
        assert self.gate.wait(20)
        return super().write(descriptor, data)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_refused_while_another_goes_on(tmp_path, asynchronous):
    accelerator = Accelerator()
    build_norm(accelerator)
    disk = accelerator._prepared.saver._disk = Gated()
    accelerator.save_state(tmp_path / "a", asynchronous=True)
    with pytest.raises(SaveInProgressError, match=f"{tmp_path}/a is still being saved"):
        accelerator.save_state(tmp_path / "b", asynchronous=asynchronous, when_busy="refuse")
    threading.Timer(0.1, disk.gate.set).start()
    accelerator.save_state(tmp_path / "b", asynchronous=asynchronous)
    accelerator.end_training()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("where", ["save_state", "load_state", "end_training", "result"])
def test_failures_surface(tmp_path, where):
    accelerator = Accelerator()
    build_norm(accelerator)
    accelerator.save_state(tmp_path / "a")
    accelerator._prepared.saver._disk = Failing()
    handle = accelerator.save_state(tmp_path / "b", asynchronous=True)
    call = {
        "save_state": lambda: accelerator.save_state(tmp_path / "c"),
        "load_state": lambda: accelerator.load_state(tmp_path / "a"),
        "end_training": accelerator.end_training,
        "result": handle.result,
    }[where]
    with pytest.raises(CheckpointSaveError, match="Input/output error"):
        call()
    accelerator._prepared.saver._disk = LOCAL
    accelerator.load_state(tmp_path / "a")
    accelerator.save_state(tmp_path / "c", asynchronous=True)
    accelerator.end_training()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_save_hooks_run_before_the_call_returns(tmp_path):
    accelerator = Accelerator()
    model, *_ = build_norm(accelerator)
    weights_seen = []

    def hook(models, weights, folder):
        weights_seen.append(threading.current_thread() is threading.main_thread())
        weights[0]["0.weight"] = torch.zeros_like(weights[0]["0.weight"])

    accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(tmp_path / "a", asynchronous=True)
    assert weights_seen == [True]
    accelerator.load_state(tmp_path / "a")
    assert model[0].weight.abs().sum() == 0


class ScheduleFree(torch.optim.SGD):
    """Has two sets of parameters, and switches between them in place."""

    def eval(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1)

    train = eval


def test_optimizers_that_change_parameters_between_steps(tmp_path, monkeypatch):
    gate, write = threading.Event(), Disk.write
    monkeypatch.setattr(Disk, "write", lambda *given: (gate.wait(20), write(*given))[1])
    accelerator = Accelerator()
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, ScheduleFree(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    handle = accelerator.save_state(tmp_path / "a", asynchronous=True)
    optimizer.eval()
    gate.set()
    handle.result()
    accelerator.load_state(tmp_path / "a")
    assert torch.equal(model.weight, before)


def test_an_accelerator_is_pickled_without_its_saves(tmp_path):
    accelerator = Accelerator()
    handle = accelerator.save_state(tmp_path / "a", asynchronous=True)
    other = pickle.loads(pickle.dumps(accelerator))
    assert other._prepared.saver._current is None
    handle.result()
    assert other.save_state(tmp_path / "b", asynchronous=True).result()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_that_cannot_be_removed_stops_neither_this_run_nor_the_next(
    tmp_path, monkeypatch, asynchronous
):
    real = Disk.remove_tree
    trouble = True

    def refuse(disk, path):
        if trouble and "checkpoint_0." in path.name:
            raise PermissionError(1, "Operation not permitted", str(path / "state.json"))
        real(disk, path)

    def begin():
        config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
        accelerator = Accelerator(project_config=config)
        build(accelerator)
        return accelerator

    def saves(accelerator):
        saved = [accelerator.save_state(asynchronous=asynchronous) for _ in range(3)]
        return [(each.result() if asynchronous else each).name for each in saved]

    monkeypatch.setattr(Disk, "remove_tree", refuse)
    with pytest.warns(UserWarning, match=r"checkpoint_0\..*could not be removed.*Operation not permitted"):
        assert saves(begin()) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    again = begin()
    assert again.load_state().name == "checkpoint_2"
    with pytest.warns(UserWarning, match=r"checkpoint_0\..*could not be removed"):
        assert saves(again) == ["checkpoint_3", "checkpoint_4", "checkpoint_5"]
    trouble = False
    with pytest.warns(UserWarning, match="it is removed"):
        again.save_state()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_6"]


def test_the_number_counts_even_if_removing_older_checkpoints_is_interrupted(tmp_path, monkeypatch):
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(project_config=config)
    build(accelerator)
    accelerator.save_state()

    def interrupt(disk, path):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Disk, "remove_tree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        accelerator.save_state()
    with pytest.warns(UserWarning, match="it is removed"):
        assert accelerator.save_state().name == "checkpoint_2"


def test_weights_are_offered_as_they_are_at_the_time():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    source = accelerator.weight_source(model, dtype="bfloat16")
    with torch.no_grad():
        model[0].weight.fill_(5)
    found = {name: (dtype, tensor) for name, dtype, _, tensor in source}
    assert found.keys() == model.state_dict().keys()
    assert found["0.weight"][0] == torch.bfloat16
    assert (found["0.weight"][1] == 5).all()
    assert found["0.weight"][1].data_ptr() == model[0].weight.data_ptr(), "nothing is copied"
    assert found["1.num_batches_tracked"][0] == torch.int64
