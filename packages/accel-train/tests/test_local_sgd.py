"""Local SGD against models that are trained by hand, in float64."""

import contextlib
import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, DistributedDataParallelKwargs, GradScalerKwargs, LocalSGD
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
RANKS = 2


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def rows(count):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def averaged(models):
    """Give all models the mean of their parameters and floating-point buffers, and the first one's others."""
    states = [model.state_dict() for model in models]
    for name in states[0]:
        values = torch.stack([state[name] for state in states])
        mean = values.mean(0) if values.is_floating_point() else values[0]
        for state in states:
            state[name].copy_(mean)


def by_hand(epochs, count, accumulation, every):
    """What the ranks hold after training as `ours` does, and their optimizers: from each epoch on, rank 0's states."""
    models = [make() for _ in range(RANKS)]
    optimizers = [optimizer_of(model) for model in models]
    batches = [rows(count)[begin : begin + 4] for begin in range(0, count, 4)]
    for _ in range(epochs):
        updates = [0, 0]
        steps = len(batches) // RANKS
        for place in range(steps):
            end = (place + 1) % accumulation == 0 or place + 1 == steps
            begin = place // accumulation * accumulation
            window = min(begin + accumulation, steps) - begin
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                (loss_of(model, batches[RANKS * place + rank]) / window).backward()
                if end:
                    optimizer.step()
                    optimizer.zero_grad()
                    updates[rank] += 1
            if end and updates[0] % every == 0:
                averaged(models)
        averaged(models)
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    return [model.state_dict() for model in models], [optimizer.state_dict() for optimizer in optimizers]


