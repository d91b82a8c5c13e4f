"""The null object of the strategy axis: one process, and every verb does what plain PyTorch does."""

import copy

import pytest
import torch
from torch import nn

from accel_train.mesh import Mesh
from accel_train.precision.base import Precision, PrecisionOptions
from accel_train.ranks import Ranks
from accel_train.strategies.base import (
    DefersSync,
    DividesSteps,
    Parts,
    Strategy,
    StrategyOptions,
)
from accel_train.strategies.capabilities import Capabilities

CPU = torch.device("cpu")


def strategy_of(kind=Strategy, mesh=None, **options):
    mesh = mesh or Mesh.of_world(1, 0)
    return kind(StrategyOptions(CPU, mesh, Precision(PrecisionOptions()), **options))


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(seed=0):
    model = make(seed)
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(2))).square().sum().backward()
    return model


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


class Noting:
    """Steps that note what is done to which model."""

    def __init__(self):
        self.done = []

    def convert(self, model):
        self.done.append(("convert", model))
        return model

    def place(self, model):
        self.done.append(("place", model))
        return model

    def compile(self, model):
        self.done.append(("compile", model))
        return model


# Preparing


def test_it_can_be_combined_with_everything():
    assert Strategy.capabilities == Capabilities(
        precisions=None, device_types=None, needs_process_group=False, num_items=True, window="any",
        hides_gradients=False, saves_windows=True, max_models=None, prepares_together=False, requires=(),
        in_stages=True,
    )  # fmt: skip
    assert Strategy.name == "single"
    assert Strategy.distributed_type is None


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (4, 2)])
def test_all_ranks_read_different_samples_and_average_over_all(world, rank):
    strategy = strategy_of(mesh=Strategy.make_mesh(None, CPU, world, rank))
    assert strategy.batch == strategy.loss == Ranks.of_world(world, rank)


def test_models_are_converted_placed_and_compiled_in_this_order_and_nothing_else_changes():
    models, steps = [make(), make(1)], Noting()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedulers, loaders = [object()], [object(), object()]
    done = strategy_of().prepare(Parts(models, optimizers, schedulers, loaders), steps)
    kinds = (done.models, done.optimizers, done.schedulers, done.loaders)
    assert kinds == (models, optimizers, schedulers, loaders)
    expected = [(step, model) for model in models for step in ("convert", "place", "compile")]
    assert steps.done == expected


def test_a_model_is_its_own_wrapper():
    strategy, model = strategy_of(), make()
    assert strategy.unwrap(model) is model
    assert strategy.plain(model) is model
    assert strategy.plain(torch.compile(model, backend="eager")) is model
    assert not strategy.states.keeps_replicas(model)
    assert not strategy.is_outdated(model)
    model.added = nn.Linear(2, 2, device="meta")
    assert strategy.is_outdated(model), "a part of it is on another device"
    model.hf_device_map = {"": 0, "added": "cpu"}
    assert not strategy.is_outdated(model), "as the map says"
    assert not strategy.states.is_divided(model)
    assert not isinstance(strategy, DefersSync)
    assert not strategy.capabilities.separate_steps
    strategy.release()


def test_plain_goes_through_wrappers_in_any_order():
    class Wrapping(Strategy):
        def unwrap(self, model):
            return model.inner if hasattr(model, "inner") else model

    def wrap(module):
        outer = nn.Module()
        outer.inner = module
        return outer

    model, strategy = make(), strategy_of(Wrapping)
    assert strategy.plain(wrap(torch.compile(wrap(model), backend="eager"))) is model


# One micro-batch


def test_a_batch_stays_whole_and_micro_batches_change_nothing():
    strategy, model, batch = strategy_of(), trained(), {"x": [torch.ones(2)]}
    before = copy.deepcopy(gradients(model))
    strategy.begin_micro_batch([model], last=False, loss_factor=0.5)
    strategy.end_micro_batch([model], last=False)
    assert strategy.shard_batch(batch) is batch
    assert same(gradients(model), before)


def test_backward_is_torchs():
    strategy, model, plain = strategy_of(), make(), trained()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    loss = model(x).square().sum()
    strategy.backward([model], loss, pending=False, kwargs={"retain_graph": True})
    assert same(gradients(model), gradients(plain))
    strategy.backward([model], loss, pending=True, kwargs={})
    assert same(gradients(model), [gradient * 2 for gradient in gradients(plain)])


# Complete gradients


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_gradients_are_scaled_once_however_often_a_parameter_comes(factor):
    model, plain = trained(), trained()
    unused = nn.Parameter(torch.ones(1))
    addresses = [gradient.data_ptr() for gradient in gradients(model)]
    strategy_of().scale_gradients([*model.parameters(), unused, *model.parameters()], factor)
    assert same(gradients(model), [gradient * 0.5 for gradient in gradients(plain)])
    assert [gradient.data_ptr() for gradient in gradients(model)] == addresses
    assert unused.grad is None
    strategy_of().scale_gradients([], factor)


def test_sparse_gradients_are_scaled():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    strategy_of().scale_gradients(table.parameters(), 0.5)
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0, 1, 0, 0.5, 0]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_is_torchs(norm_type):
    strategy, model, plain = strategy_of(), trained(), trained()
    measured = strategy.gradient_norm(list(model.parameters()), norm_type)
    assert same(gradients(model), gradients(plain)), "measuring changes nothing"
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type=norm_type)
    assert torch.equal(measured, expected)
    assert torch.equal(strategy.clip_grad_norm_(list(model.parameters()), 0.1, norm_type), expected)
    assert same(gradients(model), gradients(plain))
    strategy.clip_grad_value_(list(model.parameters()), 0.01)
    nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    assert same(gradients(model), gradients(plain))


def test_clipping_without_gradients_does_nothing():
    strategy, model = strategy_of(), make()
    assert strategy.gradient_norm(list(model.parameters())).item() == 0
    assert strategy.clip_grad_norm_(list(model.parameters()), 1.0).item() == 0
    strategy.clip_grad_value_(list(model.parameters()), 1.0)
    assert gradients(model) == [None] * 6


def test_a_step_is_torchs():
    model, plain, strategy = trained(), trained(), strategy_of()
    optimizer, reference = (torch.optim.AdamW(item.parameters(), lr=0.1) for item in (model, plain))
    strategy.unscale_(optimizer)
    assert strategy.step(optimizer) == (True, None)
    reference.step()
    assert same(model.parameters(), plain.parameters())
    assert strategy.step(optimizer, lambda: 5.0) == (True, 5.0)
    strategy.zero_grad(optimizer, set_to_none=False)
    assert same(gradients(model), [torch.zeros_like(parameter) for parameter in model.parameters()])
    strategy.zero_grad(optimizer)
    assert gradients(model) == [None] * 6


def test_a_copied_optimizer_keeps_its_strategy():
    strategy = strategy_of()
    assert copy.deepcopy([strategy])[0] is strategy


def test_an_optimizer_that_divides_its_steps_is_told_who_takes_them():
    class Optimizer(DividesSteps, torch.optim.SGD):
        told = ()

        def divide_among(self, replicas):
            self.told = (*self.told, replicas)

    class Together(Strategy):
        def replicas_of(self, optimizer):
            return self.loss

    model = trained()
    optimizer = Optimizer(model.parameters(), lr=0.1)
    strategy_of().step(optimizer)
    together = strategy_of(Together)
    together.step(optimizer)
    assert optimizer.told == (None, together.loss)
