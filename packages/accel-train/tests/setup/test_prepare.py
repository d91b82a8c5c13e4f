"""Preparing: what comes back, in one call and in several, and what a strategy is handed and can refuse."""

import copy
import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, GradScalerKwargs, PrepareError
from accel_train.data import PreparedLoader
from accel_train.loop.scheduler import AcceleratedScheduler
from accel_train.optimizer_parameters import parameters_of
from accel_train.strategies.base import Parts, Strategy
from accel_train.strategies.capabilities import Capabilities
from testkit import worlds
from testkit.samples import inputs, make


def test_what_another_accelerator_prepared_follows_the_one_that_prepared_it_last():
    """As in a notebook whose first cell is run again."""
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    loader = DataLoader(TensorDataset(inputs()), batch_size=1)
    first = Accelerator()
    model, optimizer, loader, scheduler = first.prepare(model, optimizer, loader, scheduler)
    second = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = second.prepare(model, optimizer, loader, scheduler)
    updates = 0
    before = model.weight.detach().clone()
    for (x,) in loader:
        with second.accumulate(model):
            second.backward(model(x).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        updates += not torch.equal(before, model.weight)
        before = model.weight.detach().clone()
    assert updates == 3
    assert scheduler.last_epoch == 3


def test_the_precision_of_the_last_accelerator_holds():
    model, optimizer = make(torch.float32)
    model, optimizer = Accelerator().prepare(model, optimizer)
    x = inputs().float()
    expected = model.weight.detach() - 0.1 * x.mean(dim=0)

    half = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=128.0)])
    model, optimizer = half.prepare(model, optimizer)
    half.backward(model(x).mean())
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-2, atol=1e-3)

    low = Accelerator(mixed_precision="bf16").prepare(model)
    assert low.forward.dtype is torch.bfloat16
    plain = Accelerator().prepare(model)
    assert not hasattr(plain.forward, "dtype")


def test_an_unwrapped_model_is_known():
    accelerator = Accelerator(dynamo_backend="eager")
    model, _ = make()
    prepared = accelerator.prepare(model)
    assert accelerator.prepare(model) is prepared
    assert accelerator.prepare(prepared) is prepared
    assert len(accelerator._models) == 1


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


def test_everything_prepared_is_marked():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = Accelerator().prepare(model, optimizer, DataLoader(torch.arange(4)), scheduler)
    # accelerate 1.15 puts the same mark on all four
    assert all(item._is_accelerate_prepared for item in prepared)


def test_other_objects_come_back_unchanged_and_prepared_ones_as_they_are():
    accelerator = Accelerator()
    things = [None, [1, 2], {"a": make_net()}, "text"]
    assert all(a is b for a, b in zip(accelerator.prepare(*things), things, strict=True))
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    prepared = accelerator.prepare(model, optimizer, scheduler, loader)
    again = accelerator.prepare(*prepared)
    assert all(a is b for a, b in zip(prepared, again, strict=True))
    assert all(item._is_accelerate_prepared for item in prepared[:3])
    assert len(accelerator._models) == len(accelerator._optimizers) == len(accelerator._dataloaders) == 1
    assert isinstance(prepared[1], torch.optim.Optimizer)
    assert isinstance(prepared[2], torch.optim.lr_scheduler.LRScheduler)
    assert isinstance(prepared[3], DataLoader)


def test_device_placement_needs_one_entry_per_object():
    with pytest.raises(ValueError, match="1 entries for 2 objects"):
        Accelerator().prepare(make_net(), make_net(), device_placement=[True])


def test_an_optimizer_with_state_is_prepared_with_its_state_on_the_device():
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].device == parameter.device
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]


def test_even_batches_are_overridden_for_every_kind_of_map_style_loader():
    from accel_train.data import prepare_data_loader, skip_first_batches
    from accel_train.setup.prepare import overridden_even_batches

    def shared(loader):
        return prepare_data_loader(loader, num_processes=2, process_index=1)

    single = shared(DataLoader([torch.tensor([i]) for i in range(5)], batch_size=None))
    skipping = skip_first_batches(shared(DataLoader(range(5), batch_size=1)), 2)
    with overridden_even_batches([single, skipping], False):
        assert [len(list(loader)) for loader in (single, skipping)] == [2, 0]
    assert [len(list(loader)) for loader in (single, skipping)] == [3, 1]


# What comes back


