"""Data parallelism with DistributedDataParallel; more of it is in ``tests-integration/test_ddp.py``."""

import pytest
import torch
from torch import nn

from accel_train import Accelerator, DistributedDataParallelKwargs, PrepareError
from accel_train.mesh import Mesh
from accel_train.precision.base import Precision, PrecisionOptions
from accel_train.strategies.base import DefersSync, StrategyOptions
from accel_train.strategies.ddp import DDPStrategy, inside_parallel
from testkit import worlds

CPU = torch.device("cpu")
HINT = r"DistributedDataParallelKwargs\(find_unused_parameters=True\)"


def strategy_of(**options):
    """A strategy of rank 0 of 2 that has no process group."""
    config = DistributedDataParallelKwargs()
    precision = Precision(PrecisionOptions())
    return DDPStrategy(StrategyOptions(CPU, Mesh.of_world(2, 0), precision, config, **options))


class Asis:
    """Steps that do nothing."""

    def convert(self, model):
        return model

    place = compile = convert


class Branches(nn.Module):
    """Of two branches only one takes part; of a third nothing is trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(3, 1, bias=False)
        self.unused = nn.Linear(3, 1)
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.double()

    def forward(self, x):
        return self.used(self.frozen(x))


def inputs(size=4):
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# Without a world


def test_what_it_can_do():
    strategy = strategy_of()
    assert isinstance(strategy, DefersSync)
    assert strategy.capabilities.separate_steps
    assert DDPStrategy.capabilities.needs_process_group
    assert (strategy.batch.size, strategy.loss.size) == (2, 2)


def test_parameters_without_storage_are_refused_before_ranks_talk():
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(PrepareError, match=r"'weight' \(of 2\) has no storage.*Load the weights before"):
        strategy_of().prepare_model(model, Asis())


def test_only_what_supports_join_is_joined():
    with pytest.raises(
        PrepareError, match=r"support torch's Join; got Linear\. Pass the objects that prepare"
    ):
        strategy_of().uneven.join([nn.Linear(2, 2)]).__enter__()


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.DataParallel(nn.DataParallel(model))])
def test_one_wrapper_is_taken_off(wrap):
    model = nn.Linear(2, 2)
    wrapped = wrap(model)
    assert inside_parallel(wrapped) is wrapped.module
    assert inside_parallel(model) is model
    assert strategy_of().plain(wrapped) is model


def test_a_model_without_a_wrapper_is_left_alone():
    strategy, model = strategy_of(), nn.Linear(2, 2)
    assert not strategy.states.keeps_replicas(model)
    assert strategy.states.rank_state(model) == {}
    strategy.states.load_rank_state(model, {"takes_buffers": False})
    strategy.begin_micro_batch([model], last=False, loss_factor=1.0)
    with strategy.no_sync(model), strategy.trigger_sync_in_backward(model):
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


def test_a_frozen_model_stays_itself_and_is_guarded():
    strategy, model = strategy_of(), Branches().requires_grad_(False)
    assert strategy.prepare_model(model, Asis()) is model
    model(inputs())
    assert not strategy.is_outdated(model)
    model.used.requires_grad_(True)
    assert strategy.is_outdated(model)
    with torch.no_grad():
        model(inputs())
    with pytest.raises(PrepareError, match=r"'used\.weight' was frozen.*accelerator\.prepare\(model\)"):
        model(inputs())
    model.requires_grad_(False)
    assert strategy.prepare_model(model, Asis()) is model
    assert len(model._forward_pre_hooks) == 1, "guards of before are taken off"


def test_a_model_without_parameters_needs_no_guard():
    model = nn.ReLU()
    assert strategy_of().prepare_model(model, Asis()) is model
    assert not model._forward_pre_hooks


# Unused parameters


def unused(**options):
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    model = Branches()
    trained = [item for item in model.parameters() if item.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.5))
    optimizer.step()  # before any backward there is nothing to say
    for rows in inputs(8).split(4):
        rows = rows[2 * accelerator.process_index :][:2]
        optimizer.zero_grad()
        accelerator.backward(model(rows).mean())
        optimizer.step()
    return accelerator.get_state_dict(model)


def test_unused_parameters_are_named_with_what_helps():
    message = rf"PrepareError: 2 of 3 parameters of Branches .*: unused\.weight, unused\.bias\. .*{HINT}"
    with pytest.raises(worlds.RankError, match=message):
        worlds.run(unused, 2)


def test_with_the_option_that_helps_they_stay_as_they_are_and_the_rest_trains():
    model = Branches()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.used.parameters(), lr=0.5)
    for rows in inputs(8).split(4):
        optimizer.zero_grad()
        model(rows).mean().backward()
        optimizer.step()
    for state in worlds.run(unused, 2, find_unused_parameters=True):
        torch.testing.assert_close(state["used.weight"], model.used.weight.detach(), rtol=1e-12, atol=0)
        assert torch.equal(state["unused.weight"], before["unused.weight"])


# Windows


class Counting(nn.Module):
    """A buffer that every rank changes in its own way."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += x
        return (self.weight * x).sum()


