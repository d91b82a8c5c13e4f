"""Objects that are prepared again, copied, or handed from one accelerator to another."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, DataLoaderConfiguration, GradScalerKwargs


def inputs(rows=12):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


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


def test_a_copied_optimizer_stays_with_its_accelerator():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*make())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)  # built on the prepared one, as scripts do
    model, optimizer, scheduler = copy.deepcopy((model, optimizer, scheduler))
    before = model.weight.detach().clone()
    moved = []
    for x in inputs(4).split(1):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        moved.append(not torch.equal(before, model.weight))
        before = model.weight.detach().clone()
    assert moved == [False, True, False, True]
    assert pickle.loads(pickle.dumps(optimizer)).defaults["lr"] == 0.1


def test_a_copied_loader_still_ends_windows():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(make()[0], DataLoader(TensorDataset(inputs(3)), batch_size=1))
    ends = []
    for (x,) in copy.deepcopy(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
        ends.append(accelerator.sync_gradients)
    assert ends == [False, True, True]


@pytest.mark.parametrize("function", [False, True])
def test_a_checkpoint_saved_while_a_loader_skips_can_be_loaded(tmp_path, function):
    from accel_train import skip_first_batches

    def begin():
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration())
        loader = DataLoader(TensorDataset(inputs()), batch_size=2, shuffle=True)
        return accelerator, *accelerator.prepare(*make(), loader)

    accelerator, *_, loader = begin()
    for number, _ in enumerate(loader):
        if number == 1:
            accelerator.save_state(tmp_path / "first")
            break
    accelerator, *_, loader = begin()
    accelerator.load_state(tmp_path / "first")
    if function:
        skipping = accelerator.prepare(skip_first_batches(loader, 2))
    else:
        skipping = accelerator.skip_first_batches(loader, 2)
    assert len(list(skipping)) == 4
    accelerator.save_state(tmp_path / "second")
    expected = [x.tolist() for (x,) in loader]
    accelerator, *_, loader = begin()
    accelerator.load_state(tmp_path / "second")
    assert [x.tolist() for (x,) in loader] == expected


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


def test_a_schedule_of_fixed_length_may_be_overrun_as_before():
    """As accelerate 1.15 does, on one process too."""
    accelerate = pytest.importorskip("accelerate")

    def curve(accelerator):
        model, optimizer = make()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        rates = []
        for x in inputs(7).split(1):
            accelerator.backward(model(x).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates += scheduler.get_last_lr()
        return rates

    assert curve(Accelerator()) == pytest.approx(curve(accelerate.Accelerator(cpu=True)), rel=1e-12)
