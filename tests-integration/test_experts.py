"""Experts divided among ranks train as on one process, which computes all samples in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from testkit import worlds
from testkit.language_models import config_of, ids, train

pytestmark = pytest.mark.usefixtures("kept_ranks")
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


class Expert(nn.Module):
    """One expert of a list; no number of ranks divides its rows evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 5)
        self.down = nn.Linear(5, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class RoutedExperts(nn.ModuleList):
    """A list whose forward takes routes, as those of transformers 4.57."""

    def __init__(self, count: int) -> None:
        super().__init__(Expert() for _ in range(count))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return over_list(self, hidden_states, top_k_index, top_k_weights)


def over_list(experts, x, indices, weights, skip=True, named=False):
    """What hand-written layers do: each expert gets its tokens, and most skip those without tokens."""
    result = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, place = torch.where(indices == number)
        if token.numel() or not skip:
            found = expert(x=x[token]) if named else expert(x[token])
            result.index_add_(0, token, found * weights[token, place, None])
    return result


class Block(nn.Module):
    def __init__(self, count: int, k: int, kind: str = "stacked", dense: bool = False) -> None:
        super().__init__()
        self.k = k
        self.dense = (
            nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, FEATURES)) if dense else None
        )
        self.norm = nn.LayerNorm(FEATURES)
        self.router = nn.Linear(FEATURES, count)
        self.experts = {
            "stacked": StackedExperts,
            "routed list": RoutedExperts,
            "list": lambda count: nn.ModuleList(Expert() for _ in range(count)),
            "unskipped list": lambda count: nn.ModuleList(Expert() for _ in range(count)),
            "list by keyword": lambda count: nn.ModuleList(Expert() for _ in range(count)),
        }[kind](count)
        self.named = kind == "list by keyword"
        self.skip = kind != "unskipped list"

    def forward(self, x: Tensor) -> Tensor:
        if self.dense is not None:
            x = x + self.dense(x)
        flat = self.norm(x)
        weights, indices = self.router(flat).softmax(-1).topk(self.k)
        if type(self.experts) is nn.ModuleList:
            return x + over_list(self.experts, flat, indices, weights, self.skip, self.named)
        return x + self.experts(flat, indices, weights)


class Model(nn.Module):
    """A mixture of experts in each of two blocks."""

    def __init__(self, count: int = 4, k: int = 2, kind: str = "stacked", dense: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(count, k, kind, dense) for _ in range(2))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(count=4, k=2, dtype=torch.float64, favoured=0, frozen=False, kind="stacked", dense=False):
    """A model; all its tokens go to the first `favoured` experts, if there are any.

    Of a list, "some" freezes one matrix everywhere, and all of the first expert.
    """
    torch.manual_seed(0)
    model = Model(count, k, kind, dense).to(dtype)
    for block in model.blocks:
        block.router.bias.data[:favoured] += 50
        if frozen == "some":
            block.experts[0].requires_grad_(False)
            for expert in block.experts:
                expert.up.weight.requires_grad_(False)
        else:
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


def accelerator_of(ep, accumulation=1, plugin=None, compiled=False, **degrees):
    from accel_train import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        TorchDynamoPlugin,
    )

    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap",
            **{"transformer_cls_names_to_wrap": ["Block"], **(plugin or {})},
        ),
        parallelism_config=ParallelismConfig(ep_size=ep, **degrees),
        gradient_accumulation_steps=accumulation,
        dynamo_plugin=TorchDynamoPlugin(backend="eager") if compiled else None,
    )


def in_tensor_parallel(accelerator, model):
    """The model, whose dense layers ranks of ``tp`` divide, if there are any."""
    if accelerator.parallelism_config.tp_enabled:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {"blocks.*.dense.0": ColwiseParallel(), "blocks.*.dense.2": RowwiseParallel()}
        parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    return model


def on_ranks(
    ep, steps=4, size=16, clip=0.5, accumulation=1, degrees=None, plugin=None, compiled=False, **options
):
    accelerator = accelerator_of(ep, accumulation, plugin, compiled, **(degrees or {}))
    model = in_tensor_parallel(accelerator, made(**options))
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


