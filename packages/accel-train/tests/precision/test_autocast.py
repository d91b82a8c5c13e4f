"""The forward under autocast, and switching autocast off for what follows."""

import pickle

import pytest
import torch
from torch import nn

from accel_train import Accelerator


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_switched_off_holds_for_what_is_prepared_afterwards(precision, dtype):
    accelerator = Accelerator(mixed_precision=precision)
    seen = []

    class Model(torch.nn.Linear):
        def forward(self, x):
            seen.append(super().forward(x).dtype)
            return super().forward(x)

    x = torch.ones(2, 2)
    before = accelerator.prepare(Model(2, 2))
    assert accelerator.native_amp
    accelerator.native_amp = False
    assert not accelerator.native_amp
    after = accelerator.prepare(Model(2, 2))
    before(x), after(x)
    assert seen == [dtype, torch.float32]
    with accelerator.autocast():
        assert (x @ x).dtype is torch.float32
    assert accelerator.mixed_precision == precision
    assert (accelerator.scaler is not None) == (precision == "fp16")

    accelerator.native_amp = True
    with accelerator.autocast():
        assert (x @ x).dtype is dtype
    assert not hasattr(after, "_original_forward")


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


class Probe(nn.Module):
    """Records the dtype that its layer computed in."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen = None

    def forward(self, x):
        out = self.layer(x)
        self.seen = out.dtype
        return {"logits": out, "hidden": (out, out.sum()), "name": "x"}


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_forward_computes_low_and_answers_in_float32(name, dtype):
    model = Accelerator(mixed_precision=name).prepare(Probe())
    out = model(torch.randn(3, 4))
    assert model.seen is dtype
    assert model.layer.weight.dtype is torch.float32
    assert out["logits"].dtype is out["hidden"][0].dtype is out["hidden"][1].dtype is torch.float32
    assert out["name"] == "x"


def test_autocast_is_clean_after_an_exception():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("broken")

    model = Accelerator(mixed_precision="bf16").prepare(Broken())
    with pytest.raises(RuntimeError, match="broken"):
        model(torch.ones(1))
    assert not torch.is_autocast_enabled("cpu")


def test_activation_checkpointing_enters_autocast_again():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    accelerator = Accelerator(mixed_precision="bf16")
    inner = accelerator.prepare(make())
    model = Checkpointed()
    model.inner = inner
    plain = make()
    x = torch.randn(5, 4)
    accelerator.backward(model(x).sum())
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x).float().sum()
    expected.backward()
    torch.testing.assert_close(inner[0].weight.grad, plain[0].weight.grad, rtol=0, atol=0)
    assert not torch.is_autocast_enabled("cpu")


def test_unwrapping_the_fp32_wrapper_restores_the_forward_and_pickles():
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(make())
    assert accelerator.unwrap_model(model) is model
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert "forward" not in vars(plain)
    assert not hasattr(plain, "_original_forward")
    copy = pickle.loads(pickle.dumps(plain))
    x = torch.randn(2, 4)
    torch.testing.assert_close(copy(x), plain(x))
