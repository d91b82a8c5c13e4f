"""Phases of a step without values, against what autograd saves and against whole traces."""

import pytest
import torch
from torch import nn

from accel_bigmodel import EstimateError, estimate_activations
from accel_bigmodel.planning.model import find_units, shape_of_model, with_adapters
from accel_bigmodel.planning.shape import shape_of_tensors
from accel_bigmodel.planning.trace import Numbers, combine, trace_model, trace_step

FLOAT = Numbers(torch.float32)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(count)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def inputs(samples):
    return {"x": torch.empty(3 * samples, 4)}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "numbers", [FLOAT, Numbers(torch.float32, None, torch.bfloat16), Numbers(torch.bfloat16)]
)
def test_many_units_are_as_a_few(numbers, checkpointing):
    model = Net(9)
    whole = combine(
        *(trace_step(model, _cast(inputs(n), numbers), numbers, checkpointing=checkpointing) for n in (1, 2))
    )
    short = trace_model(model, lambda n: _cast(inputs(n), numbers), numbers, checkpointing=checkpointing)
    assert [(p.unit, p.backward, p.gradients) for p in short.phases] == [
        (p.unit, p.backward, p.gradients) for p in whole.phases
    ]
    assert [p.at(5) for p in short.phases] == pytest.approx([p.at(5) for p in whole.phases])


def _cast(batch, numbers):
    return {"x": batch["x"].to(numbers.weights)}


def test_what_is_alive_after_the_forward_is_what_autograd_saves_and_the_output():
    model = Net(3)
    first = trace_step(model, inputs(10), FLOAT)
    last_block = next(each for each in first if each.unit == 2 and not each.backward)
    saved = estimate_activations(model, (), inputs(10))
    output, bias_free = 30 * 8 * 4, 30 * 32 * 4  # the block's result, and what relu read
    assert saved <= last_block.peak <= saved + 2 * output + bias_free


def test_recomputing_keeps_less_and_gradients_are_complete():
    model = Net(6)
    kept, recomputed = (trace_model(model, inputs, FLOAT, checkpointing=again) for again in (False, True))
    assert max(p.at(50) for p in recomputed.phases) < 0.5 * max(p.at(50) for p in kept.phases)
    for timeline in (kept, recomputed):
        assert sum(phase.gradients for phase in timeline.phases) == sum(p.numel() for p in model.parameters())


def transformer(kind, layers=2, **settings):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, **settings,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def tokens(samples):
    ids = torch.zeros(samples, 6, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("kind", "cached", "checkpointing"),
    [
        ("llama", True, True),
        ("llama", False, False),
        pytest.param("llama", True, False, marks=pytest.mark.full),
        pytest.param("llama", False, True, marks=pytest.mark.full),
        ("gpt2", True, False),
        pytest.param("gpt2", True, True, marks=pytest.mark.full),
    ],
)
def test_many_blocks_with_a_cache_are_as_a_few(kind, cached, checkpointing):
    """A cache of keys and values stays until the backward ends, and the blocks of gpt2 get it by position."""
    model = transformer(kind, use_cache=cached, layers=9)
    steps = (trace_step(model, tokens(n), FLOAT, checkpointing=checkpointing) for n in (1, 2))
    whole = combine(*steps)
    short = trace_model(model, tokens, FLOAT, checkpointing=checkpointing)
    assert [(p.unit, p.backward, p.gradients) for p in short.phases] == [
        (p.unit, p.backward, p.gradients) for p in whole.phases
    ]
    assert [p.at(5) for p in short.phases] == pytest.approx([p.at(5) for p in whole.phases])


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_units_that_are_recomputed_cache_no_keys_and_values(kind):
    """A cache would get them twice: more memory, and masks of another length than the keys in some models."""
    found = [
        trace_model(transformer(kind, use_cache=cached), tokens, FLOAT, checkpointing=True)
        for cached in (True, False)
    ]
    with_cache, without = (max(p.at(50) for p in each.phases if p.backward) for each in found)
    # Masks are made in another way; keys and values twice would be 14% of a llama.
    assert with_cache == pytest.approx(without, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixtures_of_experts_run_in_any_dtype(dtype):
    model = transformer("mixtral", num_local_experts=2)
    timeline = trace_model(model, tokens, Numbers(dtype))
    assert sum(phase.gradients for phase in timeline.phases) == sum(p.numel() for p in model.parameters())
    saved = estimate_activations(model.to(dtype), (), tokens(3))
    assert max(phase.at(3) for phase in timeline.phases) >= saved > 0


def test_a_forward_that_needs_values_is_refused():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) if x.sum().item() > 0 else x

    with pytest.raises(EstimateError, match="Asks cannot run without values"):
        trace_model(Asks(), inputs, FLOAT)


def test_the_shape_of_a_model_and_of_its_files_are_the_same():
    model = Net(3)
    shape = shape_of_model(model)
    assert len(find_units(model)) == 3
    assert (shape.parameters, shape.outside.parameters) == (
        sum(p.numel() for p in model.parameters()),
        4 * 8 + 8,
    )
    files = shape_of_tensors("net", {name: tuple(p.shape) for name, p in model.named_parameters()})
    assert (files.units, files.outside, files.tensors) == (shape.units, shape.outside, shape.tensors)


def test_adapters_are_trained_alone():
    model = Net(2)
    shape = shape_of_model(with_adapters(model, 4), adapters=4)
    each = 2 * 4 * (8 + 32)
    assert shape.trainable == 2 * each
    assert shape.parameters == sum(p.numel() for p in model.parameters()) + 2 * each
    files = shape_of_tensors(
        "net", {name: tuple(p.shape) for name, p in model.named_parameters()}, adapters=4
    )
    assert (files.trainable, files.parameters, files.tensors) == (
        shape.trainable,
        shape.parameters,
        shape.tensors,
    )
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(EstimateError, match="rank of adapters is 0"):
        with_adapters(model, 0)
    with pytest.raises(EstimateError, match="no blocks with linear layers"):
        with_adapters(nn.Linear(2, 2), 1)
