"""Optimizer states by the names of parameters."""

import copy
import os

import pytest
import torch
from torch import nn

from accel_ckpt import (
    CheckpointError,
    CorruptCheckpointError,
    SavedTensor,
    StateMismatchError,
    check_optimizer_state,
    load_optimizer_state,
    open_training_state,
    optimizer_state_by_name,
    save_training_state,
)


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


BATCH = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(BATCH).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def through_disk(tmp_path, tree):
    path = save_training_state(tmp_path / "c", models=[], shared={"o": tree}, per_rank={})
    return open_training_state(path).shared["o"]


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=4),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_without_the_save(tmp_path, name):
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        step(model, optimizer)
    tree = through_disk(tmp_path, optimizer_state_by_name(optimizer, [model]))
    again = Net(seed=5)
    again.load_state_dict(model.state_dict())
    optimizer_2 = OPTIMIZERS[name](again.parameters())
    load_optimizer_state(optimizer_2, tree, [again])
    for _ in range(3):
        step(model, optimizer)
        step(again, optimizer_2)
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fresh", [True, False])
def test_nothing_stays_tied_to_the_files(tmp_path, fresh):
    model = nn.Linear(600, 700)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 600)).sum().backward()
    optimizer.step()
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    tree = optimizer_state_by_name(optimizer, [model])
    path = save_training_state(tmp_path / "c", models=[], shared={"o": tree}, per_rank={})
    mapped = open_training_state(path).mapped_shared(["o"])["o"]
    target = torch.optim.AdamW(model.parameters()) if fresh else optimizer
    places = {}
    if not fresh:
        optimizer.step()
        places = {key: value.data_ptr() for key, value in optimizer.state[model.weight].items()}
    load_optimizer_state(target, mapped, [model])
    os.truncate(path / "state.safetensors", 0)  # a view of the file would end the process now
    found = target.state_dict()["state"]
    for number, states in expected.items():
        assert states.keys() == found[number].keys()
        assert all(torch.equal(states[key], found[number][key]) for key in states)
    if not fresh:  # no second copy of the states
        assert {key: value.data_ptr() for key, value in target.state[model.weight].items()} == places


@pytest.mark.parametrize(
    "here",
    [
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(3, 2).t(),
        torch.zeros(1, 3).expand(2, 3),
        torch.zeros(2, 3).requires_grad_(),
        nn.Parameter(torch.zeros(2, 3)),
        None,
        5,
    ],
    ids=str,
)
def test_states_that_cannot_take_the_saved_values_are_replaced(here):
    parameter = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    saved = torch.arange(6.0).view(2, 3)
    tree = optimizer_state_by_name(optimizer, [])
    tree["state"] = {"unnamed.0.0": {"momentum_buffer": saved, "list": [saved, 3], "tuple": (saved,)}}
    optimizer.state[parameter] = {"momentum_buffer": here, "list": [here], "tuple": here}
    load_optimizer_state(optimizer, tree, [])
    found = optimizer.state[parameter]
    for tensor in (found["momentum_buffer"], found["list"][0], found["tuple"][0]):
        assert torch.equal(tensor, saved)
        assert tensor is not here
        assert tensor.data_ptr() != saved.data_ptr()
    assert found["list"][1] == 3
    assert isinstance(found["tuple"], tuple)


def test_names_are_the_canonical_ones_of_each_model():
    one, two = Net(), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([{"params": two.parameters(), "lr": 0.5}, {"params": one.parameters()}])
    tree = optimizer_state_by_name(optimizer, [torch.compile(one), two])
    assert tree["param_groups"][0]["params"] == ["model_1.weight", "model_1.bias"]
    assert tree["param_groups"][0]["lr"] == 0.5
    assert tree["param_groups"][1]["params"][0] == "model_0.first.weight"


def test_order_of_parameters_and_groups_does_not_matter():
    model = Net()
    first, second = list(model.first.parameters()), list(model.second.parameters())
    optimizer = torch.optim.Adam([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.2}])
    step(model, optimizer)
    tree = optimizer_state_by_name(optimizer, [model])
    turned = torch.optim.Adam([{"params": second[::-1]}, {"params": first[::-1]}])
    load_optimizer_state(turned, tree, [model])
    assert [group["lr"] for group in turned.param_groups] == [0.2, 0.1]
    for parameter in model.parameters():
        assert torch.equal(turned.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_parameters_of_no_model_have_a_stable_name():
    model, loose = Net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1, momentum=0.5)
    loose.grad = torch.ones(2)
    optimizer.step()
    tree = optimizer_state_by_name(optimizer, [model])
    assert list(tree["state"]) == ["unnamed.0.4"]
    again = torch.optim.SGD([*model.parameters(), loose], lr=0.3, momentum=0.5)
    load_optimizer_state(again, tree, [model])
    assert torch.equal(again.state[loose]["momentum_buffer"], torch.ones(2))
    assert again.param_groups[0]["lr"] == 0.1


