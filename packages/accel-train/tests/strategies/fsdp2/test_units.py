"""Which modules are sharded as one unit."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from accel_train import FullyShardedDataParallelPlugin as Plugin
from accel_train.errors import PrepareError
from accel_train.strategies.fsdp2.units import covering_shared, find_units, ignored_parameters
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Linear(4, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 10)


class Declared(Model):
    _no_split_modules = ("Attention",)


def units(model, **options):
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(unit)] for unit in find_units(model, Plugin(**options))]


def test_without_a_policy_blocks_are_units():
    assert units(Model()) == ["blocks.0", "blocks.1"]
    assert units(nn.Linear(2, 2)) == []


def test_a_model_of_transformers_names_its_units():
    assert units(Declared()) == ["blocks.0.attention", "blocks.1.attention"]
    wrapper = nn.Sequential(Declared())  # as PEFT wraps a model
    assert units(wrapper) == ["0.blocks.0.attention", "0.blocks.1.attention"]


def test_classes_by_name_inner_ones_first():
    found = units(Declared(), transformer_cls_names_to_wrap=["Block", "Attention"])
    assert found == ["blocks.0.attention", "blocks.0", "blocks.1.attention", "blocks.1"]
    assert units(
        Model(), auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap="Block"
    ) == [
        "blocks.0",
        "blocks.1",
    ]


def test_a_name_that_no_module_has_is_refused_with_the_near_ones():
    with pytest.raises(PrepareError, match=r"no module of the class 'Blok'.*Did you mean 'Block'"):
        units(Model(), transformer_cls_names_to_wrap=["Blok"])
    with pytest.raises(PrepareError, match="'Missing'"):
        units(Model(), transformer_cls_names_to_wrap=["Block", "Missing"])


def test_one_unit():
    assert units(Model(), auto_wrap_policy="no_wrap") == []


@pytest.mark.parametrize("least", [1, 20, 40, 55, 60, 100, 10_000])
def test_sizes_as_version_1_counts_them(least):
    # What torch's own policy does with FSDP1: children first, then whether enough is left.
    def expected(module):
        taken, found = 0, []
        for child in module.children():
            inner, names = expected(child)
            taken += inner
            found += names
        left = sum(p.numel() for p in module.parameters()) - taken
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=least)
        if policy(module=module, recurse=False, nonwrapped_numel=left) and not isinstance(
            module, nn.ModuleList
        ):
            return taken + left, [*found, module]
        return taken, found

    model = Model()
    names = {id(module): name for name, module in model.named_modules()}
    wanted = [names[id(module)] for module in expected(model)[1] if module is not model]
    assert units(model, auto_wrap_policy="size_based_wrap", min_num_params=least) == wanted
    plugin = Plugin(auto_wrap_policy="size_based_wrap", min_num_params=least)
    plugin.set_auto_wrap_policy(model)
    assert units(model, auto_wrap_policy=plugin.auto_wrap_policy) == wanted


@pytest.mark.parametrize(
    "policy",
    [
        lambda module: isinstance(module, Block),
        ModuleWrapPolicy({Block}),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    ],
    ids=["function", "policy", "version 1"],
)
def test_policies_of_the_script(policy):
    assert units(Model(), auto_wrap_policy=policy) == ["blocks.0", "blocks.1"]


def test_a_shared_module_is_one_unit():
    block = Block()
    assert units(
        nn.ModuleDict({"a": nn.ModuleList([block, block])}), transformer_cls_names_to_wrap="Block"
    ) == ["a.0"]


def test_ignored_modules():
    model = Model()
    assert ignored_parameters(model, None) == set()
    assert ignored_parameters(model, r"embed|blocks\.\d+\.mlp") == {
        model.embed.weight,
        *model.blocks[0].mlp.parameters(),
        *model.blocks[1].mlp.parameters(),
    }
    assert ignored_parameters(model, [model.head]) == set(model.head.parameters())
    with pytest.raises(
        PrepareError, match="'embedding' matches no module of Model; names look like embed, blocks"
    ):
        ignored_parameters(model, "embedding")
    with pytest.raises(PrepareError, match="Linear, which is no module of Model"):
        ignored_parameters(model, [nn.Linear(1, 1)])


def kept(model, **options):
    names = {id(module): name for name, module in model.named_modules()}
    whole = ignored_parameters(model, None)
    units, shared = covering_shared(model, find_units(model, Plugin(**options)), whole)
    return [names[id(unit)] for unit in units], shared


def tied(how):
    torch.manual_seed(0)
    model = Model()
    if "head" in how:
        model.head.weight = model.embed.weight
    if "blocks" in how:
        model.blocks[1].attention.proj.weight = model.blocks[0].attention.proj.weight
    if "module" in how:
        model.blocks.append(model.blocks[0])
    if "across" in how:
        model.extra = nn.Linear(4, 4, bias=False)
        model.extra.weight = model.blocks[1].attention.proj.weight
    if "inside" in how:
        model.blocks[0].second = nn.Linear(4, 4, bias=False)
        model.blocks[0].second.weight = model.blocks[0].attention.proj.weight
    return model


def test_blocks_that_share_parameters_with_others_are_no_units():
    assert kept(Model()) == (["blocks.0", "blocks.1"], [])
    assert kept(tied("head")) == (["blocks.0", "blocks.1"], [])
    assert kept(tied("module")) == (["blocks.0", "blocks.1"], [])
    assert kept(tied("inside")) == (["blocks.0", "blocks.1"], [])
    first, second = "blocks.0.attention.proj.weight", "blocks.1.attention.proj.weight"
    assert kept(tied("blocks")) == ([], [(first, second), (second, first)])
    assert kept(tied("across")) == (["blocks.0"], [(second, "extra.weight")])


def test_the_unit_around_all_uses_gathers_a_shared_parameter():
    names = ["Attention", "Block"]
    units, shared = kept(tied("inside"), transformer_cls_names_to_wrap=names)
    assert units == ["blocks.0", "blocks.1.attention", "blocks.1"]
    assert shared == [("blocks.0.attention.proj.weight", "blocks.0.second.weight")]


class Called(Block):
    def forward(self, hidden):
        hidden = hidden + self.attention.proj(torch.tanh(hidden))
        return hidden + self.mlp(hidden)[..., :4]


class Stack(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Called(), Called()])

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.extra(hidden) if hasattr(self, "extra") else hidden)


def stack(how):
    torch.manual_seed(0)
    model = Stack()
    if "head" in how:
        model.head.weight = model.embed.weight
    if "blocks" in how:
        model.blocks[1].attention.proj.weight = model.blocks[0].attention.proj.weight
    if "module" in how:
        model.blocks.append(model.blocks[0])
    if "across" in how:
        model.extra = nn.Linear(4, 4, bias=False)
        model.extra.weight = model.blocks[1].attention.proj.weight
    return model.double()


def trains_as_one(how, recomputes):
    from accel_train import Accelerator

    plugin = Plugin(transformer_cls_names_to_wrap=["Called"], activation_checkpointing=recomputes)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    ids = torch.arange(20 * accelerator.num_processes).view(-1, 5) * 7 % 10
    alone, model = stack(how), stack(how)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (alone, model)]
    model, optimizer = accelerator.prepare(model, optimizers[1])
    mine = ids.chunk(accelerator.num_processes)[accelerator.process_index]
    for _ in range(3):
        nn.functional.cross_entropy(alone(ids).flatten(0, 1), ids.flatten()).backward()
        wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizers[0].step()
        optimizers[0].zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(mine).flatten(0, 1), mine.flatten()))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(norm, wanted)
        optimizer.step()
        optimizer.zero_grad()
    assert len(list(model.parameters())) == len(list(alone.parameters()))
    for name, value in accelerator.get_state_dict(model).items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("how", "recomputes"),
    [("blocks", False), ("head across", False), ("head blocks module across", True)],
)
def test_shared_parameters_train_as_on_one_process(how, recomputes):
    worlds.run(trains_as_one, 2, how, recomputes)
