"""Runs of Megatron's flattened tensors, cut by hand, and what a rank holds by name. Needs no Megatron-core."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_ckpt.errors import StateMismatchError
from accel_train.strategies.megatron.build import Built
from accel_train.strategies.megatron.layout import Dims, FusedHeads, Gated, Heads, Vocabulary, WholeTensor
from accel_train.strategies.megatron.state import MegatronState, run_parts

# The second of two ranks; two groups of two queries, a key and a value of one element each. The vocabulary has six
# entries, so that the last two of this rank's four rows are padding.
DIMS = Dims(1, 2, 6, 2, 2, 1)


def run(rule, start, end, shape=(4, 3)):
    """The parts of elements `start` to `end`, each of which has its own place as value."""
    values = torch.arange(float(torch.Size(shape).numel()))[start:end]
    found = run_parts(rule, DIMS, shape, values, start)
    for parts in found.values():
        for part in parts:
            assert part.tensor.untyped_storage().data_ptr() == values.untyped_storage().data_ptr(), "a view"
    return {
        name: [(part.offsets, part.shape, part.tensor.tolist()) for part in parts]
        for name, parts in found.items()
    }


# This rank's share of the tests, in Megatron's rows:
#
#      0  1  2
#      3  4  5
#      6  7  8
#      9 10 11


def test_a_run_that_starts_and_ends_within_a_row():
    assert run(WholeTensor("w", dim=0), 2, 10) == {
        "w": [
            ((4, 2), (8, 3), [[2]]),
            ((5, 0), (8, 3), [[3, 4, 5], [6, 7, 8]]),
            ((7, 0), (8, 3), [[9]]),
        ]
    }


def test_a_run_within_one_row():
    assert run(WholeTensor("w", dim=1), 4, 5) == {"w": [((1, 4), (4, 6), [[4]])]}


def test_a_run_of_a_bias():
    assert run(WholeTensor("b", dim=0), 1, 3, shape=(4,)) == {"b": [((5,), (8,), [1, 2])]}


def test_a_transposed_part():
    assert run(WholeTensor("w", dim=1, transposed=True), 2, 10) == {
        "w": [
            ((5, 0), (6, 4), [[2]]),
            ((3, 1), (6, 4), [[3, 6], [4, 7], [5, 8]]),
            ((3, 3), (6, 4), [[9]]),
        ]
    }


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((4, 1), ((1, 1), (2, 4), [[1, 2]])), ((1, 4), ((5, 0), (8, 1), [[1], [2]]))],
    ids=["column", "row"],
)
def test_a_transposed_part_with_one_row_or_column(shape, expected):
    assert run(WholeTensor("w", dim=1, transposed=True), 1, 3, shape) == {"w": [expected]}


def test_a_run_across_fused_parts():
    assert run(Heads(("q", "k", "v")), 4, 11) == {
        "q": [((3, 1), (4, 3), [[4, 5]])],
        "k": [((1, 0), (2, 3), [[6, 7, 8]])],
        "v": [((1, 0), (2, 3), [[9, 10]])],
    }
    assert run(Gated(("gate", "up")), 4, 8) == {
        "gate": [((3, 1), (4, 3), [[4, 5]])],
        "up": [((2, 0), (4, 3), [[6, 7]])],
    }


def test_a_run_across_fused_parts_of_one_transposed_tensor():
    assert run(FusedHeads("c", transposed=True), 4, 11) == {
        "c": [
            ((1, 3), (3, 8), [[4], [5]]),
            ((0, 5), (3, 8), [[6], [7], [8]]),
            ((0, 7), (3, 8), [[9], [10]]),
        ]
    }


def test_a_run_that_misses_a_part_names_it_without_boxes():
    assert run(Heads(("q", "k", "v")), 7, 8) == {"q": [], "k": [((1, 1), (2, 3), [[7]])], "v": []}


def test_padding_is_nobodys():
    assert run(Vocabulary("t"), 4, 9) == {"t": [((5, 1), (6, 3), [[4, 5]])]}
    assert run(Vocabulary("t"), 7, 12) == {"t": []}


def test_a_single_value():
    assert run(WholeTensor("s"), 0, 1, shape=()) == {"s": [((), (), 0)]}
    assert run(WholeTensor("s"), 0, 0, shape=()) == {"s": []}


@pytest.mark.parametrize("place", [0, 5, 12])
@pytest.mark.parametrize("rule", [WholeTensor("w", dim=0), WholeTensor("w", dim=1, transposed=True)])
def test_an_empty_run(rule, place):
    assert run(rule, place, place) == {"w": []}


def test_a_run_beyond_the_tensor_is_refused():
    with pytest.raises(ValueError, match=r"elements 10 to 13, of shape \[3\], are no run .*\[4, 3\]"):
        run_parts(WholeTensor("w"), DIMS, (4, 3), torch.zeros(3), 10)


# A stage alone: no pipeline, so that no process group is needed


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(12.0).reshape(4, 3))
        self.qkv = nn.Parameter(torch.arange(12.0).reshape(4, 3).bfloat16())
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)


def made(stage=None, optimizer=None, tied=None):
    rules = {"table": Vocabulary("embed"), "qkv": Heads(("q", "k", "v")), "scale": WholeTensor("norm")}
    stage = stage or Stage()
    built = Built(stage, None, SimpleNamespace(tied=tied), rules, DIMS)
    return stage, MegatronState(built, SimpleNamespace(pp_size=1), None, optimizer)


def boxes(leaf):
    return [
        (part.offsets, part.shape, part.tensor.dtype, part.tensor.tolist())
        for part in leaf
        if not part.is_empty
    ]


def test_a_model_that_is_only_evaluated_is_held_as_it_is():
    stage, state = made(tied=("embed", "head"))
    found = state.model_state()
    assert list(found) == ["embed", "q", "k", "v", "norm", "head"]
    assert boxes(found["embed"]) == [((4, 0), (6, 3), torch.float32, [[0, 1, 2], [3, 4, 5]])]
    assert found["head"] is found["embed"], "the output layer has the embedding's table"
    assert boxes(found["k"]) == [((1, 0), (2, 3), torch.bfloat16, [[6, 7, 8]])]
    for part in found["v"]:
        part.tensor.fill_(-1)
    assert stage.qkv[3].tolist() == [-1, -1, -1], "a view, into which weights are loaded"


def test_what_the_distributed_optimizer_divides_is_held_in_float32():
    """Megatron's notes at parameters are all that is stood in for: this rank updates three elements of one tensor."""
    optimizer = SimpleNamespace(
        _get_model_param_range_map=lambda parameter: {"param": SimpleNamespace(start=7)}
    )
    stage = Stage()
    stage.qkv.main_param_sharded, stage.qkv.main_param = True, torch.tensor([7.0, 8.0, 9.0])
    stage.table.main_param_sharded, stage.table.main_param = True, None
    _, state = made(stage, optimizer)
    found = state.model_state()
    assert boxes(found["q"]) == boxes(found["embed"]) == []
    assert [(part.shape, part.tensor.dtype) for part in found["q"]] == [((4, 3), torch.float32)]
    assert boxes(found["k"]) == [((1, 1), (2, 3), torch.float32, [[7, 8]])]
    assert boxes(found["v"]) == [((1, 0), (2, 3), torch.float32, [[9]])]
    assert boxes(found["norm"]) == [((0,), (3,), torch.float32, [1, 1, 1])], "frozen: no optimizer has it"


