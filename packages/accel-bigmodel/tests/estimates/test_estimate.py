import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_bigmodel import (
    CustomDtype,
    EstimateError,
    dispatch_model,
    estimate_activations,
    estimate_memory,
    estimate_training,
    estimate_weights,
    init_empty_weights,
)
from accel_bigmodel.streaming.transfer import HostTransfer


class Mlp(nn.Module):
    """Linear layers, of which one is tied to an embedding, a frozen one, a norm and buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 20)
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Linear(20, 6).requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("count", torch.zeros(3, dtype=torch.long), persistent=False)

    def forward(self, ids, gain=1.0):
        hidden = self.frozen(self.drop(torch.nn.functional.gelu(self.first(self.embed(ids)))))
        return self.head(self.norm(hidden * self.scale) * gain)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, images):
        return self.head(self.layers(images).flatten(2).transpose(1, 2)).softmax(-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def ids():
    return torch.randint(0, 11, (3, 5))


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
            EstimateError, match=r"args is a tensor; give a sequence of inputs, such as \(tensor,\)"
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


def real_bytes(dtype, optimizer_class):
    model = Mlp().to(dtype)
    optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad])
    model(ids()).float().sum().backward()
    optimizer.step()
    state = [leaf for leaf in tree_leaves(optimizer.state_dict()["state"]) if isinstance(leaf, torch.Tensor)]
    return (
        sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        sum(tensor.nbytes for tensor in state),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_training_is_what_adam_really_holds(dtype, optimizer):
    with init_empty_weights():
        found = estimate_training(Mlp().to(dtype))
    assert (found.weights, found.gradients, found.optimizer) == real_bytes(dtype, optimizer)
    assert found.low_precision_copy == 0
    assert found.total == sum(real_bytes(dtype, optimizer))


class Casts(TorchDispatchMode):
    """Bytes of the copies that autocast makes of parameters."""

    def __init__(self, parameters):
        super().__init__()
        self.parameters = {parameter.data_ptr() for parameter in parameters}
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.parameters:
            self.nbytes += result.nbytes
        return result


def test_mixed_precision_adds_the_copies_that_autocast_makes():
    for make, inputs in (
        (Mlp, ids),
        (Conv, lambda: torch.rand(2, 3, 9, 9)),
        (Attention, lambda: torch.rand(2, 6, 8)),
    ):
        model = make()
        # Autocast copies weights that need gradients once. Frozen ones it copies at each use: here, one use each.
        with torch.autocast("cpu", torch.bfloat16), Casts(model.parameters()) as casts:
            model(inputs())
        assert estimate_training(model, mixed_precision="bf16").low_precision_copy == casts.nbytes


def test_mixed_precision_keeps_float32_masters():
    full, mixed = (estimate_training(Mlp(), mixed_precision=each) for each in ("no", "fp16"))
    low = estimate_training(Mlp().to(torch.bfloat16), mixed_precision="bf16")
    assert (mixed.weights, mixed.gradients, mixed.optimizer) == (full.weights, full.gradients, full.optimizer)
    assert (low.gradients, low.optimizer) == (full.gradients, full.optimizer)
    with pytest.raises(EstimateError, match="'no', 'fp16' or 'bf16', got 'fp8'"):
        estimate_training(Mlp(), mixed_precision="fp8")


def test_weights_in_floating_dtypes_are_those_of_a_converted_model():
    model = Mlp()
    names = {"embed", "first", "frozen", "head", "norm"}
    for estimate in estimate_weights(model, ["float32", torch.float16, "bfloat16", "float64"]):
        real = copy.deepcopy(model).to(getattr(torch, estimate.dtype))
        assert estimate.total == sum(tensor.nbytes for tensor in (*real.parameters(), *real.buffers()))
        sizes = {name: sum(p.nbytes for p in real.get_submodule(name).parameters()) for name in names}
        assert estimate.largest_layer == max(sizes.values())
        assert estimate.largest_layer_names == ("first",)


def test_integer_dtypes_are_those_of_linear_weights():
    one, half = estimate_weights(Mlp(), ["int8", "int4"])
    linear, floats = 6 * 20 * 2 + 11 * 6, 20 + 6 + 6 + 6 + 6
    tied_as_first_name = 11 * 6  # the embedding, which is not quantised, also when a linear layer shares it
    assert one.total == (linear - tied_as_first_name) + 2 * (floats + tied_as_first_name) + 3 * 8
    assert half.total == (linear - tied_as_first_name) // 2 + 2 * (floats + tied_as_first_name) + 3 * 8
    assert (
        estimate_weights(Mlp(), CustomDtype.INT4)[0].total
        == estimate_weights(Mlp(), "uint4")[0].total
        == half.total
    )
    with pytest.raises(EstimateError, match="'flout16' is not a dtype"):
        estimate_weights(Mlp(), ["flout16"])


def test_blocks_that_a_transformers_model_keeps_whole_are_layers():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 3))
    assert estimate_weights(model, ["float32"])[0].largest_layer_names == ("1",)
    model._no_split_modules = ["Sequential"]
    assert estimate_weights(model, ["float32"])[0].largest_layer_names == ("0",)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(30)), nn.Parameter(torch.ones(30))
        self.act = nn.ReLU()


def test_tensors_beside_modules_are_a_layer():
    model = nn.Sequential(nn.Linear(3, 4), Experts())
    (found,) = estimate_weights(model, ["float32"])
    assert (found.largest_layer, found.largest_layer_names) == (240, ("1",))
    assert "its own tensors" in estimate_memory(Experts(), dtypes=["float32"]).table()


def test_the_table():
    found = estimate_memory(Mlp(), dtypes=["float32", "int8"], example_args=(ids(),))
    assert found.parameters == sum(parameter.numel() for parameter in Mlp().parameters())
    assert found.activations == estimate_activations(Mlp(), (ids(),))
    lines = found.table().splitlines()
    assert lines[0] == f"Mlp: {found.parameters:,} parameters"
    assert lines[2].split() == ["float32", "1.42", "kB", "560", "bytes", "first"]
    training = found.training[0]
    assert [line.split()[:4] for line in lines if line.startswith("full")] == [
        ["full", "precision", f"{training.total / 1000:.2f}", "kB"]
    ]
    assert lines[-2].split() == ["the", "inputs", "given", "total"]
    assert lines[-1].startswith("activations")


def test_what_cannot_be_estimated():
    with pytest.raises(EstimateError, match="must be given together; give both, or neither"):
        estimate_memory(Mlp(), batch_size=1)
    with pytest.raises(EstimateError, match="Mlp does not declare that it takes tokens"):
        estimate_memory(Mlp(), batch_size=1, sequence_length=4)
