"""The facade on an accelerator, and the same on the CPU: where things are, and that a checkpoint restores them."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator


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


def parts():
    model = Noisy()
    data = TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)), torch.arange(24.0))
    collate = lambda rows: {"x": torch.stack([x for x, _ in rows]), "y": [torch.stack([y for _, y in rows])]}  # noqa: E731
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, scheduler, DataLoader(data, batch_size=4, collate_fn=collate)


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
