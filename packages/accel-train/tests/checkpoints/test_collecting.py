"""What a training state holds besides weights, as it is collected."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from accel_ckpt import Part
from accel_state import PartialState
from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accel_train.checkpoints import collecting
from accel_train.checkpoints.parts import named_models, parts_of
from accel_train.strategies.state_adapter import StateAdapter
from testkit import worlds
from testkit.samples import Held
from testkit.small_run import build, snapshot


def collect(accelerator):
    prepared = accelerator._prepared
    named = named_models(prepared)
    return collecting.collect(prepared, parts_of(prepared, named), named)


def test_collecting_changes_nothing_and_separates_what_ranks_share():
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    model, optimizer, scheduler, _ = build(accelerator)
    accelerator.register_for_checkpointing(Held({"a": 1}))
    accelerator.step = 3
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 4)).sum())
    before = snapshot(model, optimizer, scheduler), model.weight.grad.clone()
    trees = collect(accelerator)
    shared, own = trees.shared, trees.own
    assert sorted(shared) == ["custom_0", "optimizer_0", "progress", "scaler", "scheduler_0", "step"]
    assert sorted(own) == ["buffers", "loader_0", "replicas", "rng", "windows"]
    assert (shared["step"], shared["custom_0"]) == (3, {"a": 1})
    assert shared["progress"] == {
        "save_iteration": 1,
        "optimizers": [{"skipped": False, "spent": False}],
        "schedulers": ["StepLR of optimizer 0"],
        "registered": ["Held"],
        "models": ["Linear"],
        "strategy": "single",
        "precision": "fp16",
        "loaders": ["DataLoaderShard of TensorDataset in batches of 2"],
        "main_process_alone": False,
    }
    after = snapshot(model, optimizer, scheduler)
    assert torch.equal(before[0][3], after[3]), "no random number was drawn"
    assert torch.equal(before[1], model.weight.grad)
    assert accelerator.save_iteration == 0


class Failing:
    """Has no state on rank 1."""

    def state_dict(self):
        if PartialState().process_index == 1:
            raise KeyError("no state now")
        return {}

    load_state_dict = state_dict


def collected_with_a_failure():
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(Failing())
    try:
        collect(accelerator)
    except Exception as error:
        return type(error).__name__, str(error)


def test_collecting_that_fails_on_a_rank_fails_on_all():
    (kind, message), own = worlds.run(collected_with_a_failure, 2)
    assert kind == "CheckpointSaveError"
    assert "collecting the training state" in message
    assert "no state now" in message
    assert own == ("KeyError", "'no state now'")


PLUGINS = {
    "ddp": dict,
    "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
}


class Rows(nn.Module):
    """Something to divide, and statistics that are whole on every rank."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)


def buffers(folder, strategy, loads):
    accelerator = Accelerator(cpu=True, **PLUGINS[strategy]())
    model = Rows()
    if strategy == "tp":
        parallelize_module(model, accelerator.torch_device_mesh["tp"], {"project": ColwiseParallel()})
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norm = accelerator.unwrap_model(model).norm
    if loads:
        accelerator.load_state(folder)
    else:
        norm.running_mean.fill_(1.0 + accelerator.process_index)
        accelerator.save_state(folder)
    return norm.running_mean.tolist()


@pytest.mark.parametrize("strategy", PLUGINS)
def test_buffers_of_a_rank_come_back_to_it(tmp_path, strategy):
    folder = str(tmp_path / "state")
    expected = [[1.0] * 4, [2.0] * 4]
    assert worlds.run(buffers, 2, folder, strategy, False) == expected
    assert worlds.run(buffers, 2, folder, strategy, True) == expected


@pytest.mark.parametrize("kinds", [["kept"], ["kept", "divided"]])
@pytest.mark.parametrize("state", ["whole", "parts"])
def test_optimizers_are_replicated_that_step_replicas_and_have_no_parts(kinds, state):
    class Kept(StateAdapter):
        def keeps_replicas(self, model):
            return model is models["kept"]

    models = {"kept": nn.Linear(2, 2), "divided": nn.Linear(2, 2)}
    parameters = [p for kind in kinds for p in models[kind].parameters()]
    optimizers = [torch.optim.SGD(group, lr=0.1) for group in (models["divided"].parameters(), parameters)]
    leaf = torch.ones(2) if state == "whole" else Part(torch.ones(1), (0,), (2,))
    trees = {f"optimizer_{number}": {"state": {"weight": {"exp_avg": leaf}}} for number in range(2)}
    found = collecting.replicated_optimizers(Kept(None), optimizers, list(models.values()), trees)
    assert found == (["optimizer_1"] if kinds == ["kept"] and state == "whole" else [])
