"""Accumulation windows that are not finished when a state is saved."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_ckpt import CorruptCheckpointError, StateMismatchError
from accel_train import Accelerator, AccumulationError
from accel_train.checkpoints.window_state import Trained, check, dump, for_other_ranks, holds_gradients, load
from accel_train.strategies.base import Strategy
from accel_train.strategies.capabilities import Capabilities
from accel_train.strategies.state_adapter import StateAdapter
from accel_train.strategies.window_gradients import WindowGradients
from testkit import worlds
from testkit.small_run import build

pytestmark = pytest.mark.usefixtures("kept_ranks")


def open_window(steps=4, taken=2, seed=0, precision="no"):
    """A training in the middle of a window."""
    accelerator = Accelerator(gradient_accumulation_steps=steps, mixed_precision=precision)
    parts = build(accelerator, seed=seed)
    model = parts[0]
    for number in range(taken):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 4), number + 1.0)).sum(), num_items=3 + number)
    return accelerator, parts


def test_gradients_and_counts_of_an_unfinished_window_come_back(tmp_path):
    accelerator, (model, *_) = open_window()
    folder = accelerator.save_state(tmp_path / "state")
    other, (restored, *_) = open_window(taken=0, seed=9)
    other.load_state(folder)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), restored.parameters(), strict=True)
    )
    assert other.sync_gradients is accelerator.sync_gradients is False
    [window] = other._accumulator.unfinished()
    assert (window.micro_batches, window.items, window.planned, window.weighted) == (2, 7, 4, True)
    for each, net in ((accelerator, model), (other, restored)):
        for _ in range(2):
            with each.accumulate(net):
                each.backward(net(torch.ones(2, 4)).sum(), num_items=2)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), restored.parameters(), strict=True)
    )


def test_gradients_that_were_stepped_with_are_not_saved(tmp_path):
    accelerator, (model, optimizer, *_) = open_window(steps=1, taken=1)
    optimizer.step()
    folder = accelerator.save_state(tmp_path / "state")
    other, (restored, *_) = open_window(steps=1, taken=0)
    other.load_state(folder)
    assert model.weight.grad is not None
    assert restored.weight.grad is None


def test_gradients_of_zeros_come_back_as_zeros(tmp_path):
    accelerator, (_, optimizer, *_) = open_window(steps=1, taken=1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    folder = accelerator.save_state(tmp_path / "state")
    other, (restored, *_) = open_window(steps=1, taken=0)
    other.load_state(folder)
    assert torch.equal(restored.weight.grad, torch.zeros(1, 4))


def test_zeros_that_come_back_are_no_gradients_of_an_earlier_window(tmp_path):
    accelerator, (model, optimizer, *_) = open_window(steps=2, taken=2)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    accelerator.load_state(accelerator.save_state(tmp_path / "state"))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 4)).sum(), num_items=2)
    accelerator.save_state(tmp_path / "inside")


def test_a_window_of_a_model_that_was_not_prepared_cannot_be_saved(tmp_path):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    build(accelerator)
    stranger = nn.Linear(4, 1)
    with accelerator.accumulate(stranger):
        accelerator.backward(stranger(torch.ones(2, 4)).sum())
    with pytest.raises(RuntimeError, match="not part of a prepared model"):
        accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()


# Names


class Shared(nn.Module):
    """A weight under two names, and one that is inside a compiled part."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.part = torch.compile(nn.Linear(2, 1), backend="eager")


def trained_of(models=(), optimizers=(), loaders=(), prepared=None):
    return Trained(models, models if prepared is None else prepared, optimizers, loaders)


