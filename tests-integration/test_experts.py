"""Experts divided among ranks train as on one process, which computes all samples in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from testkit import worlds
from testkit.language_models import config_of, train

FEATURES, HIDDEN, CLASSES = 8, 12, 4


class StackedExperts(nn.Module):
    """Experts in two stacked parameters, as those of transformers 5."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, HIDDEN, FEATURES) / FEATURES**0.5)
        self.down = nn.Parameter(torch.randn(count, FEATURES, HIDDEN) / HIDDEN**0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if token.numel():
                inner = torch.relu(nn.functional.linear(hidden_states[token], self.up[expert]))
                out = nn.functional.linear(inner, self.down[expert])
                result.index_add_(0, token, out * top_k_weights[token, place, None])
        return result


class Block(nn.Module):
    def __init__(self, count: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.norm = nn.LayerNorm(FEATURES)
        self.router = nn.Linear(FEATURES, count)
        self.experts = StackedExperts(count)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x)
        weights, indices = self.router(flat).softmax(-1).topk(self.k)
        return x + self.experts(flat, indices, weights)


class Model(nn.Module):
    """A mixture of experts in each of two blocks."""

    def __init__(self, count: int = 4, k: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(count, k) for _ in range(2))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(count=4, k=2, dtype=torch.float64, favoured=0, frozen=False):
    """A model; all its tokens go to the first `favoured` experts, if there are any."""
    torch.manual_seed(0)
    model = Model(count, k).to(dtype)
    for block in model.blocks:
        block.router.bias.data[:favoured] += 50
        block.experts.requires_grad_(not frozen)
    return model


def samples(steps, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn((size, FEATURES), generator=generator).to(dtype),
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for _ in range(steps)
    ]


def on_one_process(steps=4, size=16, clip=0.5, **options):
    model = made(**options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    seen = []
    for x, y in samples(steps, size):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


def accelerator_of(ep, accumulation=1, plugin=None, **degrees):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            **(plugin or {}),
        ),
        parallelism_config=ParallelismConfig(ep_size=ep, **degrees),
        gradient_accumulation_steps=accumulation,
    )


def on_ranks(ep, steps=4, size=16, clip=0.5, accumulation=1, degrees=None, plugin=None, **options):
    accelerator = accelerator_of(ep, accumulation, plugin, **(degrees or {}))
    model = made(**options)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.05))
    held = {name: tuple(value.to_local().shape) for name, value in model.named_parameters()}
    ranks = accelerator.strategy.batch
    seen = []
    for x, y in samples(steps, size):
        x, y = x.chunk(ranks.size)[ranks.index], y.chunk(ranks.size)[ranks.index]
        losses = []
        for part in range(accumulation):
            with accelerator.accumulate(model):
                mine, wanted = x.chunk(accumulation)[part], y.chunk(accumulation)[part]
                loss = nn.functional.cross_entropy(model(mine), wanted)
                losses.append(loss.detach())
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
        seen.append((mean.item(), float(norm)))
    return seen, accelerator.get_state_dict(model), held, accelerator.expert_tokens()


def same(found, wanted):
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]), rtol=1e-10, atol=1e-10)
    assert found[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_equals_one_process(accumulation):
    wanted = on_one_process()
    for rank in worlds.run(on_ranks, 2, 2, accumulation=accumulation):
        same(rank, wanted)
        assert rank[2]["blocks.0.experts.up"] == (2, HIDDEN, FEATURES)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ep", "degrees"),
    [
        (4, {}),
        (2, {}),
        (2, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    ],
)
def test_training_on_four_ranks_equals_one_process(ep, degrees):
    wanted = on_one_process()
    for rank in worlds.run(on_ranks, 4, ep, degrees=degrees):
        same(rank, wanted)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"k": 1}, id="one expert a token"),
        pytest.param({"favoured": 2}, id="a rank without tokens"),
        pytest.param({"frozen": True}, id="frozen experts"),
        pytest.param({"plugin": {"activation_checkpointing": True}}, id="recomputed"),
        pytest.param({"plugin": {"reshard_after_forward": False}}, id="kept after forward"),
    ],
)
def test_training_equals_one_process_with(options):
    wanted = on_one_process(**{name: value for name, value in options.items() if name != "plugin"})
    for rank in worlds.run(on_ranks, 2, 2, **options):
        same(rank, wanted)
        counts = rank[3]
        assert counts.keys() == {"blocks.0.experts", "blocks.1.experts"}
        for of_layer in counts.values():
            assert of_layer.sum() == 4 * 16 * options.get("k", 2)
            assert not options.get("favoured") or of_layer[2:].sum() == 0


