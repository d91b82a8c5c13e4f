"""States of DeepSpeed's optimizers under other strategies: against DeepSpeed's own view, and against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

pytest.importorskip("deepspeed", reason="hatch run engines:deepspeed installs it")

FULL = pytest.mark.full
ROWS = 6


class Net(nn.Module):
    """With frozen parameters beside trained ones; parts of ranks cut through the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, 3)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        out: Tensor = self.last(hidden)
        return out


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """All weights, and all biases, frozen or not."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def begin(kind: str, precision: str = "no", config: dict[str, Any] | None = None, make: Any = adam) -> Any:
    """An accelerator, and a prepared model with its optimizer.

    Args:
        kind: "zero" and a stage, or the name of another strategy.
        precision: that the engine computes in.
        config: more of DeepSpeed's configuration.
        make: makes an optimizer of groups.
    """
    from accel_train import Accelerator, DeepSpeedPlugin

    plugin = None
    if kind.startswith("zero"):
        given = {"zero_optimization": {"stage": int(kind[-1])}, "train_micro_batch_size_per_gpu": "auto"}
        plugin = DeepSpeedPlugin(hf_ds_config={**given, **(config or {})})
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        deepspeed_plugin=plugin,
        strategy=kind if plugin is None else None,
    )
    torch.manual_seed(0)
    model = Net()
    loader = DataLoader(TensorDataset(torch.zeros(ROWS, 5)), batch_size=1)
    model, optimizer, _ = accelerator.prepare(model, make(groups_of(model)), loader)
    return accelerator, model, optimizer


def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> None:
    ranks = accelerator.strategy.batch
    for step in steps:
        rows = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))
        loss = model(rows.chunk(ranks.size)[ranks.index]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


# Frozen parameters in the groups of an optimizer


def begun(kind: str, folder: Any) -> None:
    accelerator, model, optimizer = begin(kind)
    train(accelerator, model, optimizer, range(3))
    accelerator.save_state(folder)


def continued(kind: str, folder: Any) -> dict[str, Tensor]:
    accelerator, model, optimizer = begin(kind)
    if folder is not None:
        accelerator.load_state(folder)
    train(accelerator, model, optimizer, range(0 if folder is None else 3, 6))
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize(
    ("before", "ranks", "after", "others"),
    [
        ("single", 1, "zero1", 2),
        ("zero2", 2, "single", 1),
        pytest.param("single", 1, "zero0", 2, marks=FULL),
        pytest.param("single", 1, "zero2", 2, marks=FULL),
        pytest.param("single", 1, "zero3", 2, marks=FULL),
        pytest.param("ddp", 2, "zero3", 2, marks=FULL),
        pytest.param("fsdp2", 2, "zero2", 3, marks=FULL),
        pytest.param("zero0", 2, "single", 1, marks=FULL),
        pytest.param("zero1", 3, "fsdp2", 2, marks=FULL),
        pytest.param("zero3", 2, "single", 1, marks=FULL),
        pytest.param("zero3", 2, "ddp", 2, marks=FULL),
        pytest.param("zero2", 2, "zero3", 3, marks=FULL),
    ],
)
def test_frozen_parameters_of_an_optimizer_go_along(tmp_path, before, ranks, after, others):
    [wanted] = worlds.run(continued, 1, "single", None)
    worlds.run(begun, ranks, before, tmp_path / "state")
    for found in worlds.run(continued, others, after, tmp_path / "state"):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def refused(stage):
    from accel_train import Accelerator, DeepSpeedPlugin, PrepareError

    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    model = Net()
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.frozen.parameters())}]
    with pytest.raises(
        PrepareError, match=f"Group 1 of AdamW holds 2 parameters, all frozen, .* stage {stage}"
    ):
        accelerator.prepare(model, adam(groups))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_frozen_group_is_refused_where_deepspeed_cannot_hold_it(stage):
    worlds.run(refused, 1, stage)


# 32-bit copies and states of bf16's optimizers

SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


def seen_by_deepspeed(model: nn.Module) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Values and states of trained parameters, as DeepSpeed's own functions gather them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return {
        name: (
            safe_get_full_fp32_param(p).clone(),
            safe_get_full_optimizer_state(p, "exp_avg").clone(),
            safe_get_full_optimizer_state(p, "exp_avg_sq").clone(),
        )
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def bf16_saved(kind, config, folder):
    accelerator, model, optimizer = begin(kind, "bf16", config)
    train(accelerator, model, optimizer, range(3))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
    accelerator.save_state(folder)
    assert norm == 0  # no gradient waits
    return seen_by_deepspeed(accelerator.unwrap_model(model))


def plainly_loaded(kind, folder, folder_2):
    accelerator, model, optimizer = begin(kind)
    accelerator.load_state(folder)
    accelerator.save_state(folder_2)
    plain = accelerator.unwrap_model(model)
    return {
        name: (p.detach().clone(), *(optimizer.state[p][key].clone() for key in ("exp_avg", "exp_avg_sq")))
        for name, p in plain.named_parameters()
        if p.requires_grad
    }


def bf16_loaded(kind, config, folder):
    """A first step links DeepSpeed's functions to the states, which are then loaded."""
    accelerator, model, optimizer = begin(kind, "bf16", config)
    train(accelerator, model, optimizer, range(1))
    accelerator.load_state(folder)
    return seen_by_deepspeed(accelerator.unwrap_model(model))


