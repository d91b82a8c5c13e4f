"""Switching autocast off for what follows."""

import pytest
import torch

from accel_train import Accelerator, ArgumentTypeError, OptionError


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


def test_switching_off_what_is_not_on_changes_nothing():
    accelerator = Accelerator(mixed_precision="no")
    accelerator.native_amp = False
    assert not accelerator.native_amp


def test_a_precision_without_autocast_cannot_switch_it_on():
    accelerator = Accelerator(mixed_precision="no")
    with pytest.raises(OptionError, match=r"native_amp=True needs autocast.*mixed_precision='no'"):
        accelerator.native_amp = True
    with pytest.raises(ArgumentTypeError, match="native_amp takes True or False, got str: 'no'"):
        accelerator.native_amp = "no"


def test_under_fp16_without_autocast_gradients_are_still_scaled_back():
    accelerator = Accelerator(mixed_precision="fp16")
    accelerator.native_amp = False
    model = torch.nn.Linear(2, 1, bias=False)
    plain = torch.nn.Linear(2, 1, bias=False)
    plain.load_state_dict(model.state_dict())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(norm, torch.tensor(2.0).sqrt())
    optimizer.step()
    plain(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.testing.assert_close(model.weight.detach(), plain.weight.detach() - 0.5 * plain.weight.grad)
