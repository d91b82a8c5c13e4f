"""Models divided into stages of a pipeline train as on one process, which computes all samples in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from testkit import worlds

FEATURES, ROWS, STEPS = 6, 8, 3


def chain(layers: int = 8) -> nn.Sequential:
    """Layers that differ in shape and in what they compute."""
    parts: list[nn.Module] = []
    for index in range(layers):
        parts.append(
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh() if index % 2 else nn.LayerNorm(FEATURES))
        )
    torch.manual_seed(0)
    model = nn.Sequential(*parts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return model.double()


def batches(replicas: int, steps: int = STEPS, windows: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    count = steps * windows * replicas * ROWS
    return torch.randn(count, FEATURES, dtype=torch.float64), torch.randn(
        count, FEATURES, dtype=torch.float64
    )


def one_process(replicas: int, windows: int = 1) -> dict:
    """The oracle: plain PyTorch, one batch of all ranks' samples for each step."""
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs, targets = batches(replicas, windows=windows)
    losses, norms = [], []
    for x, y in zip(inputs.chunk(STEPS), targets.chunk(STEPS), strict=True):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    with torch.no_grad():
        last = model(inputs[:ROWS])
    return {"losses": losses, "norms": norms, "weights": model.state_dict(), "output": last}


def train(degrees: dict, handler: dict, windows: int = 1, inside: bool = False, tp: bool = False) -> dict:
    """The same with stages: what every rank sees."""
    from accel_train import Accelerator, ParallelismConfig, PipelineParallelConfig

    if inside:
        handler = {**handler, "loss_function": nn.functional.mse_loss}
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=windows,
        parallelism_config=ParallelismConfig(**degrees, pp_handler=PipelineParallelConfig(**handler)),
    )
    model = chain()
    if tp:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = accelerator.torch_device_mesh["tp"]
        for layer in model:
            parallelize_module(
                layer[0],
                mesh,
                ColwiseParallel(output_layouts=__import__("torch").distributed.tensor.Replicate()),
            )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    replicas = degrees.get("dp_replicate_size", 1) * degrees.get("dp_shard_size", 1)
    inputs, targets = batches(replicas, windows=windows)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms, seen = [], [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = model(x, target=y) if inside else nn.functional.mse_loss(model(x), y)
            loss = loss.loss if inside else loss
            accelerator.backward(loss)
            seen.append(float(accelerator.reduce(loss.detach(), "mean")))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                losses.append(sum(seen) / len(seen))
                seen = []
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        output = model(inputs[:ROWS])
    own = sum(p.numel() for p in model.parameters())
    weights = accelerator.get_state_dict(model)
    return {"losses": losses, "norms": norms, "weights": weights, "output": output, "own": own}


def assert_equal(ranks: list[dict], expected: dict, within: float = 1e-9) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank["losses"], expected["losses"], rtol=within, atol=within)
        torch.testing.assert_close(rank["norms"], expected["norms"], rtol=within, atol=within)
        torch.testing.assert_close(rank["output"], expected["output"], rtol=within, atol=within)
        assert list(rank["weights"]) == list(expected["weights"])
        torch.testing.assert_close(dict(rank["weights"]), dict(expected["weights"]), rtol=within, atol=within)


SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_two_ranks(schedule: str) -> None:
    ranks = worlds.run(train, 2, {"pp_size": 2}, {"schedule": schedule, "num_micro_batches": 4}, inside=True)
    assert_equal(ranks, one_process(1))
    assert all(rank["own"] < 0.7 * sum(p.numel() for p in chain().parameters()) for rank in ranks)


def test_the_script_computes_the_loss() -> None:
    assert_equal(worlds.run(train, 2, {"pp_size": 2}, {}), one_process(1))


@pytest.mark.parametrize("inside", [False, True], ids=["loss of the script", "loss of the last stage"])
@pytest.mark.parametrize("degrees", [{"dp_replicate_size": 2}, {"dp_shard_size": 2}], ids=["ddp", "fsdp2"])
def test_stages_of_replicas_and_of_sharded_parameters(degrees: dict, inside: bool) -> None:
    assert_equal(worlds.run(train, 4, {"pp_size": 2, **degrees}, {}, inside=inside), one_process(2))


@pytest.mark.parametrize("inside", [False, True], ids=["loss of the script", "loss of the last stage"])
@pytest.mark.parametrize("degrees", [{"dp_replicate_size": 2}, {"dp_shard_size": 2}], ids=["ddp", "fsdp2"])
def test_windows(degrees: dict, inside: bool) -> None:
    ranks = worlds.run(train, 4, {"pp_size": 2, **degrees}, {}, windows=2, inside=inside)
    assert_equal(ranks, one_process(2, windows=2))


def test_stages_of_divided_tensors() -> None:
    assert_equal(worlds.run(train, 4, {"pp_size": 2, "tp_size": 2}, {}, tp=True), one_process(1))
