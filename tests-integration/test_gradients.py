"""Gradient accumulation against one big batch in float64, on 1 to 4 ranks.

The oracle never uses the library: it is told which samples each rank saw in which micro-batch, and computes the update
of every window with plain autograd on all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
DIM = 5


class Tokens(Dataset):
    """Samples with their index, features, targets per token, and a mask of how many tokens count."""

    def __init__(self, size: int, tokens: int = 4) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, tokens, DIM, generator=generator, dtype=torch.float64)
        self.y = torch.randn(size, tokens, generator=generator, dtype=torch.float64)
        lengths = torch.randint(0, tokens + 1, (size,), generator=generator)
        self.mask = torch.arange(tokens)[None, :] < lengths[:, None]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index], self.y[index], self.mask[index]


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(DIM, 1, dtype=torch.float64)


def errors(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).squeeze(-1) - y) ** 2


def train(
    size: int, batch_size: int, steps: int, contract: str, clip: str | None = None, epochs: int = 2
) -> tuple[list[list[tuple[list[int], bool]]], list[torch.Tensor]]:
    """What each epoch's micro-batches held and whether they ended a window; and the weights after every update."""
    from accel_train import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Tokens(size), batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(3)
    history, weights = [], []
    for _ in range(epochs):
        seen = []
        for index, x, y, mask in loader:
            with accelerator.accumulate(model):
                loss = errors(model, x, y)
                if contract == "items":
                    accelerator.backward((loss * mask).sum(), num_items=mask.sum())
                elif contract == "int items":
                    accelerator.backward((loss * mask).sum(), num_items=int(mask.sum()))
                else:
                    accelerator.backward(loss.mean())
                if accelerator.sync_gradients and clip == "norm":
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                if accelerator.sync_gradients and clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
            seen.append((index.tolist(), accelerator.sync_gradients))
            if accelerator.sync_gradients:
                weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        history.append(seen)
    return history, weights


def oracle(size: int, histories: list[Any], contract: str, clip: str | None = None) -> list[torch.Tensor]:
    """The weights after every window, from plain autograd over what all ranks held."""
    data = Tokens(size)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    weights = []
    for epoch in range(len(histories[0])):
        window: list[list[int]] = []
        for micro in zip(*(history[epoch] for history in histories), strict=True):
            assert len({ends for _, ends in micro}) == 1, "ranks disagree about the end of a window"
            window += [indices for indices, _ in micro]
            if not micro[0][1]:
                continue
            if contract == "mean":
                loss = torch.stack([errors(model, data.x[i], data.y[i]).mean() for i in window]).mean()
            else:
                all_indices = [index for indices in window for index in indices]
                mask = data.mask[all_indices]
                total = (errors(model, data.x[all_indices], data.y[all_indices]) * mask).sum()
                loss = total / max(int(mask.sum()), 1)
            optimizer.zero_grad()
            loss.backward()
            if clip == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if clip == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
            window = []
        assert not window, "the last window of an epoch was never synchronised"
    return weights


