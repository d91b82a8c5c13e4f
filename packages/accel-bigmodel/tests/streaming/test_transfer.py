"""Copies by a thread, and by the stream of an accelerator, for which a recording fake stands in."""

import copy
import os
import threading
import time

import pytest
import torch

from accel_bigmodel import cpu_offload, undispatch
from accel_bigmodel.streaming.slot_layout import SlotLayout
from accel_bigmodel.streaming.transfer import AcceleratorTransfer, HostTransfer
from accel_bigmodel.streaming.types import Slot
from testkit.streamed import Model, same, x


def group(*values, size=100):
    tensors = [torch.full((size,), float(value)) for value in values]
    return tensors, SlotLayout(tensors)


def slot_for(transfer, layout):
    return Slot(transfer.allocate(max(512, layout.nbytes)), transfer.mark(None))


# Host


def test_host_copies():
    transfer = HostTransfer()
    tensors, layout = group(1, 2)
    slot = slot_for(transfer, layout)
    pending = transfer.copy("a", tensors, layout, slot)
    pending.wait()
    assert pending.ready()
    assert all(torch.equal(one, other) for one, other in zip(slot.views(layout), tensors, strict=True))
    assert transfer.seconds() > 0
    transfer.close()


def test_host_copies_run_in_another_thread_in_order():
    seen = []
    transfer = HostTransfer(lambda name: (time.sleep(0.01), seen.append((name, threading.get_ident()))))
    tensors, layout = group(1)
    pendings = [transfer.copy(name, tensors, layout, slot_for(transfer, layout)) for name in "abc"]
    assert not pendings[2].ready()
    pendings[2].wait()
    assert [name for name, _ in seen] == ["a", "b", "c"]
    assert {thread for _, thread in seen} != {threading.get_ident()}
    transfer.close()


def test_host_faults_are_raised_by_wait_only():
    def fail(name):
        raise OSError(name)

    transfer = HostTransfer(fail)
    tensors, layout = group(1)
    pending = transfer.copy("a", tensors, layout, slot_for(transfer, layout))
    pending.settle()
    with pytest.raises(OSError, match="a"):
        pending.wait()
    transfer.close()


def test_host_copies_can_be_cancelled():
    release = threading.Event()
    seen = []
    transfer = HostTransfer(lambda name: (release.wait(5), seen.append(name)))
    tensors, layout = group(1)
    first, second = (transfer.copy(name, tensors, layout, slot_for(transfer, layout)) for name in "ab")
    second.cancel()
    release.set()
    second.settle()
    first.wait()
    transfer.close()
    assert seen == ["a"]