def test_a_tied_parameter_has_one_name():
    model = Net()
    model.third = nn.Linear(4, 1)
    model.third.weight = model.second.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = optimizer_state_by_name(optimizer, [model])["param_groups"][0]["params"]
    assert names == [f"model_0.{name}" for name, _ in model.named_parameters()]


def test_missing_and_unexpected_parameters_are_named():
    model, small = Net(), nn.Linear(2, 2)
    tree = optimizer_state_by_name(torch.optim.SGD(model.parameters(), lr=0.1), [model])
    target = torch.optim.SGD([*model.first.parameters(), *small.parameters()], lr=0.7)
    with pytest.raises(StateMismatchError) as error:
        load_optimizer_state(target, tree, [model, small])
    assert "not in the checkpoint: model_1.bias, model_1.weight" in str(error.value)
    assert "not in the optimizer: model_0.second.bias, model_0.second.weight" in str(error.value)
    assert target.param_groups[0]["lr"] == 0.7


def test_other_groups_are_an_error():
    model = Net()
    tree = optimizer_state_by_name(torch.optim.SGD(model.parameters(), lr=0.1), [model])
    split = torch.optim.SGD(
        [{"params": model.first.parameters()}, {"params": model.second.parameters()}], lr=0.1
    )
    with pytest.raises(StateMismatchError, match=r"form a group here.*model_0\.first\.weight"):
        load_optimizer_state(split, tree, [model])


def of_two_groups(frozen):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(not frozen)
    model[1].bias.requires_grad_(not frozen)
    groups = [{"params": list(model[0].parameters()), "lr": 0.5}, {"params": list(model[1].parameters())}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def without_frozen(tree):
    """What an engine that drops frozen parameters saves."""
    kept = {**tree["param_groups"][1], "params": ["model_0.1.weight"], "lr": 0.25}
    return {**tree, "param_groups": [kept]}


def test_frozen_parameters_need_not_be_in_the_state():
    model, optimizer = of_two_groups(frozen=True)
    step(model, optimizer)
    tree = copy.deepcopy(without_frozen(optimizer_state_by_name(optimizer, [model])))
    fresh, loaded = of_two_groups(frozen=True)
    load_optimizer_state(loaded, tree, [fresh])
    assert [group["lr"] for group in loaded.param_groups] == [0.5, 0.25]
    assert [len(group["params"]) for group in loaded.param_groups] == [2, 2]
    assert set(loaded.state) == {fresh[1].weight}
    torch.testing.assert_close(
        loaded.state[fresh[1].weight], optimizer.state[model[1].weight], rtol=0, atol=0
    )


def test_trained_parameters_must_be_in_the_state():
    model, optimizer = of_two_groups(frozen=True)
    tree = without_frozen(optimizer_state_by_name(optimizer, [model]))
    fresh, loaded = of_two_groups(frozen=False)
    with pytest.raises(StateMismatchError, match=r"not in the checkpoint: model_0\.0\.bias"):
        load_optimizer_state(loaded, tree, [fresh])


def test_state_for_a_parameter_of_no_group_is_an_error():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tree = optimizer_state_by_name(optimizer, [model])
    tree["state"]["model_0.ghost"] = {"momentum_buffer": torch.ones(1)}
    with pytest.raises(StateMismatchError, match=r"model_0\.ghost"):
        load_optimizer_state(optimizer, tree, [model])


def test_state_that_belongs_to_no_parameter_is_kept():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["calls"] = 3
    tree = optimizer_state_by_name(optimizer, [model])
    assert tree["global_state"] == {"calls": 3}
    again = torch.optim.SGD(model.parameters(), lr=0.1)
    load_optimizer_state(again, tree, [model])
    assert again.state["calls"] == 3


def test_groups_without_parameters_keep_their_options():
    model = nn.Linear(2, 2)

    def make(*rates):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rate in rates:
            optimizer.add_param_group({"params": [], "lr": rate})
        return optimizer

    tree = optimizer_state_by_name(make(0.2, 0.3), [model])
    fresh = make(0.0, 0.0)
    load_optimizer_state(fresh, tree, [model])
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2, 0.3]
    with pytest.raises(StateMismatchError, match="groups without parameters: 2 in the checkpoint, 1 here"):
        load_optimizer_state(make(0.0), tree, [model])


def test_the_state_of_another_class_of_optimizer():
    model = nn.Linear(2, 2)
    tree = optimizer_state_by_name(torch.optim.AdamW(model.parameters()), [model])
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StateMismatchError, match="has no dampening, momentum, which SGD needs"):
        load_optimizer_state(other, tree, [model])
    del tree["param_groups"][0]["fused"]  # as an older torch saves it
    load_optimizer_state(torch.optim.AdamW(model.parameters()), tree, [model])


