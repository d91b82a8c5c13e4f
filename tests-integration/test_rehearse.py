"""`accel rehearse` says of a rank what is true of it in a real world: what it holds, what it reads, and what fails."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from accel_cli.rehearsal import child
from accel_cli.rehearsal.findings import find
from accel_cli.rehearsal.run import Rehearsed, chosen_ranks
from accel_state.config.launch import LaunchConfig
from accel_state.errors import ConfigError
from accel_state.launching.plan import World, plan_rank
from testkit import worlds

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"

TRAINING = """
import json, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel_train import (
    Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, TorchTensorParallelPlugin, muon_with_adamw,
)

options = json.loads(sys.argv[1])

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def size(tensors):
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)

strategy = {
    "ddp": None,
    "fsdp2": FullyShardedDataParallelPlugin(fsdp_version=2),
    "hsdp": FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy="HYBRID_SHARD"),
    "tp": TorchTensorParallelPlugin(tp_size=2),
}[options.get("strategy", "ddp")]
loading = DataLoaderConfiguration(**options.get("loading", {}))
accelerator = Accelerator(strategy=strategy, dataloader_config=loading, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
if options.get("strategy") == "tp":
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    parallelize_module(model, accelerator.torch_device_mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
if options.get("optimizer") == "muon":
    optimizer = muon_with_adamw(model, lr=0.02)
else:
    optimizer = torch.optim.AdamW(model.parameters())
count = options.get("samples", 61)
data = TensorDataset(torch.randn(count, 6), torch.randint(0, 3, (count,)))
loader = DataLoader(data, batch_size=options.get("batch", 4), drop_last=options.get("drop_last", False))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if accelerator.sync_gradients:
            break
facts = {
    "shapes": [list(local(parameter).shape) for parameter in model.parameters()],
    "parameters": size(model.parameters()),
    "gradients": size(parameter.grad for parameter in model.parameters()),
    "optimizer": size(value for state in optimizer.state.values() for value in state.values()),
    "rows of the first batch": len(x),
    "finite": bool(torch.isfinite(loss) and torch.isfinite(local(norm)).all()),
}
with open(f"{options['folder']}/{options['name']}-{accelerator.process_index}.json", "w") as file:
    json.dump(facts, file)
accelerator.save_state(f"{options['folder']}/state-{options['name']}")
accelerator.save_model(model, f"{options['folder']}/model-{options['name']}")
if options["name"] == "real":
    rows = [len(x) for x, _ in loader]
    facts |= {"batches": len(rows), "rows": sum(rows)}
    with open(f"{options['folder']}/{options['name']}-{accelerator.process_index}.json", "w") as file:
        json.dump(facts, file)
"""

CASES = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel_train import (
    Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, TorchTensorParallelPlugin,
)

case = sys.argv[1]
options = {
    "tp_does_not_fit": {"strategy": TorchTensorParallelPlugin(tp_size=3)},
    "two_plugins": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2),
                    "torch_tp_plugin": TorchTensorParallelPlugin(tp_size=2)},
    "precision": {"strategy": TorchTensorParallelPlugin(tp_size=2), "mixed_precision": "fp8"},
    "unknown_strategy": {"strategy": "zero"},
    "accumulation": {"gradient_accumulation_steps": 0},
    "split": {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
    "uneven": {"dataloader_config": DataLoaderConfiguration(even_batches=False)},
    "shape": {"strategy": TorchTensorParallelPlugin(tp_size=2)},
}.get(case, {})
accelerator = Accelerator(**options)
rank = accelerator.process_index
if case == "one_rank" and rank == 1:
    raise ValueError("only here")
if case == "operations" and rank == 0:
    accelerator.gather(torch.ones(2))
if case == "shapes":
    accelerator.gather(torch.ones(2 + rank % 2))
torch.manual_seed(0)
model = nn.Linear(6, 12 + (rank if case == "models" else 0))
if case == "shape":
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    parallelize_module(model, accelerator.torch_device_mesh["tp"], ColwiseParallel())
    model.register_forward_hook(lambda module, inputs, output: output.view(len(output), -1, 4).sum((1, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
count = 3 if case == "uneven" else 24
loader = DataLoader(TensorDataset(torch.randn(count, 6)), batch_size=3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for [x] in loader:
    if case == "metrics":
        accelerator.gather_for_metrics(torch.ones(2, 5))
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def real_rank(path, arguments, catch=False):
    """Run the script as a rank of a real world; how it failed, if it may."""
    sys.argv = [path, *arguments]
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException as error:
        if not catch:
            raise
        return type(error).__name__, str(error)
    return None


def rehearsed_rank(path, arguments, rank, size, machines, report):
    """Be the process that `accel rehearse` starts, in a process that has torch loaded."""
    world = World(size, size // machines, machines, 0, cpu=True)
    spec = plan_rank(LaunchConfig(use_cpu=True), (), world, rank, os.environ)
    os.environ.update(spec.environment(os.environ) | {"ACCELERATE_REHEARSAL": "1"})
    with contextlib.redirect_stdout(None):
        child.main([report, "script", path, *arguments])


def rehearse(path, arguments, ranks, size, folder, machines=1):
    found = []
    for rank in ranks:
        report = folder / f"report-{rank}.json"
        worlds.run(rehearsed_rank, 1, path, arguments, rank, size, machines, str(report), timeout=120)
        found.append(Rehearsed(rank, json.loads(report.read_text()), ""))
    return found


def section(rehearsed):
    return rehearsed.found["sections"]["accelerator"]


def errors(ranks, size):
    return [finding for finding in find(ranks, size) if finding.kind == "error"]


def options_of(name, folder, **options):
    return [json.dumps({"name": name, "folder": str(folder), **options})]


def facts_of(name, rank, folder):
    return json.loads((folder / f"{name}-{rank}.json").read_text())


@pytest.mark.wide(but=["ddp-2-adamw", "ddp-2-muon"])
@pytest.mark.parametrize(
    ("strategy", "size", "optimizer"),
    [
        ("ddp", 2, "adamw"),
        ("fsdp2", 4, "adamw"),
        pytest.param("tp", 4, "adamw", marks=pytest.mark.full),
        pytest.param("hsdp", 4, "adamw", marks=pytest.mark.full),
        ("ddp", 2, "muon"),
        pytest.param("fsdp2", 2, "muon", marks=pytest.mark.full),
    ],
)
def test_a_rank_holds_what_it_holds_in_a_real_world(strategy, size, optimizer, script, tmp_path):
    path = script(TRAINING)
    options = {"strategy": strategy, "optimizer": optimizer}
    machines = 2 if strategy == "hsdp" else 1
    nodes = {"LOCAL_WORLD_SIZE": "2"} if machines == 2 else {}
    worlds.run(in_machines, size, path, options_of("real", tmp_path, **options), nodes, timeout=120)
    ranks = rehearse(
        path, options_of("rehearsed", tmp_path, **options), range(size), size, tmp_path, machines
    )
    assert errors(ranks, size) == []
    for rank in ranks:
        real, made_up = facts_of("real", rank.rank, tmp_path), facts_of("rehearsed", rank.rank, tmp_path)
        assert {name: real[name] for name in made_up} == made_up
        assert made_up["finite"]
        memory = section(rank)["memory"]
        for name in ("parameters", "gradients", "optimizer"):
            assert memory[name] == real[name]
        assert rank.found["memory"]["peak of tensors"] > sum(memory.values())
        assert_plans_the_files_of(rank, tmp_path / "state-real", size)
    assert len(section(ranks[0])["mesh"]) == (2 if machines == 2 or (strategy, size) == ("tp", 4) else 1)
    assert not list(tmp_path.glob("*-rehearsed/*"))
    assert list(tmp_path.glob("state-real/*"))
    notes = [finding.text for finding in find(ranks, size) if finding.kind == "note"]
    assert len(notes) == 2


def assert_plans_the_files_of(rank, state, size):
    """What a rehearsed rank would write of a state is what the real one has written."""
    names = {path.name: path.stat().st_size for path in state.iterdir()}
    of_ranks = {other: {name for name in names if f"-{other:05d}" in name} for other in range(size)}
    of_all = names.keys() - {"manifest.json"}.union(*of_ranks.values())
    written = of_ranks[rank.rank] | (of_all if rank.rank == 0 else set())
    planned = rank.found["sections"]["save_state"]
    assert planned["files"] == len(written), written
    headers = sum(names[name] for name in written) - planned["bytes"]
    assert abs(headers) < 4000 * len(written)


def in_machines(path, arguments, nodes):
    os.environ.update(nodes)
    if nodes:
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % int(nodes["LOCAL_WORLD_SIZE"]))
    real_rank(path, arguments)


@pytest.mark.wide(but=["even", "uneven"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"samples": 9},
        {"drop_last": True},
        {"loading": {"even_batches": False}, "samples": 48},
        {"loading": {"split_batches": True}},
    ],
    ids=["even", "few", "drop_last", "uneven", "split"],
)
def test_a_rank_reads_what_it_reads_in_a_real_world(options, script, tmp_path):
    path = script(TRAINING)
    worlds.run(real_rank, 2, path, options_of("real", tmp_path, **options), timeout=120)
    ranks = rehearse(path, options_of("rehearsed", tmp_path, **options), [0, 1], 2, tmp_path)
    for rank in ranks:
        real = facts_of("real", rank.rank, tmp_path)
        [loader] = section(rank)["loaders"]
        assert loader["batches of this rank"] == real["batches"]
        assert loader["rows of this rank"] == real["rows"]
        assert loader["optimizer steps per epoch"] == -(-real["batches"] // 2)
        assert loader["samples"] == options.get("samples", 61)


SAME = ["tp_does_not_fit", "two_plugins", "precision", "unknown_strategy", "accumulation", "split", "metrics"]
"""Cases in which every rank raises the same in both worlds."""

OTHERS = {
    "one_rank": "rank 1 of {} would fail here: ValueError: only here",
    "shape": "would fail here: RuntimeError: shape",
    "uneven": "ranks get no batch",
    "operations": "enters gather(float32[2])",
    "shapes": "enters gather(float32[3])",
    "models": "wait for each other in collective",
}
"""Cases in which ranks differ, and what the rehearsal says."""


@pytest.mark.wide(only=["*-2"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", SAME)
def test_what_a_real_world_raises_the_rehearsal_raises(case, size, script, tmp_path):
    path = script(CASES)
    real = worlds.run(real_rank, size, path, [case], catch=True, timeout=120)
    [rank] = rehearse(path, [case], [size - 1], size, tmp_path)
    error = rank.found["error"]
    assert (error["type"], error["message"]) == real[size - 1]
    assert error["traceback"].startswith(f'Traceback (most recent call last):\n  File "{path}"')
    assert len(errors([rank], size)) == 1


@pytest.mark.wide(but=["one_rank", "shape", "models"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.full if case == "uneven" else ()) for case in OTHERS]
)
def test_ranks_that_differ_fail_in_both_worlds(case, script, tmp_path):
    path = script(CASES)
    with pytest.raises(worlds.RankError):  # with its error, or because one rank waits for the other
        worlds.run(real_rank, 2, path, [case], timeout=10 if case == "uneven" else 60)
    found = errors(rehearse(path, [case], [0, 1], 2, tmp_path), 2)
    assert any(OTHERS[case].format(2) in finding.text for finding in found), found


def test_what_runs_in_a_real_world_runs_in_a_rehearsal(script, tmp_path):
    path = script(CASES)
    assert worlds.run(real_rank, 2, path, ["good"], catch=True) == [None, None]
    ranks = rehearse(path, ["good"], [0, 1], 2, tmp_path)
    assert find(ranks, 2) == []
    assert [rank.found["ended"] for rank in ranks] == ["steps", "steps"]


def test_too_few_samples_for_the_world(script, tmp_path):
    path = script(TRAINING)
    [rank] = rehearse(path, options_of("rehearsed", tmp_path), [999], 1000, tmp_path)
    [warning] = [finding for finding in find([rank], 1000) if finding.kind == "warning"]
    assert warning.text == (
        "TensorDataset has 61 samples, and one step of all ranks takes 4000: 3939 of its rows are repeated samples"
    )
    arguments = options_of("rehearsed", tmp_path, drop_last=True)
    [rank] = rehearse(path, arguments, [0], 1000, tmp_path)
    assert any("no rank gets any data" in finding.text for finding in errors([rank], 1000))


def test_data_that_another_rank_reads(script, tmp_path):
    path = script(TRAINING)
    options = {"loading": {"dispatch_batches": True}}
    first, second = rehearse(path, options_of("rehearsed", tmp_path, **options), [0, 1], 2, tmp_path)
    assert first.found["error"] is None
    assert "rehearse rank 0" in second.found["error"]["message"]


# Pipelines

STAGES = """
import contextlib, json, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PipelineParallelConfig

options = json.loads(sys.argv[1])

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def size(tensors):
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)

schedule = options.get("schedule")
loss_function = None if schedule in (None, "gpipe") else nn.functional.mse_loss

def fill(module):
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.02)

