"""What every precision in the registry promises; a new entry brings its tests.

The oracle is a plain PyTorch loop: `torch.autocast` in the precision's compute dtype, and `torch.amp.GradScaler` where
the precision has a scaler. Both loops run the same operations in the same order on one process, so losses, norms and
weights are compared bit for bit. Worlds of several ranks are in ``tests-integration/conformance``.
"""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_state.host.available import is_torchao_available
from accel_state.world.process import PartialState
from accel_train import Accelerator, AccumulationError, AutocastKwargs, GradScalerKwargs, PrepareError
from accel_train.precision.base import PrecisionOptions
from accel_train.precision.registry import PRECISIONS

#: Powers of two scale without rounding; a growth every second step makes the scale change during a run.
SCALING = {"init_scale": 1024.0, "growth_interval": 2}


def precision_of(name):
    PartialState(cpu=True)  # as an accelerator makes it; warnings say which rank they come from
    return PRECISIONS.get(name)(PrecisionOptions(scaler_kwargs=SCALING))


#: `hatch run engines:fp8` runs this file where torchao is installed. Its layers are too small for fp8 and compute in
#: bfloat16; tests-integration/engines/test_fp8.py has larger ones.
NAMES = [name for name in PRECISIONS.names() if name != "fp8" or is_torchao_available()]
SCALED = [name for name in NAMES if precision_of(name).scaler is not None]
UNSCALED = [name for name in NAMES if name not in SCALED]
every = pytest.mark.parametrize("name", NAMES)
scaled = pytest.mark.parametrize("name", SCALED)


def compute_dtype(name):
    return precision_of(name).dtypes.compute or torch.float32


def raw_autocast(name):
    """What a script without the library computes in."""
    dtype = precision_of(name).dtypes.compute
    return torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext()


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def rows(count, size=6):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator))
        for _ in range(count)
    ]


def accelerator_of(name, steps=1):
    return Accelerator(
        mixed_precision=name,
        gradient_accumulation_steps=steps,
        kwargs_handlers=[GradScalerKwargs(**SCALING)],
    )


