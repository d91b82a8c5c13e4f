"""Activations that a training forward keeps, compared with what autograd really saves."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from accel_bigmodel import (
    EstimateError,
    dispatch_model,
    estimate_activations,
    estimate_memory,
    init_empty_weights,
)
from accel_bigmodel.streaming.transfer import HostTransfer
from testkit.estimated import Attention, Conv, Mlp, ids


def kept_by_autograd(output, besides):
    """Bytes that the nodes of the graph hold, read from their attributes."""
    storages, seen, rest = (
        {},
        set(),
        [leaf.grad_fn for leaf in tree_leaves(output) if leaf.grad_fn is not None],
    )
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        rest += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                for value in tree_leaves(getattr(node, name)):
                    # A Python number that tensors were multiplied by is one without dimensions here.
                    if isinstance(value, torch.Tensor) and value.dim() > 0:
                        storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    for tensor in besides:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    storages.pop(0, None)
    return sum(storages.values())


@pytest.mark.parametrize(
    ("make", "inputs", "autocast"),
    [
        (Mlp, ids, None),
        (Mlp, ids, torch.bfloat16),
        (Conv, lambda: torch.rand(2, 3, 9, 9), None),
        (Attention, lambda: torch.rand(2, 6, 8), None),
        (Attention, lambda: torch.rand(2, 6, 8), torch.bfloat16),
    ],
)
def test_activations_are_what_autograd_keeps(make, inputs, autocast):
    with init_empty_weights():
        empty = make().eval()
    model, given = make(), inputs()
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        output = model(given)
    expected = kept_by_autograd(output, [given, *model.parameters(), *model.buffers()])
    assert expected > 0
    assert estimate_activations(empty, (given,), autocast=autocast) == expected
    assert not empty.training
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_activations_count_no_values_but_shapes():
    shape = torch.empty(64, 4096, dtype=torch.long, device="meta")
    with init_empty_weights():
        small, large = (
            estimate_activations(Mlp(), (shape[:1],)),
            estimate_activations(Mlp(), (shape,), {"gain": 2.0}),
        )
    assert large / 64 == pytest.approx(small, rel=1e-3)


class Remembering(nn.Module):
    """Keeps what its forward makes, in every place where modules do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale, self.tables = None, {}

    def forward(self, query, key, value):
        if self.scale is None:
            self.scale = torch.full((8,), 2.0, device=query.device)
            self.tables[8] = self.scale + 1
            self.register_buffer("table", self.scale + 2, persistent=False)
        return self.linear(query * key + value) * self.scale * self.tables[8] * self.table


def test_a_forward_that_keeps_what_it_made_leaves_the_model_as_it_was():
    x = torch.randn(2, 8)
    model = Remembering()
    tables = model.tables
    estimate_activations(model, (x, x, x))
    assert model.scale is None
    assert tables is model.tables == {}
    assert list(dict(model.named_buffers())) == []
    assert type(model(x, x, x)) is torch.Tensor


def test_inputs_are_told_apart_as_autograd_does():
    x = torch.randn(3, 5, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    once = kept_by_autograd(attention(x, x, x), [x, *attention.parameters()])
    assert estimate_activations(attention, (x, x, x)) == once
    assert estimate_activations(attention, (x, x.clone(), x.clone())) > once
    frozen = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Sigmoid())
    assert estimate_activations(frozen, (x,)) == 0
    assert estimate_activations(frozen, (x.requires_grad_(),)) == x.nbytes


class Grouped(nn.Module):
    """Experts, each for some of the rows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 8, 16))

    def forward(self, x, ends):
        return torch._grouped_mm(x.sigmoid(), self.weight, offs=ends).sigmoid()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_grouped_matrices_in_any_dtype(dtype):
    x, ends = torch.ones(6, 8, dtype=dtype), torch.tensor([2, 6], dtype=torch.int32)
    assert estimate_activations(Grouped().to(dtype), (x, ends)) == (6 * 8 + 6 * 16) * dtype.itemsize


def test_compiled_models_and_inference_mode_change_nothing():
    given = ids()
    model = Mlp()
    expected = estimate_activations(model, (given,))
    assert estimate_activations(torch.compile(model), (given,)) == expected
    with torch.inference_mode():
        assert estimate_activations(model, (given,)) == expected


class Branch(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def test_activations_of_a_model_that_looks_at_values_are_refused():
    with pytest.raises(EstimateError, match="forward of Branch cannot run without values"):
        estimate_activations(Branch(2, 2), (torch.ones(2, 2),))
    model = Mlp().eval()
    with pytest.raises(EstimateError, match="Check the inputs"):
        estimate_activations(model, (ids(), 1.0, 2))
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("device", ["xpu", "nowhere", 1.5])
def test_devices_that_pytorch_knows_nothing_of_are_refused(device):
    with pytest.raises(EstimateError, match=r"device is .*, but this build of PyTorch can estimate only for"):
        estimate_activations(nn.Linear(2, 2), (torch.ones(1, 2),), device=device)


def test_a_tensor_is_no_sequence_of_inputs():
    for estimate in (
        lambda: estimate_activations(nn.Linear(2, 2), torch.ones(1, 2)),
        lambda: estimate_memory(nn.Linear(2, 2), example_args=torch.ones(2, 2)),
    ):
        with pytest.raises(
            EstimateError, match=r"args is a tensor; pass a sequence of inputs, such as \(tensor,\)"
        ):
            estimate()


def test_a_dispatched_model_is_left_alone():
    model = Mlp().eval()
    given = ids()
    with torch.no_grad():
        expected = model(given)
    dispatch_model(model, {"": "cpu"}, transfer=HostTransfer())
    with pytest.raises(EstimateError, match=r"is dispatched .* init_empty_weights"):
        estimate_activations(model, (given,))
    with torch.no_grad():
        assert torch.equal(model(given), expected)
