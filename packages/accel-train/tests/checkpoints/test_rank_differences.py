"""Objects, schedulers and options that ranks hold otherwise than rank 0 come back on the rank that had them."""

import logging
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_ckpt import CorruptCheckpointError, open_training_state
from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, ProjectConfiguration
from accel_train.checkpoints import rank_differences
from testkit import worlds
from testkit.samples import Held

pytestmark = pytest.mark.usefixtures("kept_ranks")


class ByLoss(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that looks at the losses of its own rank."""

    def __init__(self, optimizer):
        self.losses = []
        super().__init__(optimizer)

    def get_lr(self):
        return [0.1 for _ in self.optimizer.param_groups]

    def step(self, loss=None):
        super().step()
        if loss is not None:
            self.losses = [*self.losses, loss]


STRATEGIES = {
    "ddp": lambda: Accelerator(cpu=True),
    "fsdp2": lambda: Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()),
    "hsdp": lambda: Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    ),
}


def build(strategy):
    torch.manual_seed(0)
    accelerator = STRATEGIES[strategy]()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = ByLoss(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    return accelerator, model, optimizer, scheduler


def held_by(rank):
    """Per-rank objects: one with a number and tensors of which one is the same everywhere, one that is the same."""
    mine = {"seen": 10 + rank, "same": torch.arange(50_000.0), "own": torch.full((3,), float(rank))}
    return Held(mine), Held({"epoch": 3})


def save(folder, strategy, asynchronous=False, alone=False):
    accelerator, _, _, scheduler = build(strategy)
    rank = accelerator.process_index
    objects = held_by(rank)
    accelerator.register_for_checkpointing(*objects)
    scheduler.step(0.5 + rank)
    if alone and rank:
        accelerator.wait_for_everyone()
        return
    saved = accelerator.save_state(folder, asynchronous=asynchronous)
    if asynchronous:
        objects[0].state["own"].zero_()  # what is saved are the values of the call
        saved.result()
    if alone:
        accelerator.wait_for_everyone()


def load(folder, strategy, only=None):
    accelerator, _, _, scheduler = build(strategy)
    objects = Held(), Held()
    accelerator.register_for_checkpointing(*objects)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(rank_differences.__name__).addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator.load_state(folder, only=only)
    mine, same = (held.state for held in objects)
    return (
        mine and (mine["seen"], mine["own"].tolist(), mine["same"].numel()),
        same,
        list(scheduler.losses),
        said,
    )


@pytest.mark.parametrize(
    ("strategy", "ranks", "asynchronous"),
    [("ddp", 2, False), ("ddp", 2, True), ("fsdp2", 2, False), ("hsdp", 4, False)],
)
def test_each_rank_gets_its_own(tmp_path, strategy, ranks, asynchronous):
    folder = str(tmp_path / "state")
    worlds.run(save, ranks, folder, strategy, asynchronous)
    found = worlds.run(load, ranks, folder, strategy)
    for rank, (mine, same, losses, said) in enumerate(found):
        assert mine == (10 + rank, [float(rank)] * 3, 50_000)
        assert same == {"epoch": 3}
        assert losses == [0.5 + rank]
        assert said == []


def test_what_is_the_same_is_in_one_file(tmp_path):
    folder = str(tmp_path / "state")
    worlds.run(save, 2, folder, "ddp")
    checkpoint = open_training_state(folder)
    assert checkpoint.shared["progress"]["differing"] == {"custom_0": [1], "scheduler_0": [1]}
    assert "differing" not in checkpoint.per_rank(0)
    own = checkpoint.per_rank(1)["differing"]
    assert sorted(own) == ["custom_0", "scheduler_0"]
    assert sorted(own["custom_0"]["tensors"]) == ["custom_0.own"]


@pytest.mark.parametrize("only", [("registered",), ("schedulers",), ("registered", "optimizers")])
def test_parts_of_a_state(tmp_path, only):
    folder = str(tmp_path / "state")
    worlds.run(save, 2, folder, "ddp")
    for rank, (mine, _, losses, _) in enumerate(worlds.run(load, 2, folder, "ddp", only)):
        assert mine == ((10 + rank, [float(rank)] * 3, 50_000) if "registered" in only else None)
        assert losses == ([0.5 + rank] if "schedulers" in only else [])


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_ranks_continue_with_rank_0_and_say_so(tmp_path, ranks):
    folder = str(tmp_path / "state")
    worlds.run(save, 2, folder, "ddp")
    found = worlds.run(load, ranks, folder, "ddp")
    for mine, same, losses, _ in found:
        assert mine == (10, [0.0] * 3, 50_000)
        assert same == {"epoch": 3}
        assert losses == [0.5]
    said = "\n".join(found[0][3])
    assert "the registered object 0 (Held)" in said
    assert "scheduler 0" in said
    assert "registered object 1" not in said
    assert f"rank 1 had another state of scheduler 0 than rank 0: {ranks} ranks continue" in said
    # What is not restored is not spoken of.
    assert worlds.run(load, ranks, folder, "ddp", ("schedulers",))[0][3][0].count("registered") == 0


def kernels(folder, lr=None):
    """Rank 1 has whole and divided parameters in one group, so that torch's multi-tensor kernel is off; lr: to save."""
    accelerator, _, optimizer, _ = build("ddp")
    if lr is not None:
        [group] = optimizer.param_groups
        if accelerator.process_index:
            group["foreach"], group["lr"] = False, lr
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    [group] = optimizer.param_groups
    return group["foreach"], group["lr"]


@pytest.mark.parametrize(("lr", "differing"), [(0.1, None), (0.7, {"optimizer_0": [1]})])
def test_the_choice_of_a_kernel_is_no_difference(tmp_path, lr, differing):
    folder = str(tmp_path / "state")
    worlds.run(kernels, 2, folder, lr)
    assert open_training_state(folder).shared["progress"].get("differing") == differing
    assert worlds.run(kernels, 2, folder) == [(None, 0.1), (None, lr)]


def test_the_main_process_alone_saves_its_own(tmp_path):
    folder = str(tmp_path / "state")
    worlds.run(save, 2, folder, "ddp", False, True)
    for mine, _, losses, _ in worlds.run(load, 2, folder, "ddp"):
        assert (mine[0], losses) == (10, [0.5])


def options(folder, save):
    """Learning rates of ranks that train copies of their own, a pickle on one rank, and an object of rank 1 alone."""
    accelerator, _, optimizer, _ = build("ddp")
    rank = accelerator.process_index
    for group in optimizer.param_groups:
        group["lr"] = 0.25 + rank if save else 0.0
    odd = threading.Lock if rank else 7  # a builtin function cannot be plain data
    held = [Held({"odd": odd} if save else None)] + [Held({"rank": 1} if save else None)] * rank
    for item in held:
        accelerator.register_for_checkpointing(item, trusted=True)
    if save:
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder, trust_custom_objects=True)
    return optimizer.param_groups[0]["lr"], [item.state for item in held], optimizer.param_groups[0]["betas"]