class Probe(nn.Module):
    """Notes the dtypes that its layer was given, computed in, and has."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen = []

    def forward(self, x, fail=False):
        out = self.layer(x)
        self.seen.append(out.dtype)
        if fail:
            raise RuntimeError("on purpose")
        return {"logits": out, "nested": [(out.sum(), out > 0)], "choice": out.argmax(-1), "name": "probe"}


# Forward


@every
def test_forward_computes_in_the_compute_dtype_and_outputs_come_back_in_the_output_dtype(name):
    policy = precision_of(name).dtypes
    model = accelerator_of(name).prepare(Probe())
    assert model.layer.weight.dtype is (policy.param or torch.float32)
    outputs = model(torch.randn(3, 4))
    assert model.seen == [compute_dtype(name)]
    [(total, positive)] = outputs["nested"]
    assert outputs["logits"].dtype is total.dtype is (policy.output or torch.float32)
    assert (positive.dtype, outputs["choice"].dtype, outputs["name"]) == (torch.bool, torch.int64, "probe")


@every
def test_outputs_are_those_of_raw_autocast(name):
    model = accelerator_of(name).prepare(make())
    [(x, _)] = rows(1)
    with raw_autocast(name):
        expected = make()(x).float()
    out = model(x)
    assert out.dtype is torch.float32  # torch.equal compares values only
    assert torch.equal(out, expected)


@every
def test_the_callers_code_outside_the_model_is_not_cast(name):
    model = accelerator_of(name).prepare(make())
    x = torch.ones(4, 4)
    model(x)
    assert (x @ x).dtype is torch.float32


@every
def test_a_disabled_autocast_leaves_forward_and_loss_in_float32(name):
    accelerator = Accelerator(mixed_precision=name, kwargs_handlers=[AutocastKwargs(enabled=False)])
    model = accelerator.prepare(Probe())
    model(torch.randn(3, 4))
    assert model.seen == [torch.float32]
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


@every
def test_autocast_of_the_accelerator_computes_in_the_compute_dtype(name):
    accelerator = accelerator_of(name)
    x = torch.ones(2, 2)
    with accelerator.autocast():
        assert (x @ x).dtype is compute_dtype(name)
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            inner = (x @ x).dtype
    # The null object has no autocast, so there is nothing to switch off.
    assert inner is torch.float32
    assert (x @ x).dtype is torch.float32


@every
def test_the_state_of_autocast_is_clean_after_an_exception(name):
    def state():
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )

    before = state()
    model = accelerator_of(name).prepare(Probe())
    with pytest.raises(RuntimeError, match="on purpose"):
        model(torch.randn(3, 4), fail=True)
    assert state() == before
    with torch.autocast("cpu", torch.bfloat16):  # also inside a context of the script
        inside = state()
        with pytest.raises(RuntimeError, match="on purpose"):
            model(torch.randn(3, 4), fail=True)
        assert state() == inside
    assert model(torch.randn(3, 4))["logits"].dtype is torch.float32


@every
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_enters_the_forward_again(name, reentrant):
    """The recomputation runs inside backward, after the context of the first forward has ended."""
    accelerator = accelerator_of(name)
    model = make()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    [(x, _)] = rows(1)
    x.requires_grad_(True)  # the reentrant form differentiates only what needs a gradient at its inputs
    accelerator.backward(checkpoint(model, x, use_reentrant=reentrant).sum())
    accelerator.unscale_gradients(optimizer)
    plain, scale = make(), 1024.0 if name in SCALED else 1.0
    with raw_autocast(name):
        out = plain(x.detach())
    (out.float().sum() * scale).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad / scale)
    assert not torch.is_autocast_enabled("cpu")


# Taking it off


@every
def test_unwrapping_restores_the_models_own_forward(name):
    accelerator = accelerator_of(name)
    model = make()
    own = set(vars(model))
    prepared = accelerator.prepare(model)
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert plain is model
    assert set(vars(plain)) - own <= {"_is_accelerate_prepared"}
    assert plain.forward.__func__ is nn.Sequential.forward
    [(x, _)] = rows(1)
    expected = make()(x)
    for copied in (plain, copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert torch.equal(copied(x), expected)


@every
def test_convert_is_done_once_and_undone_by_restore(name):
    precision, model = precision_of(name), Probe()
    converted = precision.convert(precision.convert(model))
    x = torch.randn(3, 4)
    converted(x)
    precision.restore(model)
    model(x)
    precision.restore(model)  # nothing is left to restore
    model(x)
    assert model.seen == [compute_dtype(name), torch.float32, torch.float32]


@every
def test_a_forward_that_the_script_replaced_comes_back(name):
    precision, model = precision_of(name), make()

    def mine(x):
        return x @ x.T

    model.forward = mine
    precision.convert(model)
    assert model(torch.ones(2, 2)).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    precision.restore(model)
    assert model.forward is mine


@every
def test_a_copy_of_a_prepared_model_computes_with_its_own_weights(name):
    """As averages of weights are kept."""
    model = accelerator_of(name).prepare(make())
    [(x, _)] = rows(1)
    expected = model(x)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(average(x), expected)
    assert torch.equal(model(x), torch.zeros_like(expected))


# Training


class Recorded:
    """What a loop saw: losses, norms, scales at each step, and the weights at its end."""

    def __init__(self):
        self.losses, self.norms, self.scales, self.weights = [], [], [], []


def accelerated(name, steps, clip):
    accelerator = accelerator_of(name, steps)
    model = make()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    found = Recorded()
    for x, y in rows(5 * steps):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            found.losses.append(loss.item())
            if accelerator.sync_gradients:
                found.scales.append(accelerator.scaler.get_scale() if name in SCALED else 1.0)
                if clip == "norm":
                    found.norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
                elif clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    found.weights = [parameter.detach().clone() for parameter in model.parameters()]
    return found


def raw(name, steps, clip):
    model = make()
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", enabled=name in SCALED, **SCALING)
    found = Recorded()
    for number, (x, y) in enumerate(rows(5 * steps), 1):
        with raw_autocast(name):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss / steps).backward()
        found.losses.append(loss.item())
        if number % steps:
            continue
        found.scales.append(scaler.get_scale())
        scaler.unscale_(optimizer)
        if clip == "norm":
            found.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        elif clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found.weights = [parameter.detach().clone() for parameter in model.parameters()]
    return found


@every
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("clip", [None, "norm", "value"])
def test_training_equals_a_raw_loop(name, steps, clip):
    ours, theirs = accelerated(name, steps, clip), raw(name, steps, clip)
    assert ours.losses == theirs.losses
    assert ours.norms == theirs.norms
    assert ours.scales == theirs.scales
    assert all(torch.equal(a, b) for a, b in zip(ours.weights, theirs.weights, strict=True))
    assert len(ours.scales) == 5
    if name in SCALED:
        assert len(set(ours.scales)) > 1, "the scale grew during the run"
    if clip == "norm":
        assert max(ours.norms) > 0.1, "there was something to clip"


@pytest.mark.parametrize("name", [name for name in NAMES if compute_dtype(name) is not torch.float32])
def test_the_oracle_sees_the_precision(name):
    """The comparison above could not fail if every precision gave the same curve."""
    assert raw(name, 1, None).losses != raw("no", 1, None).losses


@every
def test_a_step_with_infinite_gradients_is_skipped_where_losses_are_scaled(name):
    accelerator = accelerator_of(name)
    model = make()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    [(x, y)] = rows(1)

    def step(factor):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        accelerator.backward(nn.functional.mse_loss(model(x), y) * factor)
        scale = accelerator.scaler.get_scale() if name in SCALED else None
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        moved = not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return moved, accelerator.optimizer_step_was_skipped, scheduler.get_last_lr()[0], scale

    assert step(1.0) == (True, False, 0.025, 1024.0 if name in SCALED else None)
    found = step(float("inf"))
    if name not in SCALED:
        assert found == (True, False, 0.0125, None)
        return
    assert found == (False, True, 0.025, 1024.0)
    assert step(1.0) == (True, False, 0.0125, 512.0)


@every
@pytest.mark.parametrize("overflow", [False, True], ids=["finite", "after an overflow"])
def test_a_state_continues_bit_for_bit(name, overflow):
    """Saved right after a step, when an update of the scale may be due."""
    data = rows(8)

    def begin():
        precision, model = precision_of(name), make()
        return precision, precision.convert(model), make_optimizer(model)

    def steps(precision, model, optimizer, data, last=1.0):
        seen = []
        for number, (x, y) in enumerate(data, 1):
            loss = nn.functional.mse_loss(model(x), y)
            precision.backward(loss * (last if number == len(data) else 1.0), False, {})
            seen += [loss.item(), precision.loss_scale, precision.step(optimizer)[0]]
            precision.forget_unscaled(optimizer)
            optimizer.zero_grad()
        return seen

    last = float("inf") if overflow and name in SCALED else 1.0
    precision, model, optimizer = begin()
    steps(precision, model, optimizer, data[:4], last)
    saved = copy.deepcopy((precision.state_dict([optimizer]), model.state_dict(), optimizer.state_dict()))
    expected = steps(precision, model, optimizer, data[4:])

    precision, model, optimizer = begin()
    steps(precision, model, optimizer, data[:1])  # of another run, which the state replaces
    state, weights, moments = saved
    assert (state is not None) == precision.has_state
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    if state is not None:
        precision.load_state_dict(state, [optimizer])
    assert steps(precision, model, optimizer, data[4:]) == expected


# Errors


def trained(accelerator, model, backward):
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.ones(2, 4, dtype=model[0].weight.dtype)
    backward(model(x).sum())
    return model, optimizer


@every
@pytest.mark.parametrize("call", ["step", "clip"])
def test_plain_backward_is_refused_where_losses_are_scaled(name, call):
    accelerator = accelerator_of(name)
    model, optimizer = trained(accelerator, make(), lambda loss: loss.backward())
    before = model[2].bias.detach().clone()

    def act():
        if call == "clip":
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()

    if name not in SCALED:
        act()
        assert torch.equal(model[2].bias, before - 1.0)  # d(sum of two rows)/d(bias) is 2, times 0.5
        return
    with pytest.raises(
        AccumulationError, match=rf"mixed_precision='{name}' call accelerator\.backward\(loss\)"
    ):
        act()
    assert torch.equal(model[2].bias, before)


@scaled
@pytest.mark.parametrize("call", ["step", "clip"])
def test_a_model_in_half_precision_is_refused_where_losses_are_scaled(name, call):
    accelerator = accelerator_of(name)
    model, optimizer = trained(accelerator, make().half(), accelerator.backward)
    before = model[2].bias.detach().clone()
    act = optimizer.step if call == "step" else lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(PrepareError, match=rf"mixed_precision='{name}' parameters must be float32"):
        act()
    assert torch.equal(model[2].bias, before)


def test_the_registry_has_both_kinds():
    """Else the tests above would run for no precision."""
    assert {"no", "bf16"} <= set(UNSCALED)
    assert "fp16" in SCALED
