"""Objects that are prepared again, copied, or handed from one accelerator to another."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, GradScalerKwargs


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
