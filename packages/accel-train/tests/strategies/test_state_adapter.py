"""States of models and optimizers that are plain PyTorch's, or divided among ranks."""

import copy

import pytest
import torch
from torch import nn

from accel_ckpt import Part, load_checkpoint_in_model
from accel_train import Accelerator, FullyShardedDataParallelPlugin
from accel_train.checkpoints.model_weights import WholeModel
from accel_train.mesh import Mesh
from accel_train.precision.base import Precision, PrecisionOptions
from accel_train.strategies.base import Strategy, StrategyOptions
from accel_train.strategies.state_adapter import StateAdapter, full_state_dict
from testkit import worlds
from testkit.nets import Tied

CPU = torch.device("cpu")


def strategy_of(kind=Strategy, mesh=None, **options):
    mesh = mesh or Mesh.of_world(1, 0)
    return kind(StrategyOptions(CPU, mesh, Precision(PrecisionOptions()), **options))


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(seed=0):
    model = make(seed)
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(2))).square().sum().backward()
    return model


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("compiled", [False, True])
def test_states_have_the_models_own_names(compiled):
    model, strategy = make(), strategy_of()
    prepared = torch.compile(model, backend="eager") if compiled else model
    for state in (strategy.states.model_state(prepared), full_state_dict(strategy.states, prepared)):
        assert list(state) == list(model.state_dict())
        assert state["0.weight"].data_ptr() == model[0].weight.data_ptr(), "not a copy"


@pytest.mark.parametrize(
    ("change", "strict", "problems"),
    [
        (lambda state: None, True, []),
        (lambda state: state.pop("0.bias"), True, ["0.bias"]),
        (lambda state: state.pop("0.bias"), False, []),
        (lambda state: state.update(extra=torch.ones(1)), True, ["extra"]),
        (lambda state: state.update(extra=torch.ones(1)), False, []),
        (lambda state: state.update({"0.bias": torch.ones(7)}), True, ["0.bias"]),
        (lambda state: state.update({"0.bias": torch.ones(7)}), False, ["0.bias"]),
    ],
)
def test_what_does_not_fit_is_named_and_what_fits_is_loaded(change, strict, problems):
    strategy, model, weights = strategy_of(), make(), dict(make(1).state_dict())
    change(weights)
    before = copy.deepcopy(model.state_dict())
    found = strategy.states.misfits(model, WholeModel(weights), strict)
    assert [name for name in problems if name not in " ".join(found)] == []
    assert bool(found) == bool(problems)
    assert same(model.state_dict().values(), before.values()), "comparing changes nothing"
    if not found:
        strategy.states.load_model_state(model, WholeModel(weights), strict)
        for name, value in model.state_dict().items():
            assert torch.equal(value, weights.get(name, before[name]))


def test_tied_weights_load():
    model, strategy = Tied(), strategy_of()
    weights = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
    assert strategy.states.misfits(model, WholeModel(weights), True) == []
    strategy.states.load_model_state(model, WholeModel(weights), True)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, torch.full((6, 4), 3.0))


