"""Every value of a training state, replaced by another: the load refuses it by name, or the next steps work."""

import copy
import math
import warnings

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import accel_ckpt
from accel_state.errors import AccelError
from accel_train import Accelerator, DataLoaderConfiguration

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.1, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.1, momentum=0.9, centered=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
}
SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=100, cycle_momentum=not isinstance(optimizer, torch.optim.Adagrad)
    ),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [2],
    ),
    "function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
}
NUMBERS = {
    "none": None, "text": "x", "negative": -5, "huge": 1 << 70, "nan": math.nan, "infinite": math.inf, "list": [1],
    "complex": 1j, "zero": 0, "tensor": torch.ones(2),
}  # fmt: skip


class Run:
    def __init__(self, optimizer, scheduler):
        torch.manual_seed(0)
        options = DataLoaderConfiguration(use_stateful_dataloader=True)
        self.accelerator = Accelerator(cpu=True, dataloader_config=options)
        model = torch.nn.Linear(3, 2)
        optimizer = OPTIMIZERS[optimizer](model.parameters())
        loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2, shuffle=True)
        parts = self.accelerator.prepare(model, optimizer, loader, SCHEDULERS[scheduler](optimizer))
        self.model, self.optimizer, self.loader, self.scheduler = parts
        self.arguments = (1.0,) if scheduler == "plateau" else ()

    def steps(self, count):
        for (batch,), _ in zip(self.loader, range(count), strict=False):
            self.accelerator.backward(self.model(batch).sum())
            self.optimizer.step()
            self.scheduler.step(*self.arguments)
            self.optimizer.zero_grad()

    def __repr__(self):
        return repr([part.state_dict() for part in (self.model, self.optimizer, self.scheduler)])


def paths(tree, path=()):
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from paths(value, (*path, key))
    if path:
        yield path


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def replaced(tree, path, value):
    if not path:
        return value
    if isinstance(tree, tuple):
        return tuple(replaced([*tree], path, value))
    return_ = copy.copy(tree)
    return_[path[0]] = replaced(tree[path[0]], path[1:], value)
    return return_


def others(value):
    """Values in the place of one."""
    if isinstance(value, torch.Tensor):
        found = {"none": None, "text": "x", "shape": torch.zeros(7, dtype=value.dtype), "number": 1.5}
        for dtype in (torch.bool, torch.int64, torch.complex64):
            found[str(dtype)] = torch.zeros(value.shape, dtype=dtype)
        if value.numel() == 1 and value.is_floating_point():
            found["negative"] = torch.full_like(value, -3.0)
        return found
    if isinstance(value, bool | str):
        return {"none": None, "text": "zzz", "list": [1]}
    if isinstance(value, int | float):
        return NUMBERS
    if isinstance(value, dict):
        return {"none": None, "empty": {}, "number": 3}
    if isinstance(value, list | tuple):
        kind = type(value)
        return {"none": None, "empty": kind(), "number": 3, "texts": kind(["x"] * len(value)), "text": "x"}
    return {"text": "x", "number": -1, "list": [1]}


def combinations():
    often = {("adamw", "one cycle")}
    for optimizer in OPTIMIZERS:
        for scheduler in SCHEDULERS:
            marks = [] if (optimizer, scheduler) in often else [pytest.mark.full]
            yield pytest.param(optimizer, scheduler, marks=[*marks, pytest.mark.timeout(600)])


@pytest.mark.wide
@pytest.mark.parametrize(("optimizer", "scheduler"), [*combinations()])
def test_values_that_no_step_could_use_are_refused(tmp_path, monkeypatch, optimizer, scheduler):
    run = Run(optimizer, scheduler)
    run.steps(3)
    state = run.accelerator.save_state(tmp_path / "state")
    checkpoint = accel_ckpt.open_training_state(state)
    trees = {"shared": dict(checkpoint.shared), "own": dict(checkpoint.per_rank(0))}
    now = copy.deepcopy(trees)
    kind = accel_ckpt.TrainingCheckpoint
    for reader in ("mapped_shared", "lazy_shared"):
        monkeypatch.setattr(kind, reader, lambda self, names: copy.deepcopy(now["shared"]))
    monkeypatch.setattr(kind, "per_rank", lambda self, rank, allow_missing=False: copy.deepcopy(now["own"]))
    problems = []
    for which, tree in trees.items():
        for path in paths(tree):
            if path[0] == "rng":
                continue
            for name, value in others(at(tree, path)).items():
                now[which] = replaced(tree, path, value)
                problems += [(*path, name, *problem) for problem in load(state, optimizer, scheduler)]
        now[which] = tree
    assert not problems


def load(state, optimizer, scheduler):
    """What goes wrong."""
    run = Run(optimizer, scheduler)
    run.steps(1)
    before = repr(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run.accelerator.load_state(state)
        except AccelError:
            return [] if repr(run) == before else ["changed"]
        except Exception as error:
            return [("not named", repr(error))]
        try:
            run.steps(2)
        except Exception as error:
            return [("too late", repr(error))]
    return []
