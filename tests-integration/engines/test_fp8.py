"""fp8 with the real torchao, held against torchao driven by hand: `hatch run engines:fp8`.

Both sides run the same operations in the same order, so losses and weights are compared bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel_train import (
    Accelerator,
    AORecipeKwargs,
    ArgumentTypeError,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
    convert_model_to_fp8_ao,
    has_ao_layers,
)
from testkit import worlds
from testkit.fp8 import CONVERTED, Net, rows

pytest.importorskip("torchao", reason="torchao is not installed; hatch run engines:fp8 installs it")

from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
)
from torchao.float8.float8_linear import Float8Linear


@dataclasses.dataclass(frozen=True)
class Case:
    """A run."""

    strategy: str = "single"
    gather: bool = False
    steps: int = 1  # micro-batches of a window
    windows: int = 4
    clip: float | None = None
    scaling: Any = None  # a Float8LinearConfig; cloudpickle takes the name "config" for modules of torch


@dataclasses.dataclass
class Seen:
    """What a rank saw."""

    losses: list[float]
    weights: dict[str, Tensor]
    norms: list[float] = dataclasses.field(default_factory=list)


def own(batch: tuple[Tensor, Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    x, y = batch
    return x.chunk(size)[rank], y.chunk(size)[rank]


def recipe_of(case: Case) -> AORecipeKwargs:
    if case.scaling is not None:
        return AORecipeKwargs(config=case.scaling, enable_fsdp_float8_all_gather=case.gather)
    return AORecipeKwargs(enable_fsdp_float8_all_gather=case.gather)


def accelerated(case: Case, **arguments: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(
        mixed_precision="fp8",
        cpu=True,
        kwargs_handlers=[recipe_of(case)],
        gradient_accumulation_steps=case.steps,
        strategy=case.strategy if case.strategy == "fsdp2" else None,
        **arguments,
    )
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer)


def steps_of(accelerator: Accelerator, model: nn.Module, optimizer: Any, case: Case, data: Any) -> Seen:
    seen = Seen([], {})
    for batch in data:
        x, y = own(batch, accelerator.process_index, accelerator.num_processes)
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            seen.losses.append(loss.item())
            if accelerator.sync_gradients and case.clip is not None:
                seen.norms.append(accelerator.clip_grad_norm_(model.parameters(), case.clip).item())
            optimizer.step()
            optimizer.zero_grad()
    seen.weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return seen


def ours(case: Case) -> Seen:
    accelerator, model, optimizer = accelerated(case)
    return steps_of(accelerator, model, optimizer, case, rows(case.steps * case.windows))


def by_hand(case: Case) -> Seen:
    """torchao, DDP and FSDP2 without the library."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if case.strategy != "single":
        dist.init_process_group("gloo")
    scaling = case.scaling or Float8LinearConfig(pad_inner_dim=True)
    model = convert_to_float8_training(
        Net(),
        module_filter_fn=lambda module, name: name in CONVERTED,
        config=dataclasses.replace(scaling, enable_fsdp_float8_all_gather=case.gather),
    )
    inner = model
    if case.strategy == "fsdp2":
        options = {
            "mesh": init_device_mesh("cpu", (size,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        }
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    called = DistributedDataParallel(model) if case.strategy == "ddp" else model
    seen = Seen([], {})
    for number, batch in enumerate(rows(case.steps * case.windows), 1):
        x, y = own(batch, rank, size)
        last = number % case.steps == 0
        if case.strategy == "ddp":
            called.require_backward_grad_sync = last
        elif case.strategy == "fsdp2":
            inner.set_requires_gradient_sync(last)
        with torch.autocast("cpu", torch.bfloat16):
            out = called(x)
        loss = nn.functional.mse_loss(out.float(), y)
        (loss / case.steps).backward()
        seen.losses.append(loss.item())
        if not last:
            continue
        if case.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            seen.norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        optimizer.step()
        optimizer.zero_grad()
        if case.gather:
            precompute_float8_dynamic_scale_for_fsdp(model)
    weights = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        weights[name] = getattr(whole, "_tensor", whole).detach().clone()
    seen.weights = weights
    return seen


def run(function: Any, case: Case, *args: Any) -> list[Any]:
    return worlds.run(function, 1 if case.strategy == "single" else 2, case, *args)


def assert_same(found: list[Seen], expected: list[Seen]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.losses == other.losses
        assert list(one.weights) == list(other.weights)
        for name, value in one.weights.items():
            assert torch.equal(value, other.weights[name]), name
        # Norms of divided gradients are summed in another order.
        torch.testing.assert_close(one.norms, other.norms, rtol=1e-6, atol=0)


STRATEGIES = [Case(), Case("ddp"), Case("fsdp2"), Case("fsdp2", gather=True)]
each = pytest.mark.parametrize("case", STRATEGIES, ids=lambda case: f"{case.strategy}-{case.gather}")


@each
@pytest.mark.parametrize("steps", [1, 3])
def test_training_equals_torchao_by_hand(case, steps):
    case = dataclasses.replace(case, steps=steps)
    assert_same(run(ours, case), run(by_hand, case))


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_other_recipes_equal_torchao_by_hand(recipe):
    for case in (Case(scaling=Float8LinearConfig.from_recipe_name(recipe)),):
        assert_same(run(ours, case), run(by_hand, case))


def test_clipping_equals_torchao_by_hand():
    case = Case(clip=0.5)
    found, expected = run(ours, case), run(by_hand, case)
    assert max(expected[0].norms) > 0.5, "something is clipped"
    assert_same(found, expected)


def test_fp8_is_not_bf16():
    """The comparisons above could not fail if nothing were computed in fp8."""

    def bf16() -> list[float]:
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        return steps_of(accelerator, model, optimizer, Case(), rows(4)).losses

    [found] = worlds.run(bf16, 1)
    [fp8] = run(ours, Case())
    assert found != fp8.losses
    torch.testing.assert_close(found, fp8.losses, rtol=0.1, atol=0.1)


@each
def test_a_window_has_the_gradient_of_one_large_batch(case):
    """Loss and fp8 scales are per tensor, so a window of 2 is close to, not the same as, a batch of twice the size."""

    def trained(case: Case, size: int) -> dict[str, Tensor]:
        accelerator, model, optimizer = accelerated(case)
        data = rows(case.steps * case.windows, size)
        return steps_of(accelerator, model, optimizer, case, data).weights

    whole = run(trained, dataclasses.replace(case, windows=1), 16)
    parts = run(trained, dataclasses.replace(case, windows=1, steps=2), 8)
    start = Net().state_dict()
    for one, other in zip(whole, parts, strict=True):
        for name, value in one.items():
            assert not torch.equal(value, start[name]), name
            torch.testing.assert_close(
                value, other[name], rtol=0, atol=0.021
            )  # Adam's first step is 0.01 each way


# Checkpoints


def save_midway(case: Case, folder: str) -> tuple[Seen, Seen]:
    accelerator, model, optimizer = accelerated(case)
    data = rows(case.windows)
    before = steps_of(accelerator, model, optimizer, case, data[:2])
    accelerator.save_state(folder, asynchronous=True).result()
    accelerator.save_model(model, f"{folder}-model")
    return before, steps_of(accelerator, model, optimizer, case, data[2:])


def continue_from(case: Case, folder: str) -> Seen:
    accelerator, model, optimizer = accelerated(case)
    steps_of(
        accelerator, model, optimizer, case, rows(1, 4)
    )  # other weights and scales, which the state replaces
    accelerator.load_state(folder)
    return steps_of(accelerator, model, optimizer, case, rows(case.windows)[2:])


@each
def test_a_run_continues_bit_for_bit_from_a_checkpoint(case, tmp_path):
    saved = run(save_midway, case, str(tmp_path / "state"))
    after = run(continue_from, case, str(tmp_path / "state"))
    assert_same(after, [end for _, end in saved])

    from safetensors.torch import load_file

    weights = load_file(tmp_path / "state-model" / "model.safetensors")
    assert sorted(weights) == sorted(Net().state_dict()), "names are the plain model's"
    for name, value in saved[0][0].weights.items():
        assert torch.equal(weights[name], value)


def test_a_checkpoint_continues_under_another_strategy(tmp_path):
    saved = run(save_midway, Case("fsdp2", gather=True), str(tmp_path / "state"))
    for case in (Case("ddp"), Case("fsdp2"), Case()):
        for seen in run(continue_from, case, str(tmp_path / "state")):
            bound = 0.05 if case.strategy == "single" else 0.005  # fp8's scales are of each rank's batch
            torch.testing.assert_close(seen.weights, saved[0][1].weights, rtol=0, atol=bound)


# Weights gathered in fp8


def changed_by_hand(case: Case, way: str) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs after a script changed weights, and of a model that had them from the beginning."""
    accelerator, model, optimizer = accelerated(case)
    steps_of(accelerator, model, optimizer, case, rows(2))
    x, _ = rows(1)[0]
    before = model(x)
    plain = accelerator.unwrap_model(model)
    plain.reshard()  # a forward without a backward leaves the outermost weights gathered
    with torch.no_grad():
        if way == "in place":
            for parameter in model.parameters():
                parameter.mul_(64.0)
        elif way == "parts":
            for parameter in model.parameters():
                parameter.to_local().mul_(64.0)
        else:
            state = {name: value * 64.0 for name, value in plain.state_dict().items()}
            plain.load_state_dict(state)
    after = model(x)
    plain.reshard()
    _, fresh, _ = accelerated(case)
    with torch.no_grad():
        for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
            mine.to_local().copy_(theirs.to_local())
    return [before, after], [fresh(x)]


@pytest.mark.parametrize("way", ["in place", "parts", "load_state_dict"])
def test_a_scale_is_not_used_with_other_weights(way):
    """Weights that grow 64 times would not fit into fp8 with the old scale."""
    for (before, after), [expected] in run(changed_by_hand, Case("fsdp2", gather=True), way):
        assert not torch.equal(before, after)
        assert torch.equal(after, expected)


def reductions(case: Case) -> int:
    """How many reductions a forward and a step make."""
    accelerator, model, optimizer = accelerated(case)
    data = rows(3)
    for _ in range(4):  # past the first backward passes, after which ranks compare what they have used
        steps_of(accelerator, model, optimizer, case, data)
    counted = []
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "all_reduce" in str(function) or "allreduce" in str(function):
                counted.append(1)
            return function(*args, **(kwargs or {}))

    x, y = own(data[0], accelerator.process_index, accelerator.num_processes)
    with Count():
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
    forward = len(counted)
    counted.clear()
    optimizer.step()
    return forward


def test_scales_are_computed_once_per_step():
    assert run(reductions, Case("fsdp2", gather=True)) == [0, 0], "forward and backward reduce no scale"


def marked(case: Case) -> list[str]:
    _, model, _ = accelerated(case)
    return [
        name
        for name, parameter in model.named_parameters()
        if type(parameter.to_local()).__name__ == "WeightWithDynamicFloat8CastTensor"
    ]


def test_only_converted_weights_are_gathered_in_fp8():
    assert run(marked, Case("fsdp2", gather=True)) == [[f"{name}.weight" for name in CONVERTED]] * 2
    assert run(marked, Case("fsdp2")) == [[], []]


def with_plugin(options: dict[str, Any], meta: bool, folder: str | None) -> Seen:
    plugin = FullyShardedDataParallelPlugin(**options, **({"checkpoint": folder} if folder else {}))
    accelerator = Accelerator(
        mixed_precision="fp8", cpu=True, fsdp_plugin=plugin, kwargs_handlers=[AORecipeKwargs()]
    )
    with torch.device("meta" if meta else "cpu"):
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    return steps_of(accelerator, model, optimizer, Case("fsdp2"), rows(3))


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"activation_checkpointing": True},
        {"sync_module_states": True},
        {"auto_wrap_policy": "NO_WRAP"},
        {"forward_prefetch": True},
    ],
    ids=str,
)
def test_options_of_fsdp(options):
    expected = worlds.run(with_plugin, 2, {}, False, None)
    for seen, plain in zip(worlds.run(with_plugin, 2, options, False, None), expected, strict=True):
        torch.testing.assert_close(seen.losses, plain.losses, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(seen.weights, plain.weights, rtol=0, atol=2e-2)


def test_replicas_of_shards():
    found = worlds.run(with_plugin, 4, {"dp_replicate_size": 2}, False, None)
    for seen in found:
        assert all(torch.equal(value, found[0].weights[name]) for name, value in seen.weights.items())
    expected = worlds.run(with_plugin, 4, {}, False, None)
    torch.testing.assert_close(found[0].weights, expected[0].weights, rtol=0, atol=2e-2)


def test_a_model_on_the_meta_device_is_read_from_a_checkpoint(tmp_path):
    from safetensors.torch import save_file

    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    found = worlds.run(with_plugin, 2, {}, True, str(tmp_path))
    assert_same(found, worlds.run(with_plugin, 2, {}, False, None))


# Layers


def test_conversion_keeps_parameters_hooks_and_modes():
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[AORecipeKwargs()])
    model = Net()
    called = []
    model.blocks[0].linear.register_forward_hook(lambda *_: called.append("hook"))
    model.blocks[1].linear.eval()
    before, names = dict(model.named_parameters()), list(model.state_dict())
    prepared = accelerator.prepare(model)
    assert [n for n, m in prepared.named_modules() if isinstance(m, Float8Linear)] == CONVERTED
    assert all(parameter is before[name] for name, parameter in prepared.named_parameters())
    assert list(prepared.state_dict()) == names
    prepared(rows(1)[0][0])
    assert called == ["hook"]
    assert prepared.blocks[0].linear.training
    assert not prepared.blocks[1].linear.training
    copied = copy.deepcopy(prepared)
    assert torch.equal(copied(rows(1)[0][0]), prepared(rows(1)[0][0]))
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert not has_ao_layers(plain)
    assert all(parameter is before[name] for name, parameter in plain.named_parameters())
    assert torch.equal(plain(rows(1)[0][0]), Net()(rows(1)[0][0]))
    assert called == ["hook"] * 4


def test_a_filter_and_layers_of_others():
    class Mine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model = nn.ModuleDict(
        {
            "a": nn.Linear(16, 16),
            "mine": Mine(16, 16),
            "attention": nn.MultiheadAttention(16, 2),
            "b": nn.Linear(16, 16),
        }
    )
    model["again"] = model["b"]
    asked = []

    def choose(module: nn.Module, name: str) -> bool:
        asked.append(name)
        return name != "a"

    convert_model_to_fp8_ao(model, module_filter_func=choose)
    assert asked == ["a", "b", "again"]
    assert type(model["mine"]) is Mine
    assert isinstance(model["b"], Float8Linear)
    assert model["again"] is model["b"], "a layer in two places stays one"
    assert not isinstance(model["attention"].out_proj, Float8Linear), "its forward is never called"


def test_layers_that_the_script_converted_stay():
    model = convert_to_float8_training(Net(), module_filter_fn=lambda module, name: name in CONVERTED)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    assert has_ao_layers(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False))


def test_a_model_without_fitting_layers_is_named(caplog):
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[AORecipeKwargs()])
    accelerator.prepare(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    assert "none of the 2 linear layers of Sequential computes in fp8" in caplog.text


@pytest.mark.parametrize("regional", [False, True])
def test_compiled_models_train(regional):
    def compiled() -> list[float]:
        dynamo = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
        accelerator, model, optimizer = accelerated(Case(), dynamo_plugin=dynamo)
        return steps_of(accelerator, model, optimizer, Case(), rows(4)).losses

    [found] = worlds.run(compiled, 1)
    [eager] = run(ours, Case())
    torch.testing.assert_close(found, eager.losses, rtol=2e-2, atol=2e-2)


def test_a_compiled_divided_model_trains():
    def compiled(case: Case) -> list[float]:
        accelerator, model, optimizer = accelerated(
            case, dynamo_plugin=TorchDynamoPlugin(backend="aot_eager")
        )
        return steps_of(accelerator, model, optimizer, case, rows(4)).losses

    case = Case("fsdp2", gather=True)
    for found, eager in zip(run(compiled, case), run(ours, case), strict=True):
        torch.testing.assert_close(found, eager.losses, rtol=2e-2, atol=2e-2)


# Where options come from


def test_the_recipe():
    assert AORecipeKwargs().config == Float8LinearConfig(
        pad_inner_dim=True, enable_fsdp_float8_all_gather=True
    )
    own_config = Float8LinearConfig(emulate=True)
    assert AORecipeKwargs(config=own_config).config is own_config
    changed = AORecipeKwargs(config=own_config, pad_inner_dim=True)
    assert (changed.config.emulate, changed.config.pad_inner_dim) == (True, True)
    assert (changed.pad_inner_dim, changed.enable_fsdp_float8_all_gather) == (True, False)
    with pytest.raises(ArgumentTypeError, match=r"takes torchao\.float8\.Float8LinearConfig"):
        AORecipeKwargs(config={"emulate": True})
    with pytest.raises(ArgumentTypeError, match="takes a function"):
        AORecipeKwargs(module_filter_func="first")


SCRIPT = """
import json, sys, torch
from accel_train import Accelerator
accelerator = Accelerator()
recipe = accelerator.ao_recipe_handler
sizes = 32
model = torch.nn.Sequential(*(torch.nn.Linear(sizes, sizes) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(4, sizes)).sum())
optimizer.step()
if accelerator.is_main_process:
    found = [accelerator.mixed_precision, accelerator.fp8_backend.value, recipe.pad_inner_dim,
             recipe.enable_fsdp_float8_all_gather, accelerator.strategy.name, accelerator.num_processes]
    open(sys.argv[1], "w").write(json.dumps(found))
accelerator.end_training()
"""
FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
use_cpu: true
num_processes: 2
mixed_precision: fp8
fsdp_config: {fsdp_version: 2}
fp8_config: {backend: AO, pad_inner_dim: false, enable_fsdp_float8_all_gather: true}
"""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--num_processes 1 --mixed_precision fp8", ["fp8", "AO", True, True, "single", 1]),
        (
            "--num_processes 2 --mixed_precision fp8 --fp8_backend ao --fp8_pad_inner_dim false "
            "--fp8_enable_fsdp_float8_all_gather false",
            ["fp8", "AO", False, False, "ddp", 2],
        ),
        ("--config_file FILE", ["fp8", "AO", False, True, "fsdp2", 2]),
        ("--config_file FILE --fp8_pad_inner_dim true", ["fp8", "AO", True, True, "fsdp2", 2]),
    ],
)
def test_flags_and_files_reach_the_precision(tmp_path, flags, expected):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "file.yaml").write_text(FILE)
    words = [str(tmp_path / "file.yaml") if word == "FILE" else word for word in flags.split()]
    words += [] if "FILE" in flags else ["--cpu"]
    command = [sys.executable, "-m", "accel_cli", "launch", *words, "train.py", "found.json"]
    environ = os.environ | {"HF_HOME": str(tmp_path)}
    subprocess.run(command, cwd=tmp_path, env=environ, check=True, timeout=120)
    assert json.loads((tmp_path / "found.json").read_text()) == expected


