"""One optimizer on one process against `torch.optim.Muon` with `torch.optim.AdamW`, and its states in every world."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from accel_train import Accelerator, MuonWithAdamW, muon_with_adamw
from accel_train.errors import IncompatibleOptionsError, OptionError, PrepareError
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2)
        )
        self.lm_head = nn.Linear(6, 12)

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.lm_head(hidden)


def build(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 12, (count, 8), generator=generator)


def loss_of(model, x):
    return nn.functional.cross_entropy(model(x).float(), (x + 1) % 12)


MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"adamw_lr": 3e-3, "adamw_betas": (0.8, 0.99), "adamw_weight_decay": 0.05}


def torchs(model, **options):
    hidden = [p for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name]
    others = [
        {"params": [model.embed.weight, model.lm_head.weight], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.Muon(hidden, **MUON, **options), torch.optim.AdamW(others, lr=3e-3, betas=(0.8, 0.99))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"adjust_lr_fn": "original"},
        {
            "adjust_lr_fn": "match_rms_adamw",
            "momentum": 0.9,
            "ns_steps": 3,
            "ns_coefficients": (3.0, -3.2, 1.2),
        },
    ],
)
def test_twenty_steps_are_those_of_torch(dtype, options):
    ours, theirs = build(dtype), build(dtype)
    optimizer = muon_with_adamw(ours, **MUON, **ADAMW, **options, bucket_bytes=200)
    pair = torchs(theirs, **options)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in (optimizer, *pair)]
    for x in batches(20):
        for model, optimizers in ((ours, [optimizer]), (theirs, pair)):
            loss_of(model, x).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for each in optimizers:
                each.step()
                each.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.equal(other)
    assert not ours.layers[0][1].weight.equal(build(dtype).layers[0][1].weight)


def test_without_nesterov_the_momentum_is_what_is_orthogonalised():
    ours, theirs = build(), build()
    optimizer = muon_with_adamw(ours, **MUON, **ADAMW, adjust_lr_fn="original", nesterov=False)
    pair = torchs(theirs, nesterov=False)
    for x in batches(5):
        loss_of(ours, x).backward()
        loss_of(theirs, x).backward()
        for each in (optimizer, *pair):
            each.step()
            each.zero_grad()
    assert all(a.equal(b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert (
        optimizer.state[ours.layers[0][1].weight]["momentum_buffer"].norm() < 0.9
    )  # not divided by its norm


@pytest.mark.parametrize("transposed", [False, True])
def test_each_expert_is_stepped_as_a_matrix_alone(transposed):
    torch.manual_seed(0)
    stack = torch.randn(3, 8, 20) if transposed else torch.randn(3, 20, 8)
    gradients = torch.randn(4, *stack.shape)
    ours = nn.Parameter(stack.clone())
    options = {**MUON, "adjust_lr_fn": "original"}
    optimizer = MuonWithAdamW([{"params": [ours], "transposed": transposed}], **options)
    alone = [nn.Parameter((one.T if transposed else one).contiguous()) for one in stack]
    theirs = MuonWithAdamW(alone, **options)
    for gradient in gradients:
        ours.grad = gradient
        for one, given in zip(alone, gradient, strict=True):
            one.grad = (given.T if transposed else given).contiguous()
        optimizer.step()
        theirs.step()
    for one, found in zip(alone, ours, strict=True):
        torch.testing.assert_close(found.T if transposed else found, one, rtol=0, atol=2e-3)


def test_convolutions_are_stepped_as_matrices():
    torch.manual_seed(0)
    weight, gradient = torch.randn(6, 2, 3, 3), torch.randn(6, 2, 3, 3)
    conv, flat = nn.Parameter(weight.clone()), nn.Parameter(weight.flatten(1).clone())
    conv.grad, flat.grad = gradient, gradient.flatten(1)
    MuonWithAdamW([{"params": [conv], "flatten": True}], lr=0.1).step()
    MuonWithAdamW([flat], lr=0.1).step()
    assert conv.flatten(1).equal(flat)


def test_a_parameter_without_a_gradient_stays():
    model = build()
    optimizer = muon_with_adamw(model)
    model.layers[0](torch.randn(4, 6)).sum().backward()
    before = model.layers[1][1].weight.clone()
    optimizer.step()
    assert model.layers[1][1].weight.equal(before)
    assert model.layers[1][1].weight not in optimizer.state


def test_a_matrix_without_elements_is_left_alone():
    empty, full = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2, 3))
    empty.grad, full.grad = torch.zeros(0, 3), torch.ones(2, 3)
    MuonWithAdamW([empty, full], lr=0.1).step()
    assert full.lt(1).all()


def test_groups_decay_what_has_two_dimensions():
    optimizer = muon_with_adamw(build(), lr=0.01, weight_decay=0.2)
    assert [(g["use_muon"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (True, 0.01, 0.2), (False, 0.01, 0.2), (False, 0.01, 0.0),
    ]  # fmt: skip
    decayed = muon_with_adamw(build(), decay_vectors=True, adamw_weight_decay=0.3)
    assert [(g["use_muon"], g["weight_decay"]) for g in decayed.param_groups] == [(True, 0.1), (False, 0.3)]


def test_copies_step_as_the_original():
    model = build()
    optimizer = muon_with_adamw(model, **MUON, **ADAMW)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    pairs = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    for other, its_optimizer in [(model, optimizer), *pairs]:
        other.zero_grad()
        loss_of(other, batches(2)[1]).backward()
        its_optimizer.step()
        its_optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "use_muon": False})
        assert its_optimizer.param_groups[-1]["betas"] == (0.8, 0.99)
    for other, _ in pairs:
        assert all(a.equal(b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_the_closure_is_called_with_gradients_enabled():
    model = build()
    optimizer = muon_with_adamw(model)

    def closure():
        loss = loss_of(model, batches(1)[0])
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad


# Refusals


def test_a_model_of_vectors_is_for_adamw():
    with pytest.raises(OptionError, match=r"none of the 2 trained parameters of LayerNorm is one\. Train it"):
        muon_with_adamw(nn.LayerNorm(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"^lr=-1: give a number from 0"),
        ({"adamw_lr": -1.0}, r"adamw_lr=-1"),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1"),
        ({"adamw_weight_decay": float("nan")}, r"adamw_weight_decay=nan"),
        ({"momentum": 1.5}, r"momentum=1\.5: it is from 0 to 1"),
        ({"ns_steps": 0}, r"ns_steps=0: give a number from 1 to 99"),
        ({"ns_coefficients": (1.0, 2.0)}, r"give the three numbers a, b and c"),
        (
            {"adjust_lr_fn": "rms"},
            r"adjust_lr_fn='rms' is unknown; choose one of 'match_rms_adamw', 'original'",
        ),
        ({"bucket_bytes": 0}, r"bucket_bytes=0"),
    ],
)
def test_a_number_out_of_range_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        muon_with_adamw(build(), **options)


@pytest.mark.parametrize(
    ("parameter", "options", "error", "message"),
    [
        (torch.zeros(3), {}, OptionError, r"shape \[3\] has no matrices for Muon"),
        (torch.zeros(3, 2, 5, 5), {}, OptionError, r"flatten=True a convolution's"),
        (
            torch.zeros(3, 2, dtype=torch.complex64),
            {},
            OptionError,
            r"complex64, and Muon steps real numbers",
        ),
        (
            torch.zeros(3, 2),
            {"foreach": True},
            IncompatibleOptionsError,
            r"foreach=True in a group with use_muon",
        ),
        (
            torch.zeros(3, 2),
            {"fused": True},
            IncompatibleOptionsError,
            r"fused=True in a group with use_muon",
        ),
    ],
)
def test_a_group_that_muon_cannot_step_is_refused(parameter, options, error, message):
    with pytest.raises(error, match=message):
        MuonWithAdamW([{"params": [nn.Parameter(parameter)], **options}])


@pytest.mark.parametrize(("key", "meant"), [("use_moun", "use_muon"), ("weigth_decay", "weight_decay")])
def test_a_misspelt_key_of_a_group_is_refused(key, meant):
    with pytest.raises(OptionError, match=f"the key '{key}'; did you mean '{meant}'"):
        MuonWithAdamW([{"params": [nn.Parameter(torch.ones(2, 2))], key: False}])


def test_a_group_may_have_keys_of_the_script():
    optimizer = MuonWithAdamW([{"params": [nn.Parameter(torch.ones(2, 2))], "name": "body", "scale": 2}])
    assert (optimizer.param_groups[0]["name"], optimizer.param_groups[0]["scale"]) == ("body", 2)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10, cycle_momentum=False)


def test_a_parameter_of_two_groups_is_refused():
    parameter = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="more than one parameter group"):
        MuonWithAdamW([{"params": [parameter]}, {"params": [parameter], "use_muon": False}])


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = MuonWithAdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(PrepareError, match=r"shape \[5, 3\] has a sparse gradient"):
        optimizer.step()


def test_parameters_that_an_engine_flattened_are_refused():
    optimizer = MuonWithAdamW([nn.Parameter(torch.zeros(3, 2))])
    flat = nn.Parameter(torch.zeros(6))
    flat.grad = torch.ones(6)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(PrepareError, match=r"shape \[6\] now.*DeepSpeed"):
        optimizer.step()


def test_the_state_of_other_groups_is_refused():
    model = build()
    adamw = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    ours = MuonWithAdamW([{"params": [p], "use_muon": p.dim() == 2} for p in model.parameters()])
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(OptionError, match="use_muon"):
        ours.load_state_dict(adamw.state_dict())
    assert ours.state_dict() == before


# With an Accelerator


def train(accelerator, model, optimizer, scheduler, chosen):
    ranks = accelerator.strategy.batch
    for batch in chosen:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch.chunk(ranks.size)[ranks.index]))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def prepared(kind, **options):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, TorchTensorParallelPlugin

    model = build(torch.float64)
    plugins = {
        "fsdp2": {"fsdp_plugin": FullyShardedDataParallelPlugin},
        "tp": {"torch_tp_plugin": TorchTensorParallelPlugin},
    }
    chosen = {name: make() for name, make in plugins.get(kind, {}).items()}
    accelerator = Accelerator(cpu=True, scale_scheduler=False, **chosen)
    if kind == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for layer in model.layers:
            plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
            parallelize_module(layer, accelerator.torch_device_mesh["tp"], plan)
    optimizer = muon_with_adamw(model, **{**MUON, **ADAMW, **options})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def straight(kind, **options):
    run = prepared(kind, **options)
    train(*run, batches(4))
    return run[0].get_state_dict(run[1])


def first_half(kind, folder):
    run = prepared(kind)
    train(*run, batches(4)[:2])
    run[0].save_state(folder)


def second_half(kind, folder):
    run = prepared(kind)
    run[0].load_state(folder)
    train(*run, batches(4)[2:])
    return run[0].get_state_dict(run[1])


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("single", 1),
        ("fsdp2", 2),
        pytest.param("ddp", 2, marks=pytest.mark.full),
        pytest.param("tp", 2, marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, kind, ranks):
    worlds.run(first_half, ranks, kind, tmp_path)
    for found, right in zip(
        worlds.run(second_half, ranks, kind, tmp_path), worlds.run(straight, ranks, kind), strict=True
    ):
        assert all(found[name].equal(value) for name, value in right.items())


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(("fsdp2", 2), ("single", 1)), pytest.param(("single", 1), ("fsdp2", 2), marks=pytest.mark.full)],
)
def test_a_state_goes_on_in_another_world(tmp_path, saved, loaded):
    worlds.run(first_half, saved[1], saved[0], tmp_path)
    [right] = worlds.run(straight, 1, "single")
    found = worlds.run(second_half, loaded[1], loaded[0], tmp_path)[0]
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7)


def test_a_skipped_step_changes_nothing():
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    accelerator.guard_steps()
    model = build()
    model, optimizer = accelerator.prepare(model, muon_with_adamw(model))
    for factor in (1.0, float("nan"), 1.0):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        accelerator.backward(loss_of(model, batches(1)[0]) * factor)
        optimizer.step()
        optimizer.zero_grad()
        same = all(value.equal(before[0][name]) for name, value in model.state_dict().items())
        assert same is (factor != factor)
        assert same is optimizer.step_was_skipped
