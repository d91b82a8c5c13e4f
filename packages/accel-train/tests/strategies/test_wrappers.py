"""Recognising wrappers, and taking them off."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from accel_train.strategies.wrappers import innermost, inside_compiled, is_compiled_module


class Box(nn.Module):
    """A wrapper as an engine has one."""

    def __init__(self, model):
        super().__init__()
        self.inside = model


class Tin(Box):
    """Another."""


def inside(kind):
    return lambda model: model.inside if type(model) is kind else model


def compiled(model):
    return torch.compile(model, backend="eager")


def test_what_torch_compile_returns_is_compiled():
    model = nn.Linear(2, 2)
    assert not is_compiled_module(model)
    assert inside_compiled(model) is model
    assert is_compiled_module(compiled(model))
    assert inside_compiled(compiled(model)) is model
    assert not is_compiled_module(nn.Sequential(compiled(model)))
    model.compile(backend="eager")
    assert not is_compiled_module(model), "in place"
    assert not is_compiled_module("text")


def test_a_module_that_only_looks_compiled_is_not_opened():
    model = nn.Module()
    model._orig_mod = nn.Linear(2, 2)
    assert inside_compiled(model) is model


@pytest.mark.parametrize(
    "wraps", [(), (Box,), (Tin, Box), (Box, compiled, Tin), (compiled, Tin, Tin, compiled, Box)]
)
def test_the_innermost_module_is_inside_wrappers_in_any_order(wraps):
    model = wrapped = nn.Linear(2, 2)
    for wrap in wraps:
        wrapped = wrap(wrapped)
    assert innermost(wrapped, inside(Box), inside_compiled, inside(Tin)) is model
    assert innermost(wrapped) is wrapped


@pytest.mark.wide
def test_a_script_that_compiles_nothing_loads_no_compiler():
    code = (
        "import sys, torch; from accel_train import Accelerator; "
        "accelerator = Accelerator(cpu=True); accelerator.prepare(torch.nn.Linear(1, 1)); "
        "found = {'torch._dynamo', 'torch.distributed.fsdp', 'torch.distributed.tensor'} & sys.modules.keys(); "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_asking_imports_no_compiler():
    code = (
        "import sys, torch; from accel_train.strategies.wrappers import is_compiled_module as asked; "
        "assert not asked(torch.nn.Linear(1, 1)); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