stages = PipelineParallelConfig(
    schedule=schedule, loss_function=loss_function, param_init_fn=fill if options.get("meta") else None
)
accelerator = Accelerator(
    mixed_precision=options.get("precision", "no"),
    parallelism_config=ParallelismConfig(**options["degrees"], pp_handler=stages),
    fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if "dp_shard_size" in options["degrees"] else None,
)
mistake = options.get("mistake")
if options.get("model") == "language":
    from accel_bigmodel import init_empty_weights
    from testkit.language_models import config_of, ids
    from transformers import AutoModelForCausalLM
    with init_empty_weights(include_buffers=False) if options.get("meta") else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_config(config_of("llama", 4))
    rows = ids()
    mask = torch.ones_like(rows)
    mask[3, 5:] = 0
    data = [{"input_ids": i, "attention_mask": m, "labels": i} for i, m in zip(rows, mask)]
else:
    last = 5 if mistake == "shape" else 7
    model = nn.Sequential(*(nn.Linear(6 + n % 2, 6 + (n + 1) % 2) for n in range(7)), nn.Linear(last, 6))
    data = [{"x": x, "y": y} for x, y in zip(torch.randn(64, 6), torch.randn(64, 6))]
if "tp_size" in options["degrees"]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    for layer in model:
        parallelize_module(layer, accelerator.torch_device_mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
for batch in loader:
    if mistake == "batches" and accelerator.process_index >= accelerator.num_processes // 2:
        batch = {name: tensor[:4] for name, tensor in batch.items()}
    if "x" not in batch:
        loss = model(**batch).loss
    elif loss_function is None:
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
    else:
        loss = model(batch["x"], target=batch["y"]).loss
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    break
facts = {
    "shapes": [list(local(parameter).shape) for parameter in model.parameters()],
    "parameters": size(model.parameters()),
    "gradients": size(parameter.grad for parameter in model.parameters()),
    "optimizer": size(value for state in optimizer.state.values() for value in state.values()),
    "drawn": torch.rand(()).item(),
}
model.eval()
with torch.no_grad():
    output = model(batch["x"]) if "x" in batch else model(**batch).logits
facts["output"] = [list(output.shape), str(output.dtype), str(loss.dtype)]
facts["finite"] = bool(torch.isfinite(loss) and torch.isfinite(local(norm)).all() and torch.isfinite(output).all())
with open(f"{options['folder']}/{options['name']}-{accelerator.process_index}.json", "w") as file:
    json.dump(facts, file)
"""

PIPELINES = {
    "gpipe": (2, {"degrees": {"pp_size": 2}}),
    "1f1b": (2, {"degrees": {"pp_size": 2}, "schedule": "1f1b"}),
    "turns": (2, {"degrees": {"pp_size": 2}, "schedule": "zbv_zero_bubble"}),
    "interleaved": (2, {"degrees": {"pp_size": 2}, "schedule": "interleaved_1f1b"}),
    "language": (2, {"degrees": {"pp_size": 2}, "model": "language"}),
    "language on meta, bf16": (
        2,
        {"degrees": {"pp_size": 2}, "model": "language", "meta": True, "precision": "bf16"},
    ),
    "replicas": (4, {"degrees": {"pp_size": 2, "dp_replicate_size": 2}, "schedule": "1f1b"}),
    "fsdp2, bf16": (
        4,
        {"degrees": {"pp_size": 2, "dp_shard_size": 2}, "model": "language", "precision": "bf16"},
    ),
    "tp": (4, {"degrees": {"pp_size": 2, "tp_size": 2}, "schedule": "1f1b"}),
    "four stages": (4, {"degrees": {"pp_size": 4}, "model": "language", "schedule": "gpipe"}),
}
FEW = {"gpipe", "1f1b", "language"}


@pytest.mark.parametrize(
    "case", [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in PIPELINES]
)
def test_every_stage_holds_and_passes_on_what_it_does_in_a_real_world(case, script, tmp_path):
    path = script(STAGES)
    size, options = PIPELINES[case]
    worlds.run(real_rank, size, path, options_of("real", tmp_path, **options), timeout=120)
    ranks = rehearse(path, options_of("rehearsed", tmp_path, **options), range(size), size, tmp_path)
    assert errors(ranks, size) == []
    for rank in ranks:
        real, made_up = facts_of("real", rank.rank, tmp_path), facts_of("rehearsed", rank.rank, tmp_path)
        assert real == made_up
        assert made_up["finite"]
        assert rank.found["messages"]
        memory = section(rank)["memory"]
        for name in ("parameters", "gradients", "optimizer"):
            assert memory[name] == real[name]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        # In a real world rank 0 waits for rank 1, which has failed.
        ("shape", "rank 0 of 2 would fail here: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("batches", "message 1 from rank 0 to rank 1 would not arrive: rank 0 sends float32[2, 6] at "),
    ],
)
def test_stages_that_do_not_fit(mistake, message, script, tmp_path):
    path = script(STAGES)
    options = {"degrees": {"pp_size": 2}, "schedule": "1f1b", "mistake": mistake}
    found = errors(rehearse(path, options_of("rehearsed", tmp_path, **options), [0, 1], 2, tmp_path), 2)
    assert any(message in finding.text for finding in found), found


# The command


def accel(*words, **environ):
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environ
    return subprocess.run(
        [sys.executable, "-m", "accel_cli", "rehearse", *words],
        env=variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.wide
def test_the_command(script, tmp_path):
    path = script(TRAINING)
    arguments = options_of("rehearsed", tmp_path)
    run = accel("--num_processes", "16", "--num_machines", "4", "--ranks", "0,last", path, *arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "rank             0 of 16, on machine 0 of 4" in run.stdout
    assert "15 of 16, on machine 3 of 4" in run.stdout
    assert "Nothing would fail on ranks 0, 15." in run.stdout


@pytest.mark.full
def test_the_command_s_json(script):
    run = accel("--num_processes", "2", "--ranks", "0,1", "--json", script(CASES), "operations")
    report = json.loads(run.stdout)
    assert run.returncode == 1
    assert report["would_fail"]
    assert report["world_size"] == 2
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--num_processes", "4", "--rank", "4", "SCRIPT"],
            "--rank '4' names rank 4, but a world of 4 has the ranks 0 to 3",
        ),
        (
            ["--num_processes", "4", "--ranks", "0-4000000000", "SCRIPT"],
            "--ranks '0-4000000000' names rank 4000000000",
        ),
        (["--num_processes", "4", "--ranks", "3-1", "SCRIPT"], "ends before it begins; pass 1-3"),
        (["--num_processes", "4", "--ranks", "first", "SCRIPT"], "pass ranks such as 0,1,last"),
        (["--num_processes", "4", "--rank", "0", "--ranks", "1", "SCRIPT"], "exclude each other"),
        (["--num_processes", "4", "--steps", "0", "SCRIPT"], "a whole number from 1"),
        (["--num_processes", "10", "--num_machines", "4", "SCRIPT"], "not divisible by --num_machines 4"),
        (["SCRIPT"], "pass --num_processes"),
        (["--num_processes", "4"], "there is no script to rehearse"),
    ],
)
def test_wrong_command_lines(words, message, script, capsys):
    from accel_cli.app import main

    path = script("raise SystemExit('never started')")
    assert main(["rehearse", *(path if word == "SCRIPT" else word for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_names_of_ranks():
    assert chosen_ranks("0,1,last", 8) == [0, 1, 7]
    assert chosen_ranks("2-last, 0", 5) == [0, 2, 3, 4]
    for text in ("", "-1", "0-", "8"):
        with pytest.raises(ConfigError):
            chosen_ranks(text, 8)


def cpu_seconds():
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


@pytest.mark.full
def test_a_large_world_costs_no_more_than_two_processes(script, tmp_path):
    """Seconds of computing, because other tests run at the same time."""
    path = script(TRAINING)
    alone = options_of("alone", tmp_path)
    before = cpu_seconds()
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "ACCELERATE_USE_CPU": "true"}
    subprocess.run([sys.executable, path, *alone], env=environ, check=True, timeout=300)
    single = cpu_seconds() - before
    for size in (1024, 4096):
        before = cpu_seconds()
        arguments = options_of("rehearsed", tmp_path, strategy="fsdp2", samples=40000)
        run = accel("--num_processes", str(size), "--json", path, *arguments)
        assert run.returncode == 0, run.stdout + run.stderr
        assert cpu_seconds() - before < 2 * single
        [rank] = json.loads(run.stdout)["ranks"]
        assert rank["memory"]["peak of tensors"] < 64 * 2**20


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["digits.py", "image_classification.py", "text_classification.py", "strategies/char_llama.py",
     *(f"by_feature/{path.name}" for path in sorted((EXAMPLES / "by_feature").glob("*.py")))],
)  # fmt: skip
def test_the_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = accel("--num_processes", "8", "--ranks", "0,last", str(EXAMPLES / name))
    assert run.returncode == 0, run.stdout + run.stderr
