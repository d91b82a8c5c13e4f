"""The usual mistakes of a new training loop."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, AccumulationError
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


def make():
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


X = torch.ones(2, 3, dtype=torch.float64)


# On any number of ranks


def test_an_optimizer_that_was_not_prepared_may_not_step_inside_a_window():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = accelerator.prepare(make())
    optimizer = sgd(model)
    with accelerator.accumulate(model):
        accelerator.backward(model(X).sum())
        optimizer.step()
    with pytest.raises(AccumulationError, match=r"2 parameters changed.*accelerator\.prepare\(optimizer\)"):
        accelerator.accumulate(model).__enter__()


def test_an_optimizer_that_was_not_prepared_may_step_between_windows():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(make())
    optimizer = sgd(model)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(X).sum())
            if accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()


def test_values_that_a_script_changes_itself_are_its_own_business():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = make()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.weight.clamp_(-0.1, 0.1)  # as critics of a Wasserstein GAN


@pytest.mark.parametrize("named", [False, True])
def test_a_target_network_may_follow_in_every_micro_batch(named):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, target = make(), make()
    model, target, optimizer = accelerator.prepare(model, target, sgd(model))
    for _ in range(4):
        with accelerator.accumulate(*[model, target][: 2 * named]):
            with torch.no_grad():
                wanted = target(X) + 1
            accelerator.backward((model(X) - wanted).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                target.weight.lerp_(model.weight, 0.1)


def test_backward_of_the_loss_itself_inside_a_window_is_an_error():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = make()
    model, optimizer = accelerator.prepare(model, sgd(model))
    with accelerator.accumulate(model):
        model(X).sum().backward()
        with pytest.raises(
            AccumulationError, match=r"loss\.backward\(\).*Call accelerator\.backward\(loss\)"
        ):
            optimizer.step()


def test_gradients_of_the_last_step_are_none_of_this_window():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = make()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for number in range(4):
        with accelerator.accumulate(model):
            if number != 2:  # a batch that the script leaves out
                accelerator.backward(model(X).sum())
            optimizer.step()


def test_a_closure_that_would_not_run_is_an_error():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = make()
    model, optimizer = accelerator.prepare(model, sgd(model))

    def closure():
        loss = model(X).sum()
        accelerator.backward(loss)
        return loss

    with accelerator.accumulate(model), pytest.raises(AccumulationError, match="the closure would not run"):
        optimizer.step(closure)


def test_a_closure_without_gradients_of_its_own_waits_for_the_end_of_the_window():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = make()
    reference = make()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for _ in range(2):
        with accelerator.accumulate(model):
            loss = model(X).sum()
            accelerator.backward(loss)
            optimizer.step(lambda loss=loss: loss)
    reference(X).sum().backward()
    assert torch.equal(model.weight, reference.weight - 0.1 * reference.weight.grad)


@pytest.mark.parametrize("steps", [1, 4])
def test_what_prepare_returned_was_dropped(steps):
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = make()
    optimizer = sgd(model)
    accelerator.prepare(model, optimizer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(6):
            stepped(accelerator, model, optimizer)
    [message] = [str(item.message) for item in seen]
    assert message.startswith("Parameters of SGD change")
    assert "`model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`" in message
    assert seen[0].filename == __file__


def stepped(accelerator, model, optimizer):
    accelerator.backward(model(X).sum())
    optimizer.step()
    optimizer.zero_grad()


def held_back(accelerator, model, optimizer):
    for _ in range(3):
        with accelerator.no_sync(model):
            accelerator.backward(model(X).sum())
    stepped(accelerator, model, optimizer)


def in_a_window(accelerator, model, optimizer):
    with accelerator.accumulate(model):
        stepped(accelerator, model, optimizer)


@pytest.mark.parametrize(
    ("steps", "body", "count"), [(4, stepped, 1), (4, held_back, 0), (4, in_a_window, 0), (1, stepped, 0)]
)
def test_accumulation_without_a_window_is_named_once(steps, body, count):
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = make()
    model, optimizer = accelerator.prepare(model, sgd(model))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(9):
            body(accelerator, model, optimizer)
    assert [str(item.message)[:40] for item in seen] == ["The optimizer steps after each backward("] * count
    assert all(item.filename == __file__ for item in seen)


def test_an_optimizer_of_a_copy_is_named_at_its_first_step():
    accelerator = Accelerator()
    model = make()
    model, optimizer = accelerator.prepare(model, sgd(copy.deepcopy(model)))
    before = model.weight.detach().clone()
    accelerator.backward(model(X).sum())
    named = r"SGD holds 2 parameters.*'weight' of Linear.*train\s+nothing.*copy"
    with pytest.warns(UserWarning, match=named) as told:
        optimizer.step()
    assert told[0].filename == __file__
    assert torch.equal(model.weight, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # said once


def replaced_after_the_optimizer(strategy):
    """What is said where a part of the model was replaced after its optimizer was built."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from accel_train import FullyShardedDataParallelPlugin, ParallelismConfig

    options = {}
    if strategy == "fsdp2":
        options = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
    elif strategy == "tp":
        options = {"parallelism_config": ParallelismConfig(tp_size=2)}
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)).double()
    optimizer = sgd(model)
    if strategy == "tp":
        mesh = accelerator.torch_device_mesh["tp"]
        parallelize_module(model, mesh, {"1": ColwiseParallel(output_layouts=None)})
    else:
        model[1] = nn.Linear(4, 2).double()
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(X).sum())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    return [str(one.message) for one in told if "optimizer" in str(one.message)]


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2), ("tp", 2)])
def test_t45_parameters_that_replaced_those_of_the_optimizer_are_named(strategy, ranks):
    for said in worlds.run(replaced_after_the_optimizer, ranks, strategy):
        [text] = said
        assert (
            "SGD holds 4 parameters. 2 of them, the first of shape (4, 4), are in no prepared model" in text
        )
        assert "while '1.weight' of " in text
        assert "has one and is in no prepared optimizer (2 such parameters)" in text
        assert "the new part is not trained" in text


