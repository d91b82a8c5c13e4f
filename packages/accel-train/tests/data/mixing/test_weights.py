"""Weights of sources, against arithmetic done here."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_train.data.mixing.weights import WeightsAt, shares_of
from accel_train.errors import ArgumentTypeError, DataError

NAMES = ("code", "web")


def test_shares_have_the_sum_one_and_the_order_of_the_names():
    assert shares_of({"web": 3, "code": 1}, NAMES, "weights") == (0.25, 0.75)


@given(st.lists(st.floats(min_value=0, max_value=1e308), min_size=1, max_size=6).filter(any))
def test_shares_of_any_numbers_are_finite_and_add_up(values):
    names = [str(place) for place in range(len(values))]
    shares = shares_of(dict(zip(names, values, strict=True)), names, "weights")
    assert math.isclose(sum(shares), 1, rel_tol=1e-12)
    most = max(range(len(values)), key=values.__getitem__)
    assert shares[most] == max(shares) > 0


def test_fixed_weights_are_the_same_tuple_at_each_step():
    fixed = WeightsAt({"web": 1, "code": 1}, NAMES)
    assert fixed.at(0) is fixed.at(10**9)


def test_weights_of_a_list_hold_until_the_next():
    listed = WeightsAt([(10, {"web": 1, "code": 0}), (20, {"web": 0, "code": 8})], NAMES)
    assert [listed.at(step) for step in (0, 10, 19, 20, 99)] == [(0, 1), (0, 1), (0, 1), (1, 0), (1, 0)]


def test_a_function_is_called_with_the_step():
    called = WeightsAt(lambda step: {"web": step, "code": 1}, NAMES)
    assert called.at(3) == (0.25, 0.75)


def decay(step):
    return {"web": 1 - step, "code": 1}


def test_a_wrong_weight_of_a_function_names_step_and_source():
    called = WeightsAt(decay, NAMES)
    with pytest.raises(
        DataError,
        match=r"weights at step 2 \(of decay\): the weight of 'web' must be finite and not negative",
    ):
        called.at(2)


@pytest.mark.parametrize(
    ("weights", "kind", "text"),
    [
        ({"web": 1, "code": 1, "books": 1}, DataError, "name 'books', which is no source"),
        ({"web": 1}, DataError, "lack 'code'"),
        ({"wev": 1, "code": 1}, DataError, "name 'wev', which is no source and lack 'web'"),
        ({"web": -0.5, "code": 1}, DataError, "'web' must be finite and not negative, got -0.5"),
        ({"web": math.nan, "code": 1}, DataError, "'web' must be finite and not negative, got nan"),
        ({"web": math.inf, "code": 1}, DataError, "got inf"),
        ({"web": 0, "code": 0.0}, DataError, "are 0 for all of 'code', 'web'"),
        ({"web": "0.7", "code": 1}, ArgumentTypeError, "'web' must be a number, got '0.7'"),
        ({"web": True, "code": 1}, ArgumentTypeError, "'web' must be a number, got True"),
        ([0.7, 0.3], ArgumentTypeError, r"A list of weights has pairs .*got 0\.7"),
        ([(-1, {"web": 1, "code": 1})], ArgumentTypeError, "whole number of batches from 0"),
        ([(0, [0.7, 0.3])], ArgumentTypeError, "weights from step 0 on must be a mapping .*got list"),
        ([(5, {"web": 1, "code": 1}), (5, {"web": 1, "code": 1})], DataError, r"must increase, got \[5, 5\]"),
        ([(3, {"web": math.nan, "code": 1})], DataError, "weights from step 3 on: the weight of 'web'"),
        ([], ArgumentTypeError, "weights must be a mapping"),
        ("web", ArgumentTypeError, "weights must be a mapping"),
        (0.7, ArgumentTypeError, "weights must be a mapping"),
    ],
)
def test_refused(weights, kind, text):
    with pytest.raises(kind, match=text):
        WeightsAt(weights, NAMES)
