"""States in host memory between phases of training, against the same training that keeps them on the device.

What moves is seen on simulated devices; on the CPU the same calls are refused, and nothing moves.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from accel_train import (
    Accelerator,
    AveragedWeights,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    OffloadedStatesError,
    ParallelismConfig,
)
from accel_train.offload.refusal import is_refused
from testkit import simulated_device, worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
WIDTH = 256
ON_DEVICES = pytest.mark.simulated


class Tied(nn.Module):
    """Its head is its embedding; a running average is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(ids))
        if self.training:
            self.mean.lerp_(hidden.detach().float().mean(0), 0.1)
        return self.head(self.norm(hidden))


def accelerator_for(kind: str, strategy: str, **options: Any) -> Accelerator:
    if kind != "cpu":
        simulated_device.use(f"{kind}:4")
    plugin = None
    if strategy in ("fsdp2", "hsdp", "offload"):
        plugin = FullyShardedDataParallelPlugin(
            cpu_offload=strategy == "offload",
            dp_replicate_size=2 if strategy == "hsdp" else None,
            auto_wrap_policy="size_based_wrap",
            min_num_params=1000,
        )
    degrees = ParallelismConfig(tp_size=2) if strategy == "tp" else None
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=degrees, **options)
    assert accelerator.device.type == kind
    return accelerator


def prepared(accelerator: Accelerator, strategy: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Tied()
    if strategy == "tp":
        plan = {"blocks.0": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def loss_of(accelerator: Accelerator, model: nn.Module, number: int) -> Tensor:
    # Ranks of one tensor-parallel group read the same.
    seed = 100 * number + accelerator.strategy.batch.index
    ids = torch.randint(64, (8,), generator=torch.Generator().manual_seed(seed)).to(accelerator.device)
    return nn.functional.cross_entropy(model(ids), ids.roll(1))


def allocated() -> int:
    return torch.accelerator.memory_allocated() if torch.accelerator.is_available() else 0


class Sleeps:
    """Moves all states to host memory and back; records which part of the device's memory stays in use."""

    def __init__(self, accelerator: Accelerator, sleeps: bool) -> None:
        self.accelerator = accelerator
        self.sleeps = sleeps
        self.shares: list[float] = []
        self.freed: list[int] = []

    def __call__(self) -> None:
        if self.sleeps:
            before = allocated()
            report = self.accelerator.offload_states()
            self.shares.append(allocated() / max(before, 1))
            self.freed.append(report.total)
            assert not report.kept
            self.accelerator.reload_states()


def trained(kind: str, strategy: str, sleeps: bool, **options: Any) -> dict[str, Any]:
    """Losses, norms and weights of a training that sleeps at every kind of moment."""
    accelerator = accelerator_for(kind, strategy, gradient_accumulation_steps=2, **options)
    model, optimizer = prepared(accelerator, strategy)
    identities = [id(p) for p in model.parameters()]
    sleep = Sleeps(accelerator, sleeps)
    sleep()  # nothing has run
    losses, norms = [], []
    for number in range(6):
        with accelerator.accumulate(model):
            loss = loss_of(accelerator, model, number)
            accelerator.backward(loss)
            losses.append(loss.detach().cpu())
            del loss
            sleep()  # inside a window, or with complete gradients
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).cpu())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            sleep()  # without gradients
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(accelerator, model, number).cpu())
            model.train()
            sleep()  # after an evaluation
    plain = accelerator.unwrap_model(model)
    assert [id(p) for p in model.parameters()] == identities
    assert plain.head.weight is plain.embed.weight
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    return {
        "losses": torch.stack(losses),
        "norms": torch.stack(norms),
        "weights": weights,
        "shares": sleep.shares,
        "freed": sleep.freed,
    }


def assert_equal(found: Any, expected: Any) -> None:
    for here, there in zip(found, expected, strict=True):
        for part in ("losses", "norms"):  # fp16 begins with scales that overflow
            torch.testing.assert_close(here[part], there[part], rtol=0, atol=0, equal_nan=True)
        for name, value in there["weights"].items():
            assert torch.equal(here["weights"][name], value), name


