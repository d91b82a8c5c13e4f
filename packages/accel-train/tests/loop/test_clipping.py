"""Clipping: complete gradients at their true size, and nothing while a window is being filled."""

import pytest
import torch
from torch import nn

from accel_train import Accelerator, ArgumentTypeError, GradScalerKwargs


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def test_clipping_while_accumulating_measures_and_changes_nothing():
    accelerator = Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],
    )
    model = make()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(2, 4)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        before = [p.grad.clone() for p in model.parameters()]
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e-6)
    plain = make()
    (plain(x).sum() / 2).backward()
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert float(norm) == pytest.approx(float(expected), rel=0.02)
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))


def test_t34_clipping_what_no_prepared_optimizer_holds_is_refused():
    accelerator = Accelerator(mixed_precision="fp16")
    model = accelerator.prepare(nn.Linear(3, 1))
    accelerator.backward(model(torch.ones(2, 3)).mean())
    with pytest.raises(
        ValueError, match=r"no prepared optimizer owns these parameters.*prepare\(optimizer\)"
    ):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


def trained(**options):
    scaling = GradScalerKwargs(init_scale=64.0)  # no gradient of these tests overflows
    accelerator = Accelerator(kwargs_handlers=[scaling], **options)
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def reference(factor=1.0):
    model = make()
    (model(torch.ones(2, 4)).sum() * factor).backward()
    return model


def same_gradients(ours, theirs):
    return all(
        torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


@pytest.mark.parametrize("norm_type", [1, 2, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_norms_are_those_of_torch(norm_type, max_norm):
    accelerator, model, _ = trained()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    plain = reference()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type=norm_type)
    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    assert torch.equal(norm, expected)
    assert norm.dim() == 0
    assert same_gradients(model, plain)


def test_values_are_clamped():
    accelerator, model, _ = trained()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    plain = reference()
    nn.utils.clip_grad_value_(plain.parameters(), 0.2)
    assert accelerator.clip_grad_value_(model.parameters(), 0.2) is None
    assert same_gradients(model, plain)
    assert max(parameter.grad.abs().max().item() for parameter in model.parameters()) == pytest.approx(0.2)


@pytest.mark.parametrize("form", ["tensor", "list", "generator"])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_parameters_are_one_tensor_or_any_iterable(form, precision):
    accelerator, model, _ = trained(mixed_precision=precision)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    bias = model[2].bias  # its gradient is the number of rows
    chosen = {"tensor": bias, "list": [bias], "generator": (item for item in [bias])}
    assert accelerator.clip_grad_norm_(chosen[form], 1.0).item() == 2.0
    torch.testing.assert_close(bias.grad, torch.ones(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_without_gradients_the_norm_is_zero(precision):
    accelerator, model, _ = trained(mixed_precision=precision)
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == 0.0
    accelerator.clip_grad_value_(model.parameters(), 1.0)


@pytest.mark.parametrize("method", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_model_is_no_parameter(method):
    accelerator, model, _ = trained()
    with pytest.raises(ArgumentTypeError, match=r"got the model Sequential\. Pass model\.parameters\(\)"):
        getattr(accelerator, method)(model, 1.0)


def test_in_a_window_values_stay_and_at_its_end_the_whole_is_clipped():
    accelerator, model, _ = trained(gradient_accumulation_steps=2)
    x = torch.ones(2, 4)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        accelerator.clip_grad_value_(model.parameters(), 1e-6)
        assert same_gradients(model, reference(0.5))
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    plain = reference()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.testing.assert_close(norm, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_under_fp16_only_the_owners_of_the_parameters_are_unscaled():
    """Gradients of the other optimizer stay scaled until its own step."""
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
    models = [nn.Linear(4, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    accelerator.backward((first(torch.ones(1, 4)) + second(torch.ones(1, 4))).sum())
    before = [model.weight.detach().clone() for model in (first, second)]
    assert accelerator.clip_grad_norm_(first.parameters(), 1e9).item() == 2.0
    assert (first.weight.grad[0, 0].item(), second.weight.grad[0, 0].item()) == (1.0, 64.0)
    for optimizer in optimizers:
        optimizer.step()
    for model, weight in zip((first, second), before, strict=True):
        torch.testing.assert_close(model.weight.detach(), weight - 1.0)
