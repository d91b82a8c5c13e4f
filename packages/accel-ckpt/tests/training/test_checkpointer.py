"""Checkpoints of loops that know nothing of the rest of the project."""

import copy
import os
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from accel_ckpt import (
    Checkpointer,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    RandomState,
    StateMismatchError,
    UnsupportedValueError,
    open_training_state,
)
from accel_ckpt.disk import Disk
from accel_state import PartialState
from testkit import worlds


def training(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "progress": {"step": 0, 7: (1, 2)},
    }


def train(state, steps):
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(6, 4)).pow(2).mean().backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["progress"]["step"] += 1


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path):
    uninterrupted = training()
    train(uninterrupted, 3)
    Checkpointer(tmp_path).save(3, uninterrupted, per_rank={"random": RandomState()})
    train(uninterrupted, 3)

    resumed = training(seed=5)
    progress = resumed["progress"]
    assert Checkpointer(tmp_path).load(resumed, per_rank={"random": RandomState()}) == 3
    assert resumed["progress"] is progress
    assert progress == {"step": 3, 7: (1, 2)}
    train(resumed, 3)
    for name, value in uninterrupted["model"].state_dict().items():
        assert torch.equal(resumed["model"].state_dict()[name], value), name
    assert resumed["scheduler"].get_last_lr() == uninterrupted["scheduler"].get_last_lr()


def test_random_numbers_of_every_kind_continue(tmp_path):
    Checkpointer(tmp_path).save(0, {}, per_rank={"random": RandomState()})
    drawn = random.random(), np.random.rand(), torch.rand(1)
    Checkpointer(tmp_path).load({}, per_rank={"random": RandomState()})
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))


def test_nested_parts_values_and_their_places(tmp_path):
    class Counter:
        def __init__(self, n):
            self.n = n

        def state_dict(self):
            return {"n": self.n}

        def load_state_dict(self, state):
            self.n = state["n"]

    saved = {
        "train": {"counter": Counter(3), "epoch": 2},
        "history": [1, 2],
        "table": {},
        "ema": torch.ones(3),
    }
    Checkpointer(tmp_path).save(1, saved)
    empty = {
        "train": {"counter": Counter(0), "epoch": 0},
        "history": None,
        "table": {"x": 1},
        "ema": torch.zeros(3),
    }
    counter = empty["train"]["counter"]
    Checkpointer(tmp_path).load(empty)
    assert empty["train"]["counter"] is counter
    assert counter.n == 3
    assert empty["train"]["epoch"] == 2
    assert empty["history"] == [1, 2]
    assert empty["table"] == {}
    assert torch.equal(empty["ema"], torch.ones(3))


