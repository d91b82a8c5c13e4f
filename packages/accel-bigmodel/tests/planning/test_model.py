"""Units and counts of models, against counting their parameters by hand."""

import pytest
import torch
from torch import nn

from accel_bigmodel import EstimateError
from accel_bigmodel.planning.model import find_units, shape_of_model, text_config, with_adapters
from accel_bigmodel.planning.shape import UnitSizes

pytest.importorskip("transformers", reason="the oldest versions are tested without it; hatch run test has it")
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)


class Block(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.up = nn.Linear(size, 6)
        self.norm = nn.LayerNorm(size)


class Net(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(4, 10, bias=False)
        self.register_buffer("table", torch.zeros(5, dtype=torch.float64))


def llama(**more):
    sizes = {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **more))


# units


def test_members_of_a_list_are_units():
    net = Net()
    assert find_units(net) == list(net.blocks)
    assert find_units(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))) == []
    mixed = nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])
    assert find_units(nn.Sequential(mixed)) == []
    assert find_units(nn.Sequential(nn.ModuleList())) == []


def test_outer_blocks_are_units_and_not_those_in_them():
    outer = nn.Module()
    outer.layers = nn.ModuleList(Net(2) for _ in range(2))
    assert find_units(outer) == list(outer.layers)
    mixed = nn.Module()
    mixed.both = nn.ModuleList([Net(2), Block()])  # of two classes: looked into
    assert find_units(mixed) == list(mixed.both[0].blocks)


def test_classes_that_a_model_declares_go_first():
    net = Net()
    net._no_split_modules = ["Linear"]
    assert find_units(net) == [*(block.up for block in net.blocks), net.head]
    net._no_split_modules = ["Unknown"]
    assert find_units(net) == list(net.blocks)
    wrapped = nn.Sequential(llama())
    assert find_units(wrapped) == list(wrapped[0].model.layers)


# shapes


def test_counts_by_unit():
    shape = shape_of_model(Net())
    block = 4 * 6 + 6 + 4 + 4
    assert shape.units == (UnitSizes(block, block, (4 + 6) + 6 + 4 + 4, 0, 24),) * 3
    assert shape.outside == UnitSizes(80, 80, 28, 0, 40)
    assert (shape.name, shape.buffers, shape.tensors) == ("Net", 40, 3 * 4 + 2)
    assert (shape.hidden_size, shape.tensor_parallel) == (0, ())


def test_ends_of_the_model_are_for_the_first_and_the_last_stage():
    shape = shape_of_model(Net())
    assert (shape.first, shape.last) == (UnitSizes(40, 40, 14, 0, 40), UnitSizes(40, 40, 14, 0, 40))
    staged = shape_of_model(llama())
    assert (staged.first.parameters, staged.last.parameters) == (20 * 8, 8 + 20 * 8)
    tied = Net()
    tied.head.weight = tied.embed.weight
    assert shape_of_model(tied).first is None
    with torch.device("meta"):
        bert = BertModel(
            BertConfig(num_hidden_layers=2, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        )
    assert shape_of_model(bert).first is None, "it declares no plan of pipelines"


def test_a_tied_parameter_counts_where_it_is_first():
    net = Net()
    net.head.weight = net.embed.weight
    net.blocks[2].up.weight = net.blocks[0].up.weight
    shape = shape_of_model(net)
    assert shape.outside.parameters == 40
    assert [unit.parameters for unit in shape.units] == [38, 38, 14]
    assert shape.tensors == 3 * 4 + 1 - 1


def test_frozen_parameters_are_not_trained():
    net = Net()
    net.embed.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    shape = shape_of_model(net)
    assert shape.units[0] == UnitSizes(38, 0, 0, 0, 0)
    assert (shape.outside.parameters, shape.outside.trainable, shape.outside.largest) == (80, 40, 40)
    assert (shape.parameters, shape.trainable, shape.tensors) == (194, 2 * 38 + 40, 9)


def test_a_model_of_transformers_says_what_tensor_parallelism_divides():
    shape = shape_of_model(llama())
    assert (shape.hidden_size, shape.tensor_parallel) == (8, (4, 2))
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8
    mlp = 3 * 8 * 12
    assert [unit.parameters for unit in shape.units] == [attention + mlp + 2 * 8] * 2
    assert [unit.divisible for unit in shape.units] == [attention + mlp] * 2  # all but the norms
    assert shape.outside.parameters == 2 * 20 * 8 + 8


def test_only_what_a_plan_cuts_is_divisible():
    net = Net()
    net._tp_plan = {
        "blocks.*.up": "colwise",
        "blocks.*.norm.weight": "rowwise",
        "head": "replicate",
        "embed": None,
        "other.*": "colwise",
    }
    net.config = type("Config", (), {"num_attention_heads": 6, "hidden_size": 4})()
    shape = shape_of_model(net)
    assert [unit.divisible for unit in shape.units] == [4 * 6 + 6 + 4] * 3
    assert shape.outside.divisible == 0
    assert (shape.tensor_parallel, shape.hidden_size) == ((6,), 4)


@pytest.mark.parametrize("given", [Net, "gpt2", None])
def test_what_is_no_model(given):
    with pytest.raises(TypeError, match="the model is"):
        shape_of_model(given)


def test_the_configuration_of_the_text_decoder():
    assert text_config(Net()) is None
    assert text_config(llama()).vocab_size == 20
    with torch.device("meta"):
        t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=2, vocab_size=9))
    assert text_config(t5).vocab_size == 9
    assert BertConfig().get_text_config(decoder=True).hidden_size == 768