def test_results_come_in_the_order_of_the_objects():
    first, second = make_net(), make_net(1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    loader, note = DataLoader(TensorDataset(torch.arange(4))), object()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[1], 1)
    objects = {"a": first, "b": second, "x": optimizers[0], "y": optimizers[1], "s": scheduler, "l": loader}
    for order in itertools.islice(itertools.permutations(objects), 0, None, 97):
        accelerator = Accelerator()
        *prepared, last = accelerator.prepare(*(objects[name] for name in order), note)
        found = dict(zip(order, prepared, strict=True))
        assert last is note
        assert (found["a"], found["b"]) == (first, second)
        assert [found[name].optimizer for name in "xy"] == optimizers
        assert found["s"].scheduler is scheduler
        assert found["s"].optimizers == [found["y"]]
        assert found["l"].dataset is loader.dataset


def test_one_object_comes_back_alone_and_none_as_none():
    accelerator = Accelerator()
    model = make_net()
    assert accelerator.prepare(model) is model
    assert accelerator.prepare() == ()


class Box(nn.Module):
    """The wrapper of `Boxing`."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.outdated = False

    def forward(self, *args):
        return self.module(*args)


def copied(parts):
    kinds = (parts.models, parts.optimizers, parts.schedulers, parts.loaders)
    return Parts(*map(list, kinds), parts.schedule_steps)


class Boxing(Strategy):
    """Wraps models, and notes what it is handed."""

    name = "boxing"

    def __init__(self, options):
        super().__init__(options)
        self.handed = []

    def prepare(self, parts, steps):
        self.handed.append(copied(parts))
        return super().prepare(parts, steps)

    def prepare_model(self, model, steps):
        return Box(steps.place(steps.convert(model)))

    def unwrap(self, model):
        return model.module if isinstance(model, Box) else model

    def is_outdated(self, model):
        return model.outdated


@pytest.fixture
def boxing(register):
    register(Boxing)
    return Accelerator(strategy="boxing")


def test_the_same_model_twice_in_a_call_is_prepared_once(boxing):
    model = make_net()
    first, other, second = boxing.prepare(model, make_net(1), model)
    assert first is second
    assert isinstance(first, Box)
    assert first.module is model
    assert other is not first
    assert len(boxing._models) == 2
    assert len(boxing.strategy.handed[0].models) == 2


def test_a_known_model_comes_back_as_it_was_prepared(boxing):
    model = make_net()
    prepared = boxing.prepare(model)
    assert boxing.prepare(model) is prepared
    assert boxing.prepare(prepared) is prepared
    assert boxing.prepare(make_net(1), model)[1] is prepared
    assert boxing.prepare_model(model) is prepared
    assert boxing.prepare_model(model, evaluation_mode=True) is prepared
    assert boxing._models.count(model) == 1


def test_an_outdated_model_is_prepared_again_and_its_windows_are_forgotten(boxing):
    model = make_net()
    prepared = boxing.prepare(model)
    boxing.gradient_accumulation_steps = 3
    with boxing.accumulate(prepared):
        boxing.backward(prepared(torch.randn(2, 4)).sum())
    assert len(boxing._accumulator.unfinished()) == 1
    prepared.outdated = True
    again = boxing.prepare(prepared)
    assert again is not prepared
    assert again.module is model
    assert boxing._models == [model]
    assert boxing.prepare(model) is again
    assert boxing._accumulator.unfinished() == []


def test_a_strategy_is_handed_models_and_optimizers_without_our_wrappers_and_prepared_loaders(boxing):
    model, optimizer = make()
    optimizer = Accelerator().prepare(optimizer)  # another accelerator's
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.arange(4)))
    prepared = boxing.prepare(loader, scheduler, optimizer, model)
    [parts] = boxing.strategy.handed
    assert parts.models == [model]
    assert parts.optimizers == [optimizer.optimizer]
    assert parts.schedulers == [scheduler]
    assert parts.loaders == [prepared[0]]
    assert isinstance(prepared[0], PreparedLoader)
    boxing.prepare(*prepared)
    boxing.prepare(DataLoader(TensorDataset(torch.arange(4))))
    assert len(boxing.strategy.handed) == 1, "nothing was new to the strategy"


class Copying(Strategy):
    """Puts new parameters into models, and gives optimizers of its own."""

    name = "copying"

    def prepare(self, parts, steps):
        done = super().prepare(parts, steps)
        return Parts(
            done.models, [Own(optimizer) for optimizer in done.optimizers], done.schedulers, done.loaders
        )

    def prepare_model(self, model, steps):
        for module in model.modules():
            for key, parameter in module._parameters.items():
                module._parameters[key] = nn.Parameter(parameter.detach().clone())
        return model


class Own(torch.optim.SGD):
    """Takes another optimizer's place."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, lr=0.1)


