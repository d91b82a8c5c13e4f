"""Updates: values arrive bit by bit, and all ranks fail together before anything is sent."""

import pytest
import torch

from accel_ckpt import OfferedWeights, Part, SingleProcess, WeightTransfer
from accel_ckpt.errors import StateMismatchError, TransferError, UnsupportedValueError
from accel_ckpt.transfer.connection import LocalTransport, Targets
from testkit import transfers
from testkit.transfers import Trainers

BUCKET = 1024


def model(step=0):
    generator = torch.Generator().manual_seed(step)
    return {
        "wide": torch.randn(24, 30, generator=generator),
        "low": torch.randn(7, 5, generator=generator).bfloat16(),
        "ids": torch.randint(0, 9, (3,), generator=generator),
        "count": torch.tensor(step),
    }


def trainer_state(rank, whole):
    """Two trainers: rows of `wide` divided unevenly, the rest on both."""
    low, high = (0, 11) if rank == 0 else (11, 24)
    return {**whole, "wide": Part(whole["wide"][low:high], (low, 0), (24, 30))}


def receiver_wants(rank, whole):
    """Two receivers: columns of `wide` divided, into a larger tensor of their own; the rest on both."""
    own = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    fused = torch.zeros(48, 15)
    own["wide"] = Part(fused[24:], (0, 15 * rank), (24, 30))
    return own, fused


def test_updates_of_two_receivers_from_two_trainers():
    def work(transport):
        ranks = Trainers(transport, 2)
        if transport.rank < 2:
            states = [trainer_state(transport.rank, model(step)) for step in range(3)]
            now = [0]
            offers = OfferedWeights(
                lambda: states[now[0]], replicated=["low", "ids", "count"], coordinator=ranks
            )
            transfer = WeightTransfer(transport, offers=offers, bucket_bytes=BUCKET)
            for step in range(3):
                now[0] = step
                transfer.update()
            return transport.sent, [tuple(b.shape) for b in transport.buckets]
        transport.exchange(None)  # the trainers' own exchange
        wants, fused = receiver_wants(transport.rank - 2, model())
        transfer = WeightTransfer(transport, wants=wants, bucket_bytes=BUCKET)
        found = []
        for _ in range(3):
            transfer.update()
            found.append(
                {"wide": fused[24:].clone(), **{n: wants[n].clone() for n in ("low", "ids", "count")}}
            )
        assert not fused[:24].any(), "only the slice that was named is written"
        return found, transport.exchanges

    answers = transfers.run(4, work)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    for receiver, (found, exchanges) in enumerate(answers[2:]):
        for step, got in enumerate(found):
            expected = model(step)
            expected["wide"] = expected["wide"][:, 15 * receiver : 15 * receiver + 15]
            for name, tensor in expected.items():
                assert torch.equal(got[name], tensor), (receiver, step, name)
        assert exchanges == 1 + 1 + 2 * 3, "the plan is made once"
    share = sum(t.nbytes for t in model().values()) - model()["wide"].nbytes // 2
    for receiver in (2, 3):
        sent = sum(nbytes for sent, _ in answers[:2] for to, nbytes in sent if to == receiver)
        assert sent == 3 * share, "every element once"
    assert all(size[0] <= BUCKET for _, sizes in answers[:2] for size in sizes)


def test_one_process_gives_to_itself_in_another_dtype():
    weights = {"a": torch.randn(5, 3), "b": torch.randn(2)}
    offers = OfferedWeights(lambda: weights, dtype=torch.bfloat16, coordinator=SingleProcess())
    wants = {"a": torch.zeros(5, 3, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.bfloat16)}
    WeightTransfer(LocalTransport(), offers=offers, wants=wants).update()
    assert all(torch.equal(wants[name], weights[name].bfloat16()) for name in weights)


def test_values_are_converted_while_they_are_packed():
    weights = {"a": torch.randn(50, 30)}

    def work(transport):
        if transport.rank:
            wants = {"a": torch.zeros(50, 30, dtype=torch.float16)}
            WeightTransfer(transport, wants=wants, bucket_bytes=BUCKET).update()
            return wants["a"]
        offers = OfferedWeights(lambda: weights, dtype="float16", coordinator=SingleProcess())
        WeightTransfer(transport, offers=offers, bucket_bytes=BUCKET).update()
        return sum(nbytes for _, nbytes in transport.sent)

    sent, received = transfers.run(2, work)
    assert sent == 2 * 1500
    assert torch.equal(received, weights["a"].half())


def test_tied_tensors_of_a_receiver_are_all_filled():
    tied = torch.randn(4, 2)

    def work(transport):
        if transport.rank:
            wants = {"embed": torch.zeros(4, 2), "head": torch.zeros(4, 2)}
            WeightTransfer(transport, wants=wants).update()
            return wants, transport.buckets[0].shape[0]
        offers = OfferedWeights(lambda: {"embed": tied, "head": tied}, coordinator=SingleProcess())
        WeightTransfer(transport, offers=offers).update()
        return None

    wants, bucket = transfers.run(2, work)[1]
    assert all(torch.equal(tensor, tied) for tensor in wants.values())
    assert bucket == tied.nbytes, "a bucket is no larger than a message"