@pytest.mark.parametrize(
    ("kind", "accumulation"), [("stacked", 1), ("stacked", 2), ("list", 2), ("routed list", 1)]
)
def test_training_equals_one_process(kind, accumulation):
    wanted = on_one_process(kind=kind)
    for index, rank in enumerate(worlds.run(on_ranks, 2, 2, accumulation=accumulation, kind=kind)):
        same(rank, wanted)
        name, shape = (
            ("up", (2, HIDDEN, FEATURES)) if kind == "stacked" else ("3.up.weight", (3 - index, FEATURES))
        )
        assert rank[2][f"blocks.0.experts.{name}"] == shape


@pytest.mark.full
@pytest.mark.parametrize("kind", ["stacked", "list"])
@pytest.mark.parametrize(
    ("ep", "degrees"),
    [
        (4, {}),
        (2, {}),
        (2, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    ],
)
def test_training_on_four_ranks_equals_one_process(kind, ep, degrees):
    wanted = on_one_process(kind=kind)
    for rank in worlds.run(on_ranks, 4, ep, degrees=degrees, kind=kind):
        same(rank, wanted)


@pytest.mark.wide(but=["a list, compiled", "a rank without tokens", "frozen*", "recomputed", "one expert*"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"favoured": 2, "kind": "list"}, id="a rank of a list without tokens"),
        pytest.param({"favoured": 2, "kind": "unskipped list"}, id="experts called without tokens"),
        pytest.param({"kind": "list by keyword"}, id="experts called by keyword"),
        pytest.param({"frozen": "some", "kind": "list"}, id="a list frozen in part"),
        pytest.param({"kind": "list", "plugin": {"activation_checkpointing": True}}, id="a list, recomputed"),
        pytest.param({"compiled": True}, marks=pytest.mark.full, id="compiled"),
        pytest.param({"compiled": True, "kind": "list"}, id="a list, compiled"),
        pytest.param(
            {"compiled": True, "kind": "routed list"}, marks=pytest.mark.full, id="a routed list, compiled"
        ),
        pytest.param({"k": 1}, id="one expert a token"),
        pytest.param({"favoured": 2}, id="a rank without tokens"),
        pytest.param({"frozen": True}, id="frozen experts"),
        pytest.param({"plugin": {"activation_checkpointing": True}}, id="recomputed"),
        pytest.param({"plugin": {"reshard_after_forward": False}}, id="kept after forward"),
    ],
)
def test_training_equals_one_process_with(options):
    wanted = on_one_process(
        **{name: value for name, value in options.items() if name not in ("plugin", "compiled")}
    )
    for rank in worlds.run(on_ranks, 2, 2, **options):
        same(rank, wanted)
        counts = rank[3]
        assert counts.keys() == {"blocks.0.experts", "blocks.1.experts"}
        for of_layer in counts.values():
            assert of_layer.sum() == 4 * 16 * options.get("k", 2)
            assert not options.get("favoured") or of_layer[2:].sum() == 0


WITH_TP = {"dp_shard_size": 2, "tp_size": 2}


@pytest.mark.full
@pytest.mark.parametrize(
    ("ep", "kind", "size", "accumulation"),
    [
        (2, "stacked", 16, 1),
        (4, "stacked", 16, 2),
        (4, "stacked", 6, 1),
        (2, "list", 16, 1),
        (4, "list", 6, 1),
    ],
)
def test_tensor_parallelism_and_experts_train_as_one_process(ep, kind, size, accumulation):
    wanted = on_one_process(kind=kind, dense=True, size=size)
    options = {"kind": kind, "dense": True, "size": size}
    for rank in worlds.run(on_ranks, 4, ep, degrees=WITH_TP, accumulation=accumulation, **options):
        same(rank, wanted)
        assert all(counts.sum() == 4 * size * 2 for counts in rank[3].values())


@pytest.mark.full
@pytest.mark.parametrize("kind", ["stacked", "list"])
@pytest.mark.parametrize(
    ("ep", "degrees"),
    [
        pytest.param(4, {"dp_shard_size": 4, "tp_size": 2}, id="tp, and experts sharded over two ranks"),
        pytest.param(2, {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2}, id="replicas, and tp"),
    ],
)
def test_eight_ranks_train_as_one_process(ep, degrees, kind):
    wanted = on_one_process(kind=kind, dense=True, steps=2)
    for rank in worlds.run(on_ranks, 8, ep, degrees=degrees, steps=2, kind=kind, dense=True):
        same(rank, wanted)


