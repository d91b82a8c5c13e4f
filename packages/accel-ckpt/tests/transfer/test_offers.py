"""What ranks offer: every element of a model once, in the memory that training uses."""

import pytest
import torch

from accel_ckpt import OfferedWeights, Part, SingleProcess
from accel_ckpt.errors import CheckpointError, StateMismatchError, UnsupportedValueError
from testkit import transfers


def whole(shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def test_one_process_offers_views_of_its_own_memory():
    state = {"a": whole((4, 3)), "count": torch.tensor(7), "extra._extra_state": {"not": "a tensor"}}
    offers = OfferedWeights(lambda: state, coordinator=SingleProcess())
    found = {weight.name: weight for weight in offers}
    assert found.keys() == {"a", "count"}
    assert found["a"].tensor.data_ptr() == state["a"].data_ptr()
    assert found["a"].box.sizes == (4, 3)
    assert found["count"].dtype == torch.int64
    state["a"].add_(1)  # an optimizer step
    assert torch.equal({weight.name: weight.tensor for weight in offers}["a"], whole((4, 3)) + 1)


def test_floating_point_weights_are_sent_in_another_dtype_and_integers_in_their_own():
    state = {"a": whole((2, 2)), "ids": torch.arange(3)}
    offers = OfferedWeights(lambda: state, dtype="bfloat16", coordinator=SingleProcess())
    assert offers.about["a"].dtype == torch.bfloat16
    assert offers.about["ids"].dtype == torch.int64
    sent = offers.state()
    assert sent["a"].dtype == torch.bfloat16
    assert sent["ids"].dtype == torch.int64


def test_what_other_ranks_hold_has_the_dtype_in_which_it_is_sent():
    def rank(coordinator):
        mine, others = ("a", "b") if coordinator.rank == 0 else ("b", "a")
        state = {mine: [Part.whole(whole((2, 2)))], others: Part.nothing((2, 2))}
        offers = OfferedWeights(lambda: state, dtype="bfloat16", coordinator=coordinator)
        return {name: [part.tensor.dtype for part in _listed(leaf)] for name, leaf in offers.state().items()}

    for found in transfers.run(2, rank):
        assert found == {"a": [torch.bfloat16], "b": [torch.bfloat16]}


def _listed(leaf):
    return leaf if isinstance(leaf, list) else [leaf]


@pytest.mark.parametrize("dtype", [torch.int8, "complex64", "no dtype"])
def test_no_dtype_for_weights(dtype):
    with pytest.raises(ValueError, match="dtype"):
        OfferedWeights(dict, dtype=dtype, coordinator=SingleProcess())


def test_tied_names_are_offered_once():
    tied = whole((4, 2))
    offers = OfferedWeights(lambda: {"embed": tied, "head": tied}, coordinator=SingleProcess())
    assert [weight.name for weight in offers] == ["embed"]
    assert offers.aliases == {"head": "embed"}
    assert offers.about["head"] == offers.about["embed"]
    state = offers.state()
    assert state["head"].data_ptr() == state["embed"].data_ptr()


def test_replicas_share_the_weights_and_the_first_gives_what_may_differ():
    """Four ranks: two halves of `w`, each on two ranks; parameters that all hold alike, and a buffer."""
    everything = whole((8, 3))

    def offer(transport):
        half = transport.rank % 2
        state = {
            "w": Part(everything[4 * half : 4 * half + 4], (4 * half, 0), (8, 3)),
            **{f"alike{i}": whole((5,)) for i in range(8)},
            "running_mean": torch.full((2,), float(transport.rank)),
        }
        names = [name for name in state if name.startswith("alike")]
        offers = OfferedWeights(lambda: state, replicated=names, coordinator=transport)
        return offers.about, [(w.name, w.box, w.tensor.clone()) for w in offers]

    answers = transfers.run(4, offer)
    assert all(about == answers[0][0] for about, _ in answers)
    given = [(rank, *weight) for rank, (_, own) in enumerate(answers) for weight in own]
    filled = torch.full((8, 3), -1.0)
    for _, name, box, tensor in given:
        if name == "w":
            assert (filled[box.slices] == -1).all(), "an element was offered twice"
            filled[box.slices] = tensor
    assert torch.equal(filled, everything)
    alike = {name: rank for rank, name, _, _ in given if name.startswith("alike")}
    assert sorted(alike) == [f"alike{i}" for i in range(8)]
    assert len([name for _, name, _, _ in given if name.startswith("alike")]) == 8
    assert len(set(alike.values())) == 4, "replicas share the work"
    assert [(rank, tensor.tolist()) for rank, name, _, tensor in given if name == "running_mean"] == [
        (0, [0, 0])
    ]


def test_a_weight_that_no_rank_holds_whole_is_refused_on_all_ranks():
    def offer(transport):
        parts = Part(whole((2, 3)), (2 * transport.rank, 0), (6, 3))
        return OfferedWeights(lambda: {"w": parts}, coordinator=transport)

    answers = transfers.run(2, offer)
    assert all(isinstance(answer, UnsupportedValueError) for answer in answers)
    assert "no rank holds [4:6, 0:3] of the tensor 'w'" in str(answers[1])


def test_a_rank_that_fails_stops_the_others():
    def offer(transport):
        state = {"w": whole((2,)).to("meta" if transport.rank else "cpu")}
        return OfferedWeights(lambda: state, replicated=["w"], coordinator=transport)

    first, second = transfers.run(2, offer)
    assert isinstance(second, UnsupportedValueError)
    assert isinstance(first, CheckpointError)
    assert "meta device" in str(first)


@pytest.mark.parametrize(
    "change", [lambda s: s.pop("a"), lambda s: s.update(a=whole((5,))), lambda s: s.update(a=s["a"].double())]
)
def test_a_model_that_has_changed(change):
    state = {"a": whole((4,)), "b": whole((2,))}
    offers = OfferedWeights(lambda: state, coordinator=SingleProcess())
    change(state)
    with pytest.raises(StateMismatchError, match="no longer holds its parts of a "):
        list(offers)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.empty(2, device="meta"), "meta device"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.eye(2).to_sparse(), "layout"),
    ],
)
def test_values_that_are_no_plain_memory(tensor, why):
    with pytest.raises(UnsupportedValueError, match=why):
        OfferedWeights(lambda: {"w": tensor}, coordinator=SingleProcess())