def offers_of(weights):
    return OfferedWeights(lambda: weights, coordinator=SingleProcess())


@pytest.mark.parametrize(
    ("wants", "says"),
    [
        ({"b": torch.zeros(2)}, "names are wanted and not offered"),
        ({"a": torch.zeros(3)}, "its shape is"),
        ({"a": torch.zeros(2).half()}, "are wanted as torch.float16 and sent as torch.float32"),
    ],
)
def test_one_error_on_all_ranks_before_anything_is_sent(wants, says):
    def work(transport):
        try:
            WeightTransfer(
                transport,
                offers=None if transport.rank else offers_of({"a": torch.ones(2)}),
                wants=wants
                if transport.rank == 1
                else {"a": torch.zeros(2)}
                if transport.rank == 2
                else None,
            )
        except StateMismatchError as error:
            return str(error), transport.sent
        return None

    answers = transfers.run(3, work)
    assert says in answers[0][0]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][1] == []


def test_a_rank_that_cannot_describe_its_weights():
    def work(transport):
        wants = {"a": torch.empty(2, device="meta")}
        WeightTransfer(
            transport, offers=None if transport.rank else offers_of({"a": torch.ones(2)}), wants=wants
        )

    first, second = transfers.run(2, work)
    assert isinstance(first, UnsupportedValueError)
    assert isinstance(second, UnsupportedValueError)


def test_ranks_with_other_buckets():
    def work(transport):
        WeightTransfer(transport, wants={"a": torch.zeros(2)}, bucket_bytes=2048 * (1 + transport.rank))

    answers = transfers.run(2, work)
    assert all(isinstance(answer, TransferError) for answer in answers)
    assert "rank 1 has bucket_bytes=4096, and this rank 2048" in str(answers[0])


def test_a_model_that_changed_sends_nothing():
    weights = {"a": torch.ones(2)}

    def work(transport):
        if transport.rank:
            wants = {"a": torch.zeros(2)}
            transfer = WeightTransfer(transport, wants=wants)
            transfer.update()
        else:
            transfer = WeightTransfer(transport, offers=offers_of(weights))
            transfer.update()
            weights["a"] = torch.ones(5)
        with pytest.raises((StateMismatchError, TransferError)) as caught:
            transfer.update()
        return type(caught.value), str(caught.value), len(transport.sent)

    answers = transfers.run(2, work)
    assert answers[0][0] is StateMismatchError
    assert answers[1][0] is TransferError
    assert "no longer holds its parts of a" in answers[1][1]
    assert answers[0][2] == 1


def test_a_rank_that_fails_while_it_sends_is_named_on_the_others(monkeypatch):
    def work(transport):
        if transport.rank:
            WeightTransfer(transport, wants={"a": torch.zeros(2)}).update()
            return
        transfer = WeightTransfer(transport, offers=offers_of({"a": torch.ones(2)}))
        send = transport.send

        def broken(slot, message):
            send(slot, message)
            raise RuntimeError("the cable is cut")

        transport.send = broken
        transfer.update()

    first, second = transfers.run(2, work)
    assert type(first) is RuntimeError
    assert isinstance(second, TransferError)
    assert "rank 0: RuntimeError: the cable is cut" in str(second)


def test_a_rank_in_another_update():
    def work(transport):
        transfer = _pair(transport)
        transfer._updates += transport.rank
        transfer.update()

    answers = transfers.run(2, work)
    assert all("ranks are in different updates: [0, 1]" in str(answer) for answer in answers)


def _pair(transport):
    if transport.rank:
        return WeightTransfer(transport, wants={"a": torch.zeros(2)})
    return WeightTransfer(transport, offers=offers_of({"a": torch.ones(2)}))


def test_targets_are_parameters_views_and_lists_of_parts():
    parameter = torch.nn.Parameter(torch.zeros(4))
    store = torch.zeros(3, 4)
    targets = Targets({"p": parameter, "two": [Part(store[0], (0,), (8,)), Part(store[2], (4,), (8,))]})
    assert [box.offsets for box in targets.describe()["two"].boxes] == [(0,), (4,)]
    found = targets.by_box({"p": "q"})
    assert {name for name, _ in found} == {"q", "two"}
    assert all(not tensor.requires_grad for tensors in found.values() for tensor in tensors)


def test_one_process_has_nobody_to_send_to():
    transport = LocalTransport()
    for call in (
        lambda: transport.bucket(0),
        lambda: transport.send(0, None),
        lambda: transport.receive(0, None),
    ):
        with pytest.raises(TransferError, match="one process"):
            call()