def with_muon(ep=None, **degrees):
    """Weights after four steps of Muon, whose matrices are single experts, and dense layers."""
    from accel_train import Accelerator, muon_with_adamw

    accelerator = Accelerator(cpu=True) if ep is None else accelerator_of(ep, **degrees)
    model = made(dense=True)
    if degrees:
        model = in_tensor_parallel(accelerator, model)
    optimizer = muon_with_adamw(model, lr=0.02, weight_decay=0.1, adamw_lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    steps(accelerator, model, optimizer, samples(4, 16))
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize(
    ("ranks", "ep", "degrees"),
    [
        (2, 2, {}),
        pytest.param(4, 2, {}, marks=pytest.mark.full),
        pytest.param(4, 2, {"dp_replicate_size": 2, "dp_shard_size": 2}, marks=pytest.mark.full),
        pytest.param(4, 4, WITH_TP, marks=pytest.mark.full),
    ],
)
def test_muon_steps_divided_experts_as_on_one_process(ranks, ep, degrees):
    [wanted] = worlds.run(with_muon, 1)
    before = made(dense=True).state_dict()
    for weights in worlds.run(with_muon, ranks, ep, **degrees):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-7, msg=name)
            assert (value - before[name]).abs().max() > 1e-3


def half(folder, ep, kind, degrees=None):
    """The first two of four steps, and a save."""
    accelerator, model, optimizer = started(ep, kind, degrees)
    steps(accelerator, model, optimizer, samples(4, 16)[:2])
    accelerator.save_state(folder / "state")
    accelerator.save_model(model, folder / "model")


def rest(folder, ep, kind, degrees=None):
    accelerator, model, optimizer = started(ep, kind, degrees)
    accelerator.load_state(folder / "state")
    steps(accelerator, model, optimizer, samples(4, 16)[2:])
    return accelerator.get_state_dict(model)


def started(ep, kind, degrees=None):
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True) if ep is None else accelerator_of(ep, **(degrees or {}))
    model = made(kind=kind, dense=True)
    if degrees:
        model = in_tensor_parallel(accelerator, model)
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


@pytest.mark.wide(but=["the same ranks", "one process", "from one process", "a list, from plain FSDP"])
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        pytest.param((2, 2), (2, 2), "stacked", id="the same ranks"),
        pytest.param((2, 2), (1, None), "stacked", id="one process"),
        pytest.param((1, None), (2, 2), "stacked", id="from one process"),
        pytest.param((2, 2), (2, 1), "stacked", id="experts sharded as all else"),
        pytest.param((2, 2), (1, None), "list", id="a list, one process"),
        pytest.param((1, None), (2, 2), "list", id="a list, from one process"),
        pytest.param((2, 1), (2, 2), "routed list", id="a list, from plain FSDP"),
        pytest.param((4, 2), (2, 2), "stacked", id="fewer ranks", marks=pytest.mark.full),
        pytest.param((4, 4, WITH_TP), (2, 2), "stacked", id="from tp", marks=pytest.mark.full),
        pytest.param((1, None), (4, 2, WITH_TP), "list", id="a list, with tp", marks=pytest.mark.full),
        pytest.param((2, 2), (4, 4), "stacked", id="more ranks", marks=pytest.mark.full),
        pytest.param((2, 2), (4, 4), "list", id="a list, more ranks", marks=pytest.mark.full),
    ],
)
def test_a_state_is_continued_by(tmp_path, before, after, kind):
    _, wanted = on_one_process(kind=kind, dense=True)
    worlds.run(half, before[0], tmp_path, before[1], kind, *before[2:])
    for weights in worlds.run(rest, after[0], tmp_path, after[1], kind, *after[2:]):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-10, msg=name)


def in_windows(kind, degrees, save=None, load=None):
    """The weights after two windows of four micro-batches; a state is saved or loaded in the second."""
    accelerator = accelerator_of(2, 4, **degrees)
    model = in_tensor_parallel(accelerator, made(kind=kind, dense=True))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    if load is not None:
        accelerator.load_state(load)
    ranks = accelerator.strategy.batch
    for number, (x, y) in enumerate(samples(8, 8)):
        if load is not None and number < 6:
            continue
        x, y = x.chunk(ranks.size)[ranks.index], y.chunk(ranks.size)[ranks.index]
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if number == 5 and save is not None:
            accelerator.save_state(save)
    return accelerator.get_state_dict(model)