def ours(epochs, count, accumulation, every, folder=None, stop=None, resume=False):
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model = make()
    loader = DataLoader(rows(count), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    if resume:
        accelerator.load_state(folder)
    for epoch in range(accelerator.step, epochs):
        if epoch == stop:
            accelerator.step = epoch
            accelerator.save_state(folder)
            return None
        with LocalSGD(accelerator, model, every) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
                local_sgd.step()
    return accelerator.unwrap_model(model).state_dict(), optimizer.state_dict()


def close(found, expected):
    for rank, (state, moments) in enumerate(found):
        for name, value in expected[0][rank].items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
        for place, entry in expected[1][rank]["state"].items():
            for key, value in entry.items():
                torch.testing.assert_close(moments["state"][place][key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("count", "accumulation", "every"),
    [
        (48, 1, 2),
        (48, 1, 1),
        (48, 1, 100),  # the end alone averages
        (40, 2, 2),  # a window that is cut short, and an average that the end makes
        (56, 3, 2),
    ],
)
def test_ranks_train_copies_that_are_averaged(count, accumulation, every):
    expected = by_hand(2, count, accumulation, every)
    close(worlds.run(ours, RANKS, 2, count, accumulation, every), expected)


def test_a_resumed_run_is_exact(tmp_path):
    folder = str(tmp_path / "state")
    worlds.run(ours, RANKS, 3, 40, 2, 2, folder, 1)
    resumed = worlds.run(ours, RANKS, 3, 40, 2, 2, folder, None, True)
    whole = worlds.run(ours, RANKS, 3, 40, 2, 2)
    for (state, moments), (other, other_moments) in zip(resumed, whole, strict=True):
        assert all(torch.equal(state[name], other[name]) for name in state)
        for place, entry in moments["state"].items():
            assert all(torch.equal(value, other_moments["state"][place][key]) for key, value in entry.items())
    close(resumed, by_hand(3, 40, 2, 2))


def uneven(counts, every):
    """Ranks have different numbers of batches."""
    accelerator = Accelerator()
    model = accelerator.prepare(make())
    optimizer = accelerator.prepare(optimizer_of(model))
    begin = 100 * accelerator.process_index
    with LocalSGD(accelerator, model, every) as local_sgd:
        for number in range(counts[accelerator.process_index]):
            accelerator.backward(loss_of(model, rows(1000)[begin + 4 * number :][:4]))
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
    return accelerator.unwrap_model(model).state_dict()


def uneven_by_hand(counts, every):
    models = [make() for _ in counts]
    optimizers = [optimizer_of(model) for model in models]
    for number in range(max(counts)):
        for rank, count in enumerate(counts):
            if number < count:
                loss_of(models[rank], rows(1000)[100 * rank + 4 * number :][:4]).backward()
                optimizers[rank].step()
                optimizers[rank].zero_grad()
        if (number + 1) % every == 0:
            averaged(models)
    averaged(models)
    return models[0].state_dict()


@pytest.mark.parametrize(("counts", "every"), [((6, 2), 2), ((1, 7), 2), ((0, 3), 1)])
def test_ranks_with_fewer_batches_wait_at_the_end(counts, every):
    expected = uneven_by_hand(counts, every)
    for state in worlds.run(uneven, RANKS, counts, every):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def items():
    """Losses are sums over items, of which ranks have different numbers: no rank asks the others for theirs."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(3, 1).double())
    x = rows(12)[:][0][6 * accelerator.process_index :][:6]
    parts = x.split([4, 2] if accelerator.is_main_process else [1, 5])
    with LocalSGD(accelerator, model, 8):
        for part in parts:
            with accelerator.accumulate(model):
                accelerator.backward(model(part).sum(), num_items=len(part))
        return model.module.weight.grad.clone()


def test_a_window_of_items_is_of_this_rank_alone():
    for rank, gradient in enumerate(worlds.run(items, RANKS)):
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
        model(rows(12)[:][0][6 * rank :][:6]).mean().backward()
        torch.testing.assert_close(gradient, model.weight.grad, rtol=1e-12, atol=0)


def failing():
    """One rank fails inside; the other one must not wait for it forever."""
    accelerator = Accelerator()
    model = accelerator.prepare(make())
    optimizer = accelerator.prepare(optimizer_of(model))
    found = None
    try:
        with LocalSGD(accelerator, model, 2) as local_sgd:
            for number in range(4):
                accelerator.backward(loss_of(model, rows(64)[4 * number :][:4]))
                optimizer.step()
                optimizer.zero_grad()
                if number == 2 and accelerator.process_index == 1:
                    raise RuntimeError("out of memory")
                local_sgd.step()
    except RuntimeError as error:
        found = f"{type(error).__name__}: {error}"
    if accelerator.process_index == 1:
        with contextlib.suppress(Exception):
            accelerator.gather_for_metrics([1], use_gather_object=True)
        return found
    return found


def test_an_exception_on_one_rank_leaves_no_rank_waiting():
    first, second = worlds.run(failing, RANKS)
    assert second == "RuntimeError: out of memory"
    assert first.startswith("CollectiveMismatchError"), first


def after_an_exception(cure):
    accelerator = Accelerator()
    model = accelerator.prepare(make())
    optimizer = accelerator.prepare(optimizer_of(model))
    batch = rows(64)[4 * accelerator.process_index :][:4]

    def train():
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    accelerator.save_state(cure) if cure != "enter" else None
    with contextlib.suppress(ValueError), LocalSGD(accelerator, model, 2):
        train()
        raise ValueError
    with torch.no_grad():
        model(batch[0])
    with pytest.raises(ValueError, match=r"left by an exception.*load_state\(\), or enter LocalSGD again"):
        model(batch[0])
    with pytest.raises(RuntimeError, match=r"copies of Sequential inside LocalSGD.*Save after the context"):
        accelerator.save_state("unused")
    if cure == "enter":
        with LocalSGD(accelerator, model, 2):
            pass
    else:
        accelerator.load_state(cure)
    train()
    return accelerator.unwrap_model(model)[0].weight.detach()


def then_together(count):
    """After the context, ranks train on with the gradients of all."""
    accelerator = Accelerator()
    model = accelerator.prepare(make())
    optimizer = accelerator.prepare(optimizer_of(model))
    begin = 100 * accelerator.process_index
    with LocalSGD(accelerator, model, 2) as local_sgd:
        for number in range(count[accelerator.process_index]):
            accelerator.backward(loss_of(model, rows(1000)[begin + 4 * number :][:4]))
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
    for number in range(5, 8):
        accelerator.backward(model(rows(1000)[begin + 4 * number :][0][:4]).mean())
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], optimizer.state_dict()["state"]


@pytest.mark.parametrize("count", [(3, 3), (3, 0)])
def test_ranks_do_not_drift_apart_when_they_train_together_again(count):
    (first, states), (second, others) = worlds.run(then_together, RANKS, count)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(
        torch.equal(states[place][key], others[place][key]) for place in states for key in states[place]
    )


@pytest.mark.parametrize("cure", ["enter", "load"])
def test_copies_that_an_exception_left_different_are_not_trained(tmp_path, cure):
    first, second = worlds.run(
        after_an_exception, RANKS, cure if cure == "enter" else str(tmp_path / "state")
    )
    assert torch.equal(first, second)


def saved_inside(folder, alone, moment):
    """Whether copies have stepped since their average, or not; the main process alone, or all."""
    accelerator = Accelerator()
    model = accelerator.prepare(make())
    optimizer = accelerator.prepare(optimizer_of(model))
    with LocalSGD(accelerator, model, 2) as local_sgd:
        if moment != "first":
            accelerator.backward(loss_of(model, rows(8)[:4]))
            optimizer.step()
        if moment == "averaged":
            local_sgd.average()
        try:
            if accelerator.is_main_process or not alone:
                accelerator.save_state(folder)
            accelerator.wait_for_everyone()
        except Exception as error:
            return str(error)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("moment", ["first", "stepped", "averaged"])
def test_a_save_inside_is_refused_on_all_ranks(tmp_path, alone, moment):
    for found in worlds.run(saved_inside, RANKS, str(tmp_path / "state"), alone, moment):
        assert "ranks train copies of Sequential inside LocalSGD" in found
        assert "Save after the context" in found
    assert not (tmp_path / "state").exists()


def own_buffers():
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
    model = accelerator.prepare(make())
    with LocalSGD(accelerator, model, 1):
        model(rows(8)[4 * accelerator.process_index :][0][:4])
    return model.module[1].running_mean


def test_buffers_that_ranks_keep_to_themselves_are_not_averaged():
    for rank, found in enumerate(worlds.run(own_buffers, RANKS)):
        model = make()
        model(rows(8)[4 * rank :][0][:4])
        torch.testing.assert_close(found, model[1].running_mean)


def scaled():
    """Only rank 1 has a gradient that is not finite, so only its scale falls."""
    handlers = [GradScalerKwargs(init_scale=1024.0)]
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=handlers)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scales = []
    with LocalSGD(accelerator, model, 2) as local_sgd:
        for number in range(2):
            bad = number == 0 and accelerator.process_index == 1
            accelerator.backward(model(torch.ones(2, 3)).sum() * (float("inf") if bad else 1.0))
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                accelerator.strategy.precision.update_scale()
                scales.append(accelerator.scaler.get_scale())
            local_sgd.step()
    scales.append(accelerator.scaler.get_scale())
    return scales, accelerator.scaler.state_dict()["_growth_tracker"]


def test_under_fp16_the_lowest_scale_is_everybodys():
    assert worlds.run(scaled, RANKS) == [([1024.0, 512.0], 1), ([512.0, 512.0], 1)]


def refused(form):
    handlers = [DistributedDataParallelKwargs(static_graph=form == "static")]
    accelerator = Accelerator(kwargs_handlers=handlers)
    model = make()
    prepared = accelerator.prepare(model)
    try:
        if form == "plain":
            LocalSGD(accelerator, model, 2)
        elif form == "nested":
            with LocalSGD(accelerator, prepared, 2), LocalSGD(accelerator, prepared, 2):
                pass
        elif form == "joined":
            with accelerator.join_uneven_inputs([prepared], even_batches=False):
                LocalSGD(accelerator, prepared, 2)
        elif form == "joins":
            with (
                LocalSGD(accelerator, prepared, 2),
                accelerator.join_uneven_inputs([prepared], even_batches=False),
            ):
                pass
        elif form == "guarded":
            accelerator.guard_steps()
            with LocalSGD(accelerator, prepared, 2):
                pass
        else:
            LocalSGD(accelerator, prepared, 2)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        again = (
            LocalSGD(accelerator, prepared, 2) if form in ("nested", "plain") else contextlib.nullcontext()
        )
        with again:
            return message, prepared.require_backward_grad_sync
    return None


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("static", "IncompatibleOptionsError: .*static_graph=True"),
        (
            "plain",
            r"PrepareError: .*Sequential is not a model that ddp trains. Pass the model that prepare\(\) returned",
        ),
        ("nested", "AccumulationError: .*inside another LocalSGD of the same model"),
        ("joined", r"IncompatibleOptionsError: .*join_uneven_inputs\(\) exclude"),
        ("joins", r"IncompatibleOptionsError: .*join_uneven_inputs\(\) exclude"),
        ("guarded", r"IncompatibleOptionsError: .*cannot be combined with guard_steps\(\)"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused_before_anything_changes(form, message):
    for found, syncs in worlds.run(refused, RANKS, form):
        assert re.match(message, found), found
        assert syncs == (form not in ("nested", "plain")), "a use after it holds gradients back"


def other_strategy(strategy):
    accelerator = Accelerator(strategy=strategy)
    model = nn.Linear(4, 4)
    before = model.weight
    with pytest.raises(ValueError, match=f"the strategy '{strategy}' cannot. Train with .*enabled=False"):
        LocalSGD(accelerator, model, 2)
    with LocalSGD(accelerator, model, 2, enabled=False) as local_sgd:
        local_sgd.step()
    return model.weight is before, local_sgd.num_steps


@pytest.mark.parametrize("strategy", ["fsdp2", "tp"])
def test_strategies_whose_ranks_hold_parts_are_refused_by_name(strategy):
    assert worlds.run(other_strategy, RANKS, strategy) == [(True, 1)] * RANKS


def test_one_process_has_nothing_to_average():
    accelerator = Accelerator()
    model = make()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    plain = make()
    other = optimizer_of(plain)
    local_sgd = LocalSGD(accelerator, model, 2)
    with pytest.raises(RuntimeError, match="outside its context"):
        local_sgd.step()
    with local_sgd:
        for number in range(3):
            batch = rows(64)[4 * number :][:4]
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            loss_of(plain, batch).backward()
            other.step()
            other.zero_grad()
        with pytest.raises(RuntimeError, match="entered twice"), local_sgd:
            pass
    assert not local_sgd.enabled
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize("steps", [0, -1, True, 2.0, None])
def test_the_number_of_updates_is_a_positive_whole_number(steps):
    accelerator = Accelerator()
    with pytest.raises((TypeError, ValueError), match="local_sgd_steps"):
        LocalSGD(accelerator, nn.Linear(2, 2), steps)
