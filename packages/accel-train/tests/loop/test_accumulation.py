"""Which loader a gradient window belongs to, and when it ends."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_train import Accelerator, AccumulationError, AmbiguousLoaderError
from accel_train.strategies.base import Strategy
from accel_train.strategies.capabilities import Capabilities
from testkit.samples import inputs, make


def setup(steps=2, sizes=(10,), **kwargs):
    accelerator = Accelerator(gradient_accumulation_steps=steps, **kwargs)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = [DataLoader(torch.arange(size).float().view(-1, 1), batch_size=2) for size in sizes]
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    return accelerator, model, optimizer, loaders


def micro_batch(accelerator, model, optimizer, x):
    with accelerator.accumulate(model):
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.sync_gradients


def test_windows_end_at_the_planned_length_and_at_the_last_batch_of_every_epoch():
    accelerator, model, optimizer, [train] = setup()
    for _ in range(2):
        flags = [micro_batch(accelerator, model, optimizer, x) for x in train]
        assert flags == [False, True, False, True, True]


def test_without_sync_with_dataloader_a_window_goes_over_the_end_of_an_epoch():
    from accel_train import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator, model, optimizer, [train] = setup(1, gradient_accumulation_plugin=plugin)
    flags = [micro_batch(accelerator, model, optimizer, x) for _ in range(2) for x in train]
    assert flags == [False, True] * 5


def test_t4_an_evaluation_loop_left_early_does_not_become_the_training_loader():
    accelerator, model, optimizer, [train, evaluation] = setup(sizes=(10, 4))
    for _ in range(2):
        flags = []
        for number, x in enumerate(train):
            flags.append(micro_batch(accelerator, model, optimizer, x))
            if number % 2 == 0:
                for y in evaluation:
                    model(y)
                    break
        assert flags == [False, True, False, True, True]
        assert not accelerator.gradient_state.in_dataloader


def test_an_evaluation_loop_inside_a_window_changes_nothing():
    accelerator, model, optimizer, [train, evaluation] = setup(steps=3, sizes=(10, 2))
    flags = []
    for x in train:
        flags.append(micro_batch(accelerator, model, optimizer, x))
        for y in evaluation:
            model(y)
            assert accelerator.gradient_state.end_of_dataloader
        assert accelerator.gradient_state.active_dataloader is train
    assert flags == [False, False, True, False, True]


def test_an_iterator_held_open_does_not_take_the_window():
    accelerator, model, optimizer, [train, evaluation] = setup(sizes=(10, 8))
    held = iter(evaluation)
    next(held)
    flags = []
    for number, x in enumerate(train):
        flags.append(micro_batch(accelerator, model, optimizer, x))
        if number in (1, 2):
            next(held)
    assert flags == [False, True, False, True, True]


def test_loaders_iterated_in_turn_must_be_told_apart():
    accelerator, model, optimizer, [short, long] = setup(sizes=(6, 10))
    pairs = zip(short, long, strict=False)
    _, x = next(pairs)
    with pytest.raises(AmbiguousLoaderError, match=r"6 samples.*dataloader="):
        micro_batch(accelerator, model, optimizer, x)


def test_a_named_loader_owns_the_window():
    accelerator, model, _, [short, long] = setup(sizes=(6, 10))
    flags = []
    for x, _ in zip(short, long, strict=False):
        with accelerator.accumulate(model, dataloader=short):
            accelerator.backward(model(x).mean())
        flags.append(accelerator.sync_gradients)
    assert flags == [False, True, True]


def test_break_in_the_middle_of_a_window_keeps_it_open():
    accelerator, model, optimizer, [train] = setup(steps=4)
    for x in train:
        assert not micro_batch(accelerator, model, optimizer, x)
        break
    flags = [micro_batch(accelerator, model, optimizer, x) for x in train]
    assert flags == [False, False, True, False, True]


def test_models_accumulated_separately_have_windows_of_their_own():
    accelerator, generator, _, [train] = setup(steps=2)
    critic = accelerator.prepare(nn.Linear(1, 1))
    flags = []
    for x in train:
        for model in (generator, critic):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
            flags.append(accelerator.sync_gradients)
    assert flags == [False, False, True, True, False, False, True, True, True, True]


def test_several_backwards_in_one_micro_batch_add_up():
    accelerator, model, _, [train] = setup(steps=4, sizes=(6,))
    plain = nn.Linear(1, 1)
    plain.load_state_dict(model.state_dict())
    for x in train:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            accelerator.backward((model(x) ** 2).mean())
    for x in torch.arange(6).float().view(3, 2, 1):
        ((plain(x).mean() + (plain(x) ** 2).mean()) / 3).backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad)


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(torch.arange(self.size).float().view(-1, 1))


def test_an_iterable_of_unknown_length_ends_its_last_window():
    accelerator, model, optimizer, _ = setup()
    train = accelerator.prepare(DataLoader(Stream(10), batch_size=2))
    flags = [micro_batch(accelerator, model, optimizer, x) for x in train]
    assert flags == [False, True, False, True, True]


def test_nested_accumulate_is_refused():
    accelerator, model, _, _ = setup()
    with (
        pytest.raises(AccumulationError, match=r"accumulate\(model_a, model_b\)"),
        accelerator.accumulate(model),
        accelerator.accumulate(model),
    ):
        pass


@pytest.mark.parametrize("num_items", [1.5, -1, True, torch.tensor(2.0), torch.tensor([1, 2])])
def test_num_items_must_be_one_whole_number(num_items):
    accelerator, model, _, _ = setup(steps=1)
    with pytest.raises(AccumulationError, match="num_items"):
        accelerator.backward(model(torch.ones(1, 1)).sum(), num_items=num_items)


def test_the_two_contracts_cannot_be_mixed_in_a_window():
    accelerator, model, _, _ = setup(steps=2)
    x = torch.ones(1, 1)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum(), num_items=1)
    with accelerator.accumulate(model), pytest.raises(AccumulationError, match="Pass num_items every time"):
        accelerator.backward(model(x).sum())


def test_items_of_one_micro_batch_cannot_be_counted_twice():
    accelerator, model, _, _ = setup(steps=2)
    x = torch.ones(1, 1)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum(), num_items=1)
        with pytest.raises(AccumulationError, match="counted twice"):
            accelerator.backward(model(x).sum(), num_items=1)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_a_window_has_at_least_one_micro_batch(steps):
    with pytest.raises(ValueError, match="at least 1"):
        Accelerator(gradient_accumulation_steps=steps)


def test_a_micro_batch_that_failed_before_backward_is_not_held():
    """As when a batch that does not fit into memory is left out."""
    accelerator, model, _, _ = setup()

    def fails():
        with accelerator.accumulate(model):
            raise RuntimeError("out of memory")

    flags = []
    for x in (1.0, 3.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), x)).sum())
            flags.append(accelerator.sync_gradients)
        with pytest.raises(RuntimeError, match="out of memory"):
            fails()
    assert flags == [False, True]
    assert model.weight.grad.item() == pytest.approx(2.0)


def test_only_models_and_prepared_loaders_are_accumulated():
    accelerator, model, _, [loader] = setup()
    with pytest.raises(TypeError, match=r"got list.*accumulate\(a, b\)"):
        accelerator.accumulate([model])
    with pytest.raises(TypeError, match="prepared loader, got DataLoader"):
        accelerator.accumulate(model, dataloader=DataLoader(loader.dataset))


def test_a_copied_loader_still_ends_windows():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(make()[0], DataLoader(TensorDataset(inputs(3)), batch_size=1))
    ends = []
    for (x,) in copy.deepcopy(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
        ends.append(accelerator.sync_gradients)
    assert ends == [False, True, True]


def test_the_planned_length_may_change_inside_a_window():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(make()[0])
    x = inputs(3)
    with accelerator.accumulate(model):
        accelerator.backward(model(x[:1]).sum())
    accelerator.gradient_accumulation_steps = 3
    for row in (x[1:2], x[2:]):
        with accelerator.accumulate(model):
            accelerator.backward(model(row).sum())
    assert accelerator.sync_gradients
    reference = make()[0]
    reference(x).mean().backward()
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)


# What a strategy declares


class Planned(Strategy):
    """Must know how many micro-batches a window holds when it opens, and notes what it is told."""

    name = "planned"
    capabilities = Capabilities(window="planned", num_items=False)

    def __init__(self, options):
        super().__init__(options)
        self.told = []

    def begin_micro_batch(self, models, *, last, loss_factor):
        self.told.append((list(models), last, loss_factor))

    def end_micro_batch(self, models, *, last):
        self.told.append((list(models), last))


class Summing(Strategy):
    """Has an argument of `backward` by which scripts say that they scale the loss themselves."""

    name = "summing"

    def backward(self, models, loss, *, pending, kwargs):
        super().backward(models, loss, pending=pending, kwargs={})

    def averages(self, kwargs):
        return kwargs.get("divide", True)


class Hiding(Strategy):
    """Keeps gradients of open windows to itself."""

    name = "hiding"
    capabilities = Capabilities(hides_gradients=True)


def test_a_strategy_is_told_of_every_micro_batch_and_of_the_factor_of_its_loss(register):
    register(Planned)
    accelerator, model, optimizer, [train] = setup(steps=2, sizes=(6,), strategy="planned")
    for x in train:
        micro_batch(accelerator, model, optimizer, x)
    ends = [(False, 0.5), (True, 0.5), (True, 1.0)]
    expected = [item for last, factor in ends for item in (([model], last, factor), ([model], last))]
    assert accelerator.strategy.told == expected


@pytest.mark.parametrize("rows", [4, 3], ids=["whole", "shorter"])
@pytest.mark.parametrize("inside", [True, False], ids=["accumulate", "outside"])
def test_a_loss_that_the_script_scales_is_left_as_it_is(register, rows, inside):
    register(Summing)
    accelerator = Accelerator(strategy="summing", gradient_accumulation_steps=4)
    model = accelerator.prepare(make()[0])
    x = inputs(rows)
    for index, row in enumerate(x.split(1)):
        last = index == rows - 1
        if inside:
            accelerator.gradient_accumulation_steps = rows if last else 4
            context = accelerator.accumulate(model)
        else:
            context = contextlib.nullcontext() if last else accelerator.no_sync(model)
        with context:
            accelerator.backward(model(row).sum(), divide=False)
    reference = make()[0]
    reference(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)


def test_a_loss_cannot_be_weighed_and_left_as_it_is(register):
    register(Summing)
    accelerator = Accelerator(strategy="summing", gradient_accumulation_steps=2)
    model = accelerator.prepare(make()[0])
    with (
        accelerator.accumulate(model),
        pytest.raises(
            AccumulationError, match=r"by its items, but backward\(divide=False\) asks to leave it"
        ),
    ):
        accelerator.backward(model(inputs(1)).sum(), num_items=1, divide=False)


def test_without_a_name_all_models_are_in_the_micro_batch(register):
    register(Planned)
    accelerator, model, _, _ = setup(steps=1, strategy="planned")
    other = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate():
        pass
    assert accelerator.strategy.told == [([model, other], True, 1.0), ([model, other], True)]


def test_a_planned_window_needs_a_loader_that_tells_its_length(register):
    register(Planned)
    accelerator, model, optimizer, _ = setup(steps=2, strategy="planned")
    train = accelerator.prepare(DataLoader(Stream(4), batch_size=2))
    iterator = iter(train)  # the window belongs to the loader that is being iterated
    x = next(iterator)
    with pytest.raises(AccumulationError, match=r"'planned' must know how many .*Give the dataset a length"):
        micro_batch(accelerator, model, optimizer, x)
    accelerator.gradient_accumulation_steps = 1
    assert micro_batch(accelerator, model, optimizer, x)


def test_a_planned_window_cannot_become_another(register):
    register(Planned)
    accelerator, model, optimizer, _ = setup(steps=3, strategy="planned")
    x = torch.ones(2, 1)
    micro_batch(accelerator, model, optimizer, x)
    accelerator.gradient_accumulation_steps = 2
    with pytest.raises(
        AccumulationError, match=r"holds 2 micro-batches and 3 were planned .*'planned' cannot correct"
    ):
        micro_batch(accelerator, model, optimizer, x)


def test_a_strategy_that_cannot_weigh_by_items_says_so(register):
    register(Planned)
    accelerator, model, _, _ = setup(steps=1, strategy="planned")
    with pytest.raises(
        AccumulationError, match=r"'planned' cannot weigh .*Call backward\(loss\) with the mean"
    ):
        accelerator.backward(model(torch.ones(1, 1)).sum(), num_items=1)


def test_hidden_gradients_cannot_follow_the_loss_scale(register):
    register(Hiding)
    accelerator, model, _, _ = setup(steps=2, strategy="hiding")
    accelerator._accumulator.rescale_pending(0.5)  # nothing waits
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    with pytest.raises(
        AccumulationError, match=r"'hiding' cannot rescale those\. Step optimizers equally often"
    ):
        accelerator._accumulator.rescale_pending(0.5)


# The two contracts


def plain_gradient(model, loss):
    copied = nn.Linear(1, 1)
    copied.load_state_dict(model.state_dict())
    loss(copied).backward()
    return copied.weight.grad


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("tensors", [False, True])
def test_a_window_of_items_is_one_big_batch(steps, tensors):
    accelerator, model, _, _ = setup(steps=steps)
    parts = [torch.arange(1.0, size + 1).view(-1, 1) for size in (4, 1, 3)[:steps]]
    expected = plain_gradient(model, lambda copied: copied(torch.cat(parts)).square().mean())
    for x in parts:
        with accelerator.accumulate(model):
            count = torch.tensor(len(x)) if tensors else len(x)
            accelerator.backward(model(x).square().sum(), num_items=count)
    torch.testing.assert_close(model.weight.grad, expected)


@pytest.mark.parametrize("tensors", [False, True])
def test_a_window_without_items_has_gradients_of_zero(tensors):
    accelerator, model, _, _ = setup(steps=2)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum(), num_items=torch.tensor(0) if tensors else 0)
    assert torch.equal(model.weight.grad, torch.zeros(1, 1))


def test_the_mean_of_a_window_by_hand():
    accelerator, model, optimizer, _ = setup(steps=2)
    x = torch.tensor([[1.0], [3.0]])
    expected = plain_gradient(model, lambda copied: copied(x).square().mean())
    with accelerator.no_sync(model):
        accelerator.backward(model(x[:1]).square().sum())
    accelerator.backward(model(x[1:]).square().sum())
    torch.testing.assert_close(model.weight.grad, expected)
    optimizer.step()
    assert accelerator._accumulator.manual.backwards == 0, "the next backward opens a window"


def test_gradients_may_be_dropped_before_the_first_backward_and_after_the_last():
    accelerator, model, optimizer, _ = setup(steps=2)
    may_drop = accelerator._accumulator.may_drop_gradients
    found = [may_drop(optimizer)]
    for _ in range(2):
        with accelerator.accumulate(model):
            found.append(may_drop(optimizer))
            accelerator.backward(model(torch.ones(1, 1)).sum())
            found.append(may_drop(optimizer))
        found.append(may_drop(optimizer))
    assert found == [True, True, False, False, False, True, True]


def cut_training(rows, size, micro, steps, epochs=1, **options):
    """Updates of a weight that begins at 0, where the gradient of a sample is its value; SGD with a rate of 1."""
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(torch.arange(1.0, rows + 1)[:, None], batch_size=size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = []
    for _ in range(epochs):
        for batch in loader:
            for part in batch.split(micro):
                before = model.weight.item()
                with accelerator.accumulate(model):
                    accelerator.backward(model(part).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    updates.append(round(before - model.weight.item(), 5))
    return updates


@pytest.mark.parametrize(
    ("rows", "size", "micro", "steps", "expected"),
    [
        (8, 4, 1, 4, [2.5, 6.5]),  # a window is a batch
        (8, 4, 2, 2, [2.5, 6.5]),
        (8, 4, 1, 8, [4.5]),  # … two batches
        (8, 4, 1, 2, [1.5, 3.5, 5.5, 7.5]),  # … half a batch
        (8, 4, 1, 3, [2.0, 5.0, 7.5]),  # the last one is shorter
        (6, 4, 1, 4, [2.5, 5.5]),  # the last batch is smaller
        (5, 4, 2, 2, [2.5, 5.0]),
    ],
)
def test_a_batch_may_be_cut_into_micro_batches(rows, size, micro, steps, expected):
    assert cut_training(rows, size, micro, steps) == expected
    assert cut_training(rows, size, micro, steps, epochs=3) == expected * 3


def test_a_single_batch_that_is_cut_is_warned_of_once():
    with pytest.warns(UserWarning, match="was expected to be the last: that update") as caught:
        updates = cut_training(4, 4, 1, 4, epochs=3)
    assert len(caught) == 1
    assert updates[-1] == 2.5, "later epochs are right"


def test_a_run_that_continues_with_the_last_batch_knows_how_batches_are_cut(tmp_path):
    def parts():
        accelerator = Accelerator(gradient_accumulation_steps=4)
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(torch.arange(1.0, 9.0)[:, None], batch_size=4)
        return accelerator, *accelerator.prepare(model, optimizer, loader)

    def train(batch, accelerator, model, optimizer):
        for part in batch.split(1):
            with accelerator.accumulate(model):
                accelerator.backward(model(part).mean())
                optimizer.step()
                optimizer.zero_grad()

    accelerator, model, optimizer, loader = parts()
    for batch in loader:
        train(batch, accelerator, model, optimizer)
        break
    accelerator.save_state(tmp_path / "state")
    accelerator, model, optimizer, loader = parts()
    accelerator.load_state(tmp_path / "state")
    from accel_train import skip_first_batches

    for batch in skip_first_batches(loader, 1):
        train(batch, accelerator, model, optimizer)
    assert model.weight.item() == pytest.approx(-2.5 - 6.5)


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_an_optimizer_keeps_are_corrected_once(weighted, rows, to_none):
    """It steps in every other window; the correction of the second one is not that of what the first has left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    reference = copy.deepcopy(model)
    data = torch.randn(rows, 3, dtype=torch.float64)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    often, rarely = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    loader = DataLoader(data, batch_size=1)
    model, often, rarely, loader = accelerator.prepare(model, often, rarely, loader)
    for index, x in enumerate(loader):
        with accelerator.accumulate(model):
            losses = model(x).square()
            if weighted:
                accelerator.backward(losses.sum() * (index + 1), num_items=index + 1)
            else:
                accelerator.backward(losses.mean())
            often.step()
            often.zero_grad(set_to_none=to_none)
    by_hand = torch.optim.SGD(reference[0].parameters(), lr=0.1)
    for first in (0, 4):
        part = data[first : first + 4]
        factor = torch.arange(first + 1.0, first + 1 + len(part), dtype=torch.float64) if weighted else 1.0
        count = factor.sum() if weighted else len(part)
        ((reference(part).square().squeeze(1) * factor).sum() / count).backward()
        by_hand.step()
        by_hand.zero_grad()
    plain = accelerator.unwrap_model(model)
    torch.testing.assert_close(plain[1].weight.grad, reference[1].weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plain[0].weight, reference[0].weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_kept_after_a_step_are_corrected_once(to_none):
    """The first window ends with a step and zeros, the second leaves gradients, and the third adds to them."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    data = torch.randn(12, 3, dtype=torch.float64)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for index, x in enumerate(data):
        if index == 4:
            reference = copy.deepcopy(accelerator.unwrap_model(model))
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().sum() * (index + 1), num_items=index + 1)
            if index < 4:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
    reference.zero_grad()
    for first in (4, 8):
        factor = torch.arange(first + 1.0, first + 5, dtype=torch.float64)
        ((reference(data[first : first + 4]).square().squeeze(1) * factor).sum() / factor.sum()).backward()
    found = accelerator.unwrap_model(model).weight.grad
    torch.testing.assert_close(found, reference.weight.grad, rtol=1e-12, atol=1e-12)


def test_gradients_of_windows_by_hand_are_corrected_once():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    reference = copy.deepcopy(model)
    data = torch.randn(8, 3, dtype=torch.float64)
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for index, x in enumerate(data):
        with contextlib.nullcontext() if index % 4 == 3 else accelerator.no_sync(model):
            accelerator.backward(model(x).square().sum() * (index + 1), num_items=index + 1)
    for first in (0, 4):
        factor = torch.arange(first + 1.0, first + 5, dtype=torch.float64)
        ((reference(data[first : first + 4]).square().squeeze(1) * factor).sum() / factor.sum()).backward()
    found = accelerator.unwrap_model(model).weight.grad
    torch.testing.assert_close(found, reference.weight.grad, rtol=1e-12, atol=1e-12)


def test_parameters_that_an_optimizer_gets_later_belong_to_their_models_window():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    first, second, optimizer = accelerator.prepare(first, second, torch.optim.SGD(first.parameters(), lr=0.1))
    for model in (first, second):  # both windows are open
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
    optimizer.add_param_group({"params": [*second.parameters()]})
    before = second.weight.detach().clone()
    with accelerator.accumulate(second):
        accelerator.backward(second(torch.ones(1, 1)).sum())
        optimizer.step()
    assert not torch.equal(second.weight, before), "its window is complete"