def interrupted_in_a_window(kind, degrees, folder):
    wanted = in_windows(kind, degrees)
    torch.testing.assert_close(in_windows(kind, degrees, save=folder), wanted, rtol=0, atol=0)
    torch.testing.assert_close(in_windows(kind, degrees, load=folder), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "ranks", "degrees"),
    [
        ("stacked", 2, {}),
        pytest.param("list", 2, {}, marks=pytest.mark.full),
        pytest.param("routed list", 2, {}, marks=pytest.mark.full),
        pytest.param("stacked", 4, WITH_TP, marks=pytest.mark.full),
        pytest.param("list", 4, {}, marks=pytest.mark.full),
        pytest.param("stacked", 4, {}, marks=pytest.mark.full),
    ],
)
def test_the_same_ranks_go_on_inside_a_window(tmp_path, kind, ranks, degrees):
    worlds.run(interrupted_in_a_window, ranks, kind, degrees, tmp_path / "state")


def evaluated_alone(kind):
    """What rank 0 alone computes with whole parameters, and what all compute together afterwards."""
    accelerator, model, _ = started(2, kind)
    x, _ = samples(1, 16)[0]
    with torch.no_grad():
        together = model(x)
    with accelerator.whole_parameters(model), torch.no_grad():
        alone = model(x) if accelerator.is_main_process else together
    with torch.no_grad():
        return alone, model(x)


@pytest.mark.parametrize("kind", ["stacked", "list", "routed list"])
def test_one_rank_computes_alone_with_whole_parameters(kind):
    x, _ = samples(1, 16)[0]
    with torch.no_grad():
        wanted = made(kind=kind, dense=True)(x)
    for alone, after in worlds.run(evaluated_alone, 2, kind):
        torch.testing.assert_close(alone, wanted)
        torch.testing.assert_close(after, wanted)


class Noisy(Block):
    """Draws while it routes, and drops some of its result."""

    def forward(self, x):
        weights, indices = (self.router(x) + torch.randn(len(x), 4, dtype=x.dtype)).softmax(-1).topk(self.k)
        return nn.functional.dropout(x + over_list(self.experts, x, indices, weights), 0.5)


def noisy_model():
    model = made(kind="list")
    for block in model.blocks:
        block.__class__ = Noisy
    return model


def drawing():
    accelerator = accelerator_of(2, plugin={"transformer_cls_names_to_wrap": ["Noisy"]})
    rank = accelerator.process_index
    model = accelerator.prepare(noisy_model())
    torch.manual_seed(rank)
    return model(samples(1, 4)[0][0]).detach(), torch.rand(1)


def test_a_module_that_runs_twice_draws_once():
    for rank, (found, after) in enumerate(worlds.run(drawing, 2)):
        model = noisy_model()
        torch.manual_seed(rank)
        torch.testing.assert_close(found, model(samples(1, 4)[0][0]).detach())
        torch.testing.assert_close(after, torch.rand(1))


def begun_without_tokens(empty):
    """The weights after a step in which some ranks have no token."""
    from accel_train.errors import PrepareError

    accelerator = accelerator_of(2)
    model = made(kind="list")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    [(x, _)] = samples(1, 6)
    x = x[: 0 if accelerator.process_index in empty else 6]
    try:
        accelerator.backward(model(x).square().sum())
    except PrepareError as error:
        return str(error)
    optimizer.step()
    return accelerator.get_state_dict(model)


def test_a_rank_of_a_list_may_begin_without_tokens():
    model = made(kind="list")
    [(x, _)] = samples(1, 6)
    (model(x).square().sum() / 2).backward()  # the mean over ranks
    torch.optim.SGD(model.parameters(), 0.1).step()
    for found in worlds.run(begun_without_tokens, 2, [1]):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)
    for error in worlds.run(begun_without_tokens, 2, [0, 1]):
        assert "called no member of blocks.0.experts in its first forward, on any rank" in error


class InPlace(Block):
    def forward(self, x):
        return super().forward(x.mul_(0.5))


