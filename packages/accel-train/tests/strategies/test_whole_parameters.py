"""Whole parameters of a divided model: calls without other ranks, and values that are written back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    model[4].bias.requires_grad_(False)
    return model


def prepared(kind):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, TorchTensorParallelPlugin

    model = build()
    if kind == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    elif kind in ("ddp", "single"):
        accelerator = Accelerator(cpu=True)
    else:
        options = {"dp_replicate_size": 2} if kind == "hsdp" else {}
        options |= {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20}
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return accelerator, *accelerator.prepare(model, optimizer)


def surgery(kind):
    accelerator, model, optimizer = prepared(kind)
    alone = build()
    plain = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], lr=0.05)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rank = accelerator.process_index

    def both():
        plain.zero_grad()
        alone(x).square().mean().backward()
        plain.step()
        accelerator.backward(model(x).square().mean())  # all ranks have the same samples
        optimizer.step()
        optimizer.zero_grad()

    both()
    model(x)  # leaves the outermost unit gathered
    parts = [id(parameter) for parameter in optimizer.optimizer.param_groups[0]["params"]]
    with accelerator.whole_parameters(model), torch.no_grad():
        names = dict(model.named_parameters())
        own = accelerator.unwrap_model(model)
        assert all(type(p) is nn.Parameter for p in own.parameters())
        assert [p.requires_grad for p in own.parameters()] == [p.requires_grad for p in alone.parameters()]
        for found, wanted in zip(own.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found.data, wanted.data, rtol=0, atol=1e-9)
        for _ in range(rank + 1):  # ranks call it differently often
            torch.testing.assert_close(own(x), alone(x), rtol=0, atol=1e-9)
        if kind not in ("single", "ddp"):
            next(iter(names.values())).fill_(7.0)  # is lost
    both()
    with accelerator.whole_parameters(model, write_back=True), torch.no_grad():
        own = accelerator.unwrap_model(model)
        if accelerator.is_main_process:
            own[0].weight.mul_(2)
            own[4].weight = nn.Parameter(own[4].weight * 3)
        elif rank:
            own[0].bias.fill_(5.0)  # of another rank: the main process's counts
    with torch.no_grad():
        alone[0].weight.mul_(2)
        alone[4].weight.mul_(3)
    both()
    assert [id(p) for p in optimizer.optimizer.param_groups[0]["params"]] == parts
    whole = accelerator.get_state_dict(model)
    return max((whole[k] - v).abs().max().item() for k, v in alone.state_dict().items())


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp2", 2), ("hsdp", 4), ("tp", 2), ("ddp", 2), ("single", 1)])
def test_parameters_are_whole_inside_and_rank_0s_changes_are_kept(kind, ranks):
    assert max(worlds.run(surgery, ranks, kind)) < 1e-9


def fails():
    from accel_train.errors import PrepareError

    accelerator, model, _ = prepared("fsdp2")
    before = copy.deepcopy(accelerator.get_state_dict(model))

    def change(then):
        with accelerator.whole_parameters(model, write_back=True):
            accelerator.unwrap_model(model)[0].bias.data.fill_(1.0)
            then(accelerator.unwrap_model(model)[0])

    def replace(layer):
        if accelerator.is_main_process:
            layer.weight = nn.Parameter(torch.zeros(2, 2))

    with pytest.raises(PrepareError, match="weight"):
        change(replace)
    with pytest.raises(KeyError):
        change(lambda layer: {}["absent"])
    after = accelerator.get_state_dict(model)
    model(torch.ones(2, 4, dtype=torch.float64))
    return all(after[name].equal(value) for name, value in before.items())


def test_after_an_error_nothing_is_written_and_the_model_is_divided_again():
    assert all(worlds.run(fails, 2))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x, position_ids=None):
        heads = self.inputs(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.outputs(found.transpose(1, 2).flatten(2))


def attending():
    torch.manual_seed(0)
    return Attending().double()


def whole_sequences(degrees, sharded):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = FullyShardedDataParallelPlugin() if sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**degrees))
    model = accelerator.prepare(attending())
    rank = accelerator.process_index
    x = torch.randn(2, 5 + rank, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with accelerator.whole_parameters(model), torch.no_grad():
        for _ in range(rank + 1):  # ranks call it differently often
            inside = model(x), accelerator.unwrap_model(model)(x)
    half = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).chunk(2, 1)[
        rank
    ]
    with torch.no_grad():
        return x, inside, model(half)


@pytest.mark.parametrize(
    ("degrees", "sharded"), [({"cp_size": 2, "dp_shard_size": 1}, True), ({"sp_size": 2}, False)], ids=str
)
def test_attention_inside_is_to_the_whole_input_of_a_rank(degrees, sharded):
    alone = attending()
    results = worlds.run(whole_sequences, 2, degrees, sharded)
    for x, inside, _ in results:
        for found in inside:
            torch.testing.assert_close(found, alone(x).detach(), rtol=0, atol=1e-12)
    both = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    if not sharded:  # outside it is divided again; cp's parts are balanced pieces, not halves
        joined = torch.cat([after for *_, after in results], 1)
        torch.testing.assert_close(joined, alone(both).detach(), rtol=0, atol=1e-12)