def test_an_optimizer_may_hold_what_the_loss_did_not_use():
    accelerator = Accelerator()
    model, unused = make(), nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD([*model.parameters(), *unused.parameters()], 0.1)
    )
    accelerator.backward(model(X).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_an_optimizer_that_has_nothing_to_do_yet_may_step():
    accelerator = Accelerator()
    one, two = make(), make()
    one, two, first, second = accelerator.prepare(one, two, sgd(one), sgd(two))
    accelerator.backward(one(X).sum())
    second.step()  # its model had no backward
    first.step()
    assert not torch.equal(one.weight, two.weight)


# On two ranks


def losses(data):
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = make()
    model, optimizer = accelerator.prepare(model, sgd(model))
    rows = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    if data == "own":
        rows = rows + accelerator.process_index
    if data == "zero":  # equal losses until the first step
        rows = rows * (1 + accelerator.process_index)
        nn.init.zeros_(accelerator.unwrap_model(model).weight)
        nn.init.zeros_(accelerator.unwrap_model(model).bias)
    loader = DataLoader(TensorDataset(rows), batch_size=2)
    if data == "prepared":
        loader = accelerator.prepare(loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (x,) in loader:
            accelerator.backward((model(x) - 1).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if "equal losses" in str(w.message)]


def test_ranks_that_read_the_same_samples_are_named_once():
    first, second = worlds.run(losses, 2, "same")
    assert len(first) == 1
    assert "loader = accelerator.prepare(loader)" in first[0]
    assert second == []
    for data in ("own", "zero", "prepared"):
        assert worlds.run(losses, 2, data) == [[], []], data


def equal_losses(kind):
    """Of zero: the advantages of rewards that are equal at first. Over the samples of all ranks: a contrastive loss."""
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = make()
    model, optimizer = accelerator.prepare(model, sgd(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4):
            advantage = 0 if number < 3 and kind == "zero" else 1 + accelerator.process_index
            scores = model(X) * advantage
            accelerator.backward((scores if kind == "zero" else accelerator.gather_with_grad(scores)).mean())
            optimizer.step()
            optimizer.zero_grad()
    return model.module.weight.tolist()


@pytest.mark.parametrize("kind", ["zero", "all samples"])
def test_equal_losses_need_not_be_of_the_same_samples(kind):
    first, second = worlds.run(equal_losses, 2, kind)
    assert first == second


def module_of_the_main_process():
    from accel_train import Accelerator

    accelerator = Accelerator()
    model, probe = make(), make()
    model, optimizer = accelerator.prepare(model, sgd(model))
    steps = accelerator.prepare(sgd(probe))
    for number in range(6):
        if accelerator.is_main_process:
            accelerator.backward(probe(X).mean())
            steps.step()
            steps.zero_grad()
        accelerator.backward(model(X).square().mean() * (1 + accelerator.process_index))
        optimizer.step()
        optimizer.zero_grad()
        if number > 3 and accelerator.is_main_process:
            accelerator.backward(probe(X).mean())
            steps.zero_grad()
    return model.module.weight.tolist()


def test_the_main_process_may_train_a_module_of_its_own():
    reference = make()
    optimizer = sgd(reference)
    for _ in range(6):
        (reference(X).square().mean() * 1.5).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in worlds.run(module_of_the_main_process, 2):
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), reference.weight)
