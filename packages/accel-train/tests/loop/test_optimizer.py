"""The optimizer that `prepare` returns: the wrapped one, which steps only with complete gradients."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_train import Accelerator
from accel_train.loop.observers import StepCount
from accel_train.loop.optimizer import AcceleratedOptimizer, move_state_to_parameters, move_to_device
from accel_train.mesh import Mesh
from accel_train.precision.base import Precision, PrecisionOptions
from accel_train.strategies.base import Strategy, StrategyOptions
from testkit.samples import inputs, make


def test_a_copied_optimizer_stays_with_its_accelerator():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*make())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)  # built on the prepared one, as scripts do
    model, optimizer, scheduler = copy.deepcopy((model, optimizer, scheduler))
    before = model.weight.detach().clone()
    moved = []
    for x in inputs(4).split(1):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        moved.append(not torch.equal(before, model.weight))
        before = model.weight.detach().clone()
    assert moved == [False, True, False, True]
    assert pickle.loads(pickle.dumps(optimizer)).defaults["lr"] == 0.1


@pytest.mark.parametrize(
    ("arguments", "kept"), [((), False), ((None,), False), ((True,), False), ((False,), True)]
)
def test_gradients_are_dropped_unless_zeros_are_asked_for(arguments, kept):
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
    optimizer.zero_grad(*arguments)  # None means the default to accelerate 1.15
    assert (model.weight.grad is not None) is kept


class Windows:
    """Stands in for an accumulator."""

    def __init__(self, complete=True, may_drop=True):
        self.sync_gradients = complete
        self.may_drop = may_drop
        self.observers = []
        self.first = []
        self.checked = []
        self.waiting = []

    steps_together = may_reduce = True

    def check_first_step(self, optimizer, *, closure):
        self.first.append(closure)

    def check_step(self, optimizer):
        self.checked.append(optimizer)

    def check_waiting(self, *, gradients, closure):
        self.waiting.append((gradients, closure))

    def may_drop_gradients(self, optimizer):
        return self.may_drop

    def places_of(self, optimizer, before):
        return None

    def forget_optimizer(self, optimizer):
        pass

    def window_for(self, optimizer):
        return None


class Skipping(Strategy):
    """Skips every step."""

    def step(self, optimizer, closure=None):
        return False, "skipped"


def wrapped(optimizer=None, strategy=Strategy, **windows):
    options = StrategyOptions(torch.device("cpu"), Mesh.of_world(1, 0), Precision(PrecisionOptions()))
    accumulator = Windows(**windows)
    optimizer = optimizer or make()[1]
    return AcceleratedOptimizer(optimizer, accumulator=accumulator, strategy=strategy(options)), accumulator


def parameters(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def give_gradients(optimizer):
    for parameter in parameters(optimizer):
        parameter.grad = torch.ones_like(parameter)


# The wrapped optimizer's own


def test_state_groups_and_defaults_are_the_wrapped_ones_both_ways():
    ours, _ = wrapped()
    inner = ours.optimizer
    assert (ours.state, ours.param_groups, ours.defaults) == (inner.state, inner.param_groups, inner.defaults)
    assert ours.param_groups is inner.param_groups
    ours.param_groups = groups = [{"params": [], "lr": 1.0}]
    ours.state = state = {"a": 1}
    ours.defaults = defaults = {"lr": 2.0}
    assert (inner.param_groups, inner.state, inner.defaults) == (groups, state, defaults)
    ours, _ = wrapped()
    ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})
    assert [group["lr"] for group in ours.optimizer.param_groups] == [0.1, 0.5]


def test_state_dicts_are_the_wrapped_ones():
    model, inner = make()
    inner = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    give_gradients(inner)
    inner.step()
    ours, _ = wrapped(inner)
    saved = copy.deepcopy(ours.state_dict())
    assert saved.keys() == inner.state_dict().keys()
    other, _ = wrapped(torch.optim.SGD(make()[0].parameters(), lr=0.1, momentum=0.1))
    other.load_state_dict(saved)
    assert other.optimizer.param_groups[0]["lr"] == 0.3
    found = [other.state[parameter]["momentum_buffer"] for parameter in parameters(other)]
    assert all(torch.equal(buffer, torch.ones_like(buffer)) for buffer in found)


def test_what_the_wrapped_optimizer_has_is_found_and_what_nobody_has_is_not():
    class Special(torch.optim.SGD):
        extra = "kept"

        def rotate(self, by):
            return by + 1

    model, _ = make()
    ours, _ = wrapped(Special(model.parameters(), lr=0.1))
    assert (ours.extra, ours.rotate(2)) == ("kept", 3)
    with pytest.raises(AttributeError, match="'Special' object has no attribute 'missing'"):
        _ = ours.missing
    assert repr(ours).startswith("AcceleratedOptimizer(Special (")


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_are_registered_at_the_wrapped_optimizer(kind):
    ours, _ = wrapped()
    seen = []
    for what in ("step", "state_dict", "load_state_dict"):
        register = getattr(ours, f"register_{what}_{kind}_hook")
        register(lambda optimizer, *args, what=what: seen.append((what, optimizer)))
    ours.step()
    ours.load_state_dict(ours.state_dict())
    assert seen == [(what, ours.optimizer) for what in ("step", "state_dict", "load_state_dict")]


# What differs


@pytest.mark.parametrize("complete", [True, False])
def test_a_step_needs_complete_gradients(complete):
    ours, _ = wrapped(complete=complete)
    before = [parameter.detach().clone() for parameter in parameters(ours)]
    give_gradients(ours)
    assert ours.step() is None
    moved = 0.1 if complete else 0.0
    for parameter, value in zip(parameters(ours), before, strict=True):
        torch.testing.assert_close(parameter.detach(), value - moved)
    assert ours.gradients_spent is complete


def test_the_result_of_a_closure_is_returned():
    ours, _ = wrapped()
    assert ours.step(lambda: 7.0) == 7.0


def test_a_skipped_step_is_said_and_is_over_with_the_next():
    ours, _ = wrapped(strategy=Skipping)
    assert not ours.step_was_skipped
    assert ours.step() == "skipped"
    assert ours.step_was_skipped
    ours.follow(*[getattr(wrapped()[0], name) for name in ("optimizer", "_accumulator", "_strategy")])
    ours.step()
    assert not ours.step_was_skipped


@pytest.mark.parametrize(
    ("stepped", "may_drop", "dropped"),
    [(False, True, True), (False, False, False), (True, False, True), (True, True, True)],
)
def test_gradients_of_an_unfinished_window_are_kept(stepped, may_drop, dropped):
    ours, _ = wrapped(may_drop=may_drop)
    give_gradients(ours)
    if stepped:
        ours.step()
    ours.zero_grad()
    assert [parameter.grad is None for parameter in parameters(ours)] == [dropped] * 2
    assert not ours.gradients_spent
    give_gradients(ours)
    ours.zero_grad()  # what was stepped with is gone; these belong to the next window
    assert [parameter.grad is None for parameter in parameters(ours)] == [may_drop] * 2


def test_steps_are_counted_while_somebody_asks():
    ours, windows = wrapped(strategy=Skipping)
    ours.step()
    boundaries = SimpleNamespace(passed=0)
    windows.observers.append(StepCount(boundaries))
    ours.step()
    windows.sync_gradients = False
    ours.step()
    assert boundaries.passed == 1, "a skipped step counts, one inside a window does not"


def test_the_first_steps_are_checked_and_then_ever_fewer():
    ours, windows = wrapped()
    windows.sync_gradients = False
    ours.step()
    assert windows.checked == []
    windows.sync_gradients = True
    checked = []
    for number in range(1, 40):
        seen = len(windows.checked)
        ours.step()
        if len(windows.checked) > seen:
            checked.append(number)
    assert checked == [1, 2, 3, 4, 8, 16, 32]
    assert windows.first == [False]
    ours.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    seen = len(windows.checked)
    ours.step(lambda: None)
    assert windows.first == [False, True]
    assert len(windows.checked) == seen  # its gradients come in the step
    ours.step()
    assert len(windows.checked) == seen + 1


def test_steps_that_a_rank_takes_alone_are_not_counted():
    ours, windows = wrapped()
    windows.steps_together = False
    for _ in range(7):
        ours.step()
    assert (windows.first, windows.checked) == ([False], [])
    windows.steps_together = True
    for _ in range(5):
        ours.step()
    assert len(windows.checked) == 4


def test_steps_that_wait_say_whether_they_hold_gradients_until_the_first_steps_are_done():
    ours, windows = wrapped(complete=False)
    ours.step()
    give_gradients(ours)
    ours.step()
    assert windows.waiting == [(False, False), (True, False)]
    windows.sync_gradients = True
    for _ in range(4):
        ours.step()
    windows.sync_gradients = False
    ours.step()
    assert len(windows.waiting) == 2
    ours.step(lambda: None)  # of no use at any time
    assert windows.waiting[2:] == [(False, True)]  # those gradients were stepped with


def test_flags_of_a_saved_run_come_back():
    ours, _ = wrapped(may_drop=False)
    give_gradients(ours)
    ours.restore_flags(skipped=True, spent=True)
    assert (ours.step_was_skipped, ours.gradients_spent) == (True, True)
    ours.zero_grad()
    assert all(parameter.grad is None for parameter in parameters(ours))


class ScheduleFree(torch.optim.SGD):
    """Has two modes."""

    mode = "new"

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"


def test_schedule_free_optimizers_are_told_the_mode():
    inner = ScheduleFree(make()[0].parameters(), lr=0.1)
    ours, _ = wrapped(inner)
    ours.train()
    assert inner.mode == "train"
    ours.eval()
    assert inner.mode == "eval"
    outer = torch.optim.SGD(make()[0].parameters(), lr=0.1)
    outer.optimizer = inner  # an optimizer that wraps another, as those of other libraries do
    ours, _ = wrapped(outer)
    ours.train()
    assert inner.mode == "train"
    ours, _ = wrapped()
    assert (ours.train(), ours.eval()) == (None, None)


def test_a_wrapper_that_is_built_by_hand_steps_and_drops():
    model, optimizer = make()
    ours = AcceleratedOptimizer(optimizer)
    before = model.weight.detach().clone()
    give_gradients(ours)
    ours.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1)
    ours.zero_grad()
    assert model.weight.grad is None
    assert not ours.step_was_skipped


def test_torchs_schedulers_take_the_wrapper():
    ours, _ = wrapped()
    scheduler = torch.optim.lr_scheduler.StepLR(ours, 1, gamma=0.5)
    ours.step()
    scheduler.step()
    assert ours.optimizer.param_groups[0]["lr"] == 0.05


# Placement of state


def test_state_follows_its_parameter_and_counts_stay():
    parameter = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {
        "moment": torch.ones(2),
        "step": torch.ones(()),
        "nested": [torch.ones(1), {"deep": torch.ones(1)}],
        "number": 3,
    }
    optimizer.state["global"] = {"moment": torch.ones(2)}  # torch allows keys that are no parameters
    optimizer.state[nn.Parameter(torch.ones(1))] = (
        None  # as torch's ZeroRedundancyOptimizer has of other ranks
    )
    move_state_to_parameters(optimizer)
    state = optimizer.state[parameter]
    assert state["moment"].device.type == "meta"
    assert state["nested"][0].device.type == state["nested"][1]["deep"].device.type == "meta"
    assert (state["step"].device.type, state["number"]) == ("cpu", 3)
    assert optimizer.state["global"]["moment"].device.type == "cpu"


def test_what_is_nested_moves_to_a_device():
    moved = move_to_device({"a": [torch.ones(1)], "b": (torch.ones(1), 2)}, "meta")
    assert (moved["a"][0].device.type, moved["b"][0].device.type, moved["b"][1]) == ("meta", "meta", 2)


@pytest.mark.parametrize("placed", [True, False])
def test_what_clients_read_of_prepared_objects(placed):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, plain = make()
    optimizer = accelerator.prepare_optimizer(plain, device_placement=placed)
    scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(plain, 1))
    loader = accelerator.prepare(DataLoader(inputs(4)))
    assert optimizer.device_placement is placed
    assert optimizer.accelerator_state is accelerator.state
    model = accelerator.prepare(model)
    for _ in loader:
        with accelerator.accumulate(model):
            for each in (optimizer, scheduler, loader):
                assert each.gradient_state.sync_gradients is accelerator.sync_gradients
                assert each.gradient_state.end_of_dataloader is accelerator.gradient_state.end_of_dataloader
    loader.reset()
    assert len(list(loader)) == 4