CLASSES = [
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
    "SGD",
]


@pytest.mark.parametrize("saved", CLASSES)
def test_a_state_goes_to_an_optimizer_of_its_own_class_alone(saved):
    """Adam's state has what RAdam needs, and would make another optimizer of it; Adamax fails at its first step."""
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def make(name):
        return getattr(torch.optim, name)(model.parameters(), lr=0.1)

    stepped = make(saved)
    stepped.step()
    tree = optimizer_state_by_name(stepped, [model])
    for name in CLASSES:
        optimizer = make(name)
        if name == saved:
            load_optimizer_state(optimizer, tree, [model])
            optimizer.step()
        else:
            before = repr(optimizer.state_dict())
            with pytest.raises(StateMismatchError, match=r"was of another class|this one is"):
                load_optimizer_state(optimizer, tree, [model])
            assert repr(optimizer.state_dict()) == before


def test_a_class_of_ones_own_is_that_of_torch_which_steps():
    class Own(torch.optim.AdamW):
        pass

    model = nn.Linear(2, 2)
    tree = optimizer_state_by_name(torch.optim.AdamW(model.parameters()), [model])
    load_optimizer_state(Own(model.parameters()), tree, [model])
    with pytest.raises(StateMismatchError, match=r"the saved optimizer is AdamW, and this one is Adam,"):
        load_optimizer_state(torch.optim.Adam(model.parameters()), tree, [model])


def test_how_a_step_is_computed_is_the_scripts_choice():
    model = nn.Linear(2, 2)
    tree = optimizer_state_by_name(torch.optim.AdamW(model.parameters(), lr=0.5, fused=True), [model])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    load_optimizer_state(optimizer, tree, [model])
    [group] = optimizer.param_groups
    assert (group["lr"], group["fused"], group["foreach"]) == (0.5, None, True)


def saved_net(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    step(model, optimizer)
    tree = optimizer_state_by_name(optimizer, [model])
    path = save_training_state(tmp_path / "c", models=[], shared={"o": tree, "n": 3}, per_rank={})
    return model, optimizer, open_training_state(path)


def test_a_lazy_tree_is_read_where_it_goes(tmp_path):
    model, optimizer, checkpoint = saved_net(tmp_path)
    trees = checkpoint.lazy_shared(["o"])
    assert trees["n"] == 3
    saved = trees["o"]["state"]["model_0.first.weight"]["exp_avg"]
    assert isinstance(saved, SavedTensor)
    assert (tuple(saved.shape), saved.dtype) == ((4, 3), torch.float32)
    live = optimizer.state[model.first.weight]["exp_avg"]
    expected = live.clone()
    live.zero_()
    for target in (optimizer, torch.optim.AdamW(model.parameters())):
        check_optimizer_state(target, trees["o"], [model])
        load_optimizer_state(target, trees["o"], [model])
        assert torch.equal(target.state[model.first.weight]["exp_avg"], expected)
        assert torch.equal(target.param_groups[0]["lr"], torch.tensor(0.01))
    assert optimizer.state[model.first.weight]["exp_avg"] is live


def test_a_changed_file_is_found_before_anything_changes(tmp_path):
    model, optimizer, checkpoint = saved_net(tmp_path)
    before = copy.deepcopy(optimizer.state_dict())
    path = checkpoint.directory / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    tree = checkpoint.lazy_shared(["o"])["o"]
    for act in (check_optimizer_state, load_optimizer_state):
        with pytest.raises(CorruptCheckpointError, match=r"state\.safetensors has the checksum"):
            act(optimizer, tree, [model])
    for state, old in zip(optimizer.state_dict()["state"].values(), before["state"].values(), strict=True):
        assert all(torch.equal(state[key], old[key]) for key in old)


# What a file says is not believed: fused kernels write as many elements as the parameter has


def stepped(kind, **options):
    model = nn.Linear(40, 10, bias=False)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        (torch.optim.AdamW, {}, "exp_avg"),
        (torch.optim.AdamW, {"fused": True}, "exp_avg_sq"),
        (torch.optim.Adam, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.SGD, {"momentum": 0.9}, "momentum_buffer"),
        (torch.optim.Adagrad, {"fused": True}, "sum"),
        (torch.optim.RMSprop, {}, "square_avg"),
        (torch.optim.Adamax, {}, "exp_inf"),
    ],
)
@pytest.mark.parametrize(
    "value", [torch.zeros(1), torch.zeros(10, 41), None, "x"], ids=["1", "more", "null", "text"]
)
def test_a_state_of_another_shape_than_its_parameter_is_refused(kind, options, key, value):
    model, optimizer = stepped(kind, **options)
    tree = optimizer_state_by_name(optimizer, [model])
    tree["state"]["model_0.weight"] = {**tree["state"]["model_0.weight"], key: value}
    if key == "momentum_buffer" and value is None:  # as torch writes it before the first step
        load_optimizer_state(optimizer, tree, [model])
        return
    before = optimizer.state_dict()["state"][0][key].clone()
    with pytest.raises(StateMismatchError, match=rf"as {key} of model_0\.weight, where shape \[10, 40\]"):
        load_optimizer_state(optimizer, tree, [model])
    assert torch.equal(optimizer.state_dict()["state"][0][key], before)


