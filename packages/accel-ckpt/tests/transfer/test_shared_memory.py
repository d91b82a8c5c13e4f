"""Messages through shared memory; ranks are threads, which map the files as other processes do."""

import os
import pickle
import stat
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from accel_ckpt import OfferedWeights, SharedMemoryTransport, SingleProcess, WeightTransfer
from accel_ckpt.errors import CorruptCheckpointError, TransferError, UnsafeCheckpointError
from accel_ckpt.transfer import shared_memory
from accel_ckpt.transfer.plan import Message

MESSAGE = Message(0, 1, 0, (), 64)


def joined(folder, size, function, timeout=20.0):
    def rank_main(rank):
        try:
            return function(SharedMemoryTransport(folder, rank, size, timeout=timeout))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank_main, range(size)))


def test_weights_arrive_from_two_ranks_in_bounded_memory(tmp_path):
    weights = [{"a": torch.randn(300, 7)}, {"b": torch.arange(700)}]

    def work(transport):
        if transport.rank < 2:
            own = OfferedWeights(lambda: weights[transport.rank], coordinator=SingleProcess())
            transfer, wants = WeightTransfer(transport, offers=own, bucket_bytes=2048), None
        else:
            wants = {"a": torch.zeros(300, 7), "b": torch.zeros(700, dtype=torch.int64)}
            transfer = WeightTransfer(transport, wants=wants, bucket_bytes=2048)
        for step in range(3):
            if transport.rank < 2:
                (tensor,) = weights[transport.rank].values()
                tensor += step
            transfer.update()
        assert not list((tmp_path / "run").glob("buckets-*")), "the memory has no name once it is mapped"
        assert transport.bucket(0).nbytes == 2048
        return wants

    answers = joined(tmp_path / "run", 4, work)
    for wants in answers[2:]:
        assert torch.equal(wants["a"], weights[0]["a"])
        assert torch.equal(wants["b"], weights[1]["b"])


def test_files_are_of_this_user_alone(tmp_path):
    def work(transport):
        if transport.rank == 0:
            transport.exchange("made")
            return None
        transport.exchange("made")
        folder = tmp_path / "run"
        return {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.glob("rank-*")]}

    modes = joined(tmp_path / "run", 2, work)[1]
    assert modes["run"] == 0o700
    assert modes["rank-0"] == modes["rank-1"] == 0o600


def test_a_folder_to_which_others_may_write(tmp_path):
    os.chmod(tmp_path, 0o777)
    with pytest.raises(UnsafeCheckpointError, match="other users may write"):
        SharedMemoryTransport(tmp_path, 0, 1)


def test_a_folder_of_an_earlier_transfer(tmp_path):
    SharedMemoryTransport(tmp_path / "run", 0, 1)
    with pytest.raises(TransferError, match="rank 0 of a transfer was in"):
        SharedMemoryTransport(tmp_path / "run", 0, 1)


def test_a_rank_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="rank=2 is none of 2 ranks"):
        SharedMemoryTransport(tmp_path, 2, 2)


def test_a_transport_that_was_not_opened(tmp_path):
    transport = SharedMemoryTransport(tmp_path / "run", 0, 1)
    with pytest.raises(TransferError, match="was not opened"):
        transport.bucket(0)


def segment(nbytes=64):
    memory = bytearray(2 * 4096 + 2 * nbytes)
    return shared_memory._Segment(memory), memory


def test_a_message_and_its_receipt():
    sender, _ = segment()
    sender.data(1).copy_(torch.arange(64))
    assert sender.find(MESSAGE) is None
    sender.put(1, MESSAGE)
    found = sender.find(MESSAGE)
    assert found.slot == 1
    assert sender.find(MESSAGE._replace(receiver=2)) is None
    assert sender.find(MESSAGE._replace(number=1)) is None
    into = torch.zeros(64, dtype=torch.uint8)
    assert sender.take(found, MESSAGE, into)
    assert torch.equal(into, torch.arange(64, dtype=torch.uint8))
    assert sender.find(MESSAGE) is None, "a message is taken once"
    assert sender.counters(1)[:2] == (1, 1)


def test_changed_bytes_are_not_taken():
    sender, memory = segment()
    sender.put(0, MESSAGE)
    memory[2 * 4096 + 5] ^= 1
    assert not sender.take(sender.find(MESSAGE), MESSAGE, torch.zeros(64, dtype=torch.uint8))
    assert sender.counters(0)[:2] == (1, 0)


def test_a_message_of_another_size_is_refused_before_memory_is_written():
    sender, _ = segment()
    sender.put(0, MESSAGE._replace(nbytes=32))
    into = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(TransferError, match="sent 32 bytes as message 0, and 64 were planned"):
        sender.take(sender.find(MESSAGE), MESSAGE, into)
    assert not into.any()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"to": 1}', pickle.dumps(print), b'{"to": -1}'])
def test_a_header_that_is_none(text):
    sender, memory = segment()
    sender.put(0, MESSAGE)
    memory[16:20] = struct.pack("=I", len(text))
    memory[20 : 20 + len(text)] = text
    assert sender.find(MESSAGE) is None


def test_a_header_that_claims_to_be_larger_than_its_place():
    sender, memory = segment()
    sender.put(0, MESSAGE)
    memory[16:20] = struct.pack("=I", 1 << 30)
    assert sender.find(MESSAGE) is None


def test_a_message_that_stays_damaged_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_TRIES", 3)

    def work(transport):
        if transport.rank == 0:
            own = OfferedWeights(lambda: {"a": torch.ones(4)}, coordinator=SingleProcess())
            WeightTransfer(transport, offers=own).update()
            return
        transfer = WeightTransfer(transport, wants={"a": torch.zeros(4)})
        segment = transport._others[0]
        data = segment.data
        segment.data = lambda slot: data(slot) ^ 1  # what another process has written over it
        transfer.update()

    first, second = joined(tmp_path / "run", 2, work, timeout=2.0)
    assert isinstance(first, TransferError)
    assert isinstance(second, CorruptCheckpointError)
    assert "message 0 of rank 0 to rank 1 is damaged" in str(second)


def test_a_process_that_has_ended(monkeypatch):
    from accel_ckpt.transfer.shared_memory import _Wait

    monkeypatch.setattr(shared_memory, "_LOOK", 0.05)
    with pytest.raises(TransferError, match="has ended"):
        _Wait(lambda: False, lambda waited: "rank 1 has ended" if waited > 0.1 else None).wait()


def test_no_room_for_the_buckets(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    transport = SharedMemoryTransport(tmp_path / "run", 0, 1)
    with pytest.raises(TransferError, match="no room for 10240 bytes of shared memory"):
        transport.open(1024, [])