CELLS = [
    ("single", 1, {}),
    ("ddp", 2, {}),
    pytest.param("ddp", 4, {}, marks=pytest.mark.full),
    ("fsdp2", 2, {}),
    pytest.param("fsdp2", 4, {}, marks=pytest.mark.full),
    pytest.param("hsdp", 4, {}, marks=pytest.mark.full),
    ("tp", 2, {}),
    ("offload", 2, {}),
]
PRECISE = [
    ("single", 1, {"mixed_precision": "fp16"}),
    ("ddp", 2, {"mixed_precision": "fp16"}),
    ("fsdp2", 2, {"mixed_precision": "bf16"}),
]


@pytest.mark.wide(but=["single-1-fp16", "ddp-2-fp16", "fsdp2-2-bf16"])
@ON_DEVICES
@pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    [*CELLS, *PRECISE],
    ids=lambda value: value.get("mixed_precision", "no") if isinstance(value, dict) else None,
)
def test_a_training_that_sleeps_has_the_same_bits_and_frees_the_device(strategy, ranks, options):
    environ = {"ACCELERATE_USE_CPU": "false"}
    expected = worlds.run(trained, ranks, "npu", strategy, False, environ=environ, **options)
    found = worlds.run(trained, ranks, "npu", strategy, True, environ=environ, **options)
    assert_equal(found, expected)
    for rank in found:
        if strategy == "offload":
            continue  # parameters, gradients and states are in host memory
        assert max(rank["shares"]) <= 0.01, rank["shares"]
        assert min(rank["freed"]) > 0


@pytest.mark.parametrize(("strategy", "ranks", "options"), CELLS)
def test_on_the_cpu_nothing_moves(strategy, ranks, options):
    expected = worlds.run(trained, ranks, "cpu", strategy, False, **options)
    found = worlds.run(trained, ranks, "cpu", strategy, True, **options)
    assert_equal(found, expected)
    assert all(not any(rank["freed"]) for rank in found)


@contextmanager
def refusing() -> Iterator[Any]:
    with pytest.raises((OffloadedStatesError, RuntimeError), match=r"reload_states\(\)") as caught:
        yield caught


def refused(kind: str, strategy: str) -> int:
    """What may not happen meanwhile, and that it works afterwards."""
    accelerator = accelerator_for(kind, strategy)
    model, optimizer = prepared(accelerator, strategy)
    accelerator.backward(loss_of(accelerator, model, 0))
    early = loss_of(accelerator, model, 1)
    plain = accelerator.unwrap_model(model)
    accelerator.offload_states()
    parameter = next(model.parameters())
    calls: list[Callable[[], Any]] = [
        lambda: loss_of(accelerator, model, 1),
        lambda: plain.blocks(torch.ones(1, WIDTH, device=accelerator.device)),
        lambda: accelerator.backward(early),
        lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
        lambda: optimizer.step(),
        lambda: optimizer.optimizer.step(),
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: accelerator.save_state("unused"),
        lambda: accelerator.load_state("unused"),
        lambda: accelerator.get_state_dict(model),
        lambda: accelerator.save_model(model, "unused"),
        lambda: accelerator.whole_parameters(model),
        lambda: accelerator.free_memory(),
        lambda: model.state_dict(),
        lambda: parameter + 1,
        lambda: parameter.grad.abs(),
        lambda: torch.save(parameter, io.BytesIO()),
    ]
    for call in calls:
        with refusing():
            call()
    assert parameter.shape.numel() > 0
    assert "reload_states" in repr(parameter)
    accelerator.reload_states()
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(loss_of(accelerator, model, 2))
    return len(calls)


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2), ("tp", 2)])
def test_what_needs_the_states_is_refused_on_the_cpu(strategy, ranks):
    assert all(worlds.run(refused, ranks, "cpu", strategy))


@ON_DEVICES
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp2", 2), ("tp", 2)])
def test_what_needs_the_states_is_refused_on_devices(strategy, ranks):
    assert all(worlds.run(refused, ranks, "npu", strategy, environ={"ACCELERATE_USE_CPU": "false"}))


def hidden_buckets(options: dict[str, Any]) -> list[float]:
    handler = DistributedDataParallelKwargs(**options)
    accelerator = accelerator_for("npu", "ddp", kwargs_handlers=[handler])
    model, optimizer = prepared(accelerator, "ddp")
    sleep = Sleeps(accelerator, True)
    for number in range(3):
        sleep()
        loss_of(accelerator, model, number)
        sleep()  # ddp has formed its buckets anew in the second forward
        accelerator.backward(loss_of(accelerator, model, number))
        optimizer.step()
        optimizer.zero_grad()
    return sleep.shares