def windows(sync_each_batch):
    from accel_train import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    strategy, model = accelerator.strategy, accelerator.prepare(Counting())
    x = torch.full((1,), 1.0 + accelerator.process_index)  # 1 and 2
    found = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(x))
        found.append(
            (model.module.count.item(), model.module.weight.grad.item(), strategy.states.rank_state(model))
        )
        if accelerator.sync_gradients:
            model.zero_grad()
    return found, model.require_backward_grad_sync


def test_a_window_reduces_at_its_end_and_its_state_says_whether_buffers_are_taken():
    """Gradients are x / 2 of each micro-batch; ranks have 1 and 2, so 0.5 and 1.0, and 1.5 on average at the end."""
    (first, reset), (second, _) = worlds.run(windows, 2, False)
    assert reset
    assert [gradient for _, gradient, _ in first] == [0.5, 1.5, 0.5, 1.5]
    assert [gradient for _, gradient, _ in second] == [1.0, 1.5, 1.0, 1.5]
    assert [state for *_, state in first] == [state for *_, state in second]
    # Rank 0's buffer is taken at the first forward of a window (a no-op at first), and stays its own inside.
    taken = [state["takes_buffers"] for *_, state in second]
    for (before, *_), (after, *_), (other, *_), takes in zip(second, second[1:], first, taken, strict=False):
        assert after == (other if takes else before) + 2


def test_reducing_each_micro_batch_gives_the_same_gradients():
    for rank, (found, _) in enumerate(worlds.run(windows, 2, True)):
        assert [gradient for _, gradient, _ in found] == [0.75, 1.5, 0.75, 1.5], rank


def restored():
    accelerator = Accelerator()
    strategy, model = accelerator.strategy, accelerator.prepare(Counting())
    x = torch.full((1,), 1.0 + accelerator.process_index)
    found = []
    for takes in (False, True):
        model(x).backward()
        strategy.states.load_rank_state(model, {"takes_buffers": takes})
        assert strategy.states.rank_state(model) == {"takes_buffers": takes}
        before = model.module.count.item()
        model(x).backward()
        found.append(model.module.count.item() - before)
    strategy.states.load_rank_state(model, {})
    return found, strategy.states.rank_state(model)


def test_a_rank_state_that_is_loaded_decides_the_next_forward():
    (first, state), (second, _) = worlds.run(restored, 2)
    assert first == [1.0, 1.0]
    assert second[0] == 2.0, "its own buffer"
    assert second[1] != 2.0, "rank 0's"
    assert state == {"takes_buffers": True}


def wrapped():
    accelerator = Accelerator()
    strategy = accelerator.strategy
    model = Branches()
    prepared = accelerator.prepare(model)
    guarded = len(prepared._forward_pre_hooks)
    model.frozen.requires_grad_(True)
    outdated = strategy.is_outdated(prepared)
    again = accelerator.prepare(prepared)
    return (
        strategy.unwrap(prepared) is model,
        strategy.states.keeps_replicas(prepared),
        guarded,
        outdated,
        again is prepared,
        strategy.plain(again) is model,
        strategy.is_outdated(again),
        len(again._forward_pre_hooks),
        list(strategy.states.model_state(again)) == list(model.state_dict()),
    )


def test_a_partly_frozen_model_is_wrapped_again_when_it_is_unfrozen():
    expected = (True, True, 1, True, False, True, False, 0, True)
    assert worlds.run(wrapped, 2) == [expected] * 2