def check(ranks: int, size: int, batch_size: int, steps: int, contract: str, clip: str | None = None) -> None:
    results = worlds.run(train, ranks, size, batch_size, steps, contract, clip)
    expected = oracle(size, [history for history, _ in results], contract, clip)
    for _, weights in results:
        assert len(weights) == len(expected)
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.wide(only=["2-*", "4-*"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_t1_a_short_window_is_divided_by_what_it_held(ranks: int, steps: int) -> None:
    check(ranks, size=23, batch_size=2, steps=steps, contract="mean")


@pytest.mark.wide(only=["2-*", "4-*"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_t2_varying_token_counts_equal_one_big_batch(ranks: int, steps: int) -> None:
    check(ranks, size=23, batch_size=2, steps=steps, contract="items")


def test_t2_counts_may_be_plain_numbers() -> None:
    check(2, size=13, batch_size=2, steps=3, contract="int items")


@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("contract", ["mean", "items"])
def test_clipping_sees_the_gradients_of_the_big_batch(clip: str, contract: str) -> None:
    check(2, size=13, batch_size=2, steps=3, contract=contract, clip=clip)


def no_items() -> list[float]:
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = make_model()
    model = accelerator.prepare(model)
    x = torch.randn(3, DIM, dtype=torch.float64).to(accelerator.device)
    with accelerator.accumulate(model):
        accelerator.backward((model(x) * 0).sum(), num_items=0)
    return [float(p.grad.abs().sum()) for p in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_without_items_leaves_zero_gradients(ranks: int) -> None:
    assert worlds.run(no_items, ranks) == [[0.0, 0.0]] * ranks


def only_one_rank_has_items(rank_with: int) -> torch.Tensor:
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(make_model())
    data = Tokens(3)
    count = 4 if accelerator.process_index == rank_with else 0
    mask = torch.zeros(3, 4)
    mask.view(-1)[:count] = 1
    x, y, mask = (each.to(accelerator.device) for each in (data.x, data.y, mask))
    accelerator.backward((errors(model, x, y) * mask).sum(), num_items=count)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_a_rank_without_items_does_not_dilute_the_others() -> None:
    model = make_model()
    data = Tokens(3)
    mask = torch.zeros(3, 4)
    mask.view(-1)[:4] = 1
    ((errors(model, data.x, data.y) * mask).sum() / 4).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for ours in worlds.run(only_one_rank_has_items, 3, 1):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def uneven_ranks(steps: int) -> tuple[list[list[int]], torch.Tensor]:
    """Ranks whose last window holds different numbers of micro-batches."""
    from accel_train import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        gradient_accumulation_steps=steps, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(Tokens(10), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    held = []
    for index, x, y, _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(errors(model, x, y).mean())
        held.append(index.tolist())
    return held, torch.cat([p.grad.flatten() for p in model.parameters()])


def test_ranks_with_different_numbers_of_micro_batches_are_averaged_over_all() -> None:
    results = worlds.run(uneven_ranks, 2, 4)
    held = [indices for indices, _ in results]
    assert [len(item) for item in held] == [3, 2]
    model, data = make_model(), Tokens(10)
    micro_batches = [indices for rank in held for indices in rank]
    torch.stack([errors(model, data.x[i], data.y[i]).mean() for i in micro_batches]).mean().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for _, ours in results:
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def by_hand(every: int) -> tuple[list[list[int]], torch.Tensor]:
    """The manual form: no_sync on all but every n-th batch and the last."""
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = make_model()
    loader = DataLoader(Tokens(12), batch_size=2)
    model, loader = accelerator.prepare(model, loader)
    held = []
    for number, (index, x, y, _) in enumerate(loader, start=1):
        held.append(index.tolist())
        if number % every and number != len(loader):
            with accelerator.no_sync(model):
                accelerator.backward(errors(model, x, y).sum())
        else:
            accelerator.backward(errors(model, x, y).sum())
    return held, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_manual_form_averages_gradients_once(ranks: int) -> None:
    results = worlds.run(by_hand, ranks, 4)
    model, data = make_model(), Tokens(12)
    for held, _ in results:
        for indices in held:
            (errors(model, data.x[indices], data.y[indices]).sum() / ranks).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for _, ours in results:
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def one_named(items: bool) -> list[list[float]]:
    """Two models and a parameter of their own are trained, and one model is named, as many scripts do."""
    from accel_train import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=4)
    ranks = accelerator.num_processes
    named, other, scale = make_model(), make_model(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    parameters = [*named.parameters(), *other.parameters(), *([scale] if ranks == 1 else [])]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    loader = DataLoader(Tokens(6 * ranks), batch_size=1)
    named, other, optimizer, loader = accelerator.prepare(named, other, optimizer, loader)
    for _, x, y, _mask in loader:
        with accelerator.accumulate(named):
            loss = scale * (errors(named, x, y).sum() + 3 * errors(other, x, y).sum())
            if items:
                accelerator.backward(loss, num_items=x.shape[1])
            else:
                accelerator.backward(loss / x.shape[1])
            gradients = [[] if p.grad is None else p.grad.flatten().tolist() for p in parameters]
            optimizer.step()
            optimizer.zero_grad()
    return gradients


def one_named_reference(ranks: int) -> list[list[float]]:
    named, other, scale = make_model(), make_model(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    parameters = [*named.parameters(), *other.parameters(), *([scale] if ranks == 1 else [])]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    data = Tokens(6 * ranks)
    for rows in (slice(0, 4 * ranks), slice(4 * ranks, 6 * ranks)):
        optimizer.zero_grad()
        x, y = data.x[rows], data.y[rows]
        (scale * (errors(named, x, y) + 3 * errors(other, x, y)).mean()).backward()
        gradients = [p.grad.flatten().tolist() for p in parameters if p.grad is not None]
        optimizer.step()
    return gradients


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("items", [False, True])
def test_what_a_window_does_not_name_is_scaled_with_it(ranks: int, items: bool) -> None:
    expected = one_named_reference(ranks)
    for ours in worlds.run(one_named, ranks, items):
        for mine, reference in zip(ours, expected, strict=True):
            assert mine == pytest.approx(reference, rel=1e-10)


class Weighted(nn.Module):
    """A model and a weight of its loss."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.inner, self.weight = make_model(), weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) ** 2).mean() * self.weight.sum()


def loss_weights(strategy: str, inside: bool, averaged: bool) -> tuple[list[str], list[float]]:
    """Train a model and a weight of its loss, which a prepared module holds or not; warnings, and the weight."""
    import warnings

    from accel_train import Accelerator
    from accel_train.plugins import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin() if strategy == "fsdp2" else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64, device=accelerator.device))
    model = Weighted(weight) if inside else make_model()
    optimizer = torch.optim.SGD([*model.parameters(), *([] if inside else [weight])], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.full((2, DIM), 1.0 + accelerator.process_index, dtype=torch.float64, device=accelerator.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            accelerator.backward(model(x) if inside else (model(x) ** 2).mean() * weight.sum())
            if averaged:
                weight.grad = accelerator.reduce(weight.grad, "mean")
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if "prepared model" in str(w.message)], weight.tolist()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_parameters_of_no_prepared_model_are_named_once(strategy: str) -> None:
    (said, first), (nothing, second) = worlds.run(loss_weights, 2, strategy, False, False)
    assert len(said) == 1
    assert said[0].startswith(
        "SGD trains a parameter of no prepared model, the first of shape (3,) (group 0). "
    )
    assert f"{strategy} does not average" in said[0]
    assert "each of 2 ranks trains its own values" in said[0]
    assert nothing == []  # rank 0 speaks for all
    assert first != second  # what it warns of
    (_, first), (_, second) = worlds.run(loss_weights, 2, strategy, False, True)
    assert first == second


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_of_a_prepared_model_need_no_warning(size: int) -> None:
    said, weights = zip(*worlds.run(loss_weights, size, "ddp", size == 2, False), strict=True)
    assert said == ([],) * size
    assert weights[0] == weights[-1] != [1.0] * 3
