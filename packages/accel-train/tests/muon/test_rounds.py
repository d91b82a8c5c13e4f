"""Muon in worlds of several ranks, against one process with all samples."""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


class Experts(nn.Module):
    """Every token visits every expert, weighed by a router."""

    def __init__(self, count, width, inner):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, inner) / inner**0.5)

    def forward(self, x, weights):
        hidden = torch.tanh(torch.einsum("bw,eiw->bei", x, self.up))
        return torch.einsum("bei,ewi,be->bw", hidden, self.down, weights)


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.router = nn.Linear(width, 3, bias=False)
        self.experts = Experts(3, width, inner)

    def forward(self, x):
        normed = self.norm(x)
        x = x + self.down(torch.tanh(self.up(normed)))
        return x + self.experts(x, torch.softmax(self.router(x), -1))


class Model(nn.Module):
    def __init__(self, width=6, inner=10):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(2))
        self.unused = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, 12)

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.lm_head(hidden)


def build():
    torch.manual_seed(0)
    model = Model().double()
    model.unused.requires_grad_(False)
    return model


def batches(count, first=0):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 12, (first + count, 8), generator=generator)[first:]


def optimizer_of(model, **options):
    from accel_train import muon_with_adamw

    options = {"lr": 0.02, "weight_decay": 0.1, "adamw_lr": 3e-3, "bucket_bytes": 300, **options}
    return muon_with_adamw(model, **options)


