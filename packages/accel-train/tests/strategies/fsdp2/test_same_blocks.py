"""Blocks and parameters that some ranks leave out: trained as on one process, or an error that names them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


class Mixture(nn.Module):
    """Experts without tokens are not called."""

    def __init__(self, experts=4):
        super().__init__()
        self.router = nn.Linear(6, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(experts))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number : number + 1])
        return self.head(out)


def steps(seed, count=6, **options):
    """The largest error of weights after each step, against one process."""
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    torch.manual_seed(seed)
    model = Mixture().double()
    alone = copy.deepcopy(model)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1) for m in (alone, model)]
    model, optimizer = accelerator.prepare(model, optimizers[1])
    generator = torch.Generator().manual_seed(seed)
    worst = []
    for _ in range(count):
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        y = torch.randn(8, 2, generator=generator, dtype=torch.float64)
        optimizers[0].zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        optimizers[0].step()
        ranks, rank = accelerator.num_processes, accelerator.process_index
        loss = nn.functional.mse_loss(model(x.chunk(ranks)[rank]), y.chunk(ranks)[rank])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        whole = accelerator.get_state_dict(model)
        worst.append(max((whole[k] - v).abs().max().item() for k, v in alone.state_dict().items()))
    return worst


@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (4, {"dp_replicate_size": 2})])
def test_experts_inside_one_unit_train_as_on_one_process(ranks, options):
    for worst in worlds.run(steps, ranks, 0, auto_wrap_policy="NO_WRAP", **options):
        assert max(worst) < 1e-9


def mixture_of_units(seed):
    from accel_state.errors import CollectiveMismatchError

    try:
        return steps(seed)
    except CollectiveMismatchError as error:
        return str(error)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))])
def test_experts_that_are_units_are_an_error_on_all_ranks(seed):
    for message in worlds.run(mixture_of_units, 2, seed):
        assert "Ranks run different blocks in the forward of Mixture" in message
        assert "experts." in message
        assert "NO_WRAP" in message


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.left_out: set[int] = set()

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if number not in self.left_out:
                x = x + torch.tanh(block(x))
        return x


def prepared():
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    torch.manual_seed(0)
    model = Layers().double()
    alone = copy.deepcopy(model)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return accelerator, alone, *accelerator.prepare(model, optimizer)


def all_leave_out():
    accelerator, alone, model, optimizer = prepared()
    plain = torch.optim.AdamW(alone.parameters(), lr=0.05)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for left_out in ({}, {}, {1}, {}, {0, 2}, {2}, {1}, {1}, {}, {0}):
        for each in (alone, accelerator.unwrap_model(model)):
            each.left_out = set(left_out)
        plain.zero_grad()
        alone(x).square().mean().backward()
        plain.step()
        with torch.no_grad():
            model(x)
        accelerator.backward(model(x.chunk(2)[accelerator.process_index]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    whole = accelerator.get_state_dict(model)
    return max((whole[k] - v).abs().max().item() for k, v in alone.state_dict().items())


def test_blocks_that_all_ranks_leave_out_train_as_on_one_process():
    assert max(worlds.run(all_leave_out, 2)) < 1e-9


def one_leaves_out(rank, number, late):
    from accel_state.errors import CollectiveMismatchError

    accelerator, _, model, optimizer = prepared()
    x = torch.ones(2, 4, dtype=torch.float64)
    for step in range(4):
        if step == late and accelerator.process_index == rank:
            model.left_out = {number}
        try:
            accelerator.backward(model(x).square().mean())
        except CollectiveMismatchError as error:
            raise AssertionError(f"in step {step}: {error}") from error  # the world ends here
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("rank", "number", "late", "comes"),
    [
        pytest.param(0, 1, 2, "'blocks.2'", marks=pytest.mark.wide),
        (1, 1, 2, "'blocks.2'"),
        pytest.param(1, 2, 3, "the end of it", marks=pytest.mark.wide),
        pytest.param(1, 0, 2, "'blocks.1'", marks=pytest.mark.full),
    ],
)
def test_a_block_that_one_rank_leaves_out_later_is_an_error_before_it_is_mixed(rank, number, late, comes):
    with pytest.raises(worlds.RankError, match=f"in step {late}.*this rank comes to {comes}, and others"):
        worlds.run(one_leaves_out, 2, rank, number, late, timeout=30)


def one_evaluates(rank):
    accelerator, _, model, optimizer = prepared()
    x = torch.ones(2, 4, dtype=torch.float64)
    for step in range(4):
        if step == 2 and accelerator.process_index == rank:
            model.eval()
            model(x)
            model.train()
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.wide), 1])
def test_a_call_on_one_rank_alone_is_an_error(rank):
    with pytest.raises(
        worlds.RankError, match=r"after its beginning this rank comes to 'blocks.0', and others do not"
    ):
        worlds.run(one_evaluates, 2, rank, timeout=30)


class Branches(nn.Module):
    """Two blocks with a branch each that a call can leave out."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.branch = nn.Linear(4, 4)

        def forward(self, x, whole):
            h = self.body(x).tanh()
            return h + self.branch(h) if whole else h

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Branches.Block(), Branches.Block()])
        self.double()

    def forward(self, x, whole=True):
        for block in self.blocks:
            x = block(x, whole or block is self.blocks[1])
        return x


def contrasted(model, x, step):
    """Two forwards, one backward."""
    return (model(x[:2]) - model(x[2:])).square().mean()


def without_a_branch_later(model, x, step):
    """When ranks no longer compare which parameters have gradients."""
    return model(x, whole=not 10 <= step < 14).square().mean()


def trained_alike(loss_of, count, raw=False, **options):
    """The largest error of weights, against one process; `raw`: by a backward that is not the accelerator's."""
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"], **options)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = Branches()
    alone = copy.deepcopy(model)
    oracle, optimizer = (torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1) for m in (alone, model))
    model, optimizer = accelerator.prepare(model, optimizer)
    ranks = accelerator.num_processes
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        parts = torch.randn(4 * ranks, 4, generator=generator, dtype=torch.float64).chunk(ranks)
        sum(loss_of(alone, part, step) / ranks for part in parts).backward()
        loss = loss_of(model, parts[accelerator.process_index], step)
        loss.backward() if raw else accelerator.backward(loss)
        for each in (oracle, optimizer):
            each.step()
            each.zero_grad()
    whole = accelerator.get_state_dict(model)
    return max((whole[name] - value).abs().max().item() for name, value in alone.state_dict().items())


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {}), (2, {"raw": True}), pytest.param(4, {"dp_replicate_size": 2}, marks=pytest.mark.full)],
)
@pytest.mark.parametrize(("loss_of", "count"), [(contrasted, 3), (without_a_branch_later, 16)])
def test_blocks_that_run_twice_or_in_part_train_as_on_one_process(loss_of, count, ranks, options):
    assert max(worlds.run(trained_alike, ranks, loss_of, count, **options)) < 1e-12
