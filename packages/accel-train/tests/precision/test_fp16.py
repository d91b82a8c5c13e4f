"""float16 with a gradient scaler, on the CPU, against plain torch."""

import pytest
import torch
from torch import nn

from accel_train import Accelerator, AccumulationError, GradScalerKwargs


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def fp16_reference(data, clip, scaler):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return model, scaler


@pytest.mark.parametrize("clip", [False, True])
def test_t18_fp16_on_the_cpu_really_scales_skips_and_clips(clip):
    torch.manual_seed(1)
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(6)]
    data[2] = (data[2][0] * 1e30, data[2][1])  # overflows half precision
    options = {"init_scale": 1024.0, "growth_interval": 2}
    reference, scaler = fp16_reference(data, clip, torch.amp.GradScaler("cpu", **options))

    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**options)])
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    skipped = []
    for x, y in data:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert skipped == [False, False, True, False, False, False]
    assert scheduler.scheduler.last_epoch == 5
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    accelerator._plan.precision.update_scale()
    assert accelerator.scaler.get_scale() == scaler.get_scale()


def test_t34_each_optimizer_is_unscaled_once_per_step():
    """Two models, two optimizers, norm and value clipping, accumulation: equal to the same in float32."""

    def run(precision):
        accelerator = Accelerator(
            mixed_precision=precision,
            gradient_accumulation_steps=2,
            kwargs_handlers=[GradScalerKwargs(init_scale=256.0, growth_interval=1)]
            if precision == "fp16"
            else None,
        )
        models = [make(0), make(1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        *models, first, second = accelerator.prepare(*models, *optimizers)
        torch.manual_seed(2)
        norms = []
        for _ in range(6):
            x = torch.randn(8, 4)
            with accelerator.accumulate(*models):
                accelerator.backward(models[0](x).mean() + (models[1](x) ** 2).mean())
                if accelerator.sync_gradients:
                    for model in models:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
                        accelerator.clip_grad_value_(model.parameters(), 0.05)
                    accelerator.unscale_gradients()
                first.step()
                second.step()
                first.zero_grad()
                second.zero_grad()
        return norms, [p.detach() for model in models for p in model.parameters()]

    norms, low = run("fp16")
    expected_norms, full = run("no")
    assert norms == pytest.approx(expected_norms, rel=0.02)
    for ours, theirs in zip(low, full, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=2e-3)


def test_t34_optimizers_of_a_gan_step_in_turn():
    """One optimizer's step must not let the scale change while the other's gradients wait."""
    accelerator = Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0, growth_interval=1)],
    )
    left, right = make(0), make(1)
    plain_left, plain_right = make(0), make(1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (left, right)]
    left, right, left_optimizer, right_optimizer = accelerator.prepare(left, right, *optimizers)
    plain = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain_left, plain_right)]
    torch.manual_seed(3)
    right_ahead = torch.randn(8, 4)
    with accelerator.accumulate(right):  # right's window stays open while left steps
        accelerator.backward(right(right_ahead).mean())
    (plain_right(right_ahead).mean() / 2).backward()
    for _ in range(2):
        x = torch.randn(8, 4)
        with accelerator.accumulate(left):
            accelerator.backward(left(x).mean())
            left_optimizer.step()
            left_optimizer.zero_grad()
        (plain_left(x).mean() / 2).backward()
    plain[0].step()
    with accelerator.accumulate(right):
        accelerator.backward(right(right_ahead).mean())
        right_optimizer.step()
    (plain_right(right_ahead).mean() / 2).backward()
    plain[1].step()
    for ours, theirs in zip(right.parameters(), plain_right.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=2e-3)


def test_backward_after_clipping_is_refused():
    accelerator = Accelerator(mixed_precision="fp16")
    model = make()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(2, 4)
    accelerator.backward(model(x).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(AccumulationError, match="Clip once, after the last backward"):
        accelerator.backward(model(x).sum())


def test_a_step_left_out_after_clipping_is_forgotten_with_the_gradients():
    accelerator = Accelerator(mixed_precision="fp16")
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.randn(2, 4)
    for zero_grad in (optimizer.zero_grad, model.zero_grad):
        accelerator.backward(model(x).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        zero_grad()
    accelerator.backward(model(x).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    plain = make()
    plain(x).sum().backward()
    assert float(norm) == pytest.approx(
        float(nn.utils.get_total_norm([p.grad for p in plain.parameters()])), rel=0.02
    )


def test_a_closure_cannot_be_scaled():
    accelerator = Accelerator(mixed_precision="fp16")
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: None)


def test_t34_a_waiting_window_follows_the_scale():
    """One network overflows and makes the scale fall while gradients of the other wait for their last micro-batch."""
    accelerator = Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )
    torch.manual_seed(0)
    slow, fast = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (slow, fast)]
    slow, fast, *optimizers = accelerator.prepare(slow, fast, *optimizers)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    expected = [model.weight.detach() - x.mean(dim=0) for model in (slow, fast)]

    def half_window(model, optimizer, factor=1.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean() * factor)
            optimizer.step()
            optimizer.zero_grad()

    half_window(slow, optimizers[0])
    for factor in [float("inf")] * 4 + [1.0] * 2:
        half_window(fast, optimizers[1], factor)
    half_window(slow, optimizers[0])
    assert accelerator.scaler.get_scale() == 256.0
    for model, weight in zip((slow, fast), expected, strict=True):
        torch.testing.assert_close(model.weight.detach(), weight, rtol=1e-2, atol=1e-3)


def test_t34_a_second_step_without_backward_is_refused():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(2, 3)).mean())
    optimizer.step()
    with pytest.raises(RuntimeError, match="already been called"):
        optimizer.step()


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
