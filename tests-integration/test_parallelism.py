"""Training on meshes of several kinds of parallelism, against plain PyTorch in one process with all samples."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import testkit
from accel_train.errors import IncompatibleOptionsError
from testkit import worlds
from testkit.sentences import LENGTH, Sentences, divide, losses_of, make, make_optimizer

pytestmark = pytest.mark.usefixtures("kept_ranks")


@dataclasses.dataclass(frozen=True)
class Case:
    """Degrees of parallelism, and how a run uses them."""

    degrees: dict
    fsdp: dict | None = None  # options of the plugin; None: no plugin
    communication: str | None = None
    balance: bool | None = None
    accumulation: int = 1
    items: bool = False
    precision: str = "no"
    variables: tuple = ()  # what a launcher sets
    save: str = ""
    load: str = ""
    batches: int = 5

    @property
    def ranks(self):
        product = 1
        for size in self.degrees.values():
            product *= size
        return product

    def __str__(self):
        words = [f"{name}{size}" for name, size in self.degrees.items()]
        words += ["fsdp"] if self.fsdp is not None else []
        words += [self.communication or ""] + (["items"] if self.items else [])
        words += [] if self.balance is None else ["balanced" if self.balance else "in order"]
        return "-".join(word for word in words if word)


def oracle(case, start=0):
    """Norms and weights of plain PyTorch; a step takes four sequences for each accumulated micro-batch."""
    model = make()
    optimizer = make_optimizer(model)
    norms = []
    for batch in list(DataLoader(Sentences(), batch_size=4 * case.accumulation))[start:]:
        places = torch.arange(LENGTH).expand(len(batch["input_ids"]), LENGTH)
        losses = losses_of(model, batch, places)
        if case.items:
            ((losses * batch["counts"]).sum() / batch["counts"].sum()).backward()
        else:
            losses.mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.detach() for name, value in model.state_dict().items()}


def accelerator_of(case):
    from accel_train import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        TorchContextParallelConfig,
    )

    os.environ.update(dict(case.variables))
    handlers = {}
    if case.communication or case.balance is not None:
        handlers = {"cp_handler": TorchContextParallelConfig(case.communication, case.balance)}
    config = ParallelismConfig(**{f"{name}_size": size for name, size in case.degrees.items()}, **handlers)
    return Accelerator(
        parallelism_config=None if case.variables else config,
        fsdp_plugin=None if case.fsdp is None else FullyShardedDataParallelPlugin(**case.fsdp),
        gradient_accumulation_steps=case.accumulation,
        mixed_precision=case.precision,
    )


def prepared(case):
    accelerator = accelerator_of(case)
    degrees = accelerator.parallelism_config.degrees
    # Ranks of one tensor must have the same values to divide; the others get those of the first.
    model = make(seed=0 if degrees["tp"] > 1 or accelerator.process_index == 0 else 5)
    if degrees["tp"] > 1:
        divide(model, accelerator.torch_device_mesh["tp"])
    optimizer = make_optimizer(model)
    loader = DataLoader(Sentences(), batch_size=4 // accelerator.strategy.batch.size)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(case):
    accelerator, model, optimizer, loader = prepared(case)
    norms, read = [], []
    if case.load:
        accelerator.load_state(case.load)
        loader = accelerator.skip_first_batches(loader, 2)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            places = batch.get("position_ids")
            if places is None:
                places = torch.arange(LENGTH, device=accelerator.device).expand(
                    len(batch["input_ids"]), LENGTH
                )
            losses = losses_of(model, batch, places).double()
            read.append(batch["input_ids"].tolist())
            if case.items:
                accelerator.backward((losses * batch["counts"]).sum(), num_items=batch["counts"].sum())
            else:
                accelerator.backward(losses.mean())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3).item())
            optimizer.step()
            optimizer.zero_grad()
        if number + 1 == case.batches and case.save:
            accelerator.save_state(case.save)
            accelerator.save_model(model, f"{case.save}-model")
            break
    weights = {name: value.cpu().clone() for name, value in accelerator.get_state_dict(model).items()}
    return accelerator.strategy.name, norms, weights, read


def check(case, bound=1e-10):
    norms, weights = oracle(case)
    found = worlds.run(train, case.ranks, case)
    for _, here, ours, _ in found:
        torch.testing.assert_close(here, norms, rtol=bound, atol=bound)
        torch.testing.assert_close(ours, weights, rtol=bound, atol=bound, check_dtype=False)
    return found


FAST = [
    Case({"dp_shard": 2, "tp": 2}),
    Case({"dp_shard": 2, "cp": 2}, accumulation=2, items=True),
    Case({"sp": 2}),
]
FULL = [
    Case({"dp_replicate": 2}),
    Case({"dp_shard": 2}),
    Case({"tp": 2}),
    Case({"cp": 2}),
    Case({"cp": 2}, communication="alltoall", items=True),
    Case({"cp": 2}, fsdp={"activation_checkpointing": True}),
    Case({"cp": 2}, fsdp={"activation_checkpointing": True}, communication="alltoall"),
    Case({"sp": 2}, fsdp={"activation_checkpointing": True}, items=True),
    Case({"dp_replicate": 2, "dp_shard": 2}, accumulation=2),
    Case({"dp_replicate": 2, "tp": 2}, items=True),
    Case({"dp_replicate": 2, "cp": 2}),
    Case({"dp_replicate": 2, "sp": 2}, accumulation=2),
    Case({"dp_shard": 2, "tp": 2}, accumulation=2, items=True),
    Case({"dp_shard": 2, "sp": 2}, items=True),
    Case({"cp": 2, "sp": 2}, fsdp={}, communication="alltoall", items=True),
    Case({"cp": 2, "tp": 2}),
    Case({"sp": 2, "tp": 2}, items=True),
    Case({"cp": 4}, accumulation=2, items=True),
    Case({"cp": 4}, communication="alltoall", balance=True),
    Case({"cp": 4}, balance=False),
    Case({"cp": 2}, communication="alltoall", balance=False),
    Case({"dp_replicate": 2, "cp": 2}, fsdp={}),
    Case({"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    Case({"dp_shard": 2, "cp": 2, "tp": 2}, items=True),
    Case({"dp_replicate": 2, "dp_shard": 2, "cp": 2}),
]


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str
)
def test_training_equals_one_process(case):
    found = check(case)
    sharded = case.fsdp is not None or "dp_shard" in case.degrees
    assert {name for name, *_ in found} == {"fsdp2" if sharded else "tp" if "tp" in case.degrees else "ddp"}


def test_t41_context_and_sequence_parallelism_go_together_and_need_no_engine():
    assert {name for name, *_ in check(Case({"cp": 2, "sp": 2}))} == {"ddp"}


def test_ranks_of_one_sequence_read_its_parts_and_those_of_a_tensor_read_alike():
    *_, tensor = zip(*worlds.run(train, 4, Case({"dp_replicate": 2, "tp": 2}, batches=1)), strict=True)
    assert tensor[0] == tensor[1] != tensor[2] == tensor[3]
    *_, parts = zip(*worlds.run(train, 2, Case({"cp": 2}, balance=False)), strict=True)
    whole = [batch["input_ids"].tolist() for batch in DataLoader(Sentences(), batch_size=4)]
    joined = [
        [first + second for first, second in zip(*batches, strict=True)]
        for batches in zip(*parts, strict=True)
    ]
    assert joined == whole


@pytest.mark.full
@pytest.mark.parametrize("degrees", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}, {"sp": 2}], ids=str)
def test_bf16(degrees):
    check(Case(degrees, precision="bf16"), bound=5e-2)


MESHES = [
    Case({"dp_shard": 2, "tp": 2}),
    Case({"dp_replicate": 2, "dp_shard": 2}),
    Case({"cp": 2}),
    Case({"dp_replicate": 2, "tp": 2}),
    Case({"dp_shard": 2, "cp": 2, "tp": 2}),
]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (MESHES[0], MESHES[2]),
        *(
            pytest.param(first, second, marks=pytest.mark.full)
            for first in MESHES
            for second in MESHES
            if (first, second) != (MESHES[0], MESHES[2])
        ),
    ],
    ids=str,
)
def test_a_state_is_continued_on_another_mesh(saved, loaded, tmp_path):
    folder = str(tmp_path / "state")
    norms, weights = oracle(Case({}))
    found = worlds.run(train, saved.ranks, dataclasses.replace(saved, save=folder, batches=2))
    for _, here, ours, _ in worlds.run(train, loaded.ranks, dataclasses.replace(loaded, load=folder)):
        torch.testing.assert_close([*found[0][1], *here], norms, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(ours, weights, rtol=1e-10, atol=1e-10)
    from safetensors.torch import load_file

    torch.testing.assert_close(load_file(f"{folder}-model/model.safetensors"), found[0][2], rtol=0, atol=0)


def evaluate(case):
    accelerator, model, _, _ = prepared(case)
    loader = accelerator.prepare(DataLoader(Sentences(10), batch_size=4))
    model.eval()
    seen = []
    with torch.no_grad():
        for batch in loader:
            ids = batch["input_ids"]
            places = batch.get("position_ids", torch.arange(ids.shape[1], device=ids.device).expand_as(ids))
            logits = model(ids, places)
            seen.append((accelerator.gather_for_metrics(logits), accelerator.gather_for_metrics(places)))
    logits, places = (torch.cat(each).cpu() for each in zip(*seen, strict=True))
    return logits, places


@pytest.mark.parametrize("degrees", [{"dp_replicate": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}], ids=str)
def test_metrics_have_every_sample_once(degrees):
    model = make().eval()
    whole = Sentences(10)
    expected = model(whole.ids[:, :-1], torch.arange(LENGTH).expand(10, LENGTH)).detach()
    found = worlds.run(evaluate, 4, Case(degrees))
    parts = degrees.get("cp", 1)
    for logits, places in found:
        named = expected.gather(1, places[:, :, None].expand_as(logits))
        torch.testing.assert_close(logits, named, rtol=1e-10, atol=1e-10)
    together = torch.cat([places for _, places in found[:parts]], 1)
    assert torch.equal(together.sort().values, torch.arange(LENGTH).expand(10, LENGTH))


def facts(case):
    accelerator = accelerator_of(case)
    again = accelerator.parallelism_config
    mesh = accelerator.torch_device_mesh
    return {
        "places": (
            accelerator.data_parallel_rank,
            accelerator.data_parallel_shard_rank,
            accelerator.context_parallel_rank,
            accelerator.sequence_parallel_rank,
            accelerator.tensor_parallel_rank,
            accelerator.pipeline_parallel_rank,
        ),
        "batch": (accelerator.strategy.batch.index, accelerator.strategy.batch.size),
        "names": mesh.mesh_dim_names,
        "unions": {name: mesh[name].size() for name in ("dp", "dp_cp", "dp_shard_cp")},
        "same": again.get_device_mesh() is mesh and again.get_device_mesh("cpu") is mesh,
        "saves": accelerator.should_save_model,
        "fsdp2": (accelerator.is_fsdp2, accelerator.is_composable_parallelism_enabled),
    }


def test_places_and_names_of_the_mesh():
    found = worlds.run(facts, 8, Case({"dp_replicate": 2, "dp_shard": 2, "cp": 2}))
    assert [one["places"] for one in found] == [
        (r, s, c, 0, 0, 0) for r in (0, 1) for s in (0, 1) for c in (0, 1)
    ]
    assert [one["batch"] for one in found] == [(i, 4) for i in (0, 0, 1, 1, 2, 2, 3, 3)]
    first = found[0]
    assert first["names"] == ("dp_replicate", "dp_shard", "cp")
    assert first["unions"] == {"dp": 4, "dp_cp": 8, "dp_shard_cp": 4}
    assert first["same"]
    assert all(one["saves"] for one in found)
    assert first["fsdp2"] == (True, True)


def test_a_launcher_gives_degrees():
    variables = (
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
        ("PARALLELISM_CONFIG_CP_SIZE", "2"),
        ("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall"),
        ("PARALLELISM_CONFIG_CP_LOAD_BALANCE", "false"),
    )
    found = check(Case({"cp": 2}, variables=variables))
    assert found[0][0] == "ddp"
    first = found[0][-1][0][0]
    assert first == Sentences().ids[0, : LENGTH // 2].tolist(), "the first piece, not one from each end"


def refused(case, wrong):
    accelerator = accelerator_of(case)
    if wrong == "plan":
        accelerator.prepare(make())
    elif wrong == "length":
        loader = accelerator.prepare(DataLoader(Sentences(length=7), batch_size=2))
        next(iter(loader))


@pytest.mark.parametrize(
    ("case", "wrong", "message"),
    [
        (Case({"tp": 4}), "world", r"tp 4 multiply to 4, and there are 2 processes; start 4 processes"),
        (Case({"tp": 2}), "plan", "tp_size is 2, and no parameter of Net is divided.*parallelize_module"),
        (
            Case({"cp": 2}),
            "length",
            "7 positions, which cp_size 2 cannot divide.*Pad them to a multiple of 4",
        ),
        (Case({"dp_replicate": 2}, fsdp={}), "shard", "FSDP has nothing to shard over"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_cannot_be_is_refused_on_all_ranks(case, wrong, message):
    with pytest.raises(worlds.RankError, match=message):
        worlds.run(refused, 2, case, wrong)


def test_one_process_is_told_what_to_start():
    from accel_train import Accelerator, ParallelismConfig

    with pytest.raises(IncompatibleOptionsError, match="cp 2 multiply to 2, and there are 1 processes"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))


SCRIPT = """
import sys
import torch
sys.path.insert(0, {folder!r})
from testkit.sentences import Sentences, divide, losses_of, make, make_optimizer
from torch.utils.data import DataLoader
from accel_train import Accelerator

