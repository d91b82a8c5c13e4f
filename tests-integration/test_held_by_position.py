"""Objects that states hold by their place: a changed order is either the same order, or an error that tells.

Also: a parameter that is replaced after the first step, whose optimizer would train the old one.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_ckpt import StateMismatchError
from accel_state import broadcast_object_list
from accel_train import Accelerator, AveragedWeights, FullyShardedDataParallelPlugin, PrepareError
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()


def shared_folder(folder):
    found = [folder]
    broadcast_object_list(found)
    return found[0]


def prepared_again(folder, again):
    """Two models of one shape; the first, or an evaluated one, is prepared again before the save."""
    accelerator = Accelerator(cpu=True)
    a, b, c = net(1), net(2), net(3)
    a[0].requires_grad_(False)
    optimizer = torch.optim.Adam([*a.parameters(), *b.parameters()], lr=0.1)
    a, b, optimizer = accelerator.prepare(a, b, optimizer)
    c = accelerator.prepare_model(c, evaluation_mode=True)
    accelerator.unwrap_model(a)[0].requires_grad_(True)
    if again == "training":
        a = accelerator.prepare(a)
    else:
        a = accelerator.prepare_model(a, evaluation_mode=True)
    accelerator.save_state(folder)
    expected = [accelerator.unwrap_model(model).state_dict() for model in (a, b, c)]
    resumed = Accelerator(cpu=True)
    a, b, c = net(4), net(5), net(6)
    optimizer = torch.optim.Adam([*a.parameters(), *b.parameters()], lr=0.1)
    a, b, optimizer = resumed.prepare(a, b, optimizer)
    c = resumed.prepare_model(c, evaluation_mode=True)
    resumed.load_state(folder)
    for model, state in zip((a, b, c), expected, strict=True):
        found = resumed.unwrap_model(model).state_dict()
        assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize("again", ["training", "evaluation"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_is_prepared_again_keeps_its_place(tmp_path, ranks, again):
    worlds.run(prepared_again, ranks, str(tmp_path / "state"), again)


class Counter:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class OtherCounter(Counter):
    pass


def script(order=(0, 1), schedules=("step", "cosine"), registered=(Counter, OtherCounter)):
    accelerator = Accelerator(cpu=True)
    models = [net(1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    made = {
        "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
    }
    schedulers = [made[name](optimizer) for name, optimizer in zip(schedules, optimizers, strict=True)]
    accelerator.prepare(*models, *optimizers)
    for place in order:
        accelerator.prepare(schedulers[place])
    accelerator.register_for_checkpointing(*(kind() for kind in registered))
    return accelerator


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"order": (1, 0)},
            "scheduler 0 is StepLR of optimizer 0 there and CosineAnnealingLR of optimizer 1 here",
        ),
        (
            {"schedules": ("cosine", "cosine")},
            "scheduler 0 is StepLR of optimizer 0 there and CosineAnnealingLR",
        ),
        (
            {"registered": (OtherCounter, Counter)},
            "the registered object 0 is Counter there and OtherCounter here",
        ),
    ],
)
def test_objects_in_another_order_are_refused(tmp_path, options, message):
    folder = script().save_state(tmp_path / "state")
    with pytest.raises(StateMismatchError, match=message):
        script(**options).load_state(folder)


def test_schedulers_of_one_class_that_changed_places_are_refused(tmp_path):
    folder = script(schedules=("step", "step")).save_state(tmp_path / "state")
    with pytest.raises(
        StateMismatchError, match="StepLR of optimizer 0 there and StepLR of optimizer 1 here"
    ):
        script(schedules=("step", "step"), order=(1, 0)).load_state(folder)


class OtherNet(nn.Linear):
    pass


MOVED = {
    "model": lambda accelerator, order: accelerator.prepare(
        *([nn.Linear, OtherNet][place](4, 1) for place in order)
    ),
    "loader": lambda accelerator, order: accelerator.prepare(
        *(DataLoader(range(16), batch_size=[2, 4][place]) for place in order)
    ),
    "average of a model": lambda accelerator, order: [
        AveragedWeights(accelerator, models[place])
        for models in [accelerator.prepare(net(1), net(2))]
        for place in order
    ],
    "average of a decay": lambda accelerator, order: [
        AveragedWeights(accelerator, model, decay=[0.9, 0.99][place])
        for model in [accelerator.prepare(net(1))]
        for place in order
    ],
}


@pytest.mark.parametrize("kind", MOVED)
def test_objects_of_equal_shapes_that_changed_places_are_refused(tmp_path, kind):
    first, again, moved = (Accelerator(cpu=True) for _ in range(3))
    MOVED[kind](first, (0, 1))
    first.save_state(tmp_path / "state")
    MOVED[kind](again, (0, 1))
    again.load_state(tmp_path / "state")
    MOVED[kind](moved, (1, 0))
    with pytest.raises(StateMismatchError, match=r"0 is .* there and .* here"):
        moved.load_state(tmp_path / "state")


def test_loaders_may_get_larger_batches(tmp_path):
    first, larger = Accelerator(cpu=True), Accelerator(cpu=True)
    first.prepare(*(DataLoader(range(16), batch_size=size) for size in (2, 4, 8)))
    first.save_state(tmp_path / "state")
    larger.prepare(*(DataLoader(range(16), batch_size=size) for size in (4, 8, 16)))
    larger.load_state(tmp_path / "state")


def test_a_class_may_get_another_name(tmp_path):
    class Renamed(Counter):
        pass

    folder = script().save_state(tmp_path / "state")
    script(registered=(Renamed, OtherCounter)).load_state(folder)


def test_freed_models_leave_their_averages_and_what_is_passed_leaves_states(tmp_path):
    """FARM#544: folds in one process."""
    accelerator = Accelerator(cpu=True)
    kept, passed = Counter(), OtherCounter()
    model = accelerator.prepare(net(1))
    average = AveragedWeights(accelerator, model)
    accelerator.register_for_checkpointing(kept, passed)
    model, average, passed = accelerator.free_memory(model, average, passed)
    assert [type(item) for item in accelerator._custom_objects] == [Counter]
    accelerator.save_state(tmp_path / "state")
    alone = Accelerator(cpu=True)
    alone.register_for_checkpointing(Counter())
    alone.load_state(tmp_path / "state")