class Counting(Block):
    """Calls other experts when it runs again."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.experts[self.calls % 2](x)


class Chained(Block):
    """Each token goes through two experts, one after the other."""

    def forward(self, x):
        _, indices = self.router(x).topk(2)
        for turn in range(2):
            x = x + over_list(self.experts, x, indices[:, turn, None], torch.ones_like(x[:, :1]))
        return x


class SharedFirst(Block):
    """The others get what the first one returns."""

    def forward(self, x):
        x = x + self.experts[0](x)
        return x + over_list(self.experts[1:], x, self.router(x)[:, 1:].argmax(-1, keepdim=True), x[:, :1])


class Rerouted(Block):
    """What one expert returns decides which tokens another one gets, always as many."""

    def forward(self, x):
        first = self.experts[0](x)
        chosen = self.router(x + first)[:, 1].argsort()[:2]
        return (x + first).index_add(0, chosen, self.experts[1](x[chosen]))


class Stored(Block):
    """What one expert returns goes into a tensor that another one gets."""

    def forward(self, x):
        both = torch.zeros_like(x)
        both[0] = self.experts[0](x)[0]
        return x + self.experts[1](both)


class SometimesChained(Block):
    """In its first forward no expert gets what another one returned."""

    first = True

    def forward(self, x):
        found = x + self.experts[0](x)
        return found if self.first else self.experts[1](found)


class Apart(Model):
    """Calls an expert outside of the module that holds it."""

    def forward(self, x):
        return super().forward(x + self.blocks[0].experts[0](x))


def refused_in_forward(kind):
    accelerator = accelerator_of(2, plugin={"transformer_cls_names_to_wrap": [kind.__name__, "Block"]})
    model = made(kind="list")
    if issubclass(kind, Block):
        model.blocks[0].__class__ = kind
    else:
        model.__class__ = kind
    model = accelerator.prepare(model)
    try:
        model(samples(1, 4)[0][0])
        if kind is SometimesChained:
            kind.first = False
            model(samples(1, 4)[0][0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


OF_ANOTHER = r"blocks.0.experts.{} with values that were computed from what another member returned"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Chained, "Chained calls blocks.0.experts."),
        (SharedFirst, "SharedFirst calls blocks.0.experts."),
        (Rerouted, "Rerouted calls " + OF_ANOTHER.format(1)),
        (Stored, "Stored calls " + OF_ANOTHER.format(1)),
        (SometimesChained, "SometimesChained calls " + OF_ANOTHER.format(1)),
        (InPlace, "InPlace, which holds blocks.0.experts, changes one of its inputs or buffers in place"),
        (Counting, "Counting called other members of blocks.0.experts, or with other tokens"),
        (Apart, "blocks.0.experts.0 was called outside of the forward of Block"),
    ],
)
def test_a_module_that_cannot_run_twice_is_refused(kind, message):
    found = worlds.run(refused_in_forward, 2, kind)
    assert all(message in str(each).replace("FSDP", "") for each in found), found


def kept(reshard):
    """The dimensions of the mesh of a divided parameter before and after a forward."""
    accelerator = accelerator_of(2, plugin={"reshard_after_forward": reshard})
    model = accelerator.prepare(made())
    names = []
    for _ in range(2):
        names.append(model.blocks[0].experts.up.device_mesh.mesh_dim_names)
        model(samples(1, 4)[0][0])
    return names


@pytest.mark.parametrize("reshard", [True, False])
def test_experts_stay_gathered_after_forward_where_all_else_does(reshard):
    for before, after in worlds.run(kept, 2, reshard):
        assert before == ("efsdp", "ep")
        assert after == (before if reshard else ("ep",))


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


def nearly_same(found, wanted):
    """Losses and weights in float32."""
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]), rtol=1e-5, atol=1e-5)
    for name, value in wanted[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


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
    for found in worlds.run(train_language_model, 2, kind, 2):
        nearly_same(found, wanted)


def with_balanced_load(kind, ep):
    """Two steps with the auxiliary loss, which each rank computes of its own tokens."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = config_of(kind)
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    model = AutoModelForCausalLM.from_config(config)
    accelerator = None
    if ep is not None:
        accelerator = accelerator_of(ep, plugin={"transformer_cls_names_to_wrap": None})
        model = accelerator.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if accelerator is not None:
        optimizer = accelerator.prepare(optimizer)
    seen = []
    for _ in range(2):
        halves = ids().chunk(2)
        if accelerator is None:
            loss = sum(model(input_ids=rows, labels=rows).loss for rows in halves) / 2
            loss.backward()
        else:
            rows = halves[accelerator.process_index]
            loss = model(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            loss = accelerator.reduce(loss.detach(), "mean")
        seen.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    return seen, {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_the_auxiliary_loss_is_the_mean_of_those_of_ranks(kind):
    pytest.importorskip("transformers")
    wanted = with_balanced_load(kind, None)
    for found in worlds.run(with_balanced_load, 2, kind, 2):
        nearly_same(found, wanted)
