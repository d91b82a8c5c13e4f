"""Averages of weights, against torch's `AveragedModel` on one process, and resumed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    model[4].weight = nn.Parameter(torch.randn(4, 6))
    model[0].bias.requires_grad_(False)
    return model.double()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(count)]


def wanted(count, decay):
    model = build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2)
    averaged = AveragedModel(model, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
    for x in batches(count):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    return averaged.module.state_dict(), model.state_dict()


def loss_of(output, target):
    return output.square().mean()


PIPELINES = {
    "pp": ({}, {}),
    "gpipe": ({}, {"schedule": "gpipe"}),
    "interleaved": ({}, {"schedule": "interleaved_1f1b", "cuts": ["1", "2", "4"]}),
    "replicas": ({"dp_replicate_size": 2}, {}),
    "sharded": ({"dp_shard_size": 2}, {}),
}


def prepared(kind, decay):
    from accel_train import Accelerator, AveragedWeights, FullyShardedDataParallelPlugin

    model = build()
    options = {"gradient_accumulation_steps": 2}
    if kind == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        from accel_train import TorchTensorParallelPlugin

        accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2), **options)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    elif kind in PIPELINES:
        from accel_train import ParallelismConfig, PipelineParallelConfig

        degrees, handler = PIPELINES[kind]
        handler = PipelineParallelConfig(loss_function=loss_of, **handler)
        parallelism = ParallelismConfig(pp_size=2, **degrees, pp_handler=handler)
        accelerator = Accelerator(cpu=True, parallelism_config=parallelism, **options)
    else:
        sharding = {"dp_replicate_size": 2} if kind == "hsdp" else {}
        plugin = FullyShardedDataParallelPlugin(**sharding) if kind in ("fsdp2", "hsdp") else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer, AveragedWeights(accelerator, model, decay)


def train(accelerator, model, optimizer, average, chosen):
    for x in chosen:
        for _ in range(2):  # a window of two, of which the first half is no update
            with accelerator.accumulate(model):
                inside = accelerator.strategy.name == "pp"
                accelerator.backward(model(x, target=x).loss if inside else loss_of(model(x), x))
                optimizer.step()
                average.update()
                optimizer.zero_grad()


def averages(kind, decay):
    accelerator, model, optimizer, average = prepared(kind, decay)
    x = batches(5)
    train(accelerator, model, optimizer, average, x[:3])
    if accelerator.strategy.name != "pp":  # whose model takes no call without labels outside of evaluation
        model(x[0])  # leaves the outermost unit gathered
    with average.applied():
        with torch.no_grad():
            model(x[0])
        accelerator.get_state_dict(model)
    train(accelerator, model, optimizer, average, x[3:])
    trained = accelerator.get_state_dict(model)
    with average.applied():
        found = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        with torch.no_grad():
            output = model(x[0])
        with pytest.raises(RuntimeError, match="applied"):
            average.update()
    after = accelerator.get_state_dict(model)
    assert average.count == 5
    assert all(after[name].equal(value) for name, value in trained.items())
    return found, after, output


@pytest.mark.parametrize(
    ("kind", "ranks", "decay"),
    [
        ("single", 1, 0.9),
        ("ddp", 2, None),
        ("fsdp2", 2, 0.9),
        pytest.param("hsdp", 4, None, marks=pytest.mark.full),
        ("tp", 2, 0.9),
        ("pp", 2, 0.9),
        pytest.param("gpipe", 2, None, marks=pytest.mark.full),
        pytest.param("interleaved", 2, 0.9, marks=pytest.mark.full),
        pytest.param("replicas", 4, 0.9, marks=pytest.mark.full),
        pytest.param("sharded", 4, 0.9, marks=pytest.mark.full),
    ],
)
def test_averages_are_those_of_torch_on_one_process(kind, ranks, decay):
    right, trained = wanted(5, decay)
    alone = build()
    alone.load_state_dict(right)
    for found, after, output in worlds.run(averages, ranks, kind, decay):
        for name, value in right.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
            torch.testing.assert_close(after[name], trained[name], rtol=0, atol=1e-9)
        torch.testing.assert_close(output, alone(batches(1)[0]).detach(), rtol=0, atol=1e-9)


def first_half(kind, folder):
    accelerator, model, optimizer, average = prepared(kind, 0.9)
    train(accelerator, model, optimizer, average, batches(5)[:2])
    accelerator.save_state(folder)
    with average.applied():
        accelerator.save_model(model, folder.with_name("averaged"))
        with pytest.raises(Exception, match="applied"):
            accelerator.save_state(folder / "never")


def second_half(kind, folder):
    accelerator, model, optimizer, average = prepared(kind, 0.9)
    accelerator.load_state(folder)
    train(accelerator, model, optimizer, average, batches(5)[2:])
    with average.applied():
        state = accelerator.get_state_dict(model)  # of one process the model's own tensors
        return average.count, {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize(
    ("saved", "saving", "resumed", "ranks"),
    [
        pytest.param("fsdp2", 2, "fsdp2", 2, marks=pytest.mark.full),
        ("fsdp2", 2, "fsdp2", 3),
        pytest.param("ddp", 2, "fsdp2", 2, marks=pytest.mark.full),
        ("fsdp2", 2, "single", 1),
        ("pp", 2, "single", 1),
        ("single", 1, "pp", 2),
        pytest.param("pp", 2, "interleaved", 2, marks=pytest.mark.full),
        pytest.param("sharded", 4, "fsdp2", 2, marks=pytest.mark.full),
        pytest.param("fsdp2", 2, "sharded", 4, marks=pytest.mark.full),
        pytest.param("replicas", 4, "pp", 2, marks=pytest.mark.full),
    ],
)
def test_a_resumed_average_goes_on(saved, saving, resumed, ranks, tmp_path):
    right, _ = wanted(5, 0.9)
    worlds.run(first_half, saving, saved, tmp_path / "state")
    half, _ = wanted(2, 0.9)
    for name, value in load_file(tmp_path / "averaged" / "model.safetensors").items():
        torch.testing.assert_close(value, half[name], rtol=0, atol=1e-9)
    for count, found in worlds.run(second_half, ranks, resumed, tmp_path / "state"):
        assert count == 5
        for name, value in right.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)


class EveryKind(nn.Module):
    """Parameters of every kind, of which one appears twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.shared = nn.Linear(4, 4, dtype=torch.float64)
        self.shared.weight = self.linear.weight
        self.frozen = nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=False)
        self.wave = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.codes = nn.Parameter(torch.arange(5, dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 4, dtype=torch.float64))

    def forward(self, x):
        return self.shared(self.linear(x)) * self.scalar + (self.wave * x).abs() + self.empty.sum()


