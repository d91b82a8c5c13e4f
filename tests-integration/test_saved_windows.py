"""States saved inside an accumulation window, against runs that nothing has interrupted, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
WIDTH, STEPS, MICRO_BATCHES, SAVED_AFTER = 8, 4, 12, 5
FULL = pytest.mark.full


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.up.bias.requires_grad_(False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A block is used in the first two micro-batches of a window only, and a parameter in the last."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.early = Block()
        self.head = nn.Linear(WIDTH, 1)
        self.late = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, place):
        for block in (*self.blocks, *([self.early] if place < 2 else ())):
            x = block(x)
        return self.head(x * self.late if place == STEPS - 1 else x).squeeze(-1)


def make(seed, dtype):
    torch.manual_seed(seed)
    return Net().to(dtype)


def begin(options):
    """An accelerator with two models, and an optimizer for each."""
    from accel_train import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        ParallelismConfig,
        TorchDynamoPlugin,
    )

    given = {} if options is None else dict(options)
    precision = given.pop("precision", "no")
    arguments = {"strategy": given.pop("strategy", "fsdp2")}
    if arguments["strategy"] == "fsdp2":
        plugin = {"transformer_cls_names_to_wrap": ["Block"]} | given.pop("plugin", {})
        arguments = {"fsdp_plugin": FullyShardedDataParallelPlugin(**plugin)}
    degrees = given.pop("degrees", None)
    if degrees:
        arguments["parallelism_config"] = ParallelismConfig(**degrees)
    if given.pop("compiled", False):
        arguments["dynamo_plugin"] = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accumulation = GradientAccumulationPlugin(
        num_steps=STEPS, sync_with_dataloader=False, sync_each_batch=given.pop("sync_each_batch", False)
    )
    accelerator = Accelerator(
        gradient_accumulation_plugin=accumulation, mixed_precision=precision, **arguments
    )
    assert not given
    dtype = torch.float64 if precision == "no" else torch.float32
    models = [make(seed, dtype) for seed in (0, 1)]
    if degrees and "tp_size" in degrees:
        models = [divided(model, accelerator.torch_device_mesh["tp"]) for model in models]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    return accelerator, dtype, *accelerator.prepare(*models, *optimizers)


def divided(model, mesh):
    """Among the ranks of a mesh; norms compute on a part of each sequence, so that their gradients are summands."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for block in (*model.blocks, model.early):
        plan = {
            "": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
            ),
            "norm": SequenceParallel(use_local_output=True),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
        output = PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=True
        )
        parallelize_module(block, mesh, output)
    return model


