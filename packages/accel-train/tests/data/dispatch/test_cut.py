from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_train.data.dispatch import cut
from accel_train.data.dispatch.cut import pieces_of
from accel_train.errors import DataError, DispatchError


def cut_round(batches, first, ranks, **options):
    return cut.cut_round(batches, lambda: first, ranks, **options)


def rows(*values):
    return torch.tensor(values)


@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    ranks=st.integers(1, 6),
    first_rows=st.integers(1, 6),
)
def test_pieces_share_all_rows_evenly_in_order(counts, ranks, first_rows):
    total = sum(counts)
    parts = pieces_of(counts, ranks, first_rows)
    flat = [(batch, row) for part in parts for batch, start, stop in part for row in range(start, stop)]
    real = [(batch, row) for batch, count in enumerate(counts) for row in range(count)]
    assert flat[:total] == real
    assert all(batch == -1 for batch, _ in flat[total:])
    assert [row for _, row in flat[total:]] == [i % first_rows for i in range(len(flat) - total)]
    assert {sum(stop - start for _, start, stop in part) for part in parts} == {-(-total // ranks)}


def test_a_full_round_hands_out_whole_batches_of_any_shape():
    batches = [{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 5)}]
    cut = cut_round(batches, batches[0], 2, split=False, last=False)
    assert cut.parts[0] is batches[0]
    assert cut.parts[1] is batches[1]
    assert (list(cut.rows), cut.real, cut.valid) == ([2, 2], 4, None)


def test_the_first_batch_is_only_asked_for_where_something_must_be_completed():
    def first():
        raise AssertionError("nothing to complete")

    cut.cut_round([rows(6, 7, 8), rows(9)], first, 2, split=False, last=True)
    cut.cut_round([rows(6, 7)], first, 2, split=True, last=False)
    cut.cut_round([rows(6, 7), rows(1)], first, 2, split=False, last=False)


def test_the_tail_is_shared_out_evenly():
    cut = cut_round([rows(6, 7, 8), rows(9)], rows(0, 1, 2), 2, split=False, last=True)
    assert [part.tolist() for part in cut.parts] == [[6, 7], [8, 9]]
    assert (list(cut.rows), cut.real, cut.valid) == ([2, 2], 4, None)
    cut = cut_round([rows(6, 7, 8), rows(9, 10)], rows(0, 1, 2), 2, split=False, last=True)
    assert [part.tolist() for part in cut.parts] == [[6, 7, 8], [9, 10, 0]]
    assert (list(cut.rows), cut.real, cut.valid) == ([3, 3], 5, (3, 2))


def test_few_samples_are_repeated_as_often_as_needed():
    cut = cut_round([rows(5)], rows(5), 4, split=False, last=True)
    assert [part.tolist() for part in cut.parts] == [[5]] * 4
    assert (cut.real, cut.valid) == (1, (1, 0, 0, 0))


def test_a_tail_that_cannot_be_joined_is_handed_out_whole():
    batches = [torch.ones(3, 2), torch.ones(1, 4)]
    first = torch.zeros(3, 7)
    cut = cut_round(batches, first, 3, split=False, last=True)
    assert [tuple(part.shape) for part in cut.parts] == [(3, 2), (1, 4), (3, 7)]
    assert (list(cut.rows), cut.real, cut.valid) == ([3, 1, 3], 4, (3, 1, 0))


def test_values_that_are_no_tensors_are_cut_with_their_rows():
    Pair = namedtuple("Pair", "name count")
    two = torch.tensor(2.0)
    batches = [
        {"x": rows(0, 1, 2), "text": ["a", "b", "c"], "pair": Pair(("p", "q", "r"), 7), "scale": two},
        {"x": rows(3), "text": ["d"], "pair": Pair(("s",), 7), "scale": two},
    ]
    cut = cut_round(batches, batches[0], 2, split=False, last=True)
    assert [part["text"] for part in cut.parts] == [["a", "b"], ["c", "d"]]
    assert [part["pair"] for part in cut.parts] == [Pair(("p", "q"), 7), Pair(("r", "s"), 7)]
    assert [part["x"].tolist() for part in cut.parts] == [[0, 1], [2, 3]]
    assert [part["scale"].item() for part in cut.parts] == [2.0, 2.0]


def test_batches_without_tensors():
    cut = cut_round([["a", "b", "c"]], ["a", "b", "c"], 2, split=False, last=True)
    assert cut.parts == [["a", "b"], ["c", "a"]]
    assert cut.valid == (2, 1)
    whole = cut_round(["text"], "text", 2, split=False, last=True)
    assert whole.parts == ["text", "text"]
    assert whole.valid[0] > 10**9
    assert whole.valid[1] == 0
    assert whole.real is None


def test_arrays_of_numpy_are_cut_and_left_whole_where_they_would_have_to_be_joined():
    numpy = pytest.importorskip("numpy")
    batch = {"x": rows(0, 1, 2, 3), "array": numpy.arange(4)}
    cut = cut_round([batch], batch, 2, split=True, last=False)
    assert [part["array"].tolist() for part in cut.parts] == [[0, 1], [2, 3]]
    tail = [{"x": rows(0, 1, 2), "array": numpy.arange(3)}, {"x": rows(3), "array": numpy.arange(1)}]
    assert [len(part["x"]) for part in cut_round(tail, tail[0], 2, split=False, last=True).parts] == [3, 1]


def test_split_batches_are_cut():
    cut = cut_round([rows(0, 1, 2, 3)], rows(0, 1, 2, 3), 2, split=True, last=False)
    assert [part.tolist() for part in cut.parts] == [[0, 1], [2, 3]]
    cut = cut_round([rows(8, 9, 10)], rows(0, 1, 2, 3), 2, split=True, last=True)
    assert [part.tolist() for part in cut.parts] == [[8, 9], [10, 0]]
    assert cut.valid == (2, 1)


def test_what_cannot_be_cut_is_refused_with_a_way_out():
    batch = {"x": torch.ones(4, 2), "lengths": torch.ones(3)}
    with pytest.raises(DispatchError, match=r"4 rows holds a tensor of shape \(3,\).*slice_fn_for_dispatch"):
        cut_round([batch], batch, 2, split=True, last=False)
    with pytest.raises(DataError, match="empty batch"):
        cut_round([torch.empty(0, 2)], torch.empty(0, 2), 2, split=True, last=True)
    with pytest.raises(DispatchError, match="slice_fn_for_dispatch needs"):
        cut_round(["text"], "text", 2, split=False, last=False, slice_fn=lambda *a, **k: None)


def test_the_users_way_of_cutting():
    calls = []

    def slice_fn(data, part, process_index=None, num_processes=None):
        calls.append((data.tolist(), part, process_index, num_processes))
        return data[part] * 10

    cut = cut_round([rows(0, 1), rows(2, 3)], rows(0, 1), 2, split=False, last=False, slice_fn=slice_fn)
    assert [part.tolist() for part in cut.parts] == [[0, 10], [20, 30]]
    assert calls == [([0, 1, 2, 3], slice(0, 2), 0, 2), ([0, 1, 2, 3], slice(2, 4), 1, 2)]


def test_a_tail_with_a_tensor_that_has_not_one_row_per_sample_is_handed_out_whole():
    batch = {"x": rows(6, 7), "mask": torch.arange(5)}
    cut = cut_round([batch], {"x": rows(0, 1), "mask": torch.arange(5)}, 2, split=False, last=True)
    assert [part["x"].tolist() for part in cut.parts] == [[6, 7], [0, 1]]
    assert all(part["mask"].tolist() == [0, 1, 2, 3, 4] for part in cut.parts)
    assert cut.valid == (2, 0)
    # Whole batches are not joined along such a tensor, either.
    tail = [{"x": rows(6, 7), "mask": torch.arange(5)}, {"x": rows(8), "mask": torch.arange(5)}]
    cut = cut_round(tail, tail[0], 3, split=False, last=True)
    assert [part["mask"].tolist() for part in cut.parts] == [[0, 1, 2, 3, 4]] * 3
    assert cut.valid == (2, 1, 0)


@pytest.mark.parametrize(
    "shared",
    [("a", "b"), (torch.tensor(1.0), torch.tensor(2.0)), (["p", "q", "r", "s"], ["p", "q", "r", "t"])],
)
def test_values_that_differ_between_batches_are_not_lost_in_the_tail(shared):
    tail = [{"x": rows(0, 1, 2), "shared": shared[0]}, {"x": rows(3), "shared": shared[1]}]
    cut = cut_round(tail, tail[0], 2, split=False, last=True)
    assert [part["x"].tolist() for part in cut.parts] == [[0, 1, 2], [3]]
    assert [part["shared"] for part in cut.parts] == list(shared)


def test_what_a_whole_batch_shares_is_that_of_the_real_rows():
    first, last = {"x": rows(0, 1), "name": "first"}, {"x": rows(4, 5, 6), "name": "last"}
    cut = cut_round([last], first, 2, split=False, last=True)
    assert [(part["x"].tolist(), part["name"]) for part in cut.parts] == [([4, 5], "last"), ([6, 0], "last")]


def test_lists_are_joined_by_rows_only():
    tail = [{"x": rows(0, 1, 2), "classes": ["p", "q"]}, {"x": rows(3), "classes": ["p", "q"]}]
    cut = cut_round(tail, tail[0], 2, split=False, last=True)
    assert [(part["x"].tolist(), part["classes"]) for part in cut.parts] == [
        ([0, 1], ["p", "q"]),
        ([2, 3], ["p", "q"]),
    ]


def test_the_users_way_of_cutting_gets_a_completed_tail():
    def slice_fn(data, part, process_index=None, num_processes=None):
        return {"x": data["x"][part], "text": data["text"][part]}

    first = {"x": rows(0, 1), "text": ["a", "b"]}
    tail = [{"x": rows(8, 9), "text": ["i", "j"]}, {"x": rows(10), "text": ["k"]}]
    cut = cut_round(tail, first, 2, split=False, last=True, slice_fn=slice_fn)
    assert [(part["x"].tolist(), part["text"]) for part in cut.parts] == [
        ([8, 9], ["i", "j"]),
        ([10, 0], ["k", "a"]),
    ]
    assert (list(cut.rows), cut.real, cut.valid) == ([2, 2], 3, (2, 1))
    with pytest.raises(DispatchError, match="cannot be joined: tensors of different shapes"):
        cut_round([torch.ones(1, 2), torch.ones(1, 3)], None, 2, split=False, last=True, slice_fn=slice_fn)
    with pytest.raises(DataError, match="empty batch"):
        cut_round([rows(1)], torch.ones(0), 2, split=False, last=True, slice_fn=slice_fn)
