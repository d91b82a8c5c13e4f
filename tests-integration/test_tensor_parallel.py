"""Models that the script divides among ranks that read the same samples, against plain PyTorch on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
WIDTH = 8
FOUR = pytest.param(4, marks=pytest.mark.full)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Sequences to a number for each place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def make(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 6, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(20, 6, generator=generator, dtype=torch.float64))


def divide(model, mesh, sequence=False):
    """Among the ranks of a mesh as Megatron does; `sequence`: norms compute on a part of each sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(use_local_output=True),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(block, mesh, plan)
    if sequence:
        first = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        )
        parallelize_module(model.blocks[0], mesh, first)
        last = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        )
        parallelize_module(model.head, mesh, last)
    return model


def group(accelerator):
    mesh = accelerator.torch_device_mesh
    return mesh["tp"]


def begin(tp, steps=1, **options):
    from accel_train import Accelerator, TorchTensorParallelPlugin

    plugin = TorchTensorParallelPlugin(tp_size=tp)
    return Accelerator(torch_tp_plugin=plugin, gradient_accumulation_steps=steps, **options)


def loader_of(ranks, batch=4):
    return DataLoader(data(), batch_size=batch // ranks)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def windows(accelerator, model, optimizer, loader, epochs=2, clip=0.1):
    """Weights after every step, and norms; the last window of an epoch is short."""
    weights, norms = [], []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                if accelerator.sync_gradients:
                    norms.append(norm.item())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                weights.append({k: v.clone() for k, v in accelerator.get_state_dict(model).items()})
    return weights, norms


def plain(steps, epochs=2, clip=0.1):
    model = make()
    optimizer = optimizer_of(model)
    weights, norms = [], []
    batches = list(DataLoader(data(), batch_size=4))
    for _ in range(epochs):
        for begin in range(0, len(batches), steps):
            window = batches[begin : begin + steps]
            for x, y in window:
                ((model(x) - y).square().mean() / len(window)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            optimizer.zero_grad()
            weights.append({k: v.clone() for k, v in model.state_dict().items()})
    return weights, norms


def check(found, wanted, bound=1e-11):
    assert len(found[0]) == len(wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=bound, atol=bound)
    for here, there in zip(found[0], wanted[0], strict=True):
        assert here.keys() == there.keys()
        for name, value in there.items():
            torch.testing.assert_close(here[name], value, rtol=bound, atol=bound, msg=name)


def divided(steps, kind):
    """One of the ways to divide a model; ranks begin with other values of what they hold whole."""
    accelerator = begin(2, steps)
    model = make()
    model = model if kind == "whole" else divide(model, group(accelerator), kind == "sequence")
    with torch.no_grad():
        for parameter in model.parameters():
            if not hasattr(parameter, "to_local"):
                parameter += accelerator.process_index
    model, optimizer, loader = accelerator.prepare(
        model, optimizer_of(model), loader_of(accelerator.strategy.batch.size)
    )
    return windows(accelerator, model, optimizer, loader)


@pytest.mark.parametrize("ranks", [2, FOUR])
@pytest.mark.parametrize("kind", ["tensors", "sequence", "whole"])
@pytest.mark.parametrize("steps", [1, 2])
def test_t36_training_equals_one_process(ranks, kind, steps):
    wanted = plain(steps)
    assert max(wanted[1]) > 0.1, "something is clipped"
    for found in worlds.run(divided, ranks, steps, kind):
        check(found, wanted)


def norms_only():
    from torch.distributed.tensor.debug import CommDebugMode

    accelerator = begin(2)
    model = divide(make(), group(accelerator))
    model, loader = accelerator.prepare(model, loader_of(accelerator.strategy.batch.size))
    x, y = next(iter(loader))
    accelerator.backward((model(x) - y).square().mean())
    grads = {n: p.grad for n, p in model.named_parameters()}
    whole = {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in grads.items()}
    seen = []
    for kind in (1.0, 2.0, float("inf")):
        with CommDebugMode() as spy:
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9, norm_type=kind)
        assert not any("gather" in str(op) for op in spy.get_comm_counts()), spy.get_comm_counts()
        seen.append((norm, nn.utils.get_total_norm(list(whole.values()), kind)))
    accelerator.clip_grad_norm_(model.parameters(), seen[1][0].item() / 2)
    after = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    return seen, whole, after


def test_t36_norms_over_several_meshes_scale_every_gradient_and_gather_none():
    for seen, before, after in worlds.run(norms_only, 2):
        for norm, wanted in seen:
            assert type(norm) is torch.Tensor
            torch.testing.assert_close(norm, wanted)
        for name, value in after.items():
            torch.testing.assert_close(value, before[name] / 2, rtol=1e-5, atol=1e-8)


# FSDP over tensor parallelism


def mixed(steps, sharded_mesh="dp_replicate"):
    from torch.distributed.fsdp import fully_shard

    accelerator = begin(2, steps)
    mesh = accelerator.torch_device_mesh
    model = divide(make(), mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh[sharded_mesh])
    if steps == 1:  # with windows, the head is left out
        fully_shard(model, mesh=mesh[sharded_mesh])
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader_of(2))
    return windows(accelerator, model, optimizer, loader)


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 2])
def test_t36_meshes_of_fsdp_and_tensor_parallelism(steps):
    wanted = plain(steps)
    for found in worlds.run(mixed, 4, steps):
        check(found, wanted)


