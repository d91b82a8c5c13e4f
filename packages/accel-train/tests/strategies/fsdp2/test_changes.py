"""What a script changes in a divided model, seen at its next call; gradients against plain PyTorch with all samples."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_ckpt.parts import is_sharded
from accel_state import PartialState
from accel_train.errors import PrepareError
from accel_train.strategies.fsdp2.changes import ParameterWatch
from testkit import worlds

WIDTH = 4


class Net(nn.Module):
    """Two units, what is around them, and a scale that every rank holds whole."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x * self.scale)


def made():
    torch.manual_seed(0)
    return Net().double()


def samples():
    return torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Divided:
    """A divided model, its watch, and how often that told of a change."""

    def __init__(self, rank, mesh):
        self.rank, self.told = rank, 0
        self.model = made()
        for unit in (*self.model.blocks, self.model):
            fully_shard(unit, mesh=mesh, ignored_params={self.model.scale})
        self.watch = ParameterWatch(self.model, self._tell)
        self.model.register_forward_pre_hook(self.watch, prepend=True)
        self.parts = dict(self.model.named_parameters())

    def _tell(self):
        self.told += 1

    def evaluate(self):  # without the hook of a strategy, which frees what this leaves gathered
        with torch.no_grad():
            self.model(samples())

    def gradients(self):
        """Whole gradients of a loss of this rank's half of the samples; what is not divided stays this rank's."""
        for parameter in self.parts.values():
            parameter.grad = None  # as an optimizer does, which knows the parts
        self.model(samples().chunk(2)[self.rank]).square().mean().backward()
        return {
            name: parameter.grad.full_tensor()
            for name, parameter in self.model.named_parameters()
            if is_sharded(parameter) and parameter.grad is not None
        }

    def gathered(self):
        """Names of what is gathered; each with the part that was in its place."""
        found = self.watch.gathered()
        named = {name: p for name, p in self.model.named_parameters() if id(p) in found}
        assert len(named) == len(found), "nothing that is elsewhere"
        assert all(found[id(whole)] is self.parts[name] for name, whole in named.items())
        return sorted(named)


def unchanged(run):
    gradients = run.gradients()
    run.evaluate()  # leaves the outermost unit gathered
    run.evaluate()
    return {
        "told": run.told,
        "gradients": gradients,
        "again": run.gradients(),
        "whole": run.watch.whole == [run.model.scale],
    }


def gathering(run):
    found = [run.gathered()]
    run.model.blocks[1].unshard()
    found.append(run.gathered())
    run.model.blocks[1].reshard()
    found.append(run.gathered())
    run.evaluate()
    found.append(run.gathered())
    run.watch(run.model, ())
    return {"names": found, "told": run.told}


def freezing(run):
    """All of one unit, and of the outermost one a whole tensor that an evaluation left in its place."""
    run.evaluate()
    run.model.blocks[0].requires_grad_(False)
    run.model.head.bias.requires_grad_(False)
    frozen, told = run.gradients(), [run.told]
    run.gradients()
    told.append(run.told)
    kept = sorted(name for name, part in run.parts.items() if not part.requires_grad)
    run.evaluate()
    run.model.requires_grad_(True)
    return {"frozen": frozen, "kept": kept, "unfrozen": run.gradients(), "told": [*told, run.told]}


def adding(run):
    torch.manual_seed(10 + run.rank)
    run.model.adapter = nn.Linear(WIDTH, 2)
    run.model.alias = run.model.adapter.weight  # one parameter in two places
    run.model.scale = nn.Parameter(torch.full((WIDTH,), 5.0 + run.rank, dtype=torch.float64))
    run.evaluate()
    run.evaluate()
    wanted = {id(p) for p in (*run.model.adapter.parameters(), run.model.scale)}
    return {
        "told": run.told,
        "values": [p.detach().clone() for p in (*run.model.adapter.parameters(), run.model.scale)],
        "divided": [is_sharded(p) for p in run.model.adapter.parameters()],
        "whole": len(run.watch.whole) == 3 and {id(p) for p in run.watch.whole} == wanted,
        "gradients": run.gradients(),
    }