def test_every_parameter_has_one_name_and_those_of_no_model_are_the_optimizers():
    model, other, own = Shared(), nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    groups = [{"params": [model.first.weight]}, {"params": [other.bias, own]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    named = trained_of([model, other], [optimizer]).parameters()
    assert {name: id(parameter) for name, parameter in named.items()} == {
        "model_0.first.weight": id(model.first.weight),
        "model_0.part.weight": id(model.part._orig_mod.weight),
        "model_0.part.bias": id(model.part._orig_mod.bias),
        "model_1.weight": id(other.weight),
        "model_1.bias": id(other.bias),
        "optimizer_0.1.1": id(own),
    }


def test_prepared_models_and_parts_of_models_are_found_again_by_name():
    model, other = Shared(), nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    wrapper = nn.Sequential(other)
    trained = trained_of([model, other], prepared=[model, wrapper])
    named = {model: "prepared_0", wrapper: "prepared_1", other[1][0]: "model_1.1.0", other: "model_1."}
    for module, name in named.items():
        assert trained.name_of(module) == name
        assert trained.model_called(name) is module
    with pytest.raises(AccumulationError, match="given a Linear that is not part of a prepared model"):
        trained.name_of(nn.Linear(1, 1))


def test_a_skipping_loader_is_the_loader_it_was_made_of():
    accelerator = Accelerator()
    *_, loader = build(accelerator)
    other = accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 1))))
    trained = trained_of(loaders=[loader, other])
    assert [trained.number_of(item) for item in (loader, other)] == [0, 1]
    assert trained.number_of(accelerator.skip_first_batches(other, 1)) == 1
    assert trained.number_of(accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 1))))) is None


# Saving and loading


def dumped(accelerator):
    return dump(accelerator._accumulator, trained_here(accelerator), accelerator.strategy)


def trained_here(accelerator):
    here = accelerator._prepared
    return Trained(here.models, here.prepared_models, here.optimizers, here.loaders)


def test_between_steps_nothing_is_open():
    accelerator, _ = open_window(steps=1, taken=1)
    assert holds_gradients(dumped(accelerator)), "gradients wait for a step"
    accelerator._optimizers[0].step()
    tree = dumped(accelerator)
    assert not holds_gradients(tree)
    assert (tree["windows"], tree["gradients"]) == ([], {})


def test_a_window_is_open_also_before_its_first_gradient():
    accelerator, (model, *_) = open_window(taken=0)
    assert not holds_gradients(dumped(accelerator))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.zeros(2, 4)).sum() * 0, num_items=1)
    tree = dumped(accelerator)
    assert holds_gradients(tree)
    assert tree["gradients"] == {"model_0.weight": "zeros", "model_0.bias": "zeros"}


def test_a_window_by_hand_comes_back(tmp_path):
    def begin():
        accelerator = Accelerator(gradient_accumulation_steps=3)
        return accelerator, build(accelerator)[0]

    def micro(accelerator, model, number):
        accelerator.backward(model(torch.full((2, 4), number + 1.0)).sum(), num_items=2 + number)

    runs = []
    for resumed in (False, True):
        accelerator, model = begin()
        with accelerator.no_sync(model):
            micro(accelerator, model, 0)
        if resumed:
            folder = accelerator.save_state(tmp_path / "state")
            accelerator, model = begin()
            accelerator.load_state(folder)
        micro(accelerator, model, 1)
        runs.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_gradients_come_back_sparse(coalesced):
    def begin():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        return accelerator, accelerator.prepare(nn.Embedding(5, 2, sparse=True))

    accelerator, model = begin()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.tensor([1, 3, 1])).sum())
    if coalesced:
        model.weight.grad = model.weight.grad.coalesce()
    other, restored = begin()
    load(other._accumulator, trained_here(other), dumped(accelerator), other.strategy)
    gradient = restored.weight.grad
    assert gradient.is_sparse
    assert gradient.is_coalesced() is coalesced
    assert torch.equal(gradient.to_dense(), model.weight.grad.to_dense())


class Unsaved(Strategy):
    """Cannot save inside a window."""

    name = "unsaved"
    capabilities = Capabilities(saves_windows=False)


class Hiding(Strategy):
    """Keeps gradients in a form of its own."""

    name = "hiding"
    capabilities = Capabilities(hides_gradients=True)