def test_steps_are_ordered_by_number_and_the_oldest_go(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (2, 9, 10, 30):
        checkpointer.save(step, {"n": step})
    assert checkpointer.steps() == [10, 30]
    state = {"n": None}
    assert checkpointer.load(state) == 30
    assert checkpointer.load(state, 10) == 10
    assert state == {"n": 10}


def test_a_step_below_one_that_exists_is_refused(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(5, {"n": 5})
    with pytest.raises(CheckpointSaveError, match="step_5 exists"):
        checkpointer.save(3, {"n": 3})  # it would be the oldest: removed at once, and never the latest
    assert checkpointer.steps() == [5]


def test_wrapped_and_compiled_modules_have_the_same_names(tmp_path):
    state = training()
    Checkpointer(tmp_path).save(0, {"net": torch.compile(state["model"])})
    other = training(seed=1)["model"]
    Checkpointer(tmp_path).load({"net": other})
    assert torch.equal(other[0].weight, state["model"][0].weight)
    assert set(open_training_state(tmp_path / "step_0").models[0]) == set(other.state_dict())


def test_nothing_changes_when_anything_does_not_fit(tmp_path):
    Checkpointer(tmp_path).save(0, training())
    other = training(seed=1)
    other["optimizer"] = torch.optim.AdamW([*other["model"].parameters()][:1])
    before = copy.deepcopy(other["model"].state_dict())
    with pytest.raises(StateMismatchError, match=r"not in the optimizer: model_0\.0\.bias"):
        Checkpointer(tmp_path).load(other)
    assert all(torch.equal(before[name], value) for name, value in other["model"].state_dict().items())
    assert other["progress"]["step"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("scheduler"), "the state lacks its objects scheduler"),
        (lambda s: s.update(more=3), "it lacks the values more"),
        (lambda s: s.update(model=nn.Linear(4, 8)), "not there: bias, weight; not here: 0.bias, 0.weight"),
        (lambda s: s["model"].__setitem__(2, nn.Linear(8, 2)), r"2\.bias is \[1\] there and \[2\] here"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, message):
    Checkpointer(tmp_path).save(0, training())
    other = training()
    change(other)
    with pytest.raises(StateMismatchError, match=message):
        Checkpointer(tmp_path).load(other)


def test_bad_input(tmp_path):
    checkpointer = Checkpointer(tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError, match=r"no complete checkpoint in .*none"):
        checkpointer.load({})
    with pytest.raises(CheckpointNotFoundError, match="step_7"):
        checkpointer.load({}, 7)
    with pytest.raises(CheckpointNotFoundError):
        checkpointer.verify()
    assert checkpointer.steps() == []
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step is -1"):
        checkpointer.save(-1, {})
    with pytest.raises(ValueError, match="step is 'latest'"):
        checkpointer.save("latest", {})
    with pytest.raises(UnsupportedValueError, match=r"'a\.b'"):
        checkpointer.save(0, {"a.b": 1})
    with pytest.raises(UnsupportedValueError, match="list"):
        checkpointer.save(0, [1])
    with pytest.raises(UnsupportedValueError, match="cannot be part of per_rank"):
        checkpointer.save(0, {}, per_rank={"m": nn.Linear(1, 1)})
    with pytest.raises(UnsupportedValueError, match=r"builtin_function_or_method"):
        checkpointer.save(0, {"f": [print]})
    assert checkpointer.steps() == []
    checkpointer.save(0, {"n": 1})
    with pytest.raises(CheckpointSaveError, match="step_0 exists"):
        checkpointer.save(0, {"n": 2})


def test_a_state_of_another_kind_says_so(tmp_path):
    from accel_ckpt import save_training_state

    save_training_state(tmp_path / "step_0", models=[], shared={"x": 1}, per_rank={})
    with pytest.raises(StateMismatchError, match="no Checkpointer saved"):
        Checkpointer(tmp_path).load({"x": 0})


def test_one_flipped_bit_is_found(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    folder = checkpointer.save(0, training())
    checkpointer.verify()
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        checkpointer.verify(0)
    with pytest.raises(CorruptCheckpointError):
        checkpointer.load(training())


def test_an_incomplete_folder_is_no_step(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"n": 1})
    os.mkdir(tmp_path / "step_2")
    assert checkpointer.steps() == [1]
    with pytest.raises(CheckpointSaveError, match="step_2 exists"):
        checkpointer.save(2, {"n": 2})


def test_a_save_in_the_background_is_the_one_that_was_asked_for(tmp_path):
    state = training()
    train(state, 2)
    checkpointer = Checkpointer(tmp_path, keep=2)
    handles = []
    expected = []
    for step in (2, 3, 4):
        expected.append(copy.deepcopy(state["model"].state_dict()))
        handles.append(checkpointer.save(step, state, per_rank={"random": RandomState()}, asynchronous=True))
        train(state, 1)
    checkpointer.wait()
    assert [handle.result().name for handle in handles] == ["step_2", "step_3", "step_4"]
    assert checkpointer.steps() == [3, 4]
    for step in (3, 4):
        weights = open_training_state(tmp_path / f"step_{step}").models[0]
        assert all(torch.equal(weights[name], value) for name, value in expected[step - 2].items())
    other = training(seed=1)
    assert checkpointer.load(other) == 4
    assert other["progress"]["step"] == 4


def test_a_failure_in_the_background_is_told_by_the_next_call(tmp_path, monkeypatch):
    from accel_ckpt.disk import Disk

    def full(self, descriptor, data):
        raise OSError(28, "No space left on device")

    checkpointer = Checkpointer(tmp_path)
    monkeypatch.setattr(Disk, "write", full)
    checkpointer.save(1, {"n": torch.ones(100)}, asynchronous=True)
    with pytest.raises(CheckpointSaveError, match="No space left"):
        checkpointer.save(2, {"n": torch.ones(100)})
    monkeypatch.undo()
    assert checkpointer.steps() == []
    checkpointer.save(2, {"n": torch.ones(100)})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_that_cannot_be_removed_does_not_fail_the_saves_after_it(
    tmp_path, monkeypatch, asynchronous
):
    real = Disk.remove_tree

    def refuse(disk, path):
        if "step_1." in path.name:
            raise OSError(16, "Device or resource busy", str(path))
        real(disk, path)

    monkeypatch.setattr(Disk, "remove_tree", refuse)
    checkpointer = Checkpointer(tmp_path, keep=1)

    def save(step):
        saved = checkpointer.save(step, {"x": torch.ones(3)}, asynchronous=asynchronous)
        return saved.result() if asynchronous else saved

    save(1)
    for step in (2, 3):
        with pytest.warns(UserWarning, match=r"step_1\..*could not be removed.*resource busy"):
            assert save(step).name == f"step_{step}"
    assert checkpointer.steps() == [3]


def test_an_asynchronous_save_holds_the_values_of_the_call(tmp_path):
    state, own = training(), {"random": RandomState(), "gradient": torch.ones(300, 300)}
    train(state, 2)
    weight = state["model"][0].weight
    moment = state["optimizer"].state[weight]["exp_avg"]
    expected = weight.detach().clone(), moment.clone()
    handle = Checkpointer(tmp_path).save(2, state, per_rank=own, asynchronous=True)
    drawn = torch.rand(3)
    for changed in (weight.data, moment, own["gradient"]):
        changed.zero_()
    state["progress"]["step"] = 99
    train(state, 1)
    handle.result()
    assert Checkpointer(tmp_path).load(state, per_rank=own) == 2
    assert torch.equal(weight, expected[0])
    assert torch.equal(state["optimizer"].state[weight]["exp_avg"], expected[1])
    assert state["progress"]["step"] == 2
    assert own["gradient"].all()
    assert torch.equal(torch.rand(3), drawn)


class Counter:
    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count, "table": torch.full((3,), float(self.count))}

    def load_state_dict(self, state):
        self.count = state["count"]


def saved_with_warnings(folder):
    rank = PartialState(cpu=True).process_index
    state = {"run": {"epoch": 1, "loss": 0.5 + rank, "seen": Counter(4 + rank), "step": Counter(2)}}
    own = {"mine": Counter(rank)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Checkpointer(folder).save(1, state, per_rank=own)
    Checkpointer(folder).load(state, per_rank=own)
    return [str(warning.message) for warning in said], state["run"]["seen"].count, own["mine"].count


def test_a_part_that_is_another_on_a_rank_is_named(tmp_path):
    (said, *first), (others, *second) = worlds.run(saved_with_warnings, 2, tmp_path / "run")
    named = sorted(text.partition(" is not the same on rank 1")[0] for text in said)
    assert named == ["run.loss", "run.seen"]
    assert "per_rank=" in said[0]
    assert others == []
    assert (first, second) == ([4, 0], [4, 1])
