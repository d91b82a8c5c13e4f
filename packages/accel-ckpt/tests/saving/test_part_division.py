"""Who writes which part, and what is refused because ranks do not hold all of a tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt.divisions import Division, RankMesh
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


def offers(*held, tied=()):
    """Per rank, what it holds, and its ties."""
    ties = [*tied, *({} for _ in held)]
    return [{"parts": own, "tied": tie} for own, tie in zip(held, ties, strict=False)]


def held(*ranks):
    """Per rank, what it holds of the tensor "w"."""
    return offers(*(describe_parts({"model": {"w": list(parts)}}) for parts in ranks))


def rows(low, high, whole=None):
    whole = torch.arange(24.0).view(6, 4) if whole is None else whole
    return Part(whole[low:high], (low, 0), (6, 4))


def test_parts_that_make_up_a_tensor():
    shares = divide_parts(held([rows(0, 4)], [rows(4, 6), rows(0, 4)]), 0, [0, 0])
    assert shares.aliases == {"model": {}}
    assert sorted(key.box.offsets for own in shares.keys for key in own) == [(0, 0), (4, 0)]
    assert sorted(shares.others["model"]) == [f"model-shard-0000{rank}.safetensors" for rank in (0, 1)]


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
        divide_parts(held(*ranks), 0, [0 for _ in ranks])


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
    assert divide_parts(offers(both, only_a, tied=[tie]), 0, [0, 0]).aliases == {"model": {"b": "a"}}
    shares = divide_parts(offers(both, both, tied=[tie]), 0, [0, 0])
    assert shares.aliases == {"model": {}}
    assert {key.name for own in shares.keys for key in own} == {"a", "b"}


def test_a_file_has_one_place_for_a_name():
    box = rows(0, 2).box
    keys = [PartKey("model", "a", box), PartKey("model", "a", rows(2, 4).box), PartKey("model", "b", box)]
    assert (files_of(keys, "model"), files_of(keys, "state")) == (2, 0)


def mesh(*shape, first=0):
    """Ranks from `first` on, in order."""
    return RankMesh.of(torch.arange(first, first + torch.Size(shape).numel()).view(shape))


def ruled(names, division, shape=(12, 4)):
    """What each rank of a mesh holds of some tensors."""
    return {"model": {name: Holding(shape, "torch.float32", 4, (), division) for name in names}}


def written(every, world, load=0):
    """All that is written, by rank: the names whose boxes it writes; checks that all ranks decide alike."""
    found = [divide_parts(every, rank, [load] * world) for rank in range(world)]
    assert len({repr((one.tensors, one.others, one.aliases)) for one in found}) == 1
    return [one.names["model"] for one in found], found[0]


NAMES = [f"t{number}" for number in range(8)]


def test_all_ranks_of_a_mesh_write_their_boxes():
    one = offers(ruled(NAMES, Division(mesh(4), ((0, 1),))))[0]
    names, shares = written([one] * 4, 4)
    assert names == [frozenset(NAMES)] * 4
    assert not shares.keys
    assert shares.tensors["model"]["t0"].division.mesh.shape == (4,)


def test_copies_are_written_by_turns():
    one = offers(ruled(NAMES, Division(mesh(2, 2), (None, (0, 1)))))[0]
    names, _ = written([one] * 4, 4)
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert names[0] | names[2] == set(NAMES)
    assert len(names[0]) == len(names[2]) == 4


def test_copies_on_other_meshes_are_written_by_turns():
    own = [
        offers(ruled(NAMES, Division(RankMesh((2,), first, (2,)), ((0, 1),))))[0] for first in (0, 1)
    ]  # ranks 0 and 2, and ranks 1 and 3
    names, _ = written([own[0], own[1], own[0], own[1]], 4)
    assert names[0] == names[2]
    assert names[1] == names[3]
    assert names[0] | names[1] == set(NAMES)
    assert len(names[0]) == len(names[1]) == 4


def test_stages_write_their_own_tensors():
    stages = [
        offers(
            {"model": {**ruled([name], Division(mesh(2, first=first), ((0, 1),)))["model"],
                       other: Holding((12, 4), "", 0, ())}}
        )[0]
        for name, other, first in (("a", "b", 0), ("b", "a", 2))
    ]  # fmt: skip
    names, _ = written([stages[0], stages[0], stages[1], stages[1]], 4)
    assert names == [{"a"}, {"a"}, {"b"}, {"b"}]


def test_a_rank_of_a_mesh_that_passes_nothing_is_named():
    full, less = offers(
        ruled(NAMES, Division(mesh(4), ((0, 1),))), ruled(NAMES[:-1], Division(mesh(4), ((0, 1),)))
    )
    for rank in range(4):
        with pytest.raises(UnsupportedValueError, match="rank 2 passes nothing of the tensor 't7'"):
            divide_parts([full, full, less, full], rank, [0] * 4)


def test_ranks_that_divide_a_tensor_in_other_ways_list_their_boxes():
    """Rank 0 and 1 by rows, and the same boxes as parts on 2 and 3."""
    rule = Division(mesh(2), ((0, 1),))
    whole = torch.zeros(12, 4)
    by_rule = offers(ruled(["w"], rule))[0]
    by_part = [
        offers(describe_parts({"model": {"w": [Part(whole[low : low + 6], (low, 0), (12, 4))]}}))[0]
        for low in (0, 6)
    ]
    names, shares = written([by_rule, by_rule, *by_part], 4)
    assert not any(names)
    assert sorted(key.box.offsets for own in shares.keys for key in own) == [(0, 0), (6, 0)]


def test_other_shapes_of_a_rule_are_refused_by_rank():
    rule = Division(mesh(2), ((0, 1),))
    one, other = offers(ruled(["w"], rule), ruled(["w"], rule, (13, 4)))
    with pytest.raises(
        UnsupportedValueError, match=r"another shape: \[12, 4\] on rank 0, \[13, 4\] on rank 1"
    ):
        divide_parts([one, other], 0, [0, 0])