def batch(accelerator, number, dtype):
    """Of all ranks together, 8 sequences; each rank that reads its own samples has its part."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    ranks = accelerator.strategy.batch
    return x.chunk(ranks.size)[ranks.index].to(accelerator.device)


def train(
    options=None,
    *,
    first=0,
    save=None,
    load=None,
    items=False,
    inside=False,
    asynchronous=False,
    used=False,
    end=MICRO_BATCHES,
):
    """The weights of both models after every step, from micro-batch number `first` on.

    Args:
        options: see `begin`.
        first: the first micro-batch.
        save: where a state is saved after micro-batch `SAVED_AFTER`.
        load: from where a state is loaded first.
        items: weigh by items.
        inside: save inside of `accumulate()`.
        asynchronous: save in the background.
        used: load where other micro-batches have left gradients.
        end: the micro-batch before which it ends.
    """
    accelerator, dtype, one, two, *optimizers = begin(options)
    if load is not None:
        if used:
            with accelerator.accumulate(one, two):
                accelerator.backward(one(batch(accelerator, 99, dtype), STEPS - 1).square().mean())
        accelerator.load_state(load)
    weights = []
    for number in range(first, end):
        x = batch(accelerator, number, dtype)
        place = number % STEPS
        with accelerator.accumulate(one, two):
            loss = (one(x, place) + two(x, place)).square()
            if items:
                accelerator.backward(loss.sum(), num_items=loss.numel())
            else:
                accelerator.backward(loss.mean())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if inside and number == SAVED_AFTER and save is not None:
                accelerator.save_state(save)
        if not inside and number == SAVED_AFTER and save is not None:
            handle = accelerator.save_state(save, asynchronous=asynchronous)
        if accelerator.sync_gradients:
            weights += [
                {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
                for model in (one, two)
            ]
    if asynchronous and save is not None:
        handle.result()
    return weights


def interrupted(options, folder, **how):
    """See whether a run that saves, and one that goes on from there, have the weights of one that does neither."""
    whole = train(options, **how)
    saving = train(options, save=folder, **how)
    resumed = train(options, first=SAVED_AFTER + 1, load=folder, **how)
    assert len(whole) == 2 * MICRO_BATCHES // STEPS
    assert not torch.equal(whole[0]["early.up.weight"], whole[2]["early.up.weight"])
    torch.testing.assert_close(saving, whole, rtol=0, atol=0)
    torch.testing.assert_close(resumed, whole[2:], rtol=0, atol=0)


def policy(**dtypes):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return {"plugin": {"mixed_precision_policy": MixedPrecisionPolicy(**dtypes)}}


BF16 = {"precision": "bf16"}
CASES = {
    "float64": (2, {}, {}),
    "items": (2, {}, {"items": True, "inside": True}),
    "bf16": (2, BF16, {}),
    "bf16 throughout": (2, {**BF16, **policy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}, {}),
    "fp16": (2, {"precision": "fp16"}, {}),
    "background": (2, {}, {"asynchronous": True, "used": True}),
    "each batch": (2, {"sync_each_batch": True}, {}),
    "not divided after forward": (2, {"plugin": {"reshard_after_forward": False}}, {}),
    "offloaded": (2, {"plugin": {"cpu_offload": True}}, {}),
    "compiled": (2, {"compiled": True}, {}),
    "hsdp": (4, {"plugin": {"dp_replicate_size": 2}}, {}),
    "divided after forward among 2": (4, {"plugin": {"reshard_after_forward": 2}}, {}),
    "tp": (4, {"degrees": {"dp_shard_size": 2, "tp_size": 2}}, {}),
    "tp bf16": (4, {**BF16, "degrees": {"dp_shard_size": 2, "tp_size": 2}}, {}),
}
OFTEN = {"float64", "bf16"}


@pytest.mark.wide(but=["bf16"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OFTEN else FULL) for name in CASES])
def test_fsdp2_goes_on_inside_a_window(tmp_path, name):
    ranks, options, how = CASES[name]
    worlds.run(interrupted, ranks, options, tmp_path / "state", **how)


def saved(options, folder, items):
    train(options, save=folder, items=items, end=SAVED_AFTER + 1)


def resumed(options, folder, items):
    return train(options, load=folder, first=SAVED_AFTER + 1, items=items)


ALONE, DDP = {"strategy": "single"}, {"strategy": "ddp"}
HSDP = CASES["hsdp"][1]


@pytest.mark.wide(but=["to one process-means", "from one process-items"])
@pytest.mark.parametrize("items", [False, True], ids=["means", "items"])
@pytest.mark.parametrize(
    ("before", "ranks", "after", "others"),
    [
        pytest.param(None, 2, ALONE, 1, id="to one process"),
        pytest.param(ALONE, 1, None, 2, id="from one process"),
        pytest.param(None, 4, None, 2, marks=FULL),
        pytest.param(None, 2, HSDP, 4, marks=FULL),
        pytest.param(HSDP, 4, ALONE, 1, marks=FULL),
        pytest.param(None, 4, HSDP, 4, marks=FULL),
        pytest.param(CASES["each batch"][1] | ALONE, 1, CASES["offloaded"][1], 2, marks=FULL),
    ],
)
def test_other_ranks_go_on_inside_a_window_of_fsdp2(tmp_path, before, ranks, after, others, items):
    """All ranks together read the same samples, so one process has the same gradients."""
    [wanted] = worlds.run(train, 1, ALONE, items=items)
    worlds.run(saved, ranks, before, tmp_path / "state", items)
    for found in worlds.run(resumed, others, after, tmp_path / "state", items):
        torch.testing.assert_close(found, wanted[2:], rtol=1e-11, atol=1e-12)


def refused(options, folder, cause):
    from accel_ckpt import StateMismatchError

    accelerator, _, one, *_ = begin(options)
    before = accelerator.get_state_dict(one)
    with pytest.raises(StateMismatchError, match=cause):
        accelerator.load_state(folder)
    torch.testing.assert_close(accelerator.get_state_dict(one), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("before", "ranks", "others"),
    [({"sync_each_batch": True}, 2, 1), pytest.param(CASES["tp"][1], 4, 2, marks=FULL)],
)
def test_gradients_that_ranks_have_divided_are_not_taken_by_others(tmp_path, before, ranks, others):
    worlds.run(saved, ranks, before, tmp_path / "state", False)
    cause = r"gradients have the form of the strategy 'fsdp2'; the strategy '\w+' cannot continue with them on another"
    worlds.run(refused, others, ALONE if others == 1 else None, tmp_path / "state", cause)


def held_by_one_rank(level):
    """The gradients of a parameter after a window, of which rank 0 alone took up one; and what waits before its end."""
    from accel_train.strategies.window_gradients import OwnGradient

    accelerator, dtype, one, *_ = begin(None)
    weight = one.early.up.weight
    taken = OwnGradient(torch.full((3 * WIDTH, WIDTH), 4.0, dtype=dtype)) if level == "values" else None
    held = {"weight": taken} if accelerator.is_main_process else {}
    accelerator.strategy.states.gradients.set_unreduced({"weight": weight}, held)
    [place] = accelerator.strategy.states.gradients.unreduced({"weight": weight}).values()
    waits = None if place.value is None else place.value.values.sum().item()
    accelerator.backward(one(batch(accelerator, 0, dtype), 2).square().mean())
    return waits, weight.grad.full_tensor()


@pytest.mark.parametrize("level", ["values", "zeros"])
def test_all_ranks_reduce_a_gradient_that_one_rank_took_up(level):
    """Its block runs in no further micro-batch, so nothing else would let the other ranks reduce it."""
    found = worlds.run(held_by_one_rank, 2, level)
    expected = 2.0 if level == "values" else 0.0
    assert [waits for waits, _ in found] == ([4.0 * 3 * WIDTH * WIDTH, 0.0] if expected else [None, None])
    for _, gradient in found:
        assert torch.equal(gradient, torch.full_like(gradient, expected))


def without_gradients(folder):
    """A state after a step with `zero_grad(set_to_none=False)`, which is inside no window, and what waits then."""
    accelerator, dtype, one, _, optimizer, _ = begin(None)
    accelerator.backward(one(batch(accelerator, 0, dtype), 0).square().mean())
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    accelerator.save_state(folder)
    accelerator, dtype, one, _, optimizer, _ = begin(None)
    accelerator.load_state(folder)
    named = {str(number): parameter for number, parameter in enumerate(one.parameters())}
    held = accelerator.strategy.states.gradients.unreduced(named)
    assert {each.value for each in held.values()} == {None}
    return one.head.weight.grad.full_tensor(), one.unused.grad


def test_parts_of_zeros_stay_parts(tmp_path):
    for gradient, unused in worlds.run(without_gradients, 2, tmp_path / "state"):
        assert torch.equal(gradient, torch.zeros(1, WIDTH, dtype=torch.float64))
        assert unused is None


LAYOUTS = {"single": {}, "fsdp2": {"dp_shard_size": 2}, "tp": {"tp_size": 2}, "pp": {"pp_size": 2}}


def in_layout(name):
    """Layers that each layout divides, with an optimizer that moves a parameter whose gradient is zero."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**LAYOUTS[name]) if LAYOUTS[name] else None,
        fsdp_plugin=FullyShardedDataParallelPlugin() if name == "fsdp2" else None,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)).double()
    if name == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def steps_with_zeros(before, folder, load):
    accelerator, model, optimizer = in_layout(before)
    ranks, empty = accelerator.strategy.batch, []
    torch.manual_seed(1)
    batches = torch.randn(4, 8, WIDTH, dtype=torch.float64)
    if load:
        accelerator.load_state(folder)
        empty = [p.grad is None or bool(local(p.grad).any()) for p in model.parameters()]
        optimizer.step()  # with zeros: momentum and decay
    for x in batches[2:] if load else batches[:2]:
        accelerator.backward(model(x.chunk(ranks.size)[ranks.index]).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    if not load:
        accelerator.save_state(folder)
    return empty, accelerator.get_state_dict(model)


def local(tensor):
    return getattr(tensor, "to_local", lambda: tensor)()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("single", "tp"),
        ("fsdp2", "pp"),
        ("pp", "fsdp2"),
        ("pp", "tp"),
        pytest.param("tp", "single", marks=FULL),
        pytest.param("single", "pp", marks=FULL),
        pytest.param("tp", "pp", marks=FULL),
    ],
)
def test_zeros_are_no_open_window_for_another_layout(tmp_path, before, after):
    """`zero_grad(set_to_none=False)` leaves gradients that add nothing, and any layout can have them."""
    ranks = {name: 2 if degrees else 1 for name, degrees in LAYOUTS.items()}
    worlds.run(steps_with_zeros, 1, "single", tmp_path / "wanted", False)
    [(_, wanted)] = worlds.run(steps_with_zeros, 1, "single", tmp_path / "wanted", True)
    worlds.run(steps_with_zeros, ranks[before], before, tmp_path / "state", False)
    for empty, weights in worlds.run(steps_with_zeros, ranks[after], after, tmp_path / "state", True):
        assert not any(empty)
        torch.testing.assert_close(dict(weights), dict(wanted), rtol=1e-9, atol=1e-11)