@pytest.mark.parametrize("calls", [["both"], ["model", "optimizer"], ["optimizer", "model"]])
def test_an_optimizer_trains_the_parameters_that_preparation_put_into_the_model(register, calls):
    register(Copying)
    accelerator = Accelerator(strategy="copying")
    model, optimizer = make()
    before = model.weight.detach().clone()
    for call in calls:
        if call == "both":
            optimizer, model = accelerator.prepare(optimizer, model)
        elif call == "model":
            model = accelerator.prepare(model)
        else:
            optimizer = accelerator.prepare(optimizer)
    assert isinstance(optimizer.optimizer, Own)
    [group] = optimizer.param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(model.weight), id(model.bias)]
    accelerator.backward(model(torch.ones(1, 3, dtype=torch.float64)).sum())
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_an_optimizer_of_another_accelerator_steps_with_what_this_one_s_strategy_returned(register):
    register(Copying)
    model, optimizer = make()
    before = model.weight.detach().clone()
    theirs = Accelerator().prepare(optimizer)
    accelerator = Accelerator(strategy="copying")
    model, ours = accelerator.prepare(model, theirs)
    assert ours is theirs
    assert isinstance(ours.optimizer, Own)
    accelerator.backward(model(torch.ones(1, 3, dtype=torch.float64)).sum())
    ours.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_a_scheduler_follows_its_own_optimizer_or_all():
    accelerator = Accelerator()
    optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    stray = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedulers.append(torch.optim.lr_scheduler.StepLR(stray, 1))
    first, second, *schedulers = accelerator.prepare(*optimizers, *schedulers)
    assert [scheduler.optimizers for scheduler in schedulers] == [[first], [second], [first, second]]


class Regrouping(Strategy):
    """Gives optimizers of its own, with groups of their own."""

    name = "regrouping"

    def prepare(self, parts, steps):
        own = [torch.optim.SGD([*parameters_of(given)], lr=0.1) for given in parts.optimizers]
        return Parts(super().prepare(parts, steps).models, own, parts.schedulers, parts.loaders)


@pytest.mark.parametrize("separately", [False, True])
def test_schedulers_follow_an_optimizer_that_is_returned_for_the_given_one(register, separately):
    register(Regrouping)
    kinds = torch.optim.lr_scheduler
    accelerator = Accelerator(strategy="regrouping", scale_scheduler=False)
    model, given = make()
    warm = kinds.LinearLR(given, 0.5, total_iters=2)
    scheduler = kinds.SequentialLR(given, [warm, kinds.StepLR(given, 1, 0.1)], milestones=[2])
    if separately:
        model, optimizer = accelerator.prepare(model, given)
        scheduler = accelerator.prepare(scheduler)
    else:
        model, optimizer, scheduler = accelerator.prepare(model, given, scheduler)
    assert optimizer.optimizer is not given
    assert scheduler.optimizers == [optimizer]
    assert accelerator.prepare(given) is optimizer
    reference = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    warm = kinds.LinearLR(reference, 0.5, total_iters=2)
    expected = kinds.SequentialLR(reference, [warm, kinds.StepLR(reference, 1, 0.1)], milestones=[2])
    for _ in range(4):
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        accelerator.backward(model(torch.ones(1, 3, dtype=torch.float64)).sum())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of schedulers whose optimizer has not stepped
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        reference.step()
        expected.step()


def test_a_prepared_scheduler_is_known_and_anothers_is_wrapped_once():
    _, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    first, second = Accelerator(), Accelerator()
    optimizer, ours = first.prepare(optimizer, scheduler)
    assert first.prepare_scheduler(ours) is ours
    theirs = second.prepare_scheduler(ours)
    assert theirs is not ours
    assert theirs.scheduler is scheduler
    assert isinstance(theirs, AcceleratedScheduler)


# Device placement


class Noting(nn.Linear):
    """Notes where it is moved."""

    def __init__(self):
        super().__init__(2, 2)
        self.moves = []

    def to(self, *args, **kwargs):
        self.moves.append(args)
        return super().to(*args, **kwargs)


