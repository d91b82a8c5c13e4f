"""Boxes against the elements that they hold."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt.geometry import Box, first_gap, flat_boxes, overlap

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@st.composite
def boxes_in(draw, shape=(4, 4), most=5):
    def box():
        low = [draw(st.integers(0, n)) for n in shape]
        high = [draw(st.integers(a, n)) for a, n in zip(low, shape, strict=True)]
        return Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))

    return [box() for _ in range(draw(st.integers(0, most)))]


def elements(box):
    return set(itertools.product(*map(range, box.offsets, box.ends)))


@given(boxes_in())
def test_overlaps_are_those_of_the_elements(boxes):
    held = [element for box in boxes for element in elements(box)]
    assert overlap(boxes) == (len(set(held)) < len(held))


def test_scalars_overlap_when_there_are_two():
    assert overlap([Box((), ()), Box((), ())])
    assert not overlap([Box((), ())])


@given(boxes_in(most=2).filter(lambda boxes: len(boxes) == 2))
def test_what_two_boxes_share_and_what_not(boxes):
    one, other = boxes
    common = one.meet(other)
    assert (elements(common) if common else set()) == elements(one) & elements(other)
    rest = list(one.without(other))
    assert not overlap(rest)
    assert set().union(*map(elements, rest)) == elements(one) - elements(other)


@given(boxes_in())
def test_a_gap_is_what_nothing_covers(boxes):
    covered = set().union(*map(elements, boxes))
    gap = first_gap((4, 4), boxes)
    if gap is None:
        assert len(covered) == 16
    else:
        assert elements(gap)
        assert not elements(gap) & covered


@given(shapes.flatmap(lambda s: st.tuples(st.just(s), *[st.integers(0, math.prod(s))] * 2)))
def test_a_run_of_a_flattened_tensor_is_a_few_boxes_in_order(case):
    shape, start, stop = case
    boxes = list(flat_boxes(start, stop, shape))
    everything = list(itertools.product(*map(range, shape)))
    found = [e for box in boxes for e in sorted(elements(box))]
    assert found == everything[start:stop]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