# The incumbent


INCUMBENT = """
import json, sys, torch
from torch import nn
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs
from testkit.fp8 import Net, rows
torch.set_num_threads(1)
from torchao.float8 import Float8LinearConfig
config = Float8LinearConfig(pad_inner_dim=True, enable_fsdp_float8_all_gather=sys.argv[1] == "gather")
accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[AORecipeKwargs(config=config)])
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
before = model.blocks[0].linear.weight.detach().clone()
losses = []
for x, y in rows(4):
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps([losses, bool((model.blocks[0].linear.weight != before).any())]))
"""


@pytest.mark.parametrize("gather", ["plain", "gather"])
def test_losses_equal_accelerates(tmp_path, gather):
    """With its default recipe Accelerate's optimizer holds no converted weight, so they are not trained at all."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    done = subprocess.run(
        [sys.executable, "-c", INCUMBENT, gather],
        cwd=tmp_path,
        env=os.environ | {"HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses, trained = json.loads(done.stdout.splitlines()[-1])
    assert trained is (gather == "plain")
    [seen] = run(ours, Case(gather=gather == "gather"))
    assert (seen.losses == losses) is trained
    assert not torch.equal(seen.weights["blocks.0.linear.weight"], Net().blocks[0].linear.weight)


# Speed


def times(case: Case) -> tuple[float, float]:
    """Median seconds of a step here, and of the same step by hand, in turn."""
    accelerator, model, optimizer = accelerated(case)
    raw = convert_to_float8_training(
        Net(),
        module_filter_fn=lambda module, name: name in CONVERTED,
        config=Float8LinearConfig(pad_inner_dim=True),
    )
    plain = torch.optim.AdamW(raw.parameters(), lr=0.01)
    [(x, y)] = rows(1)

    def here() -> None:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    def hand() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = raw(x)
        nn.functional.mse_loss(out.float(), y).backward()
        plain.step()
        plain.zero_grad()

    taken: dict[Any, list[float]] = {here: [], hand: []}
    for turn in range(120):
        for step in (here, hand) if turn % 2 else (hand, here):
            start = time.perf_counter()
            step()
            taken[step].append(time.perf_counter() - start)
    return sorted(taken[here])[60], sorted(taken[hand])[60]


def test_a_step_costs_little_more_than_by_hand():
    [(here, hand)] = run(times, Case())
    assert here < hand * 1.25 + 2e-4, f"{here * 1e3:.2f} ms here, {hand * 1e3:.2f} ms by hand"
