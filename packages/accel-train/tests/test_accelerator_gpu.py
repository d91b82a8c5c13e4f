"""The facade on an accelerator, and the same on the CPU: where things are, and that a checkpoint restores them."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, DataLoaderConfiguration


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def cpu(request, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    return request.param == "cpu"


class Noisy(nn.Module):
    """Draws random numbers on its device, and keeps a count there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))

    def forward(self, inputs):
        return self.layers(inputs["x"]).squeeze(1)


def parts(workers=0):
    model = Noisy()
    data = TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)), torch.arange(24.0))
    collate = lambda rows: {"x": torch.stack([x for x, _ in rows]), "y": [torch.stack([y for _, y in rows])]}  # noqa: E731
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(
        data,
        batch_size=4,
        shuffle=True,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=workers > 0,
        multiprocessing_context="fork" if workers else None,
    )
    return model, optimizer, scheduler, loader


def step(accelerator, model, optimizer, scheduler, batch):
    loss = (model(batch) - batch["y"][0]).square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return float(loss.detach())


def test_everything_is_on_the_device(cpu):
    accelerator = Accelerator(cpu=cpu)
    device = accelerator.device
    kind = "cpu" if cpu else torch.accelerator.current_accelerator().type
    assert device.type == kind
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())
    batch = next(iter(loader))
    assert {batch["x"].device, batch["y"][0].device} == {device}
    step(accelerator, model, optimizer, scheduler, batch)
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {device}
    moments = [value for each in optimizer.state.values() for name, value in each.items() if name != "step"]
    assert {value.device for value in moments} == {device}
    gathered = accelerator.gather_for_metrics(batch)
    assert gathered["x"].device == device
    assert accelerator.reduce(torch.ones(2, device=device)).device == device


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_as_if_it_had_not_been_interrupted(cpu, precision, asynchronous, tmp_path):
    def begin():
        accelerator = Accelerator(cpu=cpu, mixed_precision=precision)
        return accelerator, *accelerator.prepare(*parts())

    accelerator, model, optimizer, scheduler, loader = begin()
    losses = []
    for number, batch in enumerate(loader):
        losses.append(step(accelerator, model, optimizer, scheduler, batch))
        if number == 2:
            saved = accelerator.save_state(tmp_path / "state", asynchronous=asynchronous)
    if asynchronous:
        saved.result()
    weights = [value.clone() for value in model.state_dict().values()]
    accelerator.free_memory()

    accelerator, model, optimizer, scheduler, loader = begin()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    torch.rand(5, device=accelerator.device)  # so that random states differ
    accelerator.load_state(tmp_path / "state")
    again = [
        step(accelerator, model, optimizer, scheduler, batch)
        for batch in accelerator.skip_first_batches(loader, 3)
    ]
    assert again == losses[3:]
    for mine, right in zip(model.state_dict().values(), weights, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("adam", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_a_run_with_workers_goes_on_inside_its_second_epoch(cpu, adam, tmp_path):
    if cpu and "capturable" in adam:
        pytest.skip("capturable is for accelerators")

    def begin():
        torch.manual_seed(3)
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=cpu, dataloader_config=config)
        model, _, _, loader = parts(workers=2)
        model.to(accelerator.device)  # a capturable optimizer is made for parameters on the device
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **adam)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)

    accelerator, model, optimizer, scheduler, loader = begin()
    losses = []
    for epoch in range(2):
        for number, batch in enumerate(loader):
            losses.append(step(accelerator, model, optimizer, scheduler, batch))
            if (epoch, number) == (1, 2):
                accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator, model, optimizer, scheduler, loader = begin()
    accelerator.load_state(tmp_path / "state")
    assert [step(accelerator, model, optimizer, scheduler, batch) for batch in loader] == losses[-3:]


def test_layers_that_were_added_to_a_prepared_model_come_to_the_device(cpu):
    accelerator = Accelerator(cpu=cpu)
    model = accelerator.prepare(nn.Sequential(nn.Linear(8, 8)))
    plain = accelerator.unwrap_model(model)
    plain.append(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(plain, optimizer)
    accelerator.backward(model(torch.ones(1, 8, device=accelerator.device)).sum())
    before = plain[1].weight.clone()
    optimizer.step()
    assert not torch.equal(plain[1].weight, before)


@pytest.mark.gpu
def test_a_batch_is_freed_when_the_loop_lets_go_of_it(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    data = torch.randn(64, 1024, 64)
    loader = Accelerator().prepare(DataLoader(data, batch_size=8, num_workers=1, pin_memory=True))
    list(loader)
    gc.collect()
    gc.disable()
    try:
        before, most = torch.accelerator.memory_allocated(), 0
        for batch in loader:
            most = max(most, torch.accelerator.memory_allocated() - before)
            del batch
        assert 0 < most <= 3 * data[:8].nbytes  # this one, the one before it, and the next on its way
    finally:
        gc.enable()
