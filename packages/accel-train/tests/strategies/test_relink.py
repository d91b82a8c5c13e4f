"""Optimizers follow parameters that preparation replaced."""

import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from accel_train.errors import PrepareError
from accel_train.strategies.relink import Replaced, followed
from testkit import worlds
from testkit.nets import Tied


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def parameter(*shape):
    return nn.Parameter(torch.ones(*(shape or (2,))))


def replace(model, change=torch.clone):
    """Put new parameters into a model; one that is used twice stays one."""
    new = {}
    for module in model.modules():
        for key, old in module._parameters.items():
            if old is not None:
                new.setdefault(id(old), nn.Parameter(change(old.detach())))
                module._parameters[key] = new[id(old)]
    return model


def held(optimizer):
    return [item for group in optimizer.param_groups for item in group["params"]]


def test_only_what_was_replaced_has_a_successor():
    replaced, old, new, other = Replaced(), parameter(), parameter(), parameter()
    replaced.add(old, new)
    assert old in replaced
    assert new not in replaced
    assert other not in replaced
    assert replaced.successor(old) is new
    assert replaced.successor(new) is replaced.successor(other) is None


def test_successors_of_successors():
    replaced, first, second, third = Replaced(), parameter(), parameter(), parameter()
    replaced.add(first, second)
    replaced.add(second, third)
    assert replaced.successor(first) is replaced.successor(second) is third


def test_a_successor_in_between_may_be_gone():
    """A model that was prepared twice: nobody holds the parameters of the first time."""
    replaced, first, second, third = Replaced(), parameter(), parameter(), parameter()
    replaced.add(first, second)
    replaced.add(second, third)
    del second
    gc.collect()
    assert replaced.successor(first) is third
    fourth = parameter()
    replaced.add(third, fourth)
    del third
    gc.collect()
    assert replaced.successor(first) is fourth


def test_a_parameter_that_is_put_back_has_no_successor():
    replaced, first, second = Replaced(), parameter(), parameter()
    replaced.add(first, second)
    replaced.add(second, first)
    assert first not in replaced
    assert replaced.successor(second) is first


def test_a_copy_knows_nothing_of_the_parameters_of_its_original():
    replaced, old, new = Replaced(), parameter(), parameter()
    replaced.add(old, new)
    assert old not in pickle.loads(pickle.dumps(replaced))
    assert old in replaced


def test_nothing_is_kept_alive_and_the_dead_are_forgotten():
    replaced, old, new = Replaced(), parameter(), parameter()
    replaced.add(old, new)
    references = [weakref.ref(old), weakref.ref(new)]
    del old, new
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    old = parameter()  # may get the identity of the dead one
    assert old not in replaced
    assert replaced.successor(old) is None


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_are_followed_by_name(compiled):
    replaced, model = Replaced(), make()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 0.1}]
    )
    given = torch.compile(model, backend="eager") if compiled else model
    with followed([given], replaced, lambda: [model]):
        replace(model)
    replaced.relink(optimizer)
    assert [id(item) for item in held(optimizer)] == [id(item) for item in model.parameters()]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    before = model[0].weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    gradient = model[0].weight.grad.clone()
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before - 0.5 * gradient)


def test_an_optimizer_of_another_model_stays_as_it_is():
    replaced, model, other = Replaced(), make(), make()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with followed([model], replaced, lambda: [model]):
        replace(model)
    replaced.relink(optimizer)
    assert [id(item) for item in held(optimizer)] == [id(item) for item in other.parameters()]


def test_tied_weights_are_one_parameter():
    replaced, model = Replaced(), Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with followed([model], replaced, lambda: [model]):
        replace(model)
    assert model.head.weight is model.embed.weight
    replaced.relink(optimizer)
    [weight] = held(optimizer)
    assert weight is model.embed.weight


def test_what_keeps_its_parameters_or_lost_a_name_is_not_noted():
    replaced, model = Replaced(), make()
    kept, lost = model[0].weight, model[1].weight
    with followed([model], replaced, lambda: [model]):
        model[1] = nn.Identity()
    assert kept not in replaced
    assert lost not in replaced


