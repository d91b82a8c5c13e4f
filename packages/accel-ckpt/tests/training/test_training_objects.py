"""Objects of a training, collected and restored. Through whole saves: test_checkpointer.py."""

import pytest
import torch
from torch import nn

from accel_ckpt import StateMismatchError, open_training_state
from accel_ckpt.modules import named_model
from accel_ckpt.saving.save_state import StateContent, save_collected
from accel_ckpt.training.training_objects import TrainingObjects, check_parts, replicated_optimizers


class Counter:
    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def training(seed):
    torch.manual_seed(seed)
    model, other = nn.Linear(3, 2), nn.BatchNorm1d(2)
    optimizers = {
        "first": torch.optim.AdamW(model.parameters()),
        "second": torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1, momentum=0.5),
    }
    for optimizer in optimizers.values():
        other(model(torch.randn(4, 3))).square().mean().backward()
        optimizer.step()
    return TrainingObjects({"model": model, "other": other}, optimizers, {"counter": Counter(seed)})


def content(objects):
    return StateContent(models=objects.weights(), shared=objects.trees(), per_rank={}, canonical=True)


def test_a_save_walks_each_model_once(tmp_path, monkeypatch):
    walked = []
    monkeypatch.setattr(named_model, "canonical_names", lambda m: walked.append(m) or {"": ""})
    objects = training(1)
    save_collected(tmp_path / "c", content(objects))
    assert walked == [objects.modules["model"], objects.modules["other"]]


def test_everything_is_put_back(tmp_path):
    saved, other = training(1), training(2)
    checkpoint = open_training_state(save_collected(tmp_path / "c", content(saved)))
    weights = {"model": checkpoint.weights(0), "other": checkpoint.weights(1)}
    restores = other.restores(weights, checkpoint.lazy_shared(saved.optimizers))
    assert other.objects["counter"].count == 2
    for restore in restores:
        restore()
    assert other.objects["counter"].count == 1
    for ours, theirs in zip(saved.weights(), other.weights(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = saved.trees(), other.trees()
    for name in saved.optimizers:
        for parameter, state in ours[name]["state"].items():
            for key, value in state.items():
                assert torch.equal(
                    torch.as_tensor(value), torch.as_tensor(theirs[name]["state"][parameter][key])
                )


def test_what_does_not_fit_is_found_before(tmp_path):
    saved, other = training(1), training(2)
    checkpoint = open_training_state(save_collected(tmp_path / "c", content(saved)))
    trees = checkpoint.lazy_shared(saved.optimizers)
    wrong = {"model": checkpoint.weights(1), "other": checkpoint.weights(0)}
    with pytest.raises(StateMismatchError, match="do not fit the module Linear"):
        other.restores(wrong, trees)
    with pytest.raises(StateMismatchError, match=r"it lacks the modules a; the state lacks its modules b"):
        check_parts({"modules": ["a", "c"]}, {"modules": ["b", "c"]}, checkpoint.directory)


def test_optimizers_of_replicas_alone_are_replicated():
    objects = training(1)
    model, other = objects.modules.values()
    assert replicated_optimizers(objects.optimizers, [model]) == ["first"]
    assert replicated_optimizers(objects.optimizers, [model, other]) == ["first", "second"]
    assert replicated_optimizers(objects.optimizers, []) == []