def every_kind(decay, folder):
    from accel_train import Accelerator, AveragedWeights

    accelerator, right = Accelerator(cpu=True), EveryKind()
    trained = [p for p in right.parameters() if p.requires_grad]
    plain = torch.optim.SGD(trained, lr=0.1)
    means = {name: p.detach().clone() for name, p in right.named_parameters()}
    model = EveryKind()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    average = AveragedWeights(accelerator, model, decay)
    x = torch.ones(2, 4, dtype=torch.float64)
    for count in range(3):
        accelerator.backward(model(x).square().mean())
        right(x).square().mean().backward()
        for each in (optimizer, plain):
            each.step()
        accelerator.unwrap_model(model).codes.data += 1  # quantised anew
        right.codes.data += 1
        average.update()
        weight = 1.0 if count == 0 else 1 / (count + 1) if decay is None else 1 - decay
        for name, p in right.named_parameters():
            averaged = p.is_floating_point() or p.is_complex()
            means[name] = means[name] * (1 - weight) + p.detach() * weight if averaged else p.detach().clone()
        for each in (optimizer, plain):
            each.zero_grad()
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    with average.applied():
        found = dict(accelerator.unwrap_model(model).named_parameters())
        assert found.keys() == means.keys()
        for name, value in means.items():
            torch.testing.assert_close(found[name].detach(), value)