@pytest.mark.parametrize("default", [True, False])
def test_device_placement_is_per_object_and_else_the_accelerators(default):
    accelerator = Accelerator(device_placement=default)
    device = accelerator.device
    moved = ([(device,)], [])

    def loader():
        return DataLoader(TensorDataset(torch.arange(4)))

    first, between, second, third = accelerator.prepare(
        Noting(), loader(), Noting(), loader(), device_placement=[True, False, False, True]
    )
    assert (first.moves, second.moves) == moved
    assert (between.device, third.device) == (None, device)
    model, batches = accelerator.prepare(Noting(), loader())
    assert (model.moves, batches.device) == ((moved[0], device) if default else ([], None))
    for placed in (True, False):
        assert accelerator.prepare_model(Noting(), device_placement=placed).moves == moved[not placed]
        evaluated = accelerator.prepare_model(Noting(), device_placement=placed, evaluation_mode=True)
        assert evaluated.moves == moved[not placed]
        batches = accelerator.prepare_data_loader(loader(), device_placement=placed)
        assert batches.device == (device if placed else None)


@pytest.mark.parametrize("placed", [True, False])
def test_the_state_of_an_optimizer_is_placed_like_its_parameters(placed):
    parameter = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"momentum_buffer": torch.ones(2), "step": torch.ones(())}
    prepared = Accelerator().prepare_optimizer(optimizer, device_placement=placed)
    state = prepared.state[parameter]
    assert state["momentum_buffer"].device.type == ("meta" if placed else "cpu")
    assert state["step"].device.type == "cpu"  # torch wants counts there


# What a strategy declares


class Single(Strategy):
    """Trains one model."""

    name = "one"
    capabilities = Capabilities(max_models=1)


class Couple(Strategy):
    """Trains two models."""

    name = "two"
    capabilities = Capabilities(max_models=2)


class Together(Boxing):
    """Needs a model and its optimizer in one call."""

    name = "together"
    capabilities = Capabilities(prepares_together=True)


def nothing_is_prepared(accelerator):
    return not any(
        [accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders]
    )


def test_more_models_than_a_strategy_trains_are_refused(register):
    register(Single, Couple)
    one = Accelerator(strategy="one")
    with pytest.raises(
        PrepareError, match=r"'one' trains at most 1 model with .* would make 2\. Create another"
    ):
        one.prepare(make_net(), make_net(1))
    assert nothing_is_prepared(one)
    model = make_net()
    prepared = one.prepare(model, model)
    assert one.prepare(model) is prepared[0]
    with pytest.raises(PrepareError, match="would make 2"):
        one.prepare(make_net(1))
    two = Accelerator(strategy="two")
    two.prepare(make_net())
    two.prepare(make_net())
    with pytest.raises(PrepareError, match=r"'two' trains at most 2 models with .* would make 3"):
        two.prepare(make_net())
    assert len(two._models) == 2


def test_a_strategy_that_prepares_together_refuses_one_without_the_other(register):
    register(Together)
    accelerator = Accelerator(strategy="together")
    model, optimizer = make()
    hint = r"accelerator\.prepare\(model, optimizer\)"
    with pytest.raises(PrepareError, match=rf"'together' .* has an optimizer without its model.*{hint}"):
        accelerator.prepare(optimizer)
    assert nothing_is_prepared(accelerator)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4))))
    evaluated = accelerator.prepare(make_net(1))
    assert accelerator.prepare(evaluated) is evaluated, "a model alone is only evaluated"
    prepared = accelerator.prepare(optimizer, model)
    assert accelerator.prepare(*prepared, loader) == (*prepared, loader)
    assert accelerator.prepare(prepared[1]) is prepared[1]


def test_a_refused_call_leaves_no_loader_behind(register):
    """Else the corrected call would prepare it twice, and each would be in the state."""
    register(Single)
    accelerator = Accelerator(strategy="one")
    with pytest.raises(PrepareError, match="at most 1 model"):
        accelerator.prepare(DataLoader(TensorDataset(torch.arange(4))), make_net(), make_net(1))
    assert nothing_is_prepared(accelerator)


def test_a_refused_call_leaves_an_outdated_model_known(register):
    class One(Boxing):
        name = "one"
        capabilities = Capabilities(max_models=1)

    register(One)
    accelerator = Accelerator(strategy="one")
    model = make_net()
    prepared = accelerator.prepare(model)
    prepared.outdated = True
    with pytest.raises(PrepareError, match="at most 1 model"):
        accelerator.prepare(prepared, make_net(1))
    assert accelerator._models == [model]
    prepared.outdated = False
    assert accelerator.prepare(model) is prepared


