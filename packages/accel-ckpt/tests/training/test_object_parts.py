"""Objects of a training as parts of its state. Through whole saves: test_checkpointer.py."""

import pytest
import torch
from torch import nn

from accel_ckpt import Checkpointer, StateMismatchError, open_training_state, save_training_state
from accel_ckpt.modules import named_model
from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.training.object_parts import ObjectPart, OptimizerPart, check_parts, replicated_optimizers
from accel_ckpt.training.state_part import SavedTrees, Trees


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
    return {"model": model, "other": other}, optimizers, Counter(seed)


def parts_of(training):
    modules, optimizers, counter = training
    models = [NamedModel(module) for module in modules.values()]
    return [*(OptimizerPart(*named, models) for named in optimizers.items()), ObjectPart("counter", counter)]


def trees_of(training):
    trees = Trees(shared={})
    for part in parts_of(training):
        part.dump(trees)
    return trees.shared


def saved_in(checkpoint):
    shared = dict(checkpoint.lazy_shared(["first", "second"]))
    return SavedTrees(checkpoint.directory, shared, None, {}, 0, 1, 1, (0,), 1, frozenset(), lambda rank: {})


def save(training, folder):
    models = [module.state_dict() for module in training[0].values()]
    return open_training_state(
        save_training_state(folder, models=models, shared=trees_of(training), per_rank={})
    )


def test_a_save_walks_each_model_once(tmp_path, monkeypatch):
    walked = []
    monkeypatch.setattr(named_model, "prefixed_modules", lambda m: walked.append(m) or [("", "", m)])
    modules, optimizers, _ = training(1)
    Checkpointer(tmp_path).save(1, {**modules, **optimizers})
    assert walked == [modules["model"], modules["other"]]


def test_everything_is_put_back(tmp_path):
    first, second = training(1), training(2)
    saved = saved_in(save(first, tmp_path / "c"))
    taken = [(part, part.read(saved)) for part in parts_of(second)]
    for part, found in taken:
        part.check(found, saved)
    assert second[2].count == 2
    for part, found in taken:
        part.load(found, saved)
    assert second[2].count == 1
    ours, theirs = trees_of(first), trees_of(second)
    for name in first[1]:
        for parameter, state in ours[name]["state"].items():
            for key, value in state.items():
                assert torch.equal(
                    torch.as_tensor(value), torch.as_tensor(theirs[name]["state"][parameter][key])
                )


def test_what_does_not_fit_is_found_before(tmp_path):
    first = training(1)
    checkpoint = save(first, tmp_path / "c")
    saved = saved_in(checkpoint)
    saved.shared["first"], saved.shared["second"] = saved.shared["second"], saved.shared["first"]
    part = parts_of(first)[0]
    with pytest.raises(StateMismatchError):
        part.check(part.read(saved), saved)
    with pytest.raises(StateMismatchError, match=r"it lacks the modules a; the state lacks its modules b"):
        check_parts({"modules": ["a", "c"]}, {"modules": ["b", "c"]}, checkpoint.directory)


def test_optimizers_of_replicas_alone_are_replicated():
    modules, optimizers, _ = training(1)
    model, other = modules.values()
    assert replicated_optimizers(optimizers, [model]) == ["first"]
    assert replicated_optimizers(optimizers, [model, other]) == ["first", "second"]
    assert replicated_optimizers(optimizers, []) == []