def half(folder, ep):
    """The first two of four steps, and a save."""
    accelerator, model, optimizer = started(ep)
    steps(accelerator, model, optimizer, samples(4, 16)[:2])
    accelerator.save_state(folder / "state")
    accelerator.save_model(model, folder / "model")


def rest(folder, ep):
    accelerator, model, optimizer = started(ep)
    accelerator.load_state(folder / "state")
    steps(accelerator, model, optimizer, samples(4, 16)[2:])
    return accelerator.get_state_dict(model)


def started(ep):
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True) if ep is None else accelerator_of(ep)
    torch.manual_seed(0)
    model = Model().double()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    return accelerator, model, optimizer


def steps(accelerator, model, optimizer, batches):
    ranks = accelerator.strategy.batch
    for x, y in batches:
        x, y = x.chunk(ranks.size)[ranks.index], y.chunk(ranks.size)[ranks.index]
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, 2), (2, 2), id="the same ranks"),
        pytest.param((2, 2), (1, None), id="one process"),
        pytest.param((1, None), (2, 2), id="from one process"),
        pytest.param((2, 2), (2, 1), id="experts sharded as all else"),
        pytest.param((4, 2), (2, 2), id="fewer ranks", marks=pytest.mark.full),
        pytest.param((2, 2), (4, 4), id="more ranks", marks=pytest.mark.full),
    ],
)
def test_a_state_is_continued_by(tmp_path, before, after):
    _, wanted = on_one_process()
    worlds.run(half, before[0], tmp_path, before[1])
    for weights in worlds.run(rest, after[0], tmp_path, after[1]):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-10, msg=name)


class Scaled(StackedExperts):
    """Not a weighted sum: the weights scale what goes in."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights**2)


def refused(kind):
    from accel_train import Accelerator, ParallelismConfig

    if kind == "ddp":
        return Accelerator(cpu=True, parallelism_config=ParallelismConfig(ep_size=2))
    if kind == "ranks":
        return accelerator_of(3)
    accelerator = accelerator_of(2)
    torch.manual_seed(0)
    model = {"none": lambda: nn.Sequential(nn.Linear(8, 8)), "odd": lambda: Model(3)}.get(kind, Model)()
    if kind == "scaled":
        for block in model.blocks:
            block.experts.__class__ = Scaled
    if kind == "shared":
        model.blocks[1].extra = nn.Module()
        model.blocks[1].extra.up = model.blocks[0].experts.up
    names = {id(parameter) for parameter in model.parameters()}
    try:
        return accelerator.prepare(model)
    except Exception as error:
        assert names == {id(parameter) for parameter in model.parameters()}  # nothing was changed
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("odd", "blocks.0.experts of Model has 3 experts, which cannot be divided among ep_size=2 ranks"),
        ("none", "has no experts that can be divided"),
        ("scaled", "is not the sum of weight x expert"),
        ("shared", "shares the parameter 'blocks.1.extra.up' with another module"),
    ],
)
def test_a_model_is_refused_before_anything_is_changed(kind, message):
    found = worlds.run(refused, 2, kind)
    assert all(each.startswith("PrepareError: ") and message in each for each in found), found


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ddp", "strategy 'ddp' cannot train with ep_size=2"),
        ("ranks", "ep_size=3 does not divide the 2 ranks of a replica"),
    ],
)
def test_a_degree_is_refused(kind, message):
    with pytest.raises(worlds.RankError, match=message):
        worlds.run(refused, 2, kind)


# Models of transformers


def train_language_model(kind, ep):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind))
    if ep is None:
        model, seen = train(None, model)
        return seen, model.state_dict()
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(),
        parallelism_config=ParallelismConfig(ep_size=ep),
    )
    model, seen = train(accelerator, model)
    return seen, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_models_of_transformers_train_as_on_one_process(kind):
    pytest.importorskip("transformers")
    wanted = train_language_model(kind, None)
    for seen, weights in worlds.run(train_language_model, 2, kind, 2):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted[0]), rtol=1e-5, atol=1e-5)
        for name, value in wanted[1].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=name)
