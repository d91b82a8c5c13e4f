"""Who writes which part, and what is refused because ranks do not hold all of a tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.parts import Part
from accel_ckpt.saving.part_division import (
    Holding,
    PartKey,
    check_cover,
    describe_parts,
    divide_parts,
    files_of,
    share,
    tied_parts,
)

held_by_ranks = st.lists(
    st.dictionaries(st.sampled_from([f"t{i}" for i in range(8)]), st.just(8)), min_size=1, max_size=4
)


@given(held_by_ranks)
def test_each_part_is_written_by_one_of_its_holders(held):
    loads = [0] * len(held)
    shares = share(held, loads)
    assert sorted(key for own in shares for key in own) == sorted({key for own in held for key in own})
    assert all(own <= set(parts) for own, parts in zip(shares, held, strict=True))
    assert loads == [8 * len(own) for own in shares]


def test_replicas_divide_the_writing():
    shares = share([{f"t{i}": 8 for i in range(8)}] * 4, [0, 0, 0, 16])
    assert sorted(map(len, shares)) == [0, 2, 3, 3] or sorted(map(len, shares)) == [1, 2, 2, 3]
    assert len(shares[3]) == min(map(len, shares))


def held(*ranks):
    """Per rank, what it holds of the tensor "w"."""
    return [describe_parts({"model": {"w": list(parts)}}) for parts in ranks]


def rows(low, high, whole=None):
    whole = torch.arange(24.0).view(6, 4) if whole is None else whole
    return Part(whole[low:high], (low, 0), (6, 4))


def test_parts_that_make_up_a_tensor():
    shares, aliases = divide_parts(held([rows(0, 4)], [rows(4, 6), rows(0, 4)]), [{}, {}], [0, 0])
    assert aliases == {"model": {}}
    assert sorted(key.box.offsets for own in shares for key in own) == [(0, 0), (4, 0)]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        pytest.param(
            ([rows(0, 2)], [rows(3, 6)]),
            r"no rank holds \[2:3, 0:4\] of the tensor 'w' of shape \[6, 4\]",
            id="gap",
        ),
        pytest.param(([Part.nothing((6, 4))],), r"no rank holds \[0:6, 0:4\]", id="nobody"),
        pytest.param(([Part.nothing((0, 4))],), r"no rank holds \[0:0, 0:4\]", id="nobody, of no element"),
        pytest.param(
            ([rows(0, 4)], [rows(2, 6)]),
            r"rank 0 holds \[0:4, 0:4\] and rank 1 \[2:6, 0:4\], which overlap",
            id="unequal replicas",
        ),
        pytest.param(
            ([rows(0, 4)], [Part(torch.zeros(2, 4), (4, 0), (7, 4))]),
            r"'w' as tensors of another shape: \[6, 4\] on rank 0, \[7, 4\] on rank 1",
            id="another shape",
        ),
        pytest.param(
            ([rows(0, 4)], [rows(4, 6, torch.zeros(6, 4).half())]),
            r"another dtype: torch.float32 on rank 0, torch.float16 on rank 1",
            id="another dtype",
        ),
    ],
)
def test_parts_that_do_not_are_refused(ranks, message):
    with pytest.raises(UnsupportedValueError, match=message):
        divide_parts(held(*ranks), [{} for _ in ranks], [0 for _ in ranks])


def test_who_holds_nothing_need_not_know_the_dtype():
    holders = [
        (0, Holding((2,), "", 0, ())),
        (1, Holding((2,), "torch.int8", 1, (Part.whole(torch.zeros(2)).box,))),
    ]
    check_cover("w", holders)


def test_tied_parts_are_the_same_memory_at_the_same_place():
    whole = torch.arange(24.0).view(6, 4)
    named = {
        "a": [rows(0, 4, whole), rows(4, 6, whole)],
        "b": [rows(0, 4, whole), rows(4, 6, whole)],
        "half": [rows(0, 4, whole), rows(4, 6, whole.clone())],
        "shifted": [Part(whole[:4], (2, 0), (6, 4))],
        "larger": [Part(whole[:4], (0, 0), (7, 4))],
        "nothing": [Part.nothing((6, 4))],
    }
    assert tied_parts(named) == {"b": "a"}


def test_a_tie_counts_if_every_holder_sees_it():
    whole = torch.zeros(6, 4)
    both = describe_parts({"model": {"a": [rows(0, 6, whole)], "b": [rows(0, 6, whole)]}})
    only_a = describe_parts({"model": {"a": [rows(0, 6, whole)]}})
    tie: dict[str, dict[str, str]] = {"model": {"b": "a"}}
    assert divide_parts([both, only_a], [tie, {"model": {}}], [0, 0])[1] == {"model": {"b": "a"}}
    shares, aliases = divide_parts([both, both], [tie, {"model": {}}], [0, 0])
    assert aliases == {"model": {}}
    assert {key.name for own in shares for key in own} == {"a", "b"}


def test_a_file_has_one_place_for_a_name():
    box = rows(0, 2).box
    keys = [PartKey("model", "a", box), PartKey("model", "a", rows(2, 4).box), PartKey("model", "b", box)]
    assert (files_of(keys, "model"), files_of(keys, "state")) == (2, 0)