def test_a_strategy_that_cannot_save_windows_says_so_and_saves_between_steps(register, tmp_path):
    register(Unsaved)
    accelerator = Accelerator(strategy="unsaved")
    model, optimizer, *_ = build(accelerator)
    accelerator.save_state(tmp_path / "first")
    accelerator.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(
        AccumulationError, match=r"'unsaved' cannot save them\. Save after optimizer\.step\(\)"
    ):
        accelerator.save_state(tmp_path / "second")
    assert not (tmp_path / "second").exists()
    optimizer.step()
    accelerator.save_state(tmp_path / "third")


@pytest.mark.parametrize(
    ("saved_by", "continued_by", "same_ranks", "message"),
    [
        ("single", "single", True, None),
        ("single", "single", False, None),
        ("hiding", "hiding", True, None),
        ("hiding", "hiding", False, r"form of the strategy 'hiding'; .* 'hiding' .* on another number of ranks"),
        ("hiding", "single", True, r"form of the strategy 'hiding'; the strategy 'single' cannot continue"),
        ("single", "hiding", True, r"form of plain tensors; the strategy 'hiding' cannot continue with them\. Cont"),
    ],
)  # fmt: skip
def test_gradients_of_one_engine_are_not_taken_for_anothers(
    register, saved_by, continued_by, same_ranks, message
):
    register(Hiding)
    accelerator = Accelerator(strategy=saved_by)
    model, *_ = build(accelerator)
    closed = dumped(accelerator)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    tree = dumped(accelerator)
    other = Accelerator(strategy=continued_by)
    build(other)
    arguments = trained_here(other), other.strategy
    check(arguments[0], closed, arguments[1], same_ranks=same_ranks)  # between steps nothing has a form
    if message is None:
        check(arguments[0], tree, arguments[1], same_ranks=same_ranks)
    else:
        with pytest.raises(StateMismatchError, match=message):
            check(arguments[0], tree, arguments[1], same_ranks=same_ranks)


def test_gradients_of_parameters_that_are_not_here_are_named():
    accelerator, _ = open_window()
    with pytest.raises(
        StateMismatchError, match=r"window for model_0\.bias, model_0\.weight, which no prepared"
    ):
        check(trained_of([nn.ReLU()]), dumped(accelerator), accelerator.strategy, same_ranks=True)


def weighted_after_zeros(folder, strategy):
    """Weights after three windows over items, with a save and a load inside the second one, or without `folder`."""
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    draws = torch.Generator().manual_seed(accelerator.process_index)
    for number in range(6):
        x = torch.randn(3 + accelerator.process_index, 4, dtype=torch.float64, generator=draws)
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().sum(), num_items=len(x))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if folder is not None and number == 2:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
    return dict(accelerator.get_state_dict(model))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_zeros_of_a_former_window_are_no_gradients_that_items_must_not_divide(tmp_path, strategy):
    """DDP forms its buckets again in the second window, and puts other zeros into the place of those of `zero_grad`."""
    expected = worlds.run(weighted_after_zeros, 2, None, strategy)[0]
    for weights in worlds.run(weighted_after_zeros, 2, tmp_path / "state", strategy):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


# Another number of ranks


def tree_of(gradient, items=0, weighted=False, micro_batches=1, models=("prepared_0",)):
    """What one rank saved: one window, and a window by hand that was not used."""
    window = {
        "models": list(models), "micro_batches": micro_batches, "planned": 4, "backwards": 1, "items": items,
        "weighted": weighted, "loader": None,
    }  # fmt: skip
    manual = {**window, "models": [], "micro_batches": 0, "backwards": 0, "items": 0, "weighted": False}
    packed = {} if gradient is None else {"model_0.weight": gradient}
    return {"averaged_over": 2, "windows": [window], "manual": manual, "gradients": packed}


def value(tree):
    return tree["gradients"]["model_0.weight"].tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_mean_over_ranks_is_their_mean_for_any_number(ranks):
    """Two ranks left 1 and 3. At the end gradients are averaged: each of the new ones brings 2."""
    trees = [tree_of(torch.tensor([1.0])), tree_of(torch.tensor([3.0]))]
    for rank in range(ranks):
        found = for_other_ranks(trees, ranks, rank)
        assert value(found) == [2.0]
        assert found["averaged_over"] == ranks
        assert found["windows"][0]["micro_batches"] == 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("models", [("prepared_0",), ("model_0.",), ()])
