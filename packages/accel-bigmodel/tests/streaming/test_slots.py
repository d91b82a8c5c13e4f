"""Memory that groups use in turn."""

from hypothesis import given
from hypothesis import strategies as st

from accel_bigmodel.streaming.slots import SlotPool
from accel_bigmodel.streaming.transfer import HostTransfer


def pool(limit, resident=0):
    return SlotPool(HostTransfer(), limit, resident)


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