def grouped():
    """Two groups: the table, and queries, keys and values; the scale is in none."""
    stage, state = made()
    state.use_groups([[stage.table], [stage.qkv]])
    return stage, state


def saved(*groups, **others):
    return {
        "state": {},
        "param_groups": [{"params": [f"model_0.{name}" for name in group]} for group in groups],
        **others,
    }


def test_a_saved_optimizer_of_the_same_parameters_is_accepted():
    _, state = grouped()
    state.check_optimizer_state(saved(["embed"], ["q", "k", "v"]), loads=True)
    state.check_optimizer_state(saved(["v", "q", "k"], [], ["embed"]), loads=True)  # in another order


@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["embed"], ["q", "v"]], r"it lacks model_0\.k\."),
        ([["embed"], ["q", "k", "v"], ["norm"]], r"model_0\.norm are in none of the groups here\."),
        ([["embed", "q", "k", "v"]], r"its parameters are grouped otherwise\."),
    ],
)
def test_a_saved_optimizer_of_other_parameters_is_refused(groups, message, loads):
    with pytest.raises(StateMismatchError, match=message):
        grouped()[1].check_optimizer_state(saved(*groups), loads)


def test_an_optimizer_that_was_saved_without_its_state():
    stage, state = grouped()
    base = torch.optim.SGD([{"params": [stage.table]}, {"params": [stage.qkv], "lr": 0.5}], lr=0.1)
    tree = state.optimizer_state(base, saves=False)
    assert tree["state"] == {}
    assert [(group["params"], group["lr"]) for group in tree["param_groups"]] == [
        (["model_0.embed"], 0.1),
        (["model_0.q", "model_0.k", "model_0.v"], 0.5),
    ]
    state.check_optimizer_state(tree, loads=False)
    with pytest.raises(StateMismatchError, match=r"no_save_optim.*MegatronLMPlugin\(no_load_optim=True\)"):
        state.check_optimizer_state(tree, loads=True)
