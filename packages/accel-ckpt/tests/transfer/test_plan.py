"""Who sends what to whom: every element once to every rank that wants it, in messages of bounded size."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ckpt.errors import StateMismatchError, TransferError
from accel_ckpt.geometry import Box
from accel_ckpt.saving.part_division import Holding
from accel_ckpt.transfer.plan import RankWeights, check_transfer, plan_transfer

DTYPES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.int64": 8, "torch.uint8": 1}


def held(shape, *boxes, dtype="torch.float32"):
    whole = Box((0,) * len(shape), tuple(shape))
    return Holding(tuple(shape), dtype, DTYPES[dtype], boxes or (whole,))


def rows(begin, end, columns=4):
    return Box((begin, 0), (end - begin, columns))


def offering(**weights):
    return RankWeights(weights, {}, {})


def wanting(ignored=(), **weights):
    return RankWeights({}, {}, weights, tuple(ignored))


def plans(ranks, bucket=1024):
    return [plan_transfer(ranks, rank, bucket) for rank in range(len(ranks))]


@st.composite
def cut(draw, size, most):
    """A dimension cut into at most so many runs."""
    inner = draw(st.sets(st.integers(1, max(1, size - 1)), max_size=most - 1)) if size > 1 else set()
    edges = [0, *sorted(inner), size]
    return list(itertools.pairwise(edges))


@st.composite
def worlds(draw):
    """Weights that trainers hold in boxes of one grid, and receivers want in boxes of another."""
    trainers, receivers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    offers = [{} for _ in range(trainers)]
    wants = [{} for _ in range(receivers)]
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 40), min_size=0, max_size=3)))
        dtype = draw(st.sampled_from(sorted(DTYPES)))

        def grid(shape=shape):
            runs = [draw(cut(size, 3)) for size in shape]
            return [
                Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
                for cell in itertools.product(*runs)
            ]

        for given_to, boxes in ((offers, grid()), (wants, grid())):
            owners = [draw(st.integers(0, len(given_to) - 1)) for _ in boxes]
            for rank in range(len(given_to)):
                own = tuple(box for box, owner in zip(boxes, owners, strict=True) if owner == rank)
                if own:
                    given_to[rank][f"w{number}"] = Holding(shape, dtype, DTYPES[dtype], own)
    return [*(RankWeights(own, {}, {}) for own in offers), *(RankWeights({}, {}, own) for own in wants)]


@settings(max_examples=60, deadline=None)
@given(worlds(), st.integers(1024, 5000))
def test_every_wanted_element_arrives_once(ranks, bucket):
    check_transfer(ranks)
    all_plans = plans(ranks, bucket)
    for receiver, rank in enumerate(ranks):
        arrived = {
            (n, box): torch.zeros(box.sizes, dtype=torch.int)
            for n, h in rank.wants.items()
            for box in h.boxes
        }
        for message in all_plans[receiver].messages:
            assert message in all_plans[message.sender].messages, "both sides plan the same"
            if message.receiver != receiver:
                continue
            assert message.nbytes <= bucket
            assert message.nbytes == sum(piece.nbytes for piece in message.pieces), "no gaps"
            for piece in message.pieces:
                assert piece.begin % piece.dtype.itemsize == 0
                assert piece.nbytes == piece.box.volume * piece.dtype.itemsize
                assert piece.offered in ranks[message.sender].offers[piece.name].boxes
                assert piece.offered.meet(piece.box) == piece.box
                arrived[piece.name, piece.wanted][piece.box.within(piece.wanted.offsets).slices] += 1
        assert all((count == 1).all() for count in arrived.values())


@settings(max_examples=40, deadline=None)
@given(worlds())
def test_all_ranks_keep_one_order_in_which_no_rank_waits_for_ever(ranks):
    """Each rank has two messages under way, in its own order; both ends must have started a message to finish it."""
    left = [[(m.sender, m.receiver, m.number) for m in plan.messages] for plan in plans(ranks)]
    arrived = set()
    while any(left):
        under_way = Counter(key for own in left for key in own[:2])
        arrived |= {key for key, count in under_way.items() if count == 2}
        before = sum(map(len, left))
        left = [own[1:] if own and own[0] in arrived else own for own in left]
        assert sum(map(len, left)) < before, "ranks wait for ever"


def test_messages_are_full_but_for_the_last():
    ranks = [offering(w=held((1000, 4))), wanting(w=held((1000, 4)))]
    sizes = [message.nbytes for message in plan_transfer(ranks, 1, 4096).messages]
    assert sizes == [4096, 4096, 4096, 16000 - 3 * 4096]
    assert plan_transfer(ranks, 0, 4096).sent_bytes(0) == 16000
    assert plan_transfer(ranks, 1, 4096).received_bytes(1) == 16000


def test_what_a_rank_gives_to_itself_is_no_message():
    both = RankWeights({"w": held((4, 4))}, {}, {"w": held((4, 4), rows(1, 3))})
    plan = plan_transfer([both, wanting(w=held((4, 4)))], 0, 1024)
    assert [piece.box for piece in plan.copies] == [rows(1, 3)]
    assert plan.sent_bytes(0) == 64


def test_two_receivers_of_the_same_rows_get_them_both():
    ranks = [offering(w=held((4, 4))), wanting(w=held((4, 4))), wanting(w=held((4, 4)))]
    assert plan_transfer(ranks, 0, 1024).sent_bytes(0) == 2 * 64


def test_tied_names_are_sent_once():
    ranks = [
        RankWeights({"embed": held((4, 4))}, {"head": "embed"}, {}),
        wanting(embed=held((4, 4)), head=held((4, 4))),
    ]
    check_transfer(ranks)
    assert plan_transfer(ranks, 1, 1024).received_bytes(1) == 64
    alone = [ranks[0], wanting(head=held((4, 4)))]
    check_transfer(alone)
    assert [p.name for m in plan_transfer(alone, 1, 1024).messages for p in m.pieces] == ["embed"]


def test_only_some_names():
    ranks = [offering(a=held((4, 4)), b=held((4, 4))), wanting(a=held((4, 4)), b=held((4, 4)))]
    assert plan_transfer(ranks, 1, 1024, names=["b"]).received_bytes(1) == 64


def test_senders_take_different_receivers_at_the_same_time():
    half = [held((512, 4), rows(0, 256)), held((512, 4), rows(256, 512))]
    ranks = [offering(w=half[0]), offering(w=half[1]), wanting(w=held((512, 4))), wanting(w=held((512, 4)))]
    first = [plan_transfer(ranks, rank, 1024).messages[0] for rank in range(2)]
    assert first[0].receiver != first[1].receiver


BAD = {
    "another name": (
        [wanting(v=held((4, 4)))],
        r"1 names are wanted and not offered \(v; the first by rank 1\)",
    ),
    "nobody wants it": (
        [RankWeights({"v": held((2,))}, {}, {"w": held((4, 4))})],
        r"1 weights are offered and no receiver wants them \(v;",
    ),
    "another shape": (
        [wanting(w=held((8, 4)))],
        r"rank 1 wants 'w' of shape \[8, 4\], and its shape is \[4, 4\]",
    ),
    "another dtype": (
        [wanting(w=held((4, 4), dtype="torch.bfloat16"))],
        r"1 weights are wanted as torch.bfloat16 and sent as torch.float32 \(w; the first by rank 1",
    ),
    "a gap": ([wanting(w=held((4, 4), rows(0, 3)))], r"no receiver takes \['3:4', '0:4'\] of 'w'"),
    "twice": ([wanting(w=held((4, 4), rows(0, 3), rows(2, 4)))], "rank 1 wants parts of 'w' that overlap"),
    "no receivers": ([offering()], "no rank wants weights"),
}


@pytest.mark.parametrize(("others", "says"), BAD.values(), ids=BAD)
def test_what_does_not_fit(others, says):
    with pytest.raises(StateMismatchError, match=says) as caught:
        check_transfer([offering(w=held((4, 4))), *others])
    assert "Nothing was sent" in str(caught.value)


def test_all_misfits_are_listed_at_once():
    ranks = [
        offering(a=held((2,)), b=held((2,)), c=held((2,))),
        wanting(a=held((3,)), b=held((4,)), d=held((1,))),
    ]
    with pytest.raises(StateMismatchError) as caught:
        check_transfer(ranks)
    assert all(f"'{name}'" in str(caught.value) for name in "ab")
    assert "(d;" in str(caught.value)
    assert "(c;" in str(caught.value)


def test_receivers_name_what_they_do_not_have():
    ranks = [offering(w=held((4, 4)), inv_freq=held((2,))), wanting(["*inv_*"], w=held((4, 4)))]
    check_transfer(ranks)


def test_receivers_may_hold_different_layers():
    check_transfer([offering(a=held((2,)), b=held((2,))), wanting(a=held((2,))), wanting(b=held((2,)))])


def test_a_bucket_that_is_too_small():
    with pytest.raises(ValueError, match="bucket_bytes is 512"):
        plan_transfer([offering(w=held((4, 4))), wanting(w=held((4, 4)))], 0, 512)


def test_descriptions_are_the_same_after_the_wire():
    own = RankWeights({"w": held((4, 4), rows(0, 2))}, {"v": "w"}, {"u": Holding((3,), "", 0, ())}, ("x*",))
    assert RankWeights.from_plain(own.to_plain(), 3) == own


def bad(**change):
    return {**RankWeights({"w": held((4, 4))}, {}, {}).to_plain(), **change}


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        bad(offers={"w": 3}),
        bad(offers={"w": [[4, 4], "torch.float32"]}),
        bad(offers={"w": [[4, -4], "torch.float32", []]}),
        bad(offers={"w": [[4, 4], "torch.float32", [[[0, 0], [5, 4]]]]}),
        bad(offers={"w": [[4, 4], "torch.float32", [[[0], [4]]]]}),
        bad(offers={"w": [[4, 4], "os.system", [[[0, 0], [4, 4]]]]}),
        bad(offers={"w": [[4, 4], "torch.float32", [[[0, 0]]]]}),
        bad(aliases={"a": 1}),
        bad(ignored=[b"x"]),
    ],
)
def test_a_description_that_is_none(data):
    with pytest.raises(TransferError, match="rank 3 of the transfer sent something else"):
        RankWeights.from_plain(data, 3)


def test_every_dtype_of_weights_is_known():
    from accel_ckpt.tensor_storage import DTYPES as known

    for dtype in known.values():
        own = RankWeights({"w": Holding((2,), str(dtype), dtype.itemsize, (Box((0,), (2,)),))}, {}, {})
        assert RankWeights.from_plain(own.to_plain(), 0) == own
        assert math.log2(dtype.itemsize).is_integer()