def test_a_closed_transfer_can_be_used_again():
    transfer = HostTransfer()
    tensors, layout = group(1)
    for _ in range(2):
        transfer.copy("a", tensors, layout, slot_for(transfer, layout)).wait()
        transfer.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_gets_a_thread_of_its_own():
    transfer = HostTransfer()
    tensors, layout = group(1)
    slot = slot_for(transfer, layout)
    transfer.copy("a", tensors, layout, slot).wait()
    child = os.fork()
    if child == 0:
        tensors[0].fill_(5)
        transfer.copy("a", tensors, layout, slot).wait()
        os._exit(int(slot.views(layout)[0][0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    transfer.close()


def test_copies_of_transfers_are_independent():
    def before(name):
        pass

    transfer = HostTransfer(before)
    other = copy.deepcopy(transfer)
    assert other is not transfer
    assert other._before_copy is before
    assert copy.deepcopy(AcceleratorTransfer("cuda:1")).device == torch.device("cuda:1")


# Accelerator


class Stream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_event(self, event):
        # CUDA takes an event that was never recorded for one that has passed.
        assert event.recorded or self.name == "compute"
        self.log.append(f"{self.name} waits for {event.name}")

    def synchronize(self):
        self.log.append(f"host waits for {self.name}")

    def __enter__(self):
        self.log.append(f"{self.name} on")

    def __exit__(self, *_):
        self.log.append(f"{self.name} off")


class Event:
    def __init__(self, log, name, clock):
        self.log, self.name, self.clock = log, name, clock
        self.recorded = False
        self.passed = True

    def record(self, stream):
        self.recorded = True
        self.at = next(self.clock)
        self.log.append(f"{stream.name} records {self.name}")

    def synchronize(self):
        self.log.append(f"host waits for {self.name}")

    def query(self):
        return self.passed

    def elapsed_time(self, other):
        return float(other.at - self.at)


class Fake(AcceleratorTransfer):
    """The logic of the accelerator over CPU memory; streams and events only take notes."""

    def __init__(self, pinned=False):
        super().__init__("cpu")
        self.log, self.events, self.pins, self.kept = [], [], [], []
        self.all_pinned = pinned
        self.compute = Stream(self.log, "compute")
        self.clock = iter(range(1000))

    def _new_stream(self):
        return Stream(self.log, "copies")

    def _new_event(self, *, timed=False):
        self.events.append(Event(self.log, f"e{len(self.events)}", self.clock))
        return self.events[-1]

    def _compute_stream(self):
        return self.compute

    def _pinned(self, nbytes):
        self.pins.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.pins[-1]

    def _is_pinned(self, tensor):
        return self.all_pinned

    def _keep_for(self, stream, memory):
        self.kept.append((stream.name, memory.data_ptr()))


def test_a_copy_is_ordered_against_the_computation():
    transfer = Fake()
    tensors, layout = group(1, 2)
    slot = slot_for(transfer, layout)
    assert transfer.log == ["compute records e0"]  # whoever had the memory before has to be done with it
    pending = transfer.copy("a", tensors, layout, slot)
    pending.wait()
    assert transfer.log[1:] == [
        "copies on",
        "copies waits for e0",
        "copies records e2",
        "copies records e1",
        "copies off",
        "compute waits for e1",
    ]
    assert all(torch.equal(one, other) for one, other in zip(slot.views(layout), tensors, strict=True))
    transfer.close()


def test_marks_are_used_again():
    transfer = Fake()
    mark = transfer.mark(None)
    assert transfer.mark(mark) is mark
    assert transfer.log == ["compute records e0"] * 2


def test_weights_that_are_not_pinned_are_packed_by_turns():
    transfer = Fake()
    for value in range(5):
        tensors, layout = group(value, value + 1)
        slot = slot_for(transfer, layout)
        transfer.copy("a", tensors, layout, slot).wait()
        assert [view[0].item() for view in slot.views(layout)] == [value, value + 1]
    assert [buffer.nbytes for buffer in transfer.pins] == [1024, 1024]
    # Before a buffer is filled again, the copy from it two groups ago has to be over.
    waits = [line for line in transfer.log if line.startswith("host waits")]
    assert len(waits) == 3
    assert waits[0] == "host waits for e1"
    transfer.close()


def test_a_slot_may_end_with_its_last_tensor():
    """The memory of a tensor that stays on the device is as large as the tensor."""
    transfer = Fake()
    tensors, layout = group(1, 2)  # 400 bytes each, aligned to 512
    slot = Slot(transfer.allocate(912), transfer.mark(None))
    transfer.copy("a", tensors, layout, slot).wait()
    assert [view.tolist() for view in slot.views(layout)] == [[1.0] * 100, [2.0] * 100]
    transfer.close()


def test_a_larger_group_gets_a_larger_buffer():
    transfer = Fake()
    for size in (10, 10, 1000):
        tensors, layout = group(1, size=size)
        slot = slot_for(transfer, layout)
        transfer.copy("a", tensors, layout, slot).wait()
        assert slot.views(layout)[0].sum() == size
    assert [buffer.nbytes for buffer in transfer.pins] == [512, 512, 4096]
    transfer.close()


def test_pinned_weights_are_sent_as_they_are():
    transfer = Fake(pinned=True)
    tensors, layout = group(3, 4)
    slot = slot_for(transfer, layout)
    transfer.copy("a", tensors, layout, slot).wait()
    assert transfer.pins == []
    assert [view[0].item() for view in slot.views(layout)] == [3, 4]
    transfer.close()


def test_weights_in_host_blocks_are_sent_as_they_lie():
    transfer = Fake()
    memory = transfer.host_block(1024)
    tensors = [torch.frombuffer(memory, dtype=torch.float32, count=100, offset=at) for at in (0, 512)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    layout = SlotLayout(tensors)
    slot = slot_for(transfer, layout)
    transfer.copy("a", tensors, layout, slot).wait()
    assert len(transfer.pins) == 1  # the block, and no staging buffer
    assert [view[0].item() for view in slot.views(layout)] == [0, 1]
    transfer.close()
    transfer.copy("a", tensors, layout, slot).wait()  # closing does not forget the blocks
    assert len(transfer.pins) == 1
    transfer.close()


def test_slots_are_kept_from_others_until_their_copies_and_uses_are_done():
    transfer = Fake()
    tensors, layout = group(1)
    slot = slot_for(transfer, layout)
    pending = transfer.copy("a", tensors, layout, slot)
    # A user may compute on another stream than the one on which the slot was allocated.
    transfer.compute = Stream(transfer.log, "other")
    pending.wait()
    assert transfer.log[-1] == "other waits for e1"
    assert transfer.kept == [("copies", slot.address), ("other", slot.address)]
    transfer.close()


@pytest.mark.parametrize("locked", [True, False])
def test_a_model_over_the_stream_of_a_device(locked):
    class Refusing(Fake):
        def host_block(self, nbytes):
            raise RuntimeError("no page-locked memory")

    model, plain = Model(), Model()
    transfer = Fake() if locked else Refusing()
    cpu_offload(model, transfer=transfer)
    for _ in range(3):
        with torch.no_grad():
            same(model(x()), plain(x()))
    assert len(transfer.pins) == (1 if locked else 2)  # one block, or two buffers for packing
    undispatch(model)
    same(model.state_dict(), plain.state_dict())


def test_what_is_left_out_stays_as_it_is():
    transfer = Fake()
    tensors, layout = group(3, 4)
    slot = slot_for(transfer, layout)
    transfer.copy("a", [None, tensors[1]], layout, slot).wait()
    assert slot.views(layout)[1][0].item() == 4
    transfer.close()


def test_ready_needs_the_thread_and_the_device():
    transfer = Fake()
    tensors, layout = group(1)
    pending = transfer.copy("a", tensors, layout, slot_for(transfer, layout))
    pending.wait()
    assert pending.ready()
    transfer.events[1].passed = False
    assert not pending.ready()
    transfer.close()


def test_device_faults_are_raised_by_wait_only():
    transfer = Fake()

    def fail(nbytes):
        raise RuntimeError("no memory to pin")

    transfer._pinned = fail
    tensors, layout = group(1)
    pending = transfer.copy("a", tensors, layout, slot_for(transfer, layout))
    pending.settle()
    with pytest.raises(RuntimeError, match="no memory to pin"):
        pending.wait()
    transfer.close()


def test_time_on_the_device_is_counted_when_it_has_passed():
    transfer = Fake()
    tensors, layout = group(1)
    for _ in range(5):
        transfer.copy("a", tensors, layout, slot_for(transfer, layout)).wait()
    assert transfer.seconds() == pytest.approx(0.005)
    assert not transfer._timed  # what is finished is not kept
    make = transfer._new_event

    def unfinished(*, timed=False):
        event = make(timed=timed)
        event.passed = False
        return event

    transfer._new_event = unfinished
    transfer.copy("a", tensors, layout, slot_for(transfer, layout)).wait()
    assert transfer.seconds() == pytest.approx(0.005)
    for event in transfer.events:
        event.passed = True
    assert transfer.seconds() == transfer.seconds() == pytest.approx(0.006)
    transfer.close()


def test_close_waits_for_the_stream():
    transfer = Fake()
    tensors, layout = group(1)
    transfer.copy("a", tensors, layout, slot_for(transfer, layout))
    transfer.close()
    assert transfer.log[-1] == "host waits for copies"


@pytest.mark.parametrize(
    ("fake", "real"), [(Stream, torch.Stream), (Event, torch.Event)], ids=["stream", "event"]
)
def test_the_fake_has_only_what_pytorch_has(fake, real):
    used = {name for name in vars(fake) if not name.startswith("__") or name in ("__enter__", "__exit__")}
    assert used <= set(dir(real))


def test_the_calls_that_the_fake_replaces_exist():
    assert callable(torch.accelerator.current_stream)
    assert "enable_timing" in torch.Event.__doc__
    assert "device" in torch.Stream.__doc__


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("memory", ["plain", "pinned", "block"])
def test_on_an_accelerator(memory):
    transfer = AcceleratorTransfer(torch.accelerator.current_accelerator())
    for value in range(6):
        tensors, layout = group(value, value + 1, size=1 << 20)
        if memory == "pinned":
            tensors = [tensor.pin_memory() for tensor in tensors]
        if memory == "block":
            block = torch.frombuffer(transfer.host_block(1 << 23), dtype=torch.float32)
            tensors = [part.copy_(tensor) for part, tensor in zip(block.chunk(2), tensors, strict=True)]
            assert transfer.host_blocks.runs(tensors, layout) is not None
        slot = slot_for(transfer, layout)
        transfer.copy("a", tensors, layout, slot).wait()
        for view, tensor in zip(slot.views(layout), tensors, strict=True):
            assert torch.equal(view.cpu(), tensor)
        slot.used_until = transfer.mark(slot.used_until)
    transfer.close()