def test_a_sum_over_items_is_kept_and_items_are_counted_once(ranks, models):
    """4.0 of 8 items in all: whatever the number of ranks, sums and counts over them stay."""
    trees = [
        tree_of(torch.tensor([1.0]), items=3, weighted=True, models=models),
        tree_of(torch.tensor([3.0]), items=5, weighted=True, models=models),
    ]
    found = [for_other_ranks(trees, ranks, rank) for rank in range(ranks)]
    assert sum(value(tree)[0] for tree in found) == 4.0
    assert [tree["windows"][0]["items"] for tree in found] == [8] + [0] * (ranks - 1)


def test_what_another_window_weighs_is_a_mean():
    trees = [tree_of(torch.tensor([1.0]), items=3, weighted=True, models=["prepared_1"]) for _ in range(2)]
    assert value(for_other_ranks(trees, 4, 0)) == [1.0]


def test_zeros_sparse_and_missing_gradients_count_as_what_they_are():
    sparse = {
        "indices": torch.tensor([[1]]), "values": torch.tensor([6.0]), "size": [2], "coalesced": True
    }  # fmt: skip
    found = for_other_ranks([tree_of("zeros"), tree_of(sparse), tree_of(None)], 2, 1)
    assert value(found) == [0.0, 2.0]
    assert for_other_ranks([tree_of("zeros"), tree_of(None)], 2, 0)["gradients"] == {
        "model_0.weight": "zeros"
    }
    assert for_other_ranks([tree_of(None), tree_of(None)], 2, 0)["gradients"] == {}


def test_ranks_with_different_numbers_of_micro_batches_are_refused():
    trees = [tree_of(None, micro_batches=1), tree_of(None, micro_batches=2)]
    with pytest.raises(AccumulationError, match=r"held \[\[1\], \[2\]\] micro-batches\. 3 ranks cannot"):
        for_other_ranks(trees, 3, 0)


# What a file says is not believed


def checked(gradients, **changed):
    check(embedding(), told(gradients, **changed), Accelerator().strategy, same_ranks=True)


def told(gradients, **changed):
    window = {
        "models": ["model_0."],
        "micro_batches": 1,
        "planned": 2,
        "backwards": 1,
        "items": 0,
        "weighted": False,
        "loader": None,
    }
    tree = {
        "engine": None,
        "averaged_over": 1,
        "sync_gradients": False,
        "last_owner": None,
        "windows": [window],
    }
    return {**tree, "manual": {**window, "models": []}, "gradients": gradients, **changed}


def pointing(indices, values=None, size=(10, 4), coalesced=False):
    indices = torch.tensor(indices)
    values = torch.ones(indices.shape[-1], 4) if values is None else values
    return {"indices": indices, "values": values, "size": list(size), "coalesced": coalesced}


class Holding(Hiding):
    """Holds back gradients of shape (10, 4), which the script divides over a mesh of two dimensions."""

    class adapter(StateAdapter):
        class window_gradients(WindowGradients):
            def unreduced(self, parameters):
                place = SimpleNamespace(shape=(10, 4), mesh_dimensions=2, value=None)
                return dict.fromkeys(parameters, place)


