"""Messages over groups of gloo; ranks are threads that join a group of their own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from accel_ckpt import GroupTransport, OfferedWeights, Part, SingleProcess, WeightTransfer, join_group
from accel_ckpt.errors import CorruptCheckpointError, TransferError
from testkit import worlds


def joined(size, function, timeout=20.0):
    """Call a function with each rank's transport; results, or exceptions."""
    port = worlds.free_port()

    def rank_main(rank):
        try:
            return function(GroupTransport(join_group("127.0.0.1", port, rank, size, timeout=timeout)))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank_main, range(size)))


def test_plain_data_goes_to_all_ranks():
    def work(transport):
        assert (transport.local_rank, transport.world_size) == (transport.rank, 3)
        return transport.exchange(
            {"rank": transport.rank, "text": "ä" * (10 * transport.rank), "pair": (1, None)}
        )

    answers = joined(3, work)
    assert answers[0] == [{"rank": r, "text": "ä" * (10 * r), "pair": (1, None)} for r in range(3)]
    assert answers[0] == answers[1] == answers[2]


def test_weights_arrive_in_messages_of_the_size_of_a_bucket():
    weights = {"a": torch.randn(300, 7), "b": torch.arange(5)}

    def work(transport):
        if transport.rank == 0:
            offers = OfferedWeights(lambda: weights, coordinator=SingleProcess())
            transfer = WeightTransfer(transport, offers=offers, bucket_bytes=2048)
        else:
            wants = {"a": torch.zeros(300, 7), "b": torch.zeros(5, dtype=torch.int64)}
            transfer = WeightTransfer(transport, wants=wants, bucket_bytes=2048)
        for _ in range(2):
            transfer.update()
        assert transport.bucket(0).nbytes == 2048
        return None if transport.rank == 0 else wants

    _, *received = joined(3, work)
    for wants in received:
        assert all(torch.equal(wants[name], weights[name]) for name in weights)


def test_ranks_that_hold_parts_offer_them_over_a_group_too():
    whole = torch.randn(6, 2)

    def work(transport):
        part = Part(whole[3 * transport.rank :][:3], (3 * transport.rank, 0), (6, 2))
        offers = OfferedWeights(lambda: {"w": part}, coordinator=transport)
        wants = {"w": torch.zeros(6, 2)}
        WeightTransfer(transport, offers=offers, wants=wants).update()
        return wants["w"]

    assert all(torch.equal(received, whole) for received in joined(2, work))


def test_what_another_rank_sends_is_not_unpickled():
    """A rank that sends pickles instead of plain data is an error."""
    import pickle

    class Runs:
        def __reduce__(self):
            return print, ("run",)

    def work(transport):
        if transport.rank:
            return transport.exchange(1)
        data = torch.frombuffer(bytearray(pickle.dumps(Runs())), dtype=torch.uint8)
        for values in (torch.tensor([data.numel()]), data):
            transport._gather(values)
        return None

    assert isinstance(joined(2, work)[1], CorruptCheckpointError)


def test_a_description_of_absurd_size_is_not_read():
    def work(transport):
        if transport.rank:
            return transport.exchange(1)
        transport._gather(torch.tensor([1 << 40]))
        return None

    answer = joined(2, work)[1]
    assert isinstance(answer, TransferError)
    assert "1099511627776 bytes" in str(answer)


def test_a_rank_that_does_not_take_part():
    def work(transport):
        return transport.exchange(1) if transport.rank else None

    answer = joined(2, work, timeout=2.0)[1]
    assert isinstance(answer, TransferError)
    assert "gone, or does not take part" in str(answer)


def test_a_group_that_nobody_else_joins():
    with pytest.raises(
        TransferError, match=r"rank 1 could not join the group of 2 processes at 127\.0\.0\.1"
    ):
        join_group("127.0.0.1", worlds.free_port(), 1, 2, timeout=1.0)


def test_a_backend_that_is_unknown():
    with pytest.raises(ValueError, match="backend='mpi'"):
        join_group("127.0.0.1", 1, 0, 1, backend="mpi")


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this build of torch has NCCL")
def test_no_nccl():
    with pytest.raises(ValueError, match="needs a build of torch with CUDA"):
        join_group("127.0.0.1", 1, 0, 1, backend="nccl")


def test_no_group():
    with pytest.raises(TransferError, match="there is no process group"):
        GroupTransport()
