import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_bigmodel import (
    CustomDtype,
    EstimateError,
    estimate_activations,
    estimate_memory,
    estimate_training,
    estimate_weights,
    init_empty_weights,
)
from testkit.estimated import Attention, Conv, Mlp, ids


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
