"""What all ranks must call and one rank calls alone: an error that names the call, and no hang."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_state.errors import CollectiveMismatchError
from testkit import worlds

STRATEGIES = ["ddp", "fsdp2"]


def trained(strategy: str):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if strategy == "fsdp2" else {}
    accelerator = Accelerator(**plugin)
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        accelerator.backward(model(torch.randn(4, 6)).sum())
        optimizer.step()
        optimizer.zero_grad()

    step()
    return accelerator, model, step


def alone(strategy: str, call: str, meanwhile: str, folder: str) -> str:
    accelerator, model, step = trained(strategy)
    if call == "load_state":
        accelerator.save_state(folder)
    calls = {
        "load_state": lambda: accelerator.load_state(folder),
        "prepare": lambda: accelerator.prepare(nn.Linear(3, 3)),
        "prepare a loader": lambda: accelerator.prepare(DataLoader(range(8))),
        "get_state_dict": lambda: accelerator.get_state_dict(model),
        "save_model": lambda: accelerator.save_model(model, folder),
        "weight_source": lambda: accelerator.weight_source(model),
    }

    if meanwhile == "steps":
        text = ""
        if accelerator.is_main_process:
            with pytest.raises(CollectiveMismatchError) as refused:
                calls[call]()
            text = str(refused.value)
        step()  # nothing has been sent, so the run can go on
        accelerator.wait_for_everyone()
        return text

    def go_on() -> None:
        if accelerator.is_main_process:
            calls[call]()
        accelerator.wait_for_everyone()

    with pytest.raises(CollectiveMismatchError) as caught:
        go_on()
    return str(caught.value)


CASES = [
    ("ddp", "load_state"),
    ("ddp", "prepare"),
    ("ddp", "prepare a loader"),
    ("fsdp2", "load_state"),
    ("fsdp2", "prepare"),
    ("fsdp2", "get_state_dict"),
    ("fsdp2", "save_model"),
    ("ddp", "weight_source"),
]


@pytest.mark.wide(but=["ddp-load_state-waits", "ddp-prepare a loader-waits", "fsdp2-get_state_dict-waits"])
@pytest.mark.parametrize("meanwhile", ["waits", pytest.param("steps", marks=pytest.mark.full)])
@pytest.mark.parametrize(("strategy", "call"), CASES)
def test_a_call_on_one_rank_is_named(strategy: str, call: str, meanwhile: str, tmp_path) -> None:
    main, other = worlds.run(alone, 2, strategy, call, meanwhile, str(tmp_path / "state"))
    operation = call.partition(" ")[0]
    assert re.search(rf"\b{operation}\b.*test_one_rank_calls.py:\d+|rank 0 is in {operation}", main)
    assert "if accelerator.is_main_process" in main
    if meanwhile == "waits":  # in a collective in which ranks compare their calls
        assert f"rank 0: {operation} at " in other


def frozen_alone() -> str:
    accelerator, _, step = trained("ddp")
    if accelerator.is_main_process:
        teacher = accelerator.prepare(nn.Linear(3, 3).requires_grad_(False))
        teacher(torch.ones(1, 3, device=accelerator.device))
    step()
    accelerator.wait_for_everyone()
    return "done"


def test_a_frozen_model_of_one_rank_is_prepared_there_alone() -> None:
    assert worlds.run(frozen_alone, 2) == ["done"] * 2


def divided_twice() -> str:
    """Two replicas of two shards; rank 3 makes a step more."""
    import torch.distributed as dist

    from accel_state.communication.torch_collectives import end_collectives
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(),
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    )
    model = accelerator.prepare(nn.Linear(6, 2))
    odd = accelerator.process_index == 3
    accelerator.backward(model(torch.ones(4, 6)).sum())
    shards = next(model.parameters()).device_mesh.get_group(1)
    try:
        for _ in range(2 if odd else 1):
            accelerator.backward(model(torch.ones(4, 6)).sum())
        accelerator.wait_for_everyone()
    except RuntimeError as error:
        for group in (shards, dist.group.WORLD):
            end_collectives(group)
        return f"{type(error).__name__}: {error}"
    return "done"


@pytest.mark.wide
def test_collectives_of_the_groups_of_hsdp_are_proof() -> None:
    texts = worlds.run(divided_twice, 4, environ={"ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": "2"})
    named = "rank 3 waits in torch's all_gather"
    assert any(text.startswith("CollectiveMismatchError") and named in text for text in texts), texts
    assert "done" not in texts