# adapters


def test_adapters_compute_a_product_of_two_matrices():
    """The base is zero, so that the outputs are those of the adapter alone, by plain matrices."""
    adapted = with_adapters(Net(1), 2)
    layer = adapted.blocks[0].up
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    nn.init.zeros_(layer.base.weight)
    nn.init.zeros_(layer.base.bias)
    x = torch.randn(3, 4)
    torch.testing.assert_close(layer(x), x @ layer.down.weight.T @ layer.up.weight.T)


def test_adapters_are_counted_and_the_model_is_not_changed():
    net = Net()
    before = list(net.parameters())
    adapted = with_adapters(net, 2)
    assert all(one is two for one, two in zip(net.parameters(), before, strict=True))
    assert all(parameter.requires_grad for parameter in before)
    names = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert names == {f"blocks.{n}.up.{part}.weight" for n in range(3) for part in ("down", "up")}
    shape = shape_of_model(adapted, adapters=2)
    assert (shape.trainable, shape.adapters, shape.tensors) == (3 * 2 * (4 + 6), 2, 6)
    assert shape.parameters == shape_of_model(net).parameters + shape.trainable


def test_adapters_are_float32_beside_bfloat16():
    adapted = with_adapters(Net().bfloat16(), 2)
    layer = adapted.blocks[0].up
    assert (layer.base.weight.dtype, layer.down.weight.dtype) == (torch.bfloat16, torch.float32)
    layer.to_empty(device="cpu")
    assert layer(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one(rank):
    with pytest.raises(EstimateError, match=f"the rank of adapters is {rank}; give a number from 1 on"):
        with_adapters(Net(), rank)


def test_no_place_for_adapters():
    with pytest.raises(EstimateError, match="Sequential has no blocks with linear layers"):
        with_adapters(nn.Sequential(nn.Linear(2, 2)), 4)


def test_experts_are_counted():
    sizes = {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 20, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=6)
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    model.model.layers[1].mlp.experts.requires_grad_(False)
    shape = shape_of_model(model)
    of_a_layer = 6 * (2 * 12 * 8 + 8 * 12)  # gate and up, down
    assert (shape.experts, shape.routes) == (6, 2)
    assert [unit.experts for unit in shape.units] == [of_a_layer, of_a_layer]
    assert [unit.trained_experts for unit in shape.units] == [of_a_layer, 0]
    assert (shape_of_model(llama()).experts, shape_of_model(llama()).routes) == (0, 0)