@pytest.mark.parametrize(
    ("name", "values", "placements", "message"),
    [
        ("weight", torch.ones(10, 4), ["sum", "1"], None),
        ("weight", "zeros", ["whole", "avg"], None),
        ("bias", "zeros", ["whole", "whole"], r"window for model_0\.bias, which no prepared model of this rank has"),
        ("weight", torch.ones(4, 10), ["sum", "1"], r"shape \[4, 10\] for model_0\.weight, whose shape is \[10, 4\]"),
        ("weight", torch.ones(10, 4), ["sum"], r"divided as \['sum'\] over a mesh; here the mesh has 2 dimensions"),
        ("weight", torch.ones(10, 4), ["sum", "2"], r"divided as \['sum', '2'\]"),
    ],
)  # fmt: skip
def test_unreduced_gradients_are_checked(register, name, values, placements, message):
    register(Holding)
    saved = {f"model_0.{name}": {"values": values, "placements": placements}}
    tree = told({}, engine="hiding", held_back=saved)
    assert holds_gradients(told({}, held_back=saved, windows=[]))
    strategy = Accelerator(strategy="hiding").strategy
    if message is None:
        check(embedding(), tree, strategy, same_ranks=True)
    else:
        with pytest.raises(StateMismatchError, match=message):
            check(embedding(), tree, strategy, same_ranks=True)


def embedding():
    return trained_of([nn.Embedding(10, 4, sparse=True)])


@pytest.mark.parametrize(
    "gradient",
    [
        pointing([[1, 10]]),
        pointing([[1, 10**12]]),
        pointing([[-1, 2]]),
        pointing([[1, 3]], torch.ones(1, 4)),
        pointing([[1, 3]], torch.ones(2, 5)),
        pointing([[3, 1]], coalesced=True),
        pointing([[1, 1]], coalesced=True),
        pointing([[1.0, 3.0]]),
        pointing([1, 3]),
        pointing([[1, 3]], size=[10, 4, -1]),
        {"indices": torch.tensor([[1]])},
        pointing([[1, 3]]) | {"values": "nothing"},
        "ones",
        7,
    ],
)
def test_a_gradient_that_points_outside_of_itself_is_refused(gradient):
    with pytest.raises(CorruptCheckpointError):
        checked({"model_0.weight": gradient})


@pytest.mark.parametrize("gradient", [torch.ones(1), torch.ones(11, 4), pointing([[1, 10]], size=[11, 4])])
def test_a_gradient_of_another_shape_is_refused(gradient):
    with pytest.raises(StateMismatchError, match=r"model_0.weight, whose shape is \[10, 4\]"):
        checked({"model_0.weight": gradient})


@pytest.mark.parametrize("gradient", [pointing([[1, 3]], coalesced=True), torch.ones(10, 4), "zeros"])
def test_gradients_that_fit_are_accepted(gradient):
    checked({"model_0.weight": gradient})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"last_owner": 3}, "window of loader 3, and 0 are prepared"),
        ({"last_owner": -1}, r"\['last_owner'\] is -1"),
        ({"averaged_over": 0}, r"\['averaged_over'\] is 0"),
        ({"sync_gradients": 1}, r"\['sync_gradients'\] is 1, where true or false"),
        ({"windows": {}}, "where a list was expected"),
        ({"windows": [{"models": []}]}, "lacks 'micro_batches'"),
        ({"manual": None}, "where a dictionary was expected"),
        ({"cut_batches": 0}, r"\['cut_batches'\] is 0, where a list"),
        ({"cut_batches": [{"models": [], "parts": 0, "rows": None}]}, r"\['parts'\] is 0"),
        ({"cut_batches": [{"models": ["model_7"], "parts": 2, "rows": None}]}, "model_7"),
        ({"engine_waits": 1}, r"\['engine_waits'\] is 1, where true or false"),
        ({"held_back": []}, r"\['held_back'\] is one list, where a dictionary"),
        ({"held_back": {"model_0.weight": {"values": "zeros"}}}, "lacks 'placements'"),
        ({"held_back": {"model_0.weight": {"values": "zeros", "placements": ["max"]}}}, r"\[0\] is 'max'"),
    ],
)
def test_counts_and_owners_of_a_window_are_checked(changed, message):
    with pytest.raises((CorruptCheckpointError, StateMismatchError), match=message):
        checked({}, **changed)


@pytest.mark.parametrize(
    "name", ["model_9.", "model_-1.", "prepared_7", "weights", "model_0.forward", "model_x.0"]
)
def test_the_model_of_a_window_is_one_that_is_prepared(name):
    with pytest.raises(StateMismatchError, match="not a prepared model or a part of one"):
        embedding().model_called(name)