def test_options_pickles_and_more_objects(tmp_path):
    folder = str(tmp_path / "state")
    worlds.run(options, 2, folder, True)
    first, second = worlds.run(options, 2, folder, False)
    assert first == (0.25, [{"odd": 7}], (0.9, 0.999))
    assert second == (1.25, [{"odd": threading.Lock}, {"rank": 1}], (0.9, 0.999))


def two_nodes(folder, load):
    """Ranks 0 and 1 on one node, 2 and 3 on another, each with a disk of its own."""
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(save_on_each_node=True))
    node, local = divmod(accelerator.process_index, 2)
    accelerator._process._shared_state["local_process_index"] = local
    model = accelerator.prepare(nn.BatchNorm1d(2))
    # Equal on ranks 0 and 3, which are on different nodes.
    own = [5, 6, 7, 5][accelerator.process_index]
    if not load:
        model.module.running_mean.fill_(own)
    held = Held(None if load else own)
    accelerator.register_for_checkpointing(held)
    place = Path(folder) / f"node-{node}"
    if load:
        accelerator.load_state(place)
    else:
        accelerator.save_state(place)
    return held.state, model.module.running_mean.tolist()


def test_ranks_are_compared_with_the_one_that_saves_for_their_node(tmp_path, monkeypatch):
    worlds.run(two_nodes, 4, str(tmp_path), False)
    found = worlds.run(two_nodes, 4, str(tmp_path), True)
    assert found == [(own, [float(own)] * 2) for own in (5, 6, 7, 5)]


def test_a_damaged_record_of_differences_is_refused(tmp_path):
    with pytest.raises(CorruptCheckpointError, match="what a rank has of its own"):
        rank_differences.take_up({"custom_0": 1}, {"custom_0": 3}, tmp_path)
