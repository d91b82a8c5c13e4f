"""What a rehearsal knows of other stages: shapes and dtypes of what they pass on, without their memory."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from accel_state.host.tensor_memory import TensorMemory
from accel_state.world.rehearsal import Rehearsal
from accel_train.plugins import PipelineParallelConfig
from accel_train.strategies.pipeline.cut import cut_model
from accel_train.strategies.pipeline.exchange import Form
from accel_train.strategies.pipeline.foresight import Foresight

ROWS = 3


class Masked(nn.Module):
    """Reads values of the batch, and needs much memory for a moment."""

    def forward(self, x):
        assert bool((x[:, :1] != 0).all()), "a value of the weights"
        return x.repeat(1, 100_000).sum(-1, keepdim=True).expand(-1, 5).contiguous()


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 7), nn.Dropout(), Masked(), nn.Linear(5, 2))


def foresight(model, policies=None, whole=()):
    cut = cut_model(model, PipelineParallelConfig(cuts=["2", "3"]), 3)
    return Foresight(
        model, cut, nn.functional.mse_loss, lambda module: module, Rehearsal(1), policies, whole=whole
    )


def batch():
    return (torch.ones(ROWS, 4),), {"target": torch.zeros(ROWS, 2)}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_forms_are_those_of_the_model(device):
    with torch.device(device):
        model = model_of()
    found = foresight(model).of(batch())
    assert found.forms == {1: [Form((ROWS, 7), torch.float32)], 2: [Form((ROWS, 5), torch.float32)]}
    assert (found.output["loss"].shape, found.output["loss"].dtype) == ((), torch.float32)


def test_nothing_is_counted_drawn_or_changed():
    model = model_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with TensorMemory() as memory:
        foresight(model).of(batch())
        peak = memory.peak
    assert peak < 10_000, "bytes: no weights, and no activations of other stages"
    assert torch.equal(torch.rand(2), expected)
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_stages_pass_on_what_fsdp_computes_in():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float16)
    found = foresight(model_of(), (policy, policy)).of(batch())
    assert [form.dtype for [form] in found.forms.values()] == [torch.float16] * 2


def test_an_error_of_another_stage_is_the_model_s_own():
    model = nn.Sequential(nn.Linear(4, 7), nn.Dropout(), nn.Linear(6, 5), nn.Linear(5, 2))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        foresight(model).of(batch())
