"""Divided experts against the same written by hand: an all-to-all, local experts, and FSDP2 for all else.

A toy mixture of experts trains on CPU ranks of one thread each, ours and the raw one in turn, round after round; losses
are checked to be equal. Experts are stacked, and in a list, which the script's loop calls.

    hatch run bench:experts
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import flags, median_ratio, same_training, table
from torch import Tensor, nn
from torch.nn.functional import gelu

from testkit import worlds
from testkit.experts import Stacked, experts_of, one_expert, routed

WIDTH, LAYERS, EXPERTS, ROUTES, STEPS = 128, 4, 8, 2, 4
TOKENS, HIDDEN = 2048, 1024  # of a rank; of an expert
SMALL = (512, 256)  # what a step costs besides computing
WARM = 10  # steps before: ranks compare what they run in the first eight backward passes


class Block(nn.Module):
    """A dense layer, a router and experts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = experts_of(kind, EXPERTS, WIDTH, HIDDEN, gelu)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.dense(x))
        weights, indices = self.router(x).softmax(-1).topk(ROUTES)
        out: Tensor = x + routed(self.experts, x, indices, weights)
        return out


def model_of(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind) for _ in range(LAYERS)))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (dist.get_world_size() * TOKENS, WIDTH)
    x, y = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    rank = dist.get_rank()
    return x.split(TOKENS)[rank], y.split(TOKENS)[rank]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.sizes = sent, received
        out = rows.new_empty((sum(received), WIDTH))
        dist.all_to_all_single(out, rows, received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        out = gradients[0].new_empty((sum(ctx.sizes[0]), WIDTH))
        dist.all_to_all_single(out, gradients[0].contiguous(), *ctx.sizes)
        return out, None, None


class ByHand(nn.Module):
    """This rank's experts, to which all ranks send their tokens."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.here = EXPERTS // ranks
        own = slice(rank * self.here, (rank + 1) * self.here)
        if isinstance(whole, Stacked):
            up, down = whole.up, whole.down
        else:
            up, down = (
                torch.stack([getattr(each, name).weight for each in whole]) for name in ("up", "down")
            )
        self.up = nn.Parameter(up.detach()[own].clone())
        self.down = nn.Parameter(down.detach()[own].clone())
        for parameter in (self.up, self.down):  # other ranks have gradients of the mean over their own tokens
            parameter.register_hook(lambda gradient: gradient / ranks)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        number = indices.flatten()
        order = number.argsort(stable=True)
        counts = number.bincount(minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        by_rank = theirs.view(-1, self.here)
        sent, received = counts.view(-1, self.here).sum(1).tolist(), by_rank.sum(1).tolist()
        rows = _AllToAll.apply(x[order // ROUTES], received, sent)
        which = torch.arange(self.here).repeat(by_rank.shape[0]).repeat_interleave(theirs)
        out = torch.zeros_like(rows)
        for expert in range(self.here):
            (token,) = torch.where(which == expert)
            out.index_add_(0, token, one_expert(rows[token], self.up[expert], self.down[expert], gelu))
        back = _AllToAll.apply(out, sent, received)
        placed = torch.empty_like(back).index_copy(0, order, back)
        return (placed.view(-1, ROUTES, WIDTH) * weights[..., None]).sum(1)


class RawBlock(Block):
    """The block with experts by hand."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.dense(x))
        weights, indices = self.router(x).softmax(-1).topk(ROUTES)
        out: Tensor = x + self.experts(x, indices, weights)
        return out


def by_hand(kind: str) -> Callable[[], float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of(kind)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        block.__class__ = RawBlock
        block.experts = ByHand(block.experts)
    own = {parameter for block in model for parameter in block.experts.parameters()}
    for block in model:
        fully_shard(block, mesh=mesh, ignored_params=own)
    fully_shard(model, mesh=mesh, ignored_params=own)
    optimizers = [
        torch.optim.AdamW(own, lr=1e-3),
        torch.optim.AdamW([p for p in model.parameters() if p not in own], lr=1e-3),
    ]
    x, y = batch()

    def step() -> float:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return step


def by_ours(kind: str) -> Callable[[], float]:
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"]),
        parallelism_config=ParallelismConfig(ep_size=dist.get_world_size()),
    )
    model = model_of(kind)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    x, y = batch()

    def step() -> float:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def measure(kind: str, rounds: int, sizes: tuple[int, int]) -> dict[str, list[float]]:
    """Seconds of a step, round after round."""
    from accel_state import PartialState

    global TOKENS, HIDDEN
    TOKENS, HIDDEN = sizes

    PartialState(cpu=True)
    runs = {"torch": by_hand(kind), "ours": by_ours(kind)}
    return same_training(runs, rounds=rounds, steps=STEPS, warm=WARM, rtol=1e-4, atol=1e-5)


def main() -> None:
    given = flags(__doc__, rounds=9, kinds=["stacked", "list"])
    rows = []
    for kind, sizes in itertools.product(given.kinds, [(TOKENS, HIDDEN), SMALL]):
        found = worlds.run(measure, 2, kind, given.rounds, sizes, timeout=600)[0]
        ms = [f"{1e3 * statistics.median(found[name]):.1f}" for name in ("torch", "ours")]
        rows.append([kind, *sizes, *ms, f"{median_ratio(found['ours'], found['torch']):.3f}"])
    table(["experts", "tokens", "inner width", "by hand, ms", "ours, ms", "ratio"], rows)


if __name__ == "__main__":
    main()
