"""Optimizers of other packages: schedule-free, 8-bit, and those that update during backward.

Run with `hatch run engines:optimizers`. The oracle is plain PyTorch with the same optimizer, and for runs that
continue a run that was not interrupted.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator
from testkit import worlds

schedulefree = pytest.importorskip("schedulefree", reason="hatch run engines:optimizers installs it")
lomo_optim = pytest.importorskip("lomo_optim", reason="hatch run engines:optimizers installs it")
bnb = pytest.importorskip("bitsandbytes", reason="hatch run engines:optimizers installs it")
torchao_optim = pytest.importorskip("torchao.optim", reason="hatch run engines:optimizers installs it")

# 8-bit states are of whole blocks of 256 values, and torchao keeps smaller tensors than 4,096 in float32.
WIDTH = 64

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "schedulefree.AdamWScheduleFree": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.01, warmup_steps=2),
    "schedulefree.SGDScheduleFree": lambda p: schedulefree.SGDScheduleFree(p, lr=0.05),
    "schedulefree.RAdamScheduleFree": lambda p: schedulefree.RAdamScheduleFree(p, lr=0.01),
    "bitsandbytes.AdamW8bit": lambda p: bnb.optim.AdamW8bit(p, lr=0.01, min_8bit_size=256),
    "bitsandbytes.Lion8bit": lambda p: bnb.optim.Lion8bit(p, lr=0.001, min_8bit_size=256),
    "torchao.AdamW8bit": lambda p: torchao_optim.AdamW8bit(p, lr=0.01),
    "torchao.AdamW4bit": lambda p: torchao_optim.AdamW4bit(p, lr=0.01),
}


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def samples() -> TensorDataset:
    x = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin())


def mode(optimizer: Any, name: str) -> None:
    if "schedulefree" in type(getattr(optimizer, "optimizer", optimizer)).__module__:
        getattr(optimizer, name)()


def plain(kind: str, batch: int) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    mode(optimizer, "train")
    for x, y in DataLoader(samples(), batch_size=batch):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    mode(optimizer, "eval")
    return copy.deepcopy(model.state_dict())


def ours(
    kind: str,
    batch: int,
    folder: str = "",
    stop: int | None = None,
    resume: bool = False,
    when: str = "train",
) -> Any:
    accelerator = Accelerator()
    model = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=batch))
    mode(optimizer, "train")
    if resume:
        accelerator.load_state(folder)
        mode(optimizer, "train")
    for x, y in accelerator.skip_first_batches(loader, accelerator.step) if resume else loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        accelerator.step += 1
        if stop is not None and accelerator.step == 2:
            mode(optimizer, when)
            if stop == 2:
                accelerator.save_state(folder)
                return None
            mode(optimizer, "train")
    mode(optimizer, "eval")
    dtypes = sorted({str(leaf.dtype) for leaf in tensors_in(optimizer.state_dict()["state"])})
    return copy.deepcopy(accelerator.unwrap_model(model).state_dict()), dtypes


def tensors_in(tree: Any) -> Any:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, torch.Tensor):
        yield getattr(tree, "codes", tree)


def equal(found: Any, expected: Any) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_process_trains_as_the_plain_loop(kind: str) -> None:
    expected = plain(kind, 8)
    found, dtypes = worlds.run(ours, 1, kind, 8, timeout=300)[0]
    assert equal(found, expected)
    assert ("torch.uint8" in dtypes) == ("bit" in kind)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_ranks_train_as_one_process_on_the_big_batch(kind: str) -> None:
    expected = plain(kind, 16)
    first, second = (found for found, _ in worlds.run(ours, 2, kind, 8, timeout=300))
    assert equal(first, second)
    if "schedulefree" in kind:
        for name, value in expected.items():
            torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_continues_exactly(tmp_path: Any, kind: str, ranks: int) -> None:
    folder = str(tmp_path / "state")
    worlds.run(ours, ranks, kind, 8, folder, 2, timeout=300)
    resumed = worlds.run(ours, ranks, kind, 8, folder, None, True, timeout=300)
    for (found, _), (expected, _) in zip(resumed, worlds.run(ours, ranks, kind, 8, timeout=300), strict=True):
        assert equal(found, expected)


# Schedule-free


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if "schedulefree" in kind])
def test_a_state_that_is_saved_with_averaged_weights_continues_exactly(tmp_path: Any, kind: str) -> None:
    folder = str(tmp_path / "state")
    worlds.run(ours, 1, kind, 8, folder, 2, when="eval")
    [(found, _)] = worlds.run(ours, 1, kind, 8, folder, None, True)
    [(expected, _)] = worlds.run(ours, 1, kind, 8, folder, 3, when="eval")  # switches there as well
    assert equal(found, expected)


def evaluated(folder: str) -> Any:
    """One step, and what a model in evaluation and its file hold."""
    accelerator = Accelerator()
    model = make()
    plain_model = copy.deepcopy(model)
    x, y = samples()[:8]
    by_hand = schedulefree.AdamWScheduleFree(plain_model.parameters(), lr=0.01)
    by_hand.train()
    for _ in range(3):
        nn.functional.mse_loss(plain_model(x), y).backward()
        by_hand.step()
        by_hand.zero_grad()
    by_hand.eval()
    model, optimizer = accelerator.prepare(model, schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01))
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    with pytest.raises(Exception, match="not in train mode"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.train()
    for _ in range(3):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    with pytest.warns(
        UserWarning, match=r"AdamWScheduleFree takes its gradients, not .*optimizer\.eval\(\) before"
    ):
        accelerator.save_model(model, f"{folder}/training")
    optimizer.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.save_model(model, f"{folder}/averaged")
    files = [load_file(f"{folder}/{name}/model.safetensors") for name in ("training", "averaged")]
    expected = plain_model.state_dict()
    return [equal(found, expected) for found in (accelerator.get_state_dict(model), *files)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_and_files_have_the_averaged_weights(tmp_path: Any, ranks: int) -> None:
    assert worlds.run(evaluated, ranks, str(tmp_path)) == [[True, False, True]] * ranks


# LOMO


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdaLomo moves its moments to CUDA whatever the model's device is; here they stay."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)


@pytest.mark.parametrize("kind", ["Lomo", "AdaLomo"])
def test_lomo_updates_during_backward(on_cpu: None, kind: str) -> None:
    model = make()
    by_hand = getattr(lomo_optim, kind)(model, lr=0.0)
    accelerator = Accelerator()
    other = make()
    other, optimizer = accelerator.prepare(other, getattr(lomo_optim, kind)(other, lr=0.0))
    assert accelerator.has_lomo_optimizer
    for number, (x, y) in enumerate(DataLoader(samples(), batch_size=8)):
        rate = 0.1 / (number + 1)
        by_hand.fused_backward(nn.functional.mse_loss(model(x), y), rate)
        accelerator.backward(nn.functional.mse_loss(other(x), y), learning_rate=rate)
        optimizer.step()
        optimizer.zero_grad()
    assert equal(other.state_dict(), model.state_dict())
    assert not equal(other.state_dict(), make().state_dict())


@pytest.mark.parametrize("kind", ["Lomo", "AdaLomo"])
def test_a_lomo_run_continues_exactly(on_cpu: None, tmp_path: Any, kind: str) -> None:
    x, y = samples()[:8]

    def prepared() -> Any:
        accelerator = Accelerator()
        model = make()
        model, _ = accelerator.prepare(model, getattr(lomo_optim, kind)(model, lr=0.0))
        return accelerator, model

    accelerator, model = prepared()
    for number in range(6):
        accelerator.lomo_backward(nn.functional.mse_loss(model(x), y), 0.05)
        if number == 2:
            accelerator.save_state(tmp_path / "state")
    other, continued = prepared()
    other.load_state(tmp_path / "state")
    for _ in range(3):
        other.backward(nn.functional.mse_loss(continued(x), y), learning_rate=0.05)
    assert equal(continued.state_dict(), model.state_dict())


def test_what_lomo_cannot_do_is_refused(on_cpu: None) -> None:
    x, y = samples()[:8]
    accelerator = Accelerator()
    model = accelerator.prepare(make())
    with pytest.raises(
        ValueError, match=r"needs exactly one prepared optimizer of lomo-optim, but there are 0"
    ):
        accelerator.backward(nn.functional.mse_loss(model(x), y), learning_rate=0.1)
    accelerator.prepare(lomo_optim.Lomo(model))
    loss = nn.functional.mse_loss(model(x), y)
    with pytest.raises(ValueError, match=r"so pass the learning rate there: accelerator\.backward"):
        accelerator.backward(loss)
    with pytest.raises(ValueError, match="so pass the learning rate there"):
        accelerator.lomo_backward(loss, None)
    with pytest.raises(ValueError, match="got num_items"):
        accelerator.backward(loss, num_items=8, learning_rate=0.1)
    accelerator.gradient_accumulation_steps = 2
    with pytest.raises(RuntimeError, match="cannot be accumulated over 2 micro-batches"):
        accelerator.backward(loss, learning_rate=0.1)
    scaled = Accelerator(mixed_precision="fp16")
    with pytest.raises(
        ValueError, match=r"Lomo updates parameters during backward.*Use mixed_precision='bf16'"
    ):
        scaled.prepare(lomo_optim.Lomo(make()))
    assert not scaled.has_lomo_optimizer


def on_two() -> Any:
    accelerator = Accelerator()
    model = make()
    accelerator.prepare(model, lomo_optim.Lomo(model))


def test_lomo_s_updates_cannot_be_guarded(on_cpu: None) -> None:
    accelerator = Accelerator()
    model = make()
    accelerator.prepare(model, lomo_optim.Lomo(model))
    with pytest.raises(ValueError, match="but Lomo updates during backward"):
        accelerator.guard_steps()
    assert accelerator.step_guard is None
    guarded = Accelerator()
    guarded.guard_steps()
    with pytest.raises(ValueError, match="but Lomo updates during backward"):
        guarded.prepare(lomo_optim.Lomo(make()))
    assert not guarded.has_lomo_optimizer


def test_lomo_on_several_ranks_is_refused() -> None:
    with pytest.raises(worlds.RankError, match=r"before the strategy 'ddp' has averaged .* over 2 ranks"):
        worlds.run(on_two, 2)
