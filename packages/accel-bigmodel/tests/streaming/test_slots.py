"""Memory that groups use in turn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_bigmodel.streaming.slots import Layout, Slot, SlotPool
from accel_bigmodel.streaming.transfer import HostTransfer


def pool(limit, resident=0):
    return SlotPool(HostTransfer(), limit, resident)


def test_a_layout_keeps_values_shapes_and_formats():
    tensors = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 7, dtype=torch.float16),
        torch.tensor([True, False, True]),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(6, 4).t(),
    ]
    layout = Layout(tensors)
    views = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(view, tensor)
        assert view.dtype == tensor.dtype
        assert view.stride() == tensor.stride()
        assert view.data_ptr() % 64 == 0 or not tensor.numel()


def test_a_layout_makes_tensors_dense():
    (view,) = Layout([torch.zeros(1, 3).expand(4, 3)]).views(torch.empty(512, dtype=torch.uint8))
    assert view.stride() == (3, 1)


def test_a_layout_knows_what_it_describes():
    layout = Layout([torch.zeros(2), torch.zeros(3)])
    assert layout.describes([torch.ones(2), torch.ones(3)])
    assert not layout.describes([torch.ones(2), torch.ones(4)])
    assert not layout.describes([torch.ones(2), torch.ones(3).half()])
    assert not Layout([torch.ones(2, 3)]).describes([torch.ones(3, 2).t()])
    assert Layout([torch.ones(3, 2).t()]).describes([torch.zeros(3, 2).t()])


def test_the_tensor_at_a_byte():
    layout = Layout([torch.zeros(200), torch.zeros(0), torch.zeros(2)])
    assert [layout.piece_at(begin) for begin in (0, 799, 1024, 1030)] == [0, 0, 2, 2]


def test_views_are_made_once():
    layout = Layout([torch.zeros(2)])
    slot = Slot(torch.empty(512, dtype=torch.uint8), None)
    assert slot.views(layout) is slot.views(layout)


def test_slots_are_used_again():
    slots = pool(2048)
    first = slots.take(1000)
    slots.give_back(first)
    assert slots.take(700) is first
    assert slots.nbytes == 1024


def test_the_smallest_that_fits_is_used():
    slots = pool(10_000)
    large, small = slots.take(4096), slots.take(1024)
    slots.give_back(large)
    slots.give_back(small)
    assert slots.take(1000) is small


def test_a_large_slot_is_kept_for_large_groups_while_there_is_room():
    slots = pool(4096 + 512)
    large = slots.take(4096)
    slots.give_back(large)
    assert slots.take(10) is not large
    assert slots.take(10) is large


def test_unused_slots_make_room():
    slots = pool(2048)
    for slot in [slots.take(512) for _ in range(4)]:
        slots.give_back(slot)
    assert slots.take(2048) is not None
    assert slots.nbytes == slots.peak == 2048


def test_no_room():
    slots = pool(1024)
    taken = slots.take(1024)
    assert slots.take(1) is None
    assert slots.take(1, beyond=True) is not None
    assert slots.nbytes == 1536
    slots.give_back(taken)
    slots.clear()
    assert slots.nbytes == 512


def test_the_peak_counts_what_stays():
    slots = pool(1024, resident=5)
    assert slots.peak == 5
    slots.give_back(slots.take(512))
    assert slots.peak == 517


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), max_size=40), st.integers(512, 6000))
def test_the_limit_is_kept(steps, limit):
    slots, used = pool(limit), []
    for give, nbytes in steps:
        if give and used:
            slots.give_back(used.pop(nbytes % len(used)))
            continue
        slot = slots.take(nbytes)
        if slot is not None:
            assert slot.buffer.nbytes >= nbytes
            assert slot not in used
            used.append(slot)
        else:
            assert sum(one.buffer.nbytes for one in used) + nbytes > limit - 511 - nbytes
        assert slots.nbytes <= limit
        assert slots.nbytes >= sum(one.buffer.nbytes for one in used)


@pytest.mark.parametrize("mode", [True, False])
def test_views_are_of_the_kind_of_their_tensors(mode):
    with torch.inference_mode(mode):
        tensor = torch.zeros(2)
    layout = Layout([tensor])
    for context in (True, False):
        with torch.inference_mode(context):
            (view,) = layout.views(torch.empty(512, dtype=torch.uint8))
            assert view.is_inference() is mode