@pytest.mark.parametrize("value", [torch.zeros(2), "x", [1], True], ids=["2", "text", "list", "true"])
def test_a_step_is_one_number(value):
    model, optimizer = stepped(torch.optim.AdamW)
    tree = optimizer_state_by_name(optimizer, [model])
    tree["state"]["model_0.weight"] = {**tree["state"]["model_0.weight"], "step": value}
    with pytest.raises(StateMismatchError, match="as step of model_0"):
        load_optimizer_state(optimizer, tree, [model])


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", "x"), ("lr", None), ("lr", True), ("betas", 0.9), ("betas", (0.9, "x")), ("amsgrad", 3)],
)
def test_an_option_of_another_kind_is_refused(name, value):
    model, optimizer = stepped(torch.optim.AdamW)
    tree = optimizer_state_by_name(optimizer, [model])
    tree["param_groups"] = [{**group, name: value} for group in tree["param_groups"]]
    with pytest.raises(StateMismatchError, match=f"has {name} = "):
        load_optimizer_state(optimizer, tree, [model])


@pytest.mark.parametrize("tree", [[], {}, {"state": []}, {"state": {}, "param_groups": [{"params": [[]]}]}])
def test_a_tree_that_is_no_state_of_an_optimizer_is_refused(tree):
    model, optimizer = stepped(torch.optim.AdamW)
    with pytest.raises(CorruptCheckpointError, match="the saved optimizer"):
        load_optimizer_state(optimizer, tree, [model])


@pytest.mark.parametrize("lazy", [False, True])
def test_groups_that_share_a_tensor_share_it_again(tmp_path, lazy):
    """torch gives all groups its default rate, which a scheduler then fills once for each of them."""

    def build(rate):
        net = nn.Linear(2, 2)
        return net, torch.optim.AdamW(
            [{"params": [net.weight]}, {"params": [net.bias]}], lr=torch.tensor(rate)
        )

    net, optimizer = build(0.5)
    trees = {"optimizer_0": optimizer_state_by_name(optimizer, [net])}
    folder = save_training_state(tmp_path / "state", models=[], shared=trees, per_rank={})
    checkpoint = open_training_state(folder)
    read = checkpoint.lazy_shared(["optimizer_0"]) if lazy else checkpoint.mapped_shared(["optimizer_0"])
    net, optimizer = build(0.1)
    load_optimizer_state(optimizer, read["optimizer_0"], [net])
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert first.item() == 0.5
    assert first is second


@pytest.mark.parametrize("lazy", [False, True])
def test_parameters_that_share_a_step_count_their_own_again(tmp_path, lazy):
    """DeepSpeed's engine has one step for all parameters of a group; torch's optimizers add to each in place."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    expected = Net()
    expected.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(expected.parameters(), lr=0.01)
    tree = optimizer_state_by_name(optimizer, [model])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    one = torch.tensor(1.0)
    for state in tree["state"].values():
        state["step"] = one
    folder = save_training_state(tmp_path / "state", models=[], shared={"o": tree}, per_rank={})
    checkpoint = open_training_state(folder)
    read = checkpoint.lazy_shared(["o"]) if lazy else checkpoint.mapped_shared(["o"])
    fresh = torch.optim.AdamW(model.parameters(), lr=0.01)
    load_optimizer_state(fresh, read["o"], [model])
    step(model, fresh)
    step(expected, other)
    for here, there in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(here, there)
    assert [float(state["step"]) for state in fresh.state.values()] == [2.0] * 4


def test_an_optimizer_that_refuses_its_state_dict_is_no_damaged_checkpoint():
    class Refuses(torch.optim.SGD):
        def state_dict(self):
            raise RuntimeError("not consolidated")

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tree = optimizer_state_by_name(optimizer, [model])
    refusing = Refuses(model.parameters(), lr=0.1)
    for use in (
        lambda: optimizer_state_by_name(refusing, [model]),
        lambda: check_optimizer_state(refusing, tree, [model]),
    ):
        with pytest.raises(
            CheckpointError, match=r"Refuses\.state_dict\(\) failed.*not consolidated"
        ) as caught:
            use()
        assert type(caught.value) is CheckpointError