def removing(run):
    run.model.scale = None
    run.watch(run.model, ())
    run.watch(run.model, ())
    return {"told": run.told, "whole": run.watch.whole}


def replacing(run):
    """Whole values, a copy of this rank's part, and a divided parameter in a place where there was none."""
    block, part = run.model.blocks[1], run.model.blocks[1].weight
    messages = []

    def refused():
        try:
            run.model(samples())
        except PrepareError as error:
            messages.append(str(error))

    for other in (nn.Parameter(torch.ones_like(part.full_tensor())), nn.Parameter(part.detach().clone())):
        block.weight = other
        refused()
    block.weight = part
    run.model.extra = nn.Parameter(part.detach().clone())
    refused()
    del run.model.extra
    return {"messages": messages, "told": run.told, "gradients": run.gradients()}


SCENES = (unchanged, gathering, freezing, adding, removing, replacing)


def ranks():
    state = PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (state.num_processes,))
    return {scene.__name__: scene(Divided(state.process_index, mesh)) for scene in SCENES}


@pytest.fixture(scope="module")
def found():
    return worlds.run(ranks, 2)


def expected_gradients(change=lambda model: None):
    model = made()
    change(model)
    model(samples()).square().mean().backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and name != "scale"
    }


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_an_unchanged_model_is_left_alone(found):
    for rank in found:
        assert (rank["unchanged"]["told"], rank["unchanged"]["whole"]) == (0, True)
        same(rank["unchanged"]["gradients"], expected_gradients())
        same(rank["unchanged"]["again"], expected_gradients())


def test_gathered_is_what_the_engine_has_put_in_place_of_parts(found):
    block, around = ["blocks.1.bias", "blocks.1.weight"], ["head.bias", "head.weight"]
    for rank in found:
        assert rank["gathering"] == {"names": [[], block, [], around], "told": 0}


def test_what_is_frozen_gets_no_gradients_until_it_is_unfrozen(found):
    def freeze(model):
        model.blocks[0].requires_grad_(False)
        model.head.bias.requires_grad_(False)

    frozen = expected_gradients(freeze)
    assert sorted(frozen) == ["blocks.1.bias", "blocks.1.weight", "head.weight"]
    for rank in found:
        same(rank["freezing"]["frozen"], frozen)
        assert rank["freezing"]["kept"] == ["blocks.0.bias", "blocks.0.weight", "head.bias"], "of the parts"
        same(rank["freezing"]["unfrozen"], expected_gradients())
        assert rank["freezing"]["told"] == [1, 1, 2]


def test_what_is_added_is_whole_and_has_rank_0s_values(found):
    torch.manual_seed(10)
    adapter = nn.Linear(WIDTH, 2)
    scale = torch.full((WIDTH,), 5.0, dtype=torch.float64)
    for rank in found:
        adding = rank["adding"]
        assert adding["told"] == 1, "both places and the other scale at once"
        torch.testing.assert_close(
            adding["values"], [adapter.weight.detach(), adapter.bias.detach(), scale], rtol=0, atol=0
        )
        assert adding["divided"] == [False, False]
        assert adding["whole"], "each once, and the old scale no longer"
        same(
            adding["gradients"],
            expected_gradients(lambda model: setattr(model, "scale", nn.Parameter(scale))),
        )


def test_what_is_removed_is_forgotten(found):
    assert [rank["removing"] for rank in found] == [{"told": 1, "whole": []}] * 2


def test_a_replaced_part_is_refused_by_name_on_every_rank(found):
    for rank in found:
        messages = rank["replacing"]["messages"]
        assert [message.split(" of Net was replaced after")[0] for message in messages] == [
            "The parameter 'blocks.1.weight'",
            "The parameter 'blocks.1.weight'",
            "The parameter 'extra'",
        ]
        assert all("parameter.copy_(values)" in message for message in messages)
        assert rank["replacing"]["told"] == 0
        same(rank["replacing"]["gradients"], expected_gradients())  # the part is back in its place
