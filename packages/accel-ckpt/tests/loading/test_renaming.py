"""Checkpoints whose names the library of a model renames or converts; the oracle is the model they were made of."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_ckpt import (
    StateMismatchError,
    check_checkpoint_fits,
    load_checkpoint_in_model,
    load_state_dict,
    save_model,
)
from testkit import worlds


class Rename:
    """A rule that changes names, as a library has it."""

    def __init__(self, old, new):
        self.old, self.new = old, new

    def rename_source_key(self, name):
        return (name.replace(self.old, self.new), self.old) if self.old in name else (name, None)


class Stack(Rename):
    """A rule that stacks `<old><number>.weight` to one tensor, and may split that again by its first dimension."""

    operations = ("stack",)

    def __init__(self, old, new, also=None):
        super().__init__(old, new)
        self.also, self.collected = also, []

    def rename_source_key(self, name):
        return (self.new, self.old) if self.old in name else (name, None)

    def add_tensor(self, target, source, pattern, value):
        assert (target, pattern) == (self.new, self.old)
        self.collected.append(value)

    def convert(self, target, model, config):
        stacked = torch.stack([value() for value in self.collected])
        if self.also is None:
            return {target: [stacked]}
        return dict(zip((target, self.also), stacked, strict=True))


class Base(nn.Module):
    """Its rules are its class's own."""

    rules = ()

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(3, 3)
        self.experts = nn.Parameter(torch.randn(12, 3, 2))
        self.register_buffer("scale", torch.randn(2))


Base.__module__ = "a_library"


def install():
    """A library that has rules for the models of its classes, as transformers beside its base class."""
    library = types.ModuleType("a_library")
    library.get_model_conversion_mapping = lambda model: model.rules
    sys.modules[library.__name__] = library


@pytest.fixture(autouse=True)
def _library():
    install()
    yield
    del sys.modules["a_library"]


def saved(folder, tensors):
    folder.mkdir(exist_ok=True)
    save_file({name: value.detach().clone() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Renamed(Base):
    rules = (Rename("old.", "middle."), Rename("middle.", "inner."), Stack("expert_list.", "experts"))


def old_names(model):
    experts = {f"expert_list.{number}.weight": value for number, value in enumerate(model.experts)}
    return {
        "old.weight": model.inner.weight,
        "middle.bias": model.inner.bias,
        "scale": model.scale,
        **experts,
    }


def test_names_are_changed_and_numbers_stacked_in_their_order(tmp_path):
    model, other = Renamed(), Renamed(seed=1)
    folder = saved(tmp_path, old_names(model))
    check_checkpoint_fits(other, folder)
    report = load_checkpoint_in_model(other, folder, strict=True)
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    assert same(other, model)
    with torch.device("meta"):
        empty = Renamed()
    load_checkpoint_in_model(empty, folder)
    assert same(empty, model)


def test_names_that_are_the_models_own_stay(tmp_path):
    """Also where a rule would fit them: save_model writes the names of the model."""

    class Shifted(Base):
        rules = (Rename("inner.", "gone."), Rename("scale", "gone"))

    model, other = Shifted(), Shifted(seed=1)
    save_model(model, tmp_path)
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert same(other, model)


def test_one_tensor_becomes_several(tmp_path):
    class Split(Base):
        rules = (Stack("both.", "one", also="two"),)

        def __init__(self):
            nn.Module.__init__(self)
            self.one, self.two = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    folder = saved(tmp_path, {"both.0": torch.arange(3.0), "both.1": torch.arange(3.0) + 7})
    model = Split()
    load_checkpoint_in_model(model, folder, strict=True)
    assert model.one.tolist() == [0, 1, 2]
    assert model.two.tolist() == [7, 8, 9]


def test_what_no_rule_knows_is_reported_by_its_name_in_the_file(tmp_path):
    folder = saved(tmp_path, {**old_names(Renamed()), "head.old.x": torch.ones(1)})
    with pytest.warns(UserWarning, match="not used"):
        assert load_checkpoint_in_model(Renamed(), folder).unexpected == ("head.old.x",)
    with pytest.raises(StateMismatchError, match=r"head\.old\.x"):
        load_checkpoint_in_model(Renamed(), folder, strict=True)


def test_a_rule_that_fails_says_what_to_do_and_changes_nothing(tmp_path):
    tensors = old_names(Renamed())
    tensors["expert_list.3.weight"] = torch.ones(5, 5)
    model, before = Renamed(seed=1), Renamed(seed=1)
    folder = saved(tmp_path, tensors)
    with pytest.raises(
        StateMismatchError, match=r"experts is made of expert_list\.0.*fails.*from_pretrained"
    ):
        load_checkpoint_in_model(model, folder)
    assert same(model, before)


def test_patterns_that_a_model_carries(tmp_path):
    class Patterns(nn.Module):
        _checkpoint_conversion_mapping = {r"^body\.(?!x)": "inner.", "unused": "gone"}

        def __init__(self, seed=0):
            super().__init__()
            torch.manual_seed(seed)
            self.inner = nn.Linear(3, 3)

    model, other = Patterns(), Patterns(seed=1)
    folder = saved(tmp_path, {"body.weight": model.inner.weight, "body.bias": model.inner.bias})
    load_checkpoint_in_model(other, folder, strict=True)
    assert same(other, model)


@pytest.mark.parametrize("head", [True, False])
def test_a_model_with_a_head_takes_weights_of_the_one_below_and_the_other_way(tmp_path, head):
    class Head(nn.Module):
        base_model_prefix = "body"

        def __init__(self):
            super().__init__()
            self.body = nn.Linear(2, 2)

    class Body(nn.Linear):
        base_model_prefix = "body"

    there, here = (Body(2, 2), Head()) if head else (Head(), Body(2, 2))
    folder = saved(tmp_path, there.state_dict())
    load_checkpoint_in_model(here, folder, strict=True)
    assert load_state_dict(folder / "model.safetensors").keys() == there.state_dict().keys()
    values = zip(here.state_dict().values(), there.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in values)


def broadcast(folder):
    from accel_state import PartialState

    install()
    PartialState(cpu=True)
    model = Renamed(seed=1)
    load_checkpoint_in_model(model, folder, strict=True, broadcast_from_rank0=True)
    return same(model, Renamed())


def test_weights_that_rank_0_sends(tmp_path):
    assert worlds.run(broadcast, 2, saved(tmp_path, old_names(Renamed()))) == [True, True]