@pytest.mark.parametrize("decay", [0.5, None])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_of_every_kind(tmp_path, ranks, decay):
    """Integers have no mean: they are taken as they are."""
    worlds.run(every_kind, ranks, decay, str(tmp_path / "state"))


def test_an_average_waits_with_the_optimizer_of_its_model():
    from accel_train import Accelerator, AveragedWeights

    accelerator = Accelerator(cpu=True)
    often, seldom, plain = (nn.Linear(4, 1).double() for _ in range(3))
    plain.load_state_dict(seldom.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (often, seldom, plain)]
    right = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    often, seldom, *prepared = accelerator.prepare(often, seldom, *optimizers[:2])
    average = AveragedWeights(accelerator, seldom, decay=0.5)
    for step, x in enumerate(batches(7)):
        with accelerator.accumulate(often):
            accelerator.backward(often(x).square().mean())
        if step % 3 == 0:
            with accelerator.accumulate(seldom):
                accelerator.backward(seldom(x).square().mean())
            plain(x).square().mean().backward()
            optimizers[2].step()
            optimizers[2].zero_grad()
            right.update_parameters(plain)
            assert accelerator.gradients_complete(seldom)  # its optimizer is about to step
        for optimizer in prepared:  # after both blocks, in every micro-batch
            optimizer.step()
            optimizer.zero_grad()
        average.update()
    assert average.count == 3
    with average.applied():
        assert torch.equal(seldom.weight, right.module.weight)


def test_a_weight_beyond_0_and_1_is_refused():
    from accel_train import Accelerator, AveragedWeights
    from accel_train.errors import OptionError

    accelerator = Accelerator(cpu=True)
    with pytest.raises(OptionError, match="from 0 to 1"):
        AveragedWeights(accelerator, accelerator.prepare(nn.Linear(2, 2)), decay=1.5)


def of_other_parameters(kind, when):
    from accel_train import (
        Accelerator,
        AveragedWeights,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        PrepareError,
    )

    plugin = FullyShardedDataParallelPlugin() if kind == "fsdp2" else None
    parallelism = ParallelismConfig(pp_size=2) if kind == "pp" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=parallelism)
    model = build()
    x = batches(1)[0]
    if when == "before prepare":
        average = AveragedWeights(accelerator, model)
        model = accelerator.prepare(model)
    else:
        model = accelerator.prepare(model)
        model(x)  # leaves the outermost unit gathered
        average = AveragedWeights(accelerator, model)
        average.update()
        accelerator.unwrap_model(model)[4] = nn.Linear(6, 4).double()
    try:
        average.update()
        with average.applied():
            pass
    except PrepareError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "when"), [("fsdp2", "before prepare"), ("pp", "before prepare"), ("ddp", "replaced")]
)
def test_parameters_that_the_model_has_since_are_named(kind, when):
    for message in worlds.run(of_other_parameters, 2, kind, when):
        assert "were changed after AveragedWeights was created" in message


def test_ddp_keeps_parameters_so_averages_may_be_made_before():
    assert worlds.run(of_other_parameters, 2, "ddp", "before prepare") == ["nothing"] * 2


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    model[1].weight = model[0].weight
    return model


def tied_averages(folder, saving):
    """The averages of a model that shares a weight inside of a stage, on two ranks that save and one that loads."""
    from accel_train import Accelerator, AveragedWeights, ParallelismConfig, PipelineParallelConfig

    handler = PipelineParallelConfig(cuts=["2"], schedule="gpipe")
    parallelism = ParallelismConfig(pp_size=2, pp_handler=handler) if saving else None
    accelerator, model = Accelerator(cpu=True, parallelism_config=parallelism), tied()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    average = AveragedWeights(accelerator, model, 0.9)
    if saving:
        for x in batches(3):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            average.update()
            optimizer.zero_grad()
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    with average.applied():
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def test_a_weight_that_a_stage_has_twice(tmp_path):
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x in batches(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    saved = worlds.run(tied_averages, 2, tmp_path / "state", True)
    loaded = worlds.run(tied_averages, 1, tmp_path / "state", False)
    for found in saved + loaded:
        torch.testing.assert_close(found, dict(averaged.module.state_dict()), rtol=0, atol=1e-9)
