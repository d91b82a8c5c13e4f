"""Which weights move together."""

import pytest
import torch
from torch import nn

from accel_bigmodel import DeviceMapError
from accel_bigmodel.streaming.groups import plan_groups


def names(groups):
    return [group.name for group in groups]


class Block(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.attention = nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x):
        return x + self.mlp(self.attention(x))


class Decoder(nn.Module):
    def __init__(self, layers=3, size=4):
        super().__init__()
        self.embed = nn.Embedding(7, size)
        self.layers = nn.ModuleList(Block(size) for _ in range(layers))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def test_blocks_are_groups_and_the_rest_are_single_modules():
    assert names(plan_groups(Decoder(), [""])) == [
        "embed", "layers.0", "layers.1", "layers.2", "norm", "head",
    ]  # fmt: skip


def test_every_streamed_tensor_is_in_a_group_under_its_name():
    model = Decoder()
    groups = plan_groups(model, [""])
    found = {name: tensor for group in groups for name, tensor in group.tensors.items()}
    expected = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    assert all(found[name] is expected[name] for name in expected)


def test_a_tied_parameter_is_in_every_group_that_uses_it():
    model = Decoder()
    groups = {group.name: group for group in plan_groups(model, ["embed", "head"])}
    assert groups["embed"].tensors["embed.weight"] is groups["head"].tensors["head.weight"]


def test_a_parameter_tied_to_a_name_that_is_not_streamed_stays():
    assert names(plan_groups(Decoder(), ["embed", "norm"])) == ["norm"]


def test_only_what_is_streamed():
    model = Decoder()
    groups = plan_groups(model, ["layers.1", "layers.2.attention.weight"])
    assert [sorted(group.tensors) for group in groups] == [
        sorted(f"layers.1.{name}" for name, _ in model.layers[1].named_parameters()),
        ["layers.2.attention.weight"],
    ]
    assert names(groups) == ["layers.1", "layers.2"]


def test_nothing_streamed():
    assert plan_groups(Decoder(), []) == []


def test_names_that_are_not_there():
    with pytest.raises(DeviceMapError, match=r"'layer', 'tail'.*'embed', 'layers', 'norm', 'head'"):
        plan_groups(Decoder(), ["layer", "tail", "norm"])


def test_a_beginning_of_a_name_is_not_a_module():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(2, 2)})
    assert names(plan_groups(model, ["a"])) == ["a"]


def test_a_model_without_repetition_goes_module_by_module():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.second(self.first(x))

    assert names(plan_groups(Plain(), [""])) == ["first", "second"]


def test_preloaded_classes_are_whole():
    for classes in (["Decoder"], "Decoder"):
        assert names(plan_groups(Decoder(), [""], preload_module_classes=classes)) == [""]
    with pytest.raises(
        DeviceMapError, match=r"preload_module_classes contains <class .*Decoder'>; give names"
    ):
        plan_groups(Decoder(), [""], preload_module_classes=[Decoder])


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleDict({"query": nn.Linear(4, 4), "key": nn.Linear(4, 4)})
        self.attention.forward = lambda x: x
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        return x


def test_blocks_made_of_blocks_are_divided():
    model = nn.Sequential(Experts(), Experts())
    groups = names(plan_groups(model, [""]))
    assert [name for name in groups if name.startswith("0.")] == [
        "0.attention.query", "0.attention.key", "0.gate",
        "0.experts.0", "0.experts.1", "0.experts.2", "0.experts.3",
    ]  # fmt: skip


def test_attention_that_uses_the_weights_of_its_parts_is_whole():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    (group,) = plan_groups(Model(), [""])
    assert group.name == "attention"
    assert set(group.tensors) == {
        f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    }


def test_a_parameter_beside_blocks_is_a_group_around_them():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            return x * self.scale

    groups = plan_groups(Towers(), [""])
    assert names(groups) == ["", "blocks.0", "blocks.1"]
    assert set(groups[0].tensors) == {"scale"}


def test_lists_of_parameters_belong_to_the_module_that_uses_them():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.scales = nn.ParameterList([torch.ones(2), torch.ones(3)])

        def forward(self, x):
            return x

    groups = plan_groups(Scales(), [""])
    assert names(groups) == ["", "blocks.0", "blocks.1"]
    assert set(groups[0].tensors) == {"scales.0", "scales.1"}


def test_a_shared_module_is_one_group():
    block = Block()
    model = nn.Sequential(block, nn.Tanh(), block)
    (group,) = plan_groups(model, [""])
    assert group.module is block
    assert len(group.tensors) == 6


def test_buffers_move_only_if_asked_and_saved():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[0].register_buffer("table", torch.zeros(3), persistent=False)
    assert "0.running_mean" not in plan_groups(model, [""])[0].tensors
    tensors = plan_groups(model, [""], offload_buffers=True)[0].tensors
    assert set(tensors) == {
        "0.weight", "0.bias", "0.running_mean", "0.running_var", "0.num_batches_tracked",
    }  # fmt: skip


def test_bytes_of_a_group():
    (group,) = plan_groups(nn.Sequential(nn.Linear(3, 5, dtype=torch.float64)), [""])
    assert group.nbytes == (3 * 5 + 5) * 8


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]),
        ("gpt2", ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1", "transformer.ln_f", "lm_head"]),  # noqa: E501
        ("t5", ["shared", "encoder.block.0", "encoder.block.1", "encoder.final_layer_norm",
                "decoder.block.0", "decoder.block.1", "decoder.final_layer_norm", "lm_head"]),
    ],
)  # fmt: skip
def test_architectures(kind, expected):
    # Newer versions of transformers give encoder and decoder embeddings of their own, tied to the shared one.
    found = [name for name in names(plan_groups(small(kind), [""])) if "coder.embed_tokens" not in name]
    assert found == expected


def small(kind):
    transformers = pytest.importorskip("transformers")
    if kind == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
            )
        )
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=16)
        )
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    )
