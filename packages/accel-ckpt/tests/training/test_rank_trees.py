"""Trees of ranks: compared by what they hold, stored as what differs, put together again."""

import pytest
import torch

from accel_ckpt import CorruptCheckpointError, Part
from accel_ckpt.training.rank_trees import RankTree, mark_of


def average(seen, buffer=0.0):
    return {"seen": seen, "weight": torch.arange(6.0), "nested": [{"mean": torch.full((3,), buffer)}]}


def own_of(tree, first):
    return RankTree.of("custom_0", tree).beside(RankTree.of("custom_0", first).marks)


@pytest.mark.parametrize(
    "buffer",
    [torch.tensor(2), torch.empty(0, 3), torch.arange(6.0)[1::2][:1], torch.tensor([1 + 2j]).conj()],
    ids=["scalar", "empty", "one element", "conjugate"],
)
def test_marks_of_odd_buffers(buffer):
    assert mark_of("b", buffer) == mark_of("b", buffer.clone())


def test_equal_trees_save_nothing():
    assert own_of(average(1), average(1)) is None
    assert own_of({"at": float("nan")}, {"at": float("nan")}) is None


@pytest.mark.parametrize(
    ("tree", "tensors"),
    [
        (average(2), set()),
        (average(1, buffer=1.0), {"custom_0.nested.0.mean"}),
        ({"weight": torch.arange(6.0)}, set()),  # the same tensor, in another dictionary
        ({"weight": torch.arange(6)}, {"custom_0.weight"}),  # of another dtype
        ({"weight": torch.arange(6.0).reshape(2, 3)}, {"custom_0.weight"}),
        ({"mean": torch.arange(6.0)}, {"custom_0.mean"}),  # under another name
        ([1, (2.5, None)], set()),
    ],
)
def test_only_what_differs_is_saved_and_the_tree_comes_back(tree, tensors):
    first = average(1)
    own = own_of(tree, first)
    assert set(own["tensors"]) == tensors
    back = RankTree.restored("custom_0", first, own, "here")
    expected = RankTree.of("custom_0", tree)
    assert RankTree.of("custom_0", back).marks == expected.marks


def test_a_single_element_of_a_large_tensor_is_a_difference():
    tensor = torch.zeros(100_000)
    other = tensor.clone()
    other[54_321] = 1.0
    assert set(own_of({"big": other}, {"big": tensor})["tensors"]) == {"custom_0.big"}


def test_what_is_divided_among_ranks_is_not_a_difference():
    rows = [{"rows": Part(torch.full((1, 2), float(at)), (at, 0), (2, 2)), "count": 3} for at in (0, 1)]
    assert own_of(rows[1], rows[0]) is None
    own = own_of({**rows[1], "count": 4}, rows[0])
    assert own["tensors"] == {}
    whole = {"rows": torch.eye(2), "count": 3}  # as it is read
    back = RankTree.restored("custom_0", whole, own, "here")
    assert back["count"] == 4
    assert torch.equal(back["rows"], torch.eye(2))


@pytest.mark.parametrize(
    "own",
    [
        {"text": "{}", "tensors": {}},
        {"text": "[", "tensors": {}},
        {"tensors": {}},
        {"text": '{"custom_0": {"!": "tensor", "v": "elsewhere"}}', "tensors": {}},
        {"text": '{"custom_0": 1}', "tensors": {"x": 3}},
    ],
)
def test_what_is_no_tree_of_a_rank_is_refused(own):
    with pytest.raises(CorruptCheckpointError, match="here: a rank's own custom_0"):
        RankTree.restored("custom_0", average(1), own, "here")
