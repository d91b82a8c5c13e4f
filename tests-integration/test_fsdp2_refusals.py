"""What FSDP2 cannot train is refused on all ranks, before it divides the model; odd parameters train as with ddp."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
DIM = 8


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, width=DIM):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Scaled(Net):
    """Has single numbers as parameters, in a block and outside, as CLIP has the scale of its logits."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks[1].gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return super().forward(x) * self.scale * self.blocks[1].gain


class Image(nn.Module):
    """Its convolution's weights are stored channels last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.head = nn.Linear(8, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))


class Normed(nn.Module):
    """Its buffers follow the samples of each rank."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.head = nn.Linear(DIM, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.up(x))))


def accelerator_of(strategy="fsdp2", **options):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(**options) if strategy == "fsdp2" else None
    return Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)


def refused(make, **options):
    """The error of `prepare` on this rank; nothing of the model is divided, and it trains on."""
    from torch.distributed.fsdp import FSDPModule

    accelerator = accelerator_of(**options)
    model, *others = make(accelerator.process_index)
    before = list(model.named_parameters())
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the message is compared
        accelerator.prepare(model, *others)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert all(now is then for (_, now), (_, then) in zip(model.named_parameters(), before, strict=True))
    return type(caught.value).__name__, str(caught.value)


# Optimizers


def with_a_copy_s_optimizer(rank):
    model = Net()
    return model, torch.optim.AdamW(copy.deepcopy(model).parameters())


def with_an_optimizer_of_another_model(rank):
    return Net(), torch.optim.SGD(Net(3).parameters(), lr=0.1)


@pytest.mark.parametrize("make", [with_a_copy_s_optimizer, with_an_optimizer_of_another_model])
def test_t45_an_optimizer_of_other_parameters_is_refused(make):
    first, second = worlds.run(refused, 2, make)
    assert first == second
    kind, message = first
    assert kind == "PrepareError"
    assert "and none of them belongs to Net" in message
    assert "would train nothing. Build it from the parameters() of the model that is prepared" in message


def several_calls():
    """Each optimizer is of a model that was prepared before, is prepared in the same call, or comes later."""
    accelerator = accelerator_of()
    first, second, third = Net(), Net(), Net()
    old = torch.optim.SGD(first.parameters(), lr=0.1)
    last = accelerator.prepare(torch.optim.SGD(third.parameters(), lr=0.1))
    prepared = accelerator.prepare(first)
    late = torch.optim.SGD(prepared.parameters(), lr=0.1)
    with torch.no_grad():
        prepared(torch.ones(2, DIM))
    own = torch.optim.SGD(second.parameters(), lr=0.1)
    accelerator.prepare(second, old, late, own)
    accelerator.prepare(third)
    return [
        all(
            hasattr(parameter, "to_local")
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        for optimizer in (old, late, own, last)
    ]


def test_t45_an_optimizer_may_come_before_or_after_its_model():
    assert worlds.run(several_calls, 2) == [[True] * 4] * 2


# Files


def on_meta(rank):
    with torch.device("meta"):
        return (Net(),)


def test_a_checkpoint_that_is_not_there_is_refused_before_anything_is_divided(tmp_path):
    first, second = worlds.run(refused, 2, on_meta, checkpoint=str(tmp_path / "none"))
    assert first == second
    assert first[0] == "CheckpointNotFoundError"


@pytest.mark.parametrize("saved", ["wider", "headless"])
def test_a_checkpoint_of_another_model_is_refused_before_anything_is_divided(tmp_path, saved):
    state = Net(16 if saved == "wider" else DIM).state_dict()
    if saved == "headless":
        state = {name: value for name, value in state.items() if "head" not in name}
    save_file(state, tmp_path / "model.safetensors")
    first, second = worlds.run(refused, 2, on_meta, checkpoint=str(tmp_path))
    assert first == second
    kind, message = first
    assert kind == "StateMismatchError"
    wanted = {
        "wider": "head.weight: (1, 16) instead of (1, 8)",
        "headless": "is not in the checkpoint: head.weight, head.bias",
    }
    assert wanted[saved] in message


def missing_on_rank_1(folder):
    from accel_train import PartialState

    rank = PartialState().process_index
    return refused(on_meta, checkpoint=str(folder / ("none" if rank else "model.safetensors")))


def test_files_that_one_rank_cannot_read_are_an_error_on_all(tmp_path):
    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    (kind, message), (other, _) = worlds.run(missing_on_rank_1, 2, tmp_path)
    assert kind == "PrepareError"
    assert "failed on another rank" in message
    assert "rank 1: CheckpointNotFoundError" in message
    assert other == "CheckpointNotFoundError"


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def with_values(folder):
    kept = Kept()
    logging.getLogger("accel_train").addHandler(kept)
    accelerator_of(checkpoint=folder).prepare(Net())
    return kept.messages


def test_a_checkpoint_that_a_model_with_values_does_not_need_is_told(tmp_path):
    first, _ = worlds.run(with_values, 2, str(tmp_path))
    assert any("is not read for Net, which has values already" in message for message in first)


# Sizes


@pytest.mark.parametrize("size", [3, 4])
def test_groups_of_ranks_that_do_not_fit_are_refused(size):
    message = f"reshard_after_forward={size} .*divided among 2. Give a divisor of 2"
    with pytest.raises(worlds.RankError, match=f"IncompatibleOptionsError.*{message}"):
        worlds.run(refused, 2, on_meta, reshard_after_forward=size)


# What the engine itself would not take


def train(make, strategy, shape, **options):
    torch.manual_seed(0)
    accelerator = accelerator_of(strategy, **options)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    norms = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(*shape, generator=generator)).square().mean())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms, accelerator.get_state_dict(model)