# Parameters that are replaced

REPLACE = {
    "assign": lambda model: model.load_state_dict(
        {name: value.detach().clone() for name, value in model.state_dict().items()}, assign=True
    ),
    "attribute": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach().clone())),
    "bias alone": lambda model: setattr(model[1], "bias", nn.Parameter(model[1].bias.detach().clone())),
    "module": lambda model: model.__setitem__(1, nn.Linear(4, 1).double()),
}


def training(strategy):
    if strategy == "fsdp2":
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    else:
        accelerator = Accelerator(cpu=True)
    model = net(1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step():
        accelerator.backward(model(torch.ones(2, 4, dtype=torch.float64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return accelerator, model, optimizer, step


def replaced(strategy, how, after):
    accelerator, model, _, step = training(strategy)
    for _ in range(after):
        step()
    try:
        REPLACE[how](accelerator.unwrap_model(model))
        step()
    except (PrepareError, RuntimeError) as error:
        return str(error)
    return "no word"


@pytest.mark.parametrize("after", [1, 7])
@pytest.mark.parametrize("how", REPLACE)
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
def test_a_parameter_that_is_replaced_after_the_first_step_is_named_at_the_next(strategy, how, after):
    for message in worlds.run(replaced, 1 if strategy == "single" else 2, strategy, how, after):
        assert message != "no word"
        if strategy != "fsdp2":
            assert "was replaced after the optimizer's first step" in message


def test_what_somebody_trains_or_nobody_is_to_train_may_be_replaced():
    accelerator, model, optimizer, step = training("single")
    step()
    model[1] = nn.Linear(4, 1).double().requires_grad_(False)
    step()
    model[1] = nn.Linear(4, 1).double()
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    before = model[1].weight.detach().clone()
    step()
    assert not torch.equal(model[1].weight, before)
    model[0].weight.data = model[0].weight.data.clone()
    step()
    other = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    model[0] = nn.Linear(4, 4).double()
    model[0].requires_grad_(False)
    other.step()