def test_a_model_prepared_again_counts_once(register):
    class One(Boxing):
        name = "one"
        capabilities = Capabilities(max_models=1)

    register(One)
    accelerator = Accelerator(strategy="one")
    prepared = accelerator.prepare(make_net())
    prepared.outdated = True
    again = accelerator.prepare(prepared)
    assert again is not prepared
    assert accelerator._models == [again.module]


# Evaluation, and device maps


def test_a_model_for_evaluation_is_converted_and_not_wrapped(register):
    register(Boxing)
    accelerator = Accelerator(strategy="boxing", mixed_precision="bf16")
    model = make_net()
    evaluated = accelerator.prepare_model(model, evaluation_mode=True)
    assert evaluated is model
    assert accelerator.strategy.handed == []
    assert evaluated(torch.randn(2, 4)).dtype is torch.float32
    assert evaluated.forward.dtype is torch.bfloat16
    assert accelerator._models == [model]


def test_an_outdated_model_for_evaluation_is_known_once(boxing):
    model = make_net()
    prepared = boxing.prepare(model)
    prepared.outdated = True
    evaluated = boxing.prepare_model(prepared, evaluation_mode=True)
    assert evaluated is model
    assert boxing._models == [model]


def test_a_model_spread_by_a_device_map_stays_where_it_is():
    model = Noting()
    model.hf_device_map = {"a": "cpu", "b": "disk"}
    assert Accelerator().prepare(model).moves == []
    whole = Noting()
    whole.hf_device_map = {"": "cpu"}
    assert len(Accelerator().prepare(whole).moves) == 1


def test_a_stage_of_transformers_own_pipeline_is_refused():
    model = Noting()
    model.config = SimpleNamespace(distributed_config=SimpleNamespace(pp_size=2, dp_replicate_size=1))
    accelerator = Accelerator()
    for prepare in (accelerator.prepare, lambda item: accelerator.prepare_model(item, evaluation_mode=True)):
        with pytest.raises(
            PrepareError, match=r"DistributedConfig\(pp_size=2\).*ParallelismConfig\(pp_size=2\)"
        ):
            prepare(model)
    for given in (None, SimpleNamespace(pp_size=1), {}):
        model.config = SimpleNamespace(distributed_config=given)
        assert accelerator.prepare_model(model) is model


def test_a_quantised_model_with_parts_on_disk_is_refused():
    model = Noting()
    model.hf_device_map, model.is_loaded_in_4bit = {"a": 0, "b": "disk"}, True
    accelerator = Accelerator()
    for prepare in (accelerator.prepare, lambda item: accelerator.prepare_model(item, evaluation_mode=True)):
        with pytest.raises(PrepareError, match=r"quantised model has parts on disk.*device_map=\{''"):
            prepare(model)
    assert nothing_is_prepared(accelerator)


def spread():
    accelerator = Accelerator()
    model = Noting()
    model.hf_device_map = {"a": 0, "b": 1}
    accelerator.prepare(model)


def test_a_spread_model_cannot_be_prepared_in_a_world_of_several():
    with pytest.raises(
        worlds.RankError, match=r"PrepareError.*\['0', '1'\].*combined with 2 processes.*one process"
    ):
        worlds.run(spread, 2)


@pytest.mark.parametrize("quantised", ["is_loaded_in_8bit", "is_loaded_in_4bit"])
def test_on_an_accelerator_a_quantised_model_may_have_no_part_on_the_cpu(quantised):
    from accel_train.setup import prepare as module

    model = Noting()
    model.hf_device_map = {"a": 0, "b": "cpu"}
    setattr(model, quantised, True)
    here = SimpleNamespace(
        plan=SimpleNamespace(device=torch.device("cuda", 0)), process=SimpleNamespace(num_processes=1)
    )
    with pytest.raises(PrepareError, match="parts on cpu by its device_map"):
        module._check_device_map(here, model)


def test_an_optimizer_that_is_given_twice_is_prepared_once():
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 2)
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    _, first, second = accelerator.prepare(model, raw, raw)
    assert first is second
    assert accelerator.prepare(raw) is first
    assert accelerator._optimizers == [first]