# State


def started(kind, steps, seed=0):
    from accel_train import Accelerator, DataLoaderConfiguration

    options = {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)}
    if kind == "tp":
        accelerator = begin(2, steps, **options)
    else:
        accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    model = make(seed)
    if kind == "tp":
        divide(model, group(accelerator))
    loader = loader_of(accelerator.strategy.batch.size)
    return accelerator, *accelerator.prepare(model, optimizer_of(model), loader)


def train_rest(accelerator, model, optimizer, loader, folder=None, stop=None):
    for number, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if number == stop:
            accelerator.save_state(folder / "state")
            accelerator.save_model(model, folder / "model")
            accelerator.wait_for_everyone()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def save(folder, kind, steps, stop):
    return train_rest(*started(kind, steps), folder, stop)


def resume(folder, kind, steps):
    objects = started(kind, steps, seed=9)
    objects[0].load_state(folder / "state")
    return train_rest(*objects)


@pytest.mark.parametrize(
    ("saved", "ranks", "loaded", "others"),
    [
        ("tp", 2, "single", 1),
        ("single", 1, "tp", 2),
        pytest.param("tp", 4, "tp", 2, marks=pytest.mark.full),
        pytest.param("tp", 4, "ddp", 2, marks=pytest.mark.full),
    ],
)
def test_states_are_loaded_by_other_strategies(tmp_path, saved, ranks, loaded, others):
    from safetensors.torch import load_file

    wanted = worlds.run(save, ranks, tmp_path, saved, 2, 3)[0]
    for weights in worlds.run(resume, others, tmp_path, loaded, 2):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-11, atol=1e-11, msg=name)
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: value.shape for name, value in written.items()} == {n: v.shape for n, v in wanted.items()}


@pytest.mark.parametrize("ranks", [2, FOUR])
def test_a_state_is_saved_inside_a_window(tmp_path, ranks):
    wanted = worlds.run(save, ranks, tmp_path, "tp", 2, 2)
    for weights, expected in zip(worlds.run(resume, ranks, tmp_path, "tp", 2), wanted, strict=True):
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name
    message = r"inside an accumulation window, whose gradients have the form of the strategy 'tp'"
    with pytest.raises(worlds.RankError, match=message):
        worlds.run(resume, 1, tmp_path, "single", 2)


# What cannot be right


def under_another(strategy, tp=2):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from accel_train import Accelerator

    if strategy == "mixed":
        accelerator = Accelerator(strategy="fsdp2")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = fully_shard(divide(make(), mesh["tp"]), mesh=mesh["dp"])
    elif strategy == "part":
        accelerator = Accelerator(strategy="ddp")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
        model = fully_shard(make(), mesh=mesh["dp"])
    elif strategy == "tp":
        accelerator = begin(1)
        model = divide(make(), init_device_mesh("cpu", (accelerator.num_processes,)))
    else:
        accelerator = Accelerator(strategy=strategy)
        model = divide(make(), init_device_mesh("cpu", (accelerator.num_processes,)))
    accelerator.prepare(model)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp"])
def test_ranks_that_would_read_different_samples_of_one_tensor_are_refused(strategy):
    message = r"PrepareError.*'blocks\.0\.up\.weight' is a DTensor.*the same samples.*tp_size=2"
    with pytest.raises(worlds.RankError, match=message):
        worlds.run(under_another, 2, strategy)


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("mixed", r"is a DTensor.*not by fully_shard alone.*tp_size=2"),
        ("part", r"divided .* among 2 ranks that read different samples, and there are 4"),
    ],
)
def test_meshes_that_leave_ranks_out_are_refused(strategy, message):
    with pytest.raises(worlds.RankError, match=rf"PrepareError.*{message}"):
        worlds.run(under_another, 4, strategy)