def train(accelerator, model, optimizer, chosen):
    ranks = accelerator.strategy.batch
    for batch in chosen:
        x = batch.chunk(ranks.size)[ranks.index]
        with accelerator.accumulate(model):
            logits = model(x)
            accelerator.backward(nn.functional.cross_entropy(logits, (x + 1) % 12))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def prepared(kind, **options):
    from accel_train import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        PipelineParallelConfig,
    )

    model = build()
    arguments = {}
    if "pp" in kind:
        del model.unused  # stages call all modules that they hold
        stages = PipelineParallelConfig(modules=["embed", "blocks", "lm_head"])
        shards = {"dp_shard_size": 2} if "fsdp2" in kind else {}
        arguments["parallelism_config"] = ParallelismConfig(pp_size=2, pp_handler=stages, **shards)
    elif "fsdp2" in kind or kind == "hsdp":
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            transformer_cls_names_to_wrap=["Block"], **({"dp_replicate_size": 2} if kind == "hsdp" else {})
        )
    if "tp" in kind:
        degrees = (
            {"dp_shard_size": 2} if "fsdp2" in kind else {"dp_replicate_size": 2} if "ddp" in kind else {}
        )
        arguments["parallelism_config"] = ParallelismConfig(tp_size=2, **degrees)
    accelerator = Accelerator(cpu=True, **arguments)
    if "tp" in kind:
        divide(model, accelerator.torch_device_mesh["tp"])
    optimizer = optimizer_of(model, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def divide(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def trained(kind, **options):
    accelerator, model, optimizer = prepared(kind, **options)
    train(accelerator, model, optimizer, batches(4))
    return accelerator.get_state_dict(model)


KINDS = [
    ("ddp", 2),
    ("fsdp2", 2),
    ("tp", 2),
    ("pp", 2),
    pytest.param("fsdp2 in pp", 4, marks=pytest.mark.full),
    pytest.param("hsdp", 4, marks=pytest.mark.full),
    pytest.param("fsdp2 x tp", 4, marks=pytest.mark.full),
    pytest.param("ddp x tp", 4, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kind", "ranks"), KINDS)
def test_training_is_that_of_one_process(kind, ranks):
    [right] = worlds.run(trained, 1, "single")
    before = build().state_dict()
    for found in worlds.run(trained, ranks, kind):
        assert {name for name in right if not name.startswith("unused")} <= found.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, right[name], rtol=0, atol=1e-7)
            assert name.startswith("unused") or not value.equal(before[name])


@contextlib.contextmanager
def counted():
    """The matrices that this rank orthogonalises, and the messages that it exchanges."""
    from accel_train.muon import rounds

    seen = {"shapes": [], "all_to_all": 0, "all_gather": 0}

    def orthogonalize(matrices, *args, inner=rounds.orthogonalize):
        seen["shapes"].append(tuple(matrices.shape))
        return inner(matrices, *args)

    def passing(name, inner):
        def send(*args, **kwargs):
            seen[name] += 1
            return inner(*args, **kwargs)

        return send

    with (
        mock.patch.object(rounds, "orthogonalize", orthogonalize),
        mock.patch.object(dist, "all_to_all_single", passing("all_to_all", dist.all_to_all_single)),
        mock.patch.object(dist, "all_gather", passing("all_gather", dist.all_gather)),
    ):
        yield seen


def one_step(kind, **options):
    accelerator, model, optimizer = prepared(kind, **options)
    with counted() as seen:
        train(accelerator, model, optimizer, batches(1))
    return seen, accelerator.get_state_dict(model)


def matrices(seen):
    """Shapes of single matrices, those of stacks apart."""
    return sorted(
        itertools.chain.from_iterable(
            [shape[1:]] * shape[0] if len(shape) == 3 else [shape] for shape in seen["shapes"]
        )
    )


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_each_matrix_is_computed_once_in_the_group(kind):
    [(alone, _)] = worlds.run(one_step, 1, "single")
    found = worlds.run(one_step, 2, kind)
    assert sorted(matrices(found[0][0]) + matrices(found[1][0])) == matrices(alone)
    assert all(seen["shapes"] for seen, _ in found)
    assert alone["all_to_all"] == alone["all_gather"] == 0
    assert all(seen["all_gather" if kind == "ddp" else "all_to_all"] for seen, _ in found)


def test_ranks_that_do_not_divide_the_work_send_nothing_and_step_alike():
    [(alone, right)] = worlds.run(one_step, 1, "single")
    for seen, found in worlds.run(one_step, 2, "ddp", divide_work=False):
        assert matrices(seen) == matrices(alone)
        assert seen["all_gather"] == 0
        for name, value in right.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7)


def divided_experts():
    """Stacks divided by expert, by rows, and by columns; unevenly."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from accel_state.world.process import PartialState
    from accel_train import MuonWithAdamW

    PartialState()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    generator = torch.Generator().manual_seed(0)
    values, gradients = torch.randn(2, 5, 7, 3, generator=generator, dtype=torch.float64)
    whole = nn.Parameter(values.clone())
    whole.grad = gradients
    MuonWithAdamW([whole], lr=0.1).step()
    counts = {}
    for dim in range(3):
        parameter = nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(dim)]))
        parameter.grad = distribute_tensor(gradients, mesh, [Shard(dim)])
        optimizer = MuonWithAdamW([parameter], lr=0.1)
        with counted() as seen:
            optimizer.step()
        counts[dim] = len(matrices(seen)), seen["all_to_all"]
        torch.testing.assert_close(parameter.full_tensor(), whole.detach(), rtol=0, atol=2e-3)
        assert optimizer.state[parameter]["momentum_buffer"].placements == parameter.placements
    return counts


def test_experts_of_a_rank_are_computed_there_without_a_message():
    first, second = worlds.run(divided_experts, 2)
    assert first[0] == (3, 0)
    assert second[0] == (2, 0)
    for dim in (1, 2):
        assert first[dim][0] + second[dim][0] == 5
        assert first[dim][1] > 0


def with_a_group():
    from accel_state.world.process import PartialState
    from accel_train import MuonWithAdamW

    rank = PartialState().process_index
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(4, 6) for _ in range(4))
    for parameter in model:
        parameter.grad = torch.randn(4, 6)
    model[1].grad = None
    optimizer = MuonWithAdamW(model, lr=0.1, group=dist.group.WORLD)
    with counted() as seen:
        optimizer.step()
    return rank, matrices(seen), [parameter.detach() for parameter in model]


def test_a_script_names_the_group_of_its_copies():
    [alone] = worlds.run(with_no_group, 1)
    found = worlds.run(with_a_group, 2)
    assert [len(computed) for _, computed, _ in found] in ([1, 2], [2, 1])
    for _, _, values in found:
        assert all(a.equal(b) for a, b in zip(values, alone, strict=True))


def with_no_group():
    from accel_train import MuonWithAdamW

    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(4, 6) for _ in range(4))
    for parameter in model:
        parameter.grad = torch.randn(4, 6)
    model[1].grad = None
    MuonWithAdamW(model, lr=0.1).step()
    return [parameter.detach() for parameter in model]


def alone_for_a_while():
    """Local SGD, where ranks step with gradients of their own, and a module that one rank alone trains."""
    from accel_train import Accelerator, LocalSGD, MuonWithAdamW

    accelerator = Accelerator(cpu=True)
    model = build()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    strategy = accelerator.strategy
    before = strategy.replicas_of(optimizer.optimizer)
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local, counted() as seen:
        for batch in batches(2):
            x = batch.chunk(2)[accelerator.process_index]
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    if accelerator.is_main_process:
        own = nn.Linear(3, 3)
        other = accelerator.prepare(MuonWithAdamW([own.weight]))
        own.weight.grad = torch.ones(3, 3)
        assert strategy.replicas_of(other.optimizer) is None
        other.optimizer.step()
    return before.size, seen["all_gather"]


def test_ranks_that_step_alone_compute_alone():
    assert worlds.run(alone_for_a_while, 2) == [(2, 0)] * 2