@ON_DEVICES
@pytest.mark.parametrize(
    "options",
    [{"gradient_as_bucket_view": False}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=str,
)
def test_buckets_are_found(options):
    for shares in worlds.run(hidden_buckets, 2, options, environ={"ACCELERATE_USE_CPU": "false"}):
        assert max(shares) <= 0.01


def compressed(sleeps: bool) -> Tensor:
    """On the CPU: torch's hook is not ordered with its own frees of memory, which the simulated device refuses."""
    handler = DistributedDataParallelKwargs(
        comm_hook="power_sgd", comm_state_option={"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
    )
    accelerator = accelerator_for("cpu", "ddp", kwargs_handlers=[handler])
    model, optimizer = prepared(accelerator, "ddp")
    for number in range(5):
        accelerator.backward(loss_of(accelerator, model, number))
        optimizer.step()
        optimizer.zero_grad()
        if sleeps:
            errors = accelerator.strategy.power_sgd.tensors(model)
            with accelerator.offloaded_states(include="gradients"):
                assert all(map(is_refused, errors))
            assert not any(map(is_refused, errors))
    assert not sleeps or errors
    return accelerator.unwrap_model(model).blocks[0].weight.detach()


def test_errors_of_compressed_gradients_move_as_well():
    expected = worlds.run(compressed, 2, False)
    assert all(map(torch.equal, worlds.run(compressed, 2, True), expected))


def averaged(strategy: str, sleeps: bool) -> tuple[dict[str, Tensor], list[float]]:
    accelerator = accelerator_for("npu", strategy)
    model, optimizer = prepared(accelerator, strategy)
    average = AveragedWeights(accelerator, model, decay=0.5)
    sleep = Sleeps(accelerator, sleeps)
    for number in range(3):
        accelerator.backward(loss_of(accelerator, model, number))
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        sleep()
    if sleeps:
        accelerator.offload_states()
        with pytest.raises(OffloadedStatesError):
            average.update()
        accelerator.reload_states()
    with average.applied():
        return {k: v.cpu() for k, v in accelerator.get_state_dict(model).items()}, sleep.shares


@pytest.mark.wide(but=["ddp"])
@ON_DEVICES
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_averages_of_weights_move_as_well(strategy):
    environ = {"ACCELERATE_USE_CPU": "false"}
    expected = worlds.run(averaged, 2, strategy, False, environ=environ)
    for (found, shares), (weights, _) in zip(
        worlds.run(averaged, 2, strategy, True, environ=environ), expected, strict=True
    ):
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        assert max(shares) <= 0.01


def one_rank_sleeps(strategy: str) -> float:
    """A rank that offloads for itself, and is back before the next collective."""
    accelerator = accelerator_for("cpu", strategy)
    model, optimizer = prepared(accelerator, strategy)
    for number in range(2):
        accelerator.backward(loss_of(accelerator, model, number))
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process:
            with accelerator.offloaded_states():
                pass
    return loss_of(accelerator, model, 3).item()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_no_rank_waits_for_another(strategy):
    assert len(worlds.run(one_rank_sleeps, 2, strategy)) == 2


def out_of_memory() -> tuple[int, int, bool]:
    """Bytes in use after a reload that had no place, and whether training goes on afterwards."""
    accelerator = accelerator_for("npu", "single")
    model, optimizer = prepared(accelerator, "single")
    accelerator.backward(loss_of(accelerator, model, 0))
    optimizer.step()
    before = model.blocks[0].weight.detach().cpu()
    report = accelerator.offload_states()
    asleep = allocated()
    torch.npu.set_capacity(report.total // 2, 0)
    with pytest.raises(OffloadedStatesError, match="still in host memory"):
        accelerator.reload_states()
    left = allocated() - asleep
    with pytest.raises(OffloadedStatesError):
        optimizer.step()
    torch.npu.set_capacity(1 << 30, 0)
    accelerator.reload_states()
    same = torch.equal(model.blocks[0].weight.detach().cpu(), before)
    optimizer.step()
    return report.total, left, same


@ON_DEVICES
def test_a_device_without_room_leaves_the_states_in_host_memory():
    [(total, left, same)] = worlds.run(out_of_memory, 1, environ={"ACCELERATE_USE_CPU": "false"})
    assert total > 0
    assert left <= total // 2  # objects before the one that had no room are back
    assert same