def place(tp):
    accelerator = begin(tp)
    return accelerator.strategy.batch.size, accelerator.strategy.batch.index


@pytest.mark.parametrize(
    ("tp", "places"),
    [
        (None, [(1, 0)] * 4),
        (1, [(4, 0), (4, 1), (4, 2), (4, 3)]),
        (2, [(2, 0), (2, 0), (2, 1), (2, 1)]),
    ],
)
def test_neighbours_read_the_same_samples(tp, places):
    assert worlds.run(place, 4, tp) == places


def three():
    begin(2)


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(
        worlds.RankError, match=r"IncompatibleOptionsError.*tp_size=2 does not divide the 3 processes"
    ):
        worlds.run(three, 3)


def fused(groups):
    accelerator = begin(2)
    model = divide(make(), group(accelerator))
    whole = [p for p in model.parameters() if not hasattr(p, "to_local")]
    divided = [p for p in model.parameters() if hasattr(p, "to_local")]
    params = {1: [*whole, *divided], 2: [{"params": whole}, {"params": divided}]}[groups]
    optimizer = torch.optim.AdamW(params, lr=1e-2, eps=1e-3, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(1))
    return windows(accelerator, model, optimizer, loader)


def test_a_fused_optimizer_of_whole_and_divided_parameters():
    for found in worlds.run(fused, 2, 2):
        check(found, plain(1))
    message = r"PrepareError.*Group 0 of AdamW has fused=True, 8 divided .* and 6 whole.*Leave out fused"
    with pytest.raises(worlds.RankError, match=message):
        worlds.run(fused, 2, 1)


def stepped_by_default(folder):
    """What torch would choose on an accelerator, before and after a state that one process saved is loaded."""
    from accel_train import Accelerator

    accelerator = Accelerator() if folder is None else begin(2)
    model = make()
    if folder is not None:
        divide(model, group(accelerator))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    prepared = optimizer.param_groups[0]["foreach"]
    if folder is None:
        return accelerator, prepared
    accelerator.load_state(folder)
    return prepared, optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]


def saved_alone(folder):
    accelerator, foreach = stepped_by_default(None)
    accelerator._optimizers[0].param_groups[0]["fused"] = True  # the script of that run had chosen it
    accelerator.save_state(folder)
    return foreach


def test_whole_and_divided_parameters_are_stepped_one_by_one(tmp_path):
    folder = str(tmp_path / "state")
    assert worlds.run(saved_alone, 1, folder) == [None]
    assert worlds.run(stepped_by_default, 2, folder) == [(False, False, None)] * 2


def add_later():
    accelerator = begin(2)
    model = divide(make(), group(accelerator))
    model = accelerator.prepare(model)
    torch.manual_seed(accelerator.process_index)
    model.head = nn.Linear(WIDTH, 1).double().to(accelerator.device)
    x, y = (each.to(accelerator.device) for each in next(iter(loader_of(1))))
    message = r"'head\.weight' was added to Net after it was prepared.*Prepare the model again"
    with pytest.raises(Exception, match=message):
        accelerator.backward((model(x) - y).square().mean())
    model.zero_grad()
    assert accelerator.prepare(model) is model
    accelerator.backward((model(x) - y).square().mean())
    return model.head.weight.detach(), model.head.weight.grad


def test_t39_parameters_that_are_added_are_refused_until_ranks_have_the_same():
    first, second = worlds.run(add_later, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def scaled(kind, steps, fused=False):
    """Gradients of float64 are scaled and unscaled exactly, because scales are powers of two."""
    accelerator = begin_as(kind, steps, "fp16")
    model = divide(make(), accelerator.torch_device_mesh["tp"])
    kinds = [[p for p in model.parameters() if hasattr(p, "placements") is split] for split in (True, False)]
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds], lr=1e-2, eps=1e-3, fused=fused)
    loader = loader_of(accelerator.strategy.batch.size)
    return windows(accelerator, *accelerator.prepare(model, optimizer, loader))


def begin_as(kind, steps, precision):
    from accel_train import Accelerator, GradScalerKwargs, ParallelismConfig

    scale = [GradScalerKwargs(init_scale=256.0)]  # nothing overflows by itself
    if kind == "tp":
        return begin(2, steps, mixed_precision=precision, kwargs_handlers=scale)
    return Accelerator(
        parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2),
        gradient_accumulation_steps=steps,
        mixed_precision=precision,
        kwargs_handlers=scale,
    )


