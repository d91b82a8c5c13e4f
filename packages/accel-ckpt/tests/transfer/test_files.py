"""Updates in a folder: whole, atomic, and readable by others."""

import threading
import time

import pytest
import safetensors.torch
import torch

from accel_ckpt import OfferedWeights, Part, SingleProcess, WeightFolder
from accel_ckpt.disk import Disk
from accel_ckpt.errors import StateMismatchError, TransferError
from testkit import transfers

ALONE = SingleProcess()


def offers_of(state, **options):
    return OfferedWeights(lambda: state, coordinator=ALONE, **options)


def test_each_update_is_a_folder_of_safetensors(tmp_path):
    state = {"a": torch.randn(40, 3), "b": torch.randn(5)}
    folder = WeightFolder(tmp_path / "out")
    assert folder.updates() == []
    offers = offers_of(state, dtype=torch.bfloat16)
    assert folder.publish(offers, coordinator=ALONE, max_shard_size=200) == 1
    found = {}
    for path in sorted(folder.path(1).glob("*.safetensors")):
        found |= safetensors.torch.load_file(path)
    assert {name: torch.equal(value, state[name].bfloat16()) for name, value in found.items()} == {
        "a": True,
        "b": True,
    }
    assert (folder.path(1) / "model.safetensors.index.json").is_file()


def test_receivers_read_their_blocks_of_the_newest(tmp_path):
    state = {"a": torch.randn(6, 4), "tied": None}
    state["tied"] = state["a"]
    folder = WeightFolder(tmp_path)
    for _ in range(3):
        state["a"].add_(1)
        folder.publish(offers_of(state), coordinator=ALONE)
    assert folder.updates() == [2, 3]
    columns = torch.zeros(6, 2)
    wants = {"a": Part(columns, (0, 2), (6, 4)), "tied": torch.zeros(6, 4)}
    assert folder.receive(wants) == 3
    assert torch.equal(columns, state["a"][:, 2:])
    assert torch.equal(wants["tied"], state["a"])


def test_a_receiver_waits_for_the_next_update(tmp_path):
    state = {"a": torch.zeros(3)}
    folder = WeightFolder(tmp_path)
    folder.publish(offers_of(state), coordinator=ALONE)

    def later():
        time.sleep(0.3)
        state["a"].add_(5)
        folder.publish(offers_of(state), coordinator=ALONE)

    thread = threading.Thread(target=later)
    thread.start()
    wants = {"a": torch.zeros(3)}
    assert folder.receive(wants, after=1, timeout=20) == 2
    thread.join()
    assert (wants["a"] == 5).all()


def test_no_update_in_time(tmp_path):
    with pytest.raises(TransferError, match="no update after 4 appeared in"):
        WeightFolder(tmp_path / "nothing").receive({"a": torch.zeros(1)}, after=4, timeout=0)


@pytest.mark.parametrize(
    ("wants", "says"),
    [
        ({"a": torch.zeros(2), "c": torch.zeros(1)}, "'c' is wanted and not there"),
        ({}, "'a' is there and not wanted"),
        ({"a": torch.zeros(3)}, r"'a' is \[2\] in torch.float32 there, and wanted as \[3\]"),
        ({"a": torch.zeros(2).half()}, "in torch.float16"),
    ],
)
def test_what_does_not_fit_fills_nothing(tmp_path, wants, says):
    folder = WeightFolder(tmp_path)
    folder.publish(offers_of({"a": torch.ones(2), "rotary": torch.ones(1)}), coordinator=ALONE)
    with pytest.raises(StateMismatchError, match=says):
        folder.receive(wants, ignored=["rot*"])
    assert not any(tensor.any() for tensor in wants.values())


def test_a_write_that_fails_leaves_the_earlier_updates(tmp_path):
    class Full(Disk):
        def write(self, descriptor, data):
            raise OSError(28, "No space left on device")

    WeightFolder(tmp_path).publish(offers_of({"a": torch.ones(2)}), coordinator=ALONE)
    with pytest.raises(OSError, match="No space left"):
        WeightFolder(tmp_path, disk=Full()).publish(offers_of({"a": torch.zeros(2)}), coordinator=ALONE)
    folder = WeightFolder(tmp_path)
    assert folder.updates() == [1]
    wants = {"a": torch.zeros(2)}
    folder.receive(wants)
    assert (wants["a"] == 1).all()
    assert folder.publish(offers_of({"a": torch.zeros(2)}), coordinator=ALONE) == 2


def test_ranks_that_hold_parts_write_whole_weights(tmp_path):
    whole = torch.randn(7, 2)

    def work(transport):
        low, high = (0, 3) if transport.rank == 0 else (3, 7)
        state = {"w": Part(whole[low:high], (low, 0), (7, 2))}
        offers = OfferedWeights(lambda: state, coordinator=transport)
        return WeightFolder(tmp_path).publish(offers, coordinator=transport)

    assert transfers.run(2, work) == [1, 1]
    found = safetensors.torch.load_file(WeightFolder(tmp_path).path(1) / "model.safetensors")
    assert torch.equal(found["w"], whole)


def test_keep_nothing(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        WeightFolder(tmp_path, keep=0)