def test_a_preparation_that_failed_notes_nothing():
    replaced, model = Replaced(), make()
    before = list(model.parameters())

    def failing():
        with followed([model], replaced, lambda: [model]):
            replace(model)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        failing()
    assert not any(item in replaced for item in before)


def test_state_goes_to_the_new_parameter():
    """The training continues as if nothing had been replaced."""

    def train(change):
        replaced, model = Replaced(), make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for number in range(4):
            if number == 2 and change:
                old = list(model.parameters())
                with followed([model], replaced, lambda: [model]):
                    replace(model)
                replaced.relink(optimizer)
                assert not any(item in optimizer.state for item in old)
            model(torch.full((2, 3), number + 1.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [item.detach() for item in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def snapshot(optimizer):
    return [id(item) for item in held(optimizer)], {
        id(key): dict(value) for key, value in optimizer.state.items()
    }


def test_what_an_optimizer_keeps_besides_its_groups_is_relinked():
    class Keeps(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            self.own = [*parameters, "other"]
            self.base = torch.optim.SGD(parameters, lr=0.1)

    model, replaced = make(), Replaced()
    optimizer = Keeps([*model.parameters()])
    params = optimizer.param_groups[0]["params"]
    with followed([model], replaced, lambda: [model]):
        replace(model)
    replaced.relink(optimizer)
    now = [id(each) for each in model.parameters()]
    assert [id(each) for each in params] == now
    assert [id(each) for each in held(optimizer.base)] == now
    assert [id(each) for each in optimizer.own[:-1]] == now


def test_a_parameter_whose_model_is_gone_is_refused_and_nothing_changes():
    replaced, old, gone, new, lost = Replaced(), parameter(), parameter(4), parameter(), parameter(4)
    replaced.add(old, new)
    replaced.add(gone, lost)
    optimizer = torch.optim.SGD([{"params": [old]}, {"params": [parameter(), gone]}], lr=0.1)
    before = snapshot(optimizer)
    del lost
    gc.collect()
    with pytest.raises(
        PrepareError, match=r"SGD holds a parameter of shape \(4,\) \(group 1, place 1\).*no longer exists"
    ):
        replaced.relink(optimizer)
    assert snapshot(optimizer) == before


def test_state_that_cannot_be_divided_is_refused_and_nothing_changes():
    replaced, model = Replaced(), make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = snapshot(optimizer)
    with followed([model], replaced, lambda: [model]):
        replace(model, torch.flatten)
    with pytest.raises(
        PrepareError, match=r"AdamW already has state of shape \(2, 3\).*holds as \(6,\).*load_state"
    ):
        replaced.relink(optimizer)
    assert snapshot(optimizer) == before


def test_state_of_another_shape_than_the_parameter_is_kept():
    """As factored moments have."""
    replaced, old, new = Replaced(), parameter(4, 2), parameter(8)
    replaced.add(old, new)
    optimizer = torch.optim.SGD([old], lr=0.1)
    optimizer.state[old] = {"rows": torch.ones(4), "step": torch.ones(()), "number": 3}
    expected = dict(optimizer.state[old])
    replaced.relink(optimizer)
    assert optimizer.state[new] == expected


def divided():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    replaced, model = Replaced(), nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.weight.grad = torch.arange(16.0).view(4, 4)
    optimizer.step()
    with followed([model], replaced, lambda: [model]):
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    replaced.relink(optimizer)
    state = optimizer.state[model.weight]
    return state["exp_avg"].to_local(), state["exp_avg"].full_tensor(), state["step"].item()


def test_state_is_divided_as_the_new_parameter_is():
    gradient = torch.arange(16.0).view(4, 4)
    for rank, (local, whole, step) in enumerate(worlds.run(divided, 2)):
        torch.testing.assert_close(local, 0.1 * gradient[2 * rank : 2 * rank + 2])
        torch.testing.assert_close(whole, 0.1 * gradient)
        assert step == 1