@pytest.mark.parametrize(
    ("kind", "config", "ranks", "others"),
    [
        ("zero1", SUMS, 2, 3),
        pytest.param("zero3", SUMS, 2, 3, marks=FULL),
    ],
)
def test_32_bit_copies_and_states_go_to_one_process_and_back(tmp_path, kind, config, ranks, others):
    wanted, *_ = worlds.run(bf16_saved, ranks, kind, config, tmp_path / "state")
    [found] = worlds.run(plainly_loaded, 1, "single", tmp_path / "state", tmp_path / "plain")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    for found in worlds.run(bf16_loaded, others, kind, config, tmp_path / "plain"):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def norms(config):
    accelerator, model, optimizer = begin("zero1", "bf16", config)
    found = []
    for norm_type in (2.0, 1.0, float("inf")):
        loss = model(torch.ones(2, 5)).square().mean()
        accelerator.backward(loss)
        plain = torch.autograd.grad(
            model.module(torch.ones(2, 5)).square().mean(),
            [p for p in model.module.parameters() if p.requires_grad],
        )
        wanted = nn.utils.get_total_norm([g.float() for g in plain], norm_type=norm_type)
        found.append((accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type), wanted))
        optimizer.zero_grad()
    return found


def test_gradients_added_up_in_float32_are_clipped():
    for found in worlds.run(norms, 2, SUMS):
        for norm, wanted in found:
            torch.testing.assert_close(norm, wanted, rtol=1e-2, atol=0)


# A fused optimizer without ZeRO: the engine flattens 32-bit copies of groups


def fused(groups: Any) -> torch.optim.Optimizer:
    """Momentum of a class that DeepSpeed takes for a fused one; real ones need a compiler."""
    from deepspeed.ops.adam import FusedAdam

    class Fused(FusedAdam):  # type: ignore[misc]
        def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
            torch.optim.Optimizer.__init__(self, params, defaults)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                        momentum.mul_(group["momentum"]).add_(p.grad.add(p, alpha=group["weight_decay"]))
                        p.sub_(momentum, alpha=group["lr"])

    return Fused(groups, dict(momentum(groups).defaults))


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([dict(group) for group in groups], lr=0.01, momentum=0.9)


def flat_copies(accelerator: Any, model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Values and momentum of trained parameters, cut by hand out of the engine's flat tensors."""
    engine = model.optimizer
    assert type(engine).__name__ == "FP16_Optimizer"
    names = {id(p): name for name, p in accelerator.unwrap_model(model).named_parameters()}
    found = {}
    for lows, flat in zip(engine.fp16_groups, engine.fp32_groups_flat, strict=True):
        sizes = [p.numel() for p in lows]
        state = engine.optimizer.state[flat]["momentum_buffer"]
        for p, value, buffer in zip(lows, flat.detach().split(sizes), state.split(sizes), strict=True):
            found[names[id(p)]] = value.view(p.shape).clone(), buffer.view(p.shape).clone()
    return found


def fused_saved(folder):
    accelerator, model, optimizer = begin("zero0", "bf16", make=fused)
    train(accelerator, model, optimizer, range(3))
    accelerator.save_state(folder)
    before = flat_copies(accelerator, model)
    train(accelerator, model, optimizer, range(3, 6))
    return before, accelerator.get_state_dict(model)


def fused_loaded(folder):
    accelerator, model, optimizer = begin("zero0", "bf16", make=fused)
    accelerator.load_state(folder)
    before = flat_copies(accelerator, model)
    train(accelerator, model, optimizer, range(3, 6))
    return before, accelerator.get_state_dict(model)


def fused_in_one_process(folder, again):
    accelerator, model, optimizer = begin("single", make=momentum)
    accelerator.load_state(folder)
    accelerator.save_state(again)
    return {
        name: (p.detach(), optimizer.state[p]["momentum_buffer"])
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def test_states_of_a_fused_optimizer_go_to_one_process_and_back(tmp_path):
    (wanted, after), *_ = worlds.run(fused_saved, 2, tmp_path / "state")
    [found] = worlds.run(fused_in_one_process, 1, tmp_path / "state", tmp_path / "plain")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    for found, trained in worlds.run(fused_loaded, 2, tmp_path / "plain"):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        torch.testing.assert_close(trained, after, rtol=0, atol=0)