def compare(make, shape, ranks=2, **options):
    wanted, expected = worlds.run(train, ranks, make, "ddp", shape)[0]
    for norms, weights in worlds.run(train, ranks, make, "fsdp2", shape, **options):
        assert norms == pytest.approx(wanted, rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_single_numbers_stay_whole_and_train_as_with_ddp():
    compare(Scaled, (4, DIM))


def test_weights_stored_channels_last_train_as_with_ddp():
    compare(Image, (4, 4, 5, 5))


def state_of_buffers(strategy, folder, loads):
    accelerator = accelerator_of(strategy)
    torch.manual_seed(0)
    model, optimizer = accelerator.prepare(made := Normed(), torch.optim.SGD(made.parameters(), lr=0.1))
    if loads:
        accelerator.load_state(folder)
    else:
        generator = torch.Generator().manual_seed(accelerator.process_index)
        for _ in range(2):
            accelerator.backward(model(torch.randn(8, DIM, generator=generator)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(folder)
    return {name: value.clone() for name, value in accelerator.unwrap_model(model).named_buffers()}


def test_a_state_holds_the_buffers_of_each_rank_as_with_ddp(tmp_path):
    of_ddp = worlds.run(state_of_buffers, 2, "ddp", tmp_path / "ddp", False)
    of_fsdp2 = worlds.run(state_of_buffers, 2, "fsdp2", tmp_path / "fsdp2", False)
    for name, value in of_ddp[0].items():
        torch.testing.assert_close(of_fsdp2[0][name], value, rtol=1e-5, atol=1e-6, msg=name)
    for kind, saved in (("ddp", of_ddp), ("fsdp2", of_fsdp2)):
        assert not torch.equal(saved[0]["norm.running_mean"], saved[1]["norm.running_mean"])
        loaded = worlds.run(state_of_buffers, 2, kind, tmp_path / kind, True)
        for mine, wanted in zip(loaded, saved, strict=True):
            for name, value in wanted.items():
                assert torch.equal(mine[name], value), (kind, name)


@pytest.mark.full
def test_parameters_stay_divided_among_groups_after_forward():
    compare(Net, (4, DIM), ranks=4, reshard_after_forward=2)


def scaled_from(folder):
    accelerator = accelerator_of(checkpoint=folder)
    with torch.device("meta"):
        model = Scaled()
    return accelerator.get_state_dict(accelerator.prepare(model))


def test_single_numbers_are_read_from_files(tmp_path):
    state = Scaled().state_dict()
    save_file(state, tmp_path / "model.safetensors")
    for found in worlds.run(scaled_from, 2, str(tmp_path)):
        for name, value in state.items():
            assert torch.equal(found[name], value), name
