"""What ranks have after they took different numbers of steps, in join_uneven_inputs() and LocalSGD: all have the same.

pytorch#38174 and #42577: torch's own `Join` makes parameters equal, and leaves momentum and schedules apart.
"""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel_train import Accelerator, AveragedWeights, DataLoaderConfiguration, GradScalerKwargs, LocalSGD
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
RANKS, EPOCHS = 2, 3
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05, amsgrad=True),
    "muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.05),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 1, bias=False)).double()


def rows(count):
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def rate_of(step):
    return 0.9**step


def by_hand(kind, counts):
    """One process: a step has the gradients of the ranks that still have data, over the number of all ranks."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    parts = [batches_of(counts, rank) for rank in range(RANKS)]
    for _ in range(EPOCHS):
        for place in range(max(counts)):
            for batches in parts:
                if place < len(batches):
                    (loss_of(model, batches[place]) / RANKS).backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            optimizer.zero_grad()
    weights = [p.detach() for p in model.parameters()]
    return (
        weights,
        [p.detach() for p in average.module.parameters()],
        optimizer.state_dict(),
        schedule.last_epoch,
    )


def batches_of(counts, rank):
    begin = 2 * sum(counts[:rank])
    return list(rows(2 * sum(counts))[begin : begin + 2 * counts[rank]].split(2))


def joined(kind, counts):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    accelerator.scale_scheduler = False
    model = net()
    model, optimizer = accelerator.prepare(model, OPTIMIZERS[kind](model.parameters()))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, rate_of))
    average = AveragedWeights(accelerator, model, decay=0.5)
    for _ in range(EPOCHS):
        with accelerator.join_uneven_inputs([model]):
            for x in batches_of(counts, accelerator.process_index):
                accelerator.backward(loss_of(model, x))
                optimizer.step()
                schedule.step()
                average.update()
                optimizer.zero_grad()
    plain = accelerator.unwrap_model(model)
    weights = [p.detach().clone() for p in plain.parameters()]
    with average.applied():
        means = [p.detach().clone() for p in plain.parameters()]
    return weights, means, optimizer.state_dict(), schedule.scheduler.last_epoch


def registered(counts):
    """A schedule and torch's average that are registered, and not prepared."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model = net()
    model, optimizer = accelerator.prepare(model, OPTIMIZERS["adam"](model.parameters()))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, rate_of)
    plain = accelerator.unwrap_model(model)
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    accelerator.register_for_checkpointing(schedule, average)
    for _ in range(EPOCHS):
        with accelerator.join_uneven_inputs([model]):
            for x in batches_of(counts, accelerator.process_index):
                accelerator.backward(loss_of(model, x))
                optimizer.step()
                schedule.step()
                average.update_parameters(plain)
                optimizer.zero_grad()
    weights, means = ([p.detach().clone() for p in each.parameters()] for each in (plain, average.module))
    return weights, means, optimizer.state_dict(), schedule.last_epoch


@pytest.mark.parametrize("counts", [(3, 2), (2, 5), (4, 0), (0, 3), (3, 3)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_after_a_join_all_ranks_have_what_the_longest_one_has(kind, counts):
    compare(worlds.run(joined, RANKS, kind, counts), *by_hand(kind, counts))


def test_after_a_join_registered_schedules_and_averages_are_equal():
    compare(worlds.run(registered, RANKS, (2, 4)), *by_hand("adam", (2, 4)))


def compare(answers, weights, means, states, steps):
    for found in answers:
        for mine, right in ((found[0], weights), (found[1], means)):
            for one, other in zip(mine, right, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        assert found[3] == steps
        assert found[2]["param_groups"][0]["lr"] == pytest.approx(states["param_groups"][0]["lr"])
        assert found[2]["state"].keys() == states["state"].keys()
        for place, entry in states["state"].items():
            for key, value in entry.items():
                torch.testing.assert_close(found[2]["state"][place][key], value, rtol=1e-9, atol=1e-12)


def scaled(counts):
    """Under fp16 each step without an overflow counts towards the next scale."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        dataloader_config=DataLoaderConfiguration(even_batches=False),
        kwargs_handlers=[GradScalerKwargs(init_scale=4.0)],
    )
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    with accelerator.join_uneven_inputs([model]):
        for x in batches_of(counts, accelerator.process_index):
            accelerator.backward(loss_of(model, x.float()))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.scaler.state_dict()["_growth_tracker"]


def test_after_a_join_the_loss_scale_is_that_of_the_longest_rank():
    assert worlds.run(scaled, RANKS, (4, 2)) == [4, 4]


def left_alone(counts):
    """LocalSGD, whose ranks may take different numbers of steps."""
    accelerator = Accelerator(cpu=True)
    accelerator.scale_scheduler = False
    model = net()
    model, optimizer = accelerator.prepare(model, OPTIMIZERS["adam"](model.parameters()))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, rate_of))
    average = AveragedWeights(accelerator, model, decay=None)
    with LocalSGD(accelerator, model, 2) as local_sgd:
        for x in batches_of(counts, accelerator.process_index):
            accelerator.backward(loss_of(model, x))
            optimizer.step()
            schedule.step()
            average.update()
            optimizer.zero_grad()
            local_sgd.step()
    with average.applied():
        means = [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]
    found = means, average.count, schedule.scheduler.last_epoch
    x = rows(2)
    accelerator.backward(loss_of(model, x))  # together again
    optimizer.step()
    schedule.step()
    average.update()
    return *found, optimizer.state_dict()["state"], optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("counts", [(4, 4), (5, 2)])
def test_after_local_steps_all_ranks_have_one_average_and_one_schedule(counts):
    first, second = worlds.run(left_alone, RANKS, counts)
    assert all(torch.equal(*pair) for pair in zip(first[0], second[0], strict=True))
    assert first[1:3] == second[1:3]
    assert first[2] == counts[0], "the schedule of rank 0, as its optimizer's states"
    assert all(
        torch.equal(first[3][place][key], second[3][place][key])
        for place in first[3]
        for key in first[3][place]
    )
    assert first[4] == second[4]


def locally(every):
    """Averages of copies whose mean is taken after each step are averages of the mean."""
    accelerator = Accelerator(cpu=True)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    average = AveragedWeights(accelerator, model, decay=0.5)
    with LocalSGD(accelerator, model, every) as local_sgd:
        for x in batches_of((6, 6), accelerator.process_index):
            accelerator.backward(loss_of(model, x))
            optimizer.step()
            average.update()
            optimizer.zero_grad()
            local_sgd.step()
    with average.applied():
        return [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("every", [1, 2, 4])
def test_averages_of_local_copies_are_those_of_their_mean(every):
    """Averaging is linear, so the mean over ranks may be taken before or after."""
    models = [net() for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    mean = net()
    average = AveragedModel(mean, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for place in range(6):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss_of(model, batches_of((6, 6), rank)[place]).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for target, *copies in zip(mean.parameters(), *(m.parameters() for m in models), strict=True):
                target.copy_(torch.stack(copies).mean(0))
                if (place + 1) % every == 0:
                    for copied in copies:
                        copied.copy_(target)
        average.update_parameters(mean)
    for found in worlds.run(locally, RANKS, every):
        for one, other in zip(found, average.module.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-12)