@pytest.mark.parametrize(
    ("kind", "ranks", "fused"),
    [
        ("tp", 2, False),
        pytest.param("tp", 2, True, marks=pytest.mark.full),
        pytest.param("tp", 4, False, marks=pytest.mark.full),
    ],
)
def test_scaled_gradients_are_clipped_and_stepped_as_on_one_process(kind, ranks, fused):
    wanted = plain(2)
    for found in worlds.run(scaled, ranks, kind, 2, fused):
        check(found, wanted)


def overflow(kind, name):
    """A step whose gradient is inf in one element that one rank holds, and a step after it."""
    from accel_train.strategies.gradients import local_part

    accelerator = begin_as(kind, 1, "fp16")
    model = divide(make(), accelerator.torch_device_mesh["tp"])
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    x, y = (tensor.to(accelerator.device) for tensor in next(iter(loader_of(1))))
    taken = []
    for wrong in (True, False):
        before = accelerator.get_state_dict(model)["blocks.0.up.weight"].clone()
        accelerator.backward((model(x) - y).square().mean())
        if wrong and accelerator.process_index == 1:
            local_part(model.get_parameter(name).grad).view(-1)[0] = torch.inf
        optimizer.step()
        after = accelerator.get_state_dict(model)["blocks.0.up.weight"]
        taken.append(
            (not torch.equal(before, after), optimizer.step_was_skipped, accelerator.scaler.get_scale())
        )
        optimizer.zero_grad()
    accelerator.backward((model(x) - y).square().mean())  # the scale changes before a window opens
    return [*taken, accelerator.scaler.get_scale()]


@pytest.mark.parametrize(
    ("kind", "ranks", "name"),
    [
        ("tp", 2, "blocks.1.down.weight"),
        pytest.param("dp_shard x tp", 4, "blocks.1.down.weight", marks=pytest.mark.full),
    ],
)
def test_inf_on_one_rank_skips_the_step_on_all(kind, ranks, name):
    for first, second, scale in worlds.run(overflow, ranks, kind, name):
        assert first[:2] == (False, True)
        assert second[:2] == (True, False)
        assert scale == first[2] / 2


def half(divided):
    from accel_train import Accelerator

    accelerator = (
        begin(2, 2, mixed_precision="fp16")
        if divided
        else Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="fp16")
    )
    model = make().float()
    if divided:
        model = divide(model, accelerator.torch_device_mesh["tp"])
    loader = DataLoader([(x.float(), y.float()) for x, y in data()], batch_size=4)
    return windows(accelerator, *accelerator.prepare(model, optimizer_of(model), loader))


def test_fp16_is_that_of_one_process():
    wanted = half(divided=False)
    assert plain(2)[1] == pytest.approx(wanted[1], rel=5e-2), "and near the exact norms"
    for found in worlds.run(half, 2, True):
        check(found, wanted, bound=5e-3)


# Whole parameters that compute with divided values


class Heads(nn.Module):
    """Attention without attention: a norm over each head, whose weight no plan for matrices divides."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.norm(self.up(x).unflatten(-1, (-1, WIDTH)))
        return self.down(torch.tanh(heads).flatten(-2))


def train_heads(degrees, divides_norm):
    """What a rank warns of, and the weights after two steps of two micro-batches."""
    import warnings

    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    options = {} if degrees is None else {"parallelism_config": ParallelismConfig(**degrees)}
    if "dp_shard_size" in (degrees or {}):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    torch.manual_seed(0)
    model = Heads().double()
    if degrees:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if divides_norm:
            plan["norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    ranks = accelerator.strategy.batch
    x, _ = data().tensors
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in x[:16].split(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch.chunk(ranks.size)[ranks.index]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    told = [str(each.message) for each in seen if "drift apart" in str(each.message)]
    return told, accelerator.get_state_dict(model)


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [(2, {"tp_size": 2}), pytest.param(4, {"tp_size": 2, "dp_shard_size": 2}, marks=pytest.mark.full)],
)
def test_a_whole_parameter_with_a_summand_of_its_gradient_is_named(ranks, degrees):
    """Each rank would step the norm with the gradient of its own heads."""
    [(_, wanted)] = worlds.run(train_heads, 1, None, False)
    for divides_norm in (False, True):
        found = worlds.run(train_heads, ranks, degrees, divides_norm)
        assert sum(len(told) for told, _ in found) == (not divides_norm)
        if not divides_norm:
            assert "1 of 1 parameters" in found[0][0][0]
            assert "the first 'norm.weight'" in found[0][0][0]
            continue
        for _, weights in found:
            torch.testing.assert_close(dict(weights), dict(wanted), rtol=1e-9, atol=1e-11)