accelerator = Accelerator()
model = make()
if accelerator.parallelism_config.tp_enabled:
    divide(model, accelerator.torch_device_mesh["tp"])
loader = DataLoader(Sentences(4096), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
for number, batch in enumerate(loader):
    places = batch.get("position_ids", torch.arange(8).expand(len(batch["input_ids"]), 8))
    loss = losses_of(model, batch, places).mean()
    if number == 1 and accelerator.process_index == 1:
        raise ValueError("one rank fails")
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


def command(tmp_path, *words, timeout):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(testkit.__file__).parents[1])))
    return subprocess.run(
        [sys.executable, "-m", "accel_cli", *words, str(script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def degrees_as_flags(**degrees):
    flags = [
        word for name, size in degrees.items() for word in (f"--parallelism_config_{name}_size", str(size))
    ]
    return ["--use_parallelism_config", *flags]


@pytest.mark.full
def test_a_mesh_of_1024_ranks_is_rehearsed(tmp_path):
    degrees = degrees_as_flags(dp_replicate=8, dp_shard=16, cp=2, sp=2, tp=2)
    done = command(tmp_path, "rehearse", "--num_processes", "1024", *degrees, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dp_replicate 8 x dp_shard 16 x cp 2 x sp 2 x tp 2" in done.stdout
    wrong = command(tmp_path, "rehearse", "--num_processes", "1024", *degrees_as_flags(tp=2), timeout=120)
    assert wrong.returncode == 2
    assert "tp 2 multiply to 2, and there are 1024 processes" in wrong.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", ["tp", "cp", "sp", "dp_shard"])
def test_a_rank_that_fails_leaves_nobody_waiting(name, tmp_path):
    done = command(tmp_path, "launch", "--cpu", *degrees_as_flags(**{name: 2}), timeout=90)
    assert done.returncode == 1
    assert "one rank fails" in done.stderr
