"""Every value of every file of a checkpoint, changed in turn, as somebody would who wants to do harm.

Loading either takes it, or raises an error of this library. It never ends the interpreter, hangs, raises what the code
happened to trip over, or opens a file outside of the folder. After loading, a step of training may fail, but the
interpreter lives.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_ckpt import load_checkpoint_in_model
from accel_ckpt.foreign.dcp import DcpFolder
from accel_ckpt.foreign.deepspeed import DeepSpeedFolder
from accel_state.errors import AccelError
from accel_train import Accelerator
from testkit import worlds
from testkit.mutations import mutated

PACKAGE = Path(__file__).parent.parent / "packages" / "accel-ckpt" / "tests"
SECONDS = 20  # for one load; a second is usual


class Noted:
    """A registered object that takes whatever its state is."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 3, "tensor": torch.ones(2), "deep": [(1, 2.5), {"a": None}]}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def training() -> tuple[Any, ...]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    plain = torch.optim.SGD(model[0].parameters(), lr=0.1)
    adam = torch.optim.AdamW(model[1].parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1)
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True)
    accelerator.register_for_checkpointing(Noted())
    return accelerator, *accelerator.prepare(model, plain, adam, scheduler, loader)


def step(accelerator: Any, model: Any, plain: Any, adam: Any, scheduler: Any, loader: Any) -> None:
    for number, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            for each in (plain, adam, scheduler):
                each.step()
            plain.zero_grad()
            adam.zero_grad()
        if number == 2:
            return


def own(folder: Path) -> Callable[[Path], None]:
    """A state of this library, inside an accumulation window with a sparse gradient."""
    made = training()
    step(*made)
    made[0].save_state(folder)

    def load(changed: Path) -> None:
        again = training()
        again[0].load_state(changed)
        with contextlib.suppress(
            Exception
        ):  # such as for a count that is too large: but the interpreter lives
            step(*again)

    return load


def _module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accelerates(folder: Path) -> Callable[[Path], None]:
    """What Accelerate 1.15 wrote."""
    shutil.copytree(PACKAGE / "fixtures" / "accelerate-1.15" / "single" / "checkpoint", folder)
    recipe = _module("crafted_recipe", PACKAGE / "fixtures" / "recipe.py")

    def load(changed: Path) -> None:
        accelerator = Accelerator(cpu=True)
        model, other = recipe.Net(), nn.Linear(4, 1)
        optimizer = recipe.optimizer_of(model)
        second = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        accelerator.prepare(model, other, optimizer, second, recipe.scheduler_of(optimizer))
        accelerator.register_for_checkpointing(Noted())
        accelerator.load_state(changed)

    return load


def dcps(folder: Path) -> Callable[[Path], None]:
    """What torch's Distributed Checkpoint wrote."""
    dcp.save(
        {"model": {"weight": torch.ones(3, 4), "bias": torch.zeros(3)}, "plain": {"lr": 0.1, "names": ["a"]}},
        storage_writer=dcp.FileSystemWriter(folder),
    )

    def load(changed: Path) -> None:
        content = DcpFolder(changed)
        for key in content.top_keys():
            content.tree(key)
        load_checkpoint_in_model(nn.Linear(4, 3), changed)

    return load


def deepspeeds(folder: Path) -> Callable[[Path], None]:
    """The layout of DeepSpeed, stage 2."""
    _module("crafted_deepspeed", PACKAGE / "foreign" / "test_deepspeed.py").write(folder, 2, 2)

    def load(changed: Path) -> None:
        content = DeepSpeedFolder(changed / "tag")
        content.weights()
        content.optimizer()

    return load


FORMATS = {"format 1": own, "Accelerate": accelerates, "DCP": dcps, "DeepSpeed": deepspeeds}


class _HangError(BaseException):
    """A load took longer than any should."""


def _hang(*_: Any) -> None:
    raise _HangError


_opened: list[str] = []


def _outside(root: Path, folder: Path, before: int) -> list[str]:
    """Files beside the folder that were opened since."""
    paths = [Path(path) for path in _opened[before:]]
    return [str(path) for path in paths if path.is_relative_to(root) and not path.is_relative_to(folder)]


def attack(name: str, root: Path, share: float, seconds: float) -> list[str]:
    """What went wrong; in a process of its own, which a mutation may end."""
    warnings.simplefilter("ignore")
    sys.addaudithook(lambda event, args: _opened.append(str(args[0])) if event == "open" else None)
    signal.signal(signal.SIGALRM, _hang)
    original, changed = root / "original", root / "changed"
    load = FORMATS[name](original)
    (root / "x").write_text("{}")
    load(original)
    chosen, until, wrong = random.Random(1), time.monotonic() + seconds, []
    for mutation in _order(original, chosen, share):
        if time.monotonic() > until:
            break
        shutil.rmtree(changed, ignore_errors=True)
        shutil.copytree(original, changed)
        try:
            mutation.write(changed)
        except UnicodeEncodeError:
            continue
        before = len(_opened)
        print(mutation.where, file=sys.stderr, flush=True)  # the last one, if the interpreter ends here
        signal.alarm(SECONDS)
        try:
            with contextlib.suppress(AccelError):
                load(changed)
        except BaseException as error:
            wrong.append(f"{mutation.where}: {type(error).__name__}: {str(error)[:200]}")
        finally:
            signal.alarm(0)
        wrong += [f"{mutation.where}: opened {path}" for path in _outside(root, changed, before)]
    return wrong


def _order(folder: Path, chosen: random.Random, share: float) -> Iterator[Any]:
    every = [mutation for mutation in mutated(folder) if chosen.random() < share]
    chosen.shuffle(every)
    return iter(every)


@pytest.mark.wide(only=["Accelerate"])
@pytest.mark.parametrize("name", FORMATS)
def test_some_values_of_every_file(name, tmp_path):
    [wrong] = worlds.run(attack, 1, name, tmp_path, share=0.05, seconds=4.0)
    assert wrong == []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FORMATS)
def test_every_value_of_every_file(name, tmp_path):
    [wrong] = worlds.run(attack, 1, name, tmp_path, share=1.0, seconds=1700.0, timeout=1750)
    assert wrong == []
