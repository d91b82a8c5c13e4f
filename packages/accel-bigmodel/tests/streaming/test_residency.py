"""What stays on the device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_bigmodel import DeviceMapError
from accel_bigmodel.streaming.residency import choose_resident, window_bytes


def choose(sizes, budget, *, around=(), prefetch=2):
    return choose_resident(
        [f"g{number}" for number in range(len(sizes))], sizes, set(around), budget, prefetch
    )


def test_everything_where_it_fits():
    assert choose([10] * 5, 50) == {0, 1, 2, 3, 4}


def test_nothing_without_a_budget():
    assert choose([10] * 5, None) == set()


def test_evenly_spread():
    assert choose([10] * 12, 60, prefetch=2) == {0, 4, 8}
    assert choose([10] * 12, 90, prefetch=2) == {0, 2, 4, 6, 8, 10}


def test_the_smallest_are_not_worth_moving():
    assert choose([160, 5, 160, 4, 160, 3], None) == {3, 5}
    assert choose([160, 5, 160, 4, 160, 3], 330, prefetch=0) == {0, 3, 5}


def test_not_even_the_smallest_where_there_is_no_room():
    assert choose([160, 160, 1], 160, prefetch=0) == set()


def test_groups_around_others():
    assert choose([5, 100, 100, 100], None, around=[0]) == {0}
    assert choose([5, 100, 100, 100], 206, around=[0], prefetch=0) == {0, 1}


def test_no_groups():
    assert choose([], None) == choose([], 0) == set()


def test_too_small():
    with pytest.raises(
        DeviceMapError, match=r"budget of 104 bytes.*'g0' \(5 bytes\) and 'g2' \(100 bytes\).*takes 105"
    ):
        choose([5, 90, 100], 104, around=[0])
    with pytest.raises(DeviceMapError, match=r"'g0' \(5 bytes\) must"):
        choose([5], 4, around=[0])


def test_window():
    assert window_bytes([1, 2, 3, 9, 1], 1) == 12
    assert window_bytes([1, 2, 3, 9, 1], 0) == 9
    assert window_bytes([1, 2], 5) == 3
    assert window_bytes([], 2) == 0


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    share=st.floats(0, 1.2),
    prefetch=st.integers(0, 4),
    data=st.data(),
)
def test_whatever_fits_leaves_room_for_the_rest(sizes, share, prefetch, data):
    around = data.draw(st.sets(st.sampled_from(range(len(sizes))), max_size=2))
    budget = int(sum(sizes) * share)
    inner = [size for number, size in enumerate(sizes) if number not in around]
    least = sum(sizes[number] for number in around) + max(inner, default=0)
    if budget < least:
        with pytest.raises(DeviceMapError, match="too small"):
            choose(sizes, budget, around=around, prefetch=prefetch)
        return
    stay = choose(sizes, budget, around=around, prefetch=prefetch)
    assert around <= stay
    largest = max((size for number, size in enumerate(sizes) if number not in stay), default=0)
    assert sum(sizes[number] for number in stay) + largest <= budget