class HalfStates(StateAdapter):
    """Holds the second half of the rows of every matrix."""

    def model_state(self, model):
        state = super().model_state(model)
        return {
            name: Part(value[len(value) // 2 :], (len(value) // 2, 0), tuple(value.shape))
            if value.dim() == 2
            else value
            for name, value in state.items()
        }


class Rows(Strategy):
    adapter = HalfStates


def test_a_strategy_that_holds_parts_reads_its_own_part():
    strategy, model, other = strategy_of(Rows), make(), make(1)
    assert strategy.states.is_divided(model)
    before, weights = copy.deepcopy(model.state_dict()), other.state_dict()
    assert strategy.states.misfits(model, WholeModel(dict(weights)), True) == []
    strategy.states.load_model_state(model, WholeModel(dict(weights)), True)
    for name, value in model.state_dict().items():
        if value.dim() == 2:
            half = len(value) // 2
            assert torch.equal(value[:half], before[name][:half])
            assert torch.equal(value[half:], weights[name][half:])
        else:
            assert torch.equal(value, weights[name])


WRONG = "0.weight is [4, 9] there and [4, 3] here"


@pytest.mark.parametrize(
    ("change", "strict", "problem"),
    [
        (lambda state: state.update({"0.weight": torch.ones(4, 9)}), False, WRONG),
        (lambda state: state.pop("0.bias"), True, "not there: 0.bias"),
        (lambda state: state.update(extra=torch.ones(1)), True, "not here: extra"),
    ],
)
def test_a_strategy_that_holds_parts_names_what_does_not_fit(change, strict, problem):
    strategy, model, weights = strategy_of(Rows), make(), dict(make(1).state_dict())
    change(weights)
    [found] = strategy.states.misfits(model, WholeModel(weights), strict)
    assert problem in found


def test_an_optimizers_state_is_named_and_comes_back():
    strategy, model, other = strategy_of(), trained(), trained(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    tree = copy.deepcopy(strategy.states.optimizer_state(optimizer, [model]))
    assert sorted(tree["state"]) == sorted(f"model_0.{name}" for name, _ in model.named_parameters())
    fresh = torch.optim.AdamW(other.parameters(), lr=0.7)
    strategy.states.load_optimizer_state(fresh, tree, [other])
    assert fresh.param_groups[0]["lr"] == 0.1
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(fresh.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])


def test_a_window_keeps_nothing_of_its_own():
    strategy, model = strategy_of(), trained()
    before = copy.deepcopy(gradients(model))
    assert strategy.states.rank_state(model) == {}
    strategy.states.load_rank_state(model, {})
    named = dict(model.named_parameters())
    assert strategy.states.gradients.unreduced(named) == {}
    strategy.states.gradients.set_unreduced(named, {})
    assert not strategy.states.gradients.are_plain
    assert same(gradients(model), before)


class _Logarithm(nn.Module):
    """Saves the logarithm of its weight."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 4), value))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.weight.detach().log()

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "weight"].exp())

    def forward(self, x):
        return x * self.weight


class _Negated(nn.Linear):
    """Saves its weight with the other sign, by hooks."""

    def __init__(self, value):
        super().__init__(4, 4)
        nn.init.constant_(self.weight, value)
        self.register_state_dict_post_hook(self._negate)
        self.register_load_state_dict_pre_hook(self._negate)

    @staticmethod
    def _negate(module, state_dict, prefix, *rest):
        state_dict[prefix + "weight"] = -state_dict[prefix + "weight"]


class _Doubling(nn.Linear):
    """Takes what it saved in version 1, or in no known one, for half of its weight."""

    _version = 2

    def __init__(self, value):
        super().__init__(4, 4)
        nn.init.constant_(self.weight, value)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp2"])
def test_a_state_of_modules_that_translate_is_restored(tmp_path, kind):
    def work(folder, kind):
        plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if kind == "fsdp2" else {}
        accelerator = Accelerator(cpu=True, **plugin)

        def build(value):
            torch.manual_seed(int(value))
            model = nn.Sequential(nn.Linear(4, 4), _Logarithm(value), _Negated(value), _Doubling(value))
            return accelerator.prepare(model)

        trained = build(3.0)
        x = torch.ones(6, 4)
        want = trained(x).detach()
        accelerator.save_state(folder)
        weights = folder + "-weights"
        accelerator.save_model(trained, weights)
        other = Accelerator(cpu=True, **plugin)
        again = other.prepare(nn.Sequential(nn.Linear(4, 4), _Logarithm(1.0), _Negated(1.0), _Doubling(1.0)))
        kept = list(again.parameters())
        other.load_state(folder)
        assert all(new is old for new, old in zip(again.parameters(), kept, strict=True))
        plain = nn.Sequential(nn.Linear(4, 4), _Logarithm(1.0), _Negated(1.0), _Doubling(1.0))
        load_checkpoint_in_model(plain, weights)
        return [torch.allclose(model(x), want, atol=1e-5) for model in (again, plain)]

    ranks = 1 if kind == "single" else 2
    assert worlds.run(work, ranks, str(tmp_path / "state"), kind) == [[True, True]] * ranks


def test_loading_a_state_fills_what_a_state_dict_only_copies(tmp_path):
    """Of a module that saves something else than it loads, torch puts the saved values in, and so do we."""

    class Doubled(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = self.weight.detach() * 2

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(Doubled(4, 4)))
    twice = model[0].weight.detach() * 2
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model[0].weight, twice)
