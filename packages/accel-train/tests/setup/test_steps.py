"""The steps that a strategy calls while it prepares a model."""

import pytest
import torch
from torch import nn

from accel_train import Accelerator, PrepareError, TorchDynamoPlugin
from accel_train.precision.base import Precision, PrecisionOptions
from accel_train.precision.bf16 import BF16Precision
from accel_train.setup.steps import Steps, place_model

CPU = torch.device("cpu")


def steps(precision=Precision, dynamo="no", as_is=(), device=CPU):
    plugin = TorchDynamoPlugin(backend=dynamo)
    return Steps(precision(PrecisionOptions()), device, plugin, {id(model) for model in as_is})


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


def test_meta_parameters_are_refused_before_anything_moves():
    with torch.device("meta"):
        model = make()
    with pytest.raises(ValueError, match=r"'0\.weight'.*meta device"):
        Accelerator().prepare(model)


class Replacing(Precision):
    """Puts another module into the model's place."""

    def convert(self, model):
        return nn.Identity()


def test_converting_undoes_what_an_earlier_precision_did():
    model = make().eval()
    x = torch.randn(2, 4)
    expected = model(x)
    low = steps(BF16Precision).convert(model)
    assert low is model
    assert not torch.equal(model(x), expected)
    assert steps().convert(model) is model
    assert torch.equal(model(x), expected)
    assert "forward" not in vars(model)


def test_a_compiled_model_keeps_its_wrapper_and_is_converted_inside():
    model, x = make().eval(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager")
    assert steps(BF16Precision).convert(compiled) is compiled
    with torch.autocast("cpu", torch.bfloat16):
        expected = make().eval()(x).float()
    assert torch.equal(compiled(x), expected)
    assert torch.equal(model(x), expected)


def test_a_module_that_takes_the_models_place_is_returned():
    assert isinstance(steps(Replacing).convert(make()), nn.Identity)


def test_models_are_placed_unless_the_script_moves_them():
    meta = torch.device("meta")
    model, other = make(), make()
    placing = steps(as_is=[other], device=meta)
    assert {parameter.device for parameter in placing.place(model).parameters()} == {meta}
    assert placing.place(other) is other
    assert {parameter.device for parameter in other.parameters()} == {CPU}


def test_a_model_that_a_device_map_spread_is_not_placed():
    meta = torch.device("meta")
    spread, whole = make(), make()
    spread.hf_device_map = {"0": "cpu", "2": 0}
    whole.hf_device_map = {"0": "cpu", "2": "cpu"}
    assert place_model(spread, meta)[0].weight.device == CPU
    assert place_model(whole, meta)[0].weight.device == meta


def test_every_parameter_without_storage_is_counted():
    model = make()
    model[2].to("meta")
    with pytest.raises(PrepareError, match=r"'2\.weight' \(the first of 2\) is on the meta device"):
        place_model(model, CPU)
    assert model[0].weight.device == CPU


def test_nothing_is_compiled_without_a_backend():
    model = make()
    assert steps().compile(model) is model
    compiled = steps(dynamo="eager").compile(model)
    assert compiled is not model
    assert compiled._orig_mod is model
