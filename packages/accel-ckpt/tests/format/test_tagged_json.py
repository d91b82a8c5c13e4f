"""Plain data keeps its exact value and type through JSON."""

import collections
import datetime
import enum
import json
import math
import pathlib
import struct
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from accel_ckpt.errors import CorruptCheckpointError, UnsupportedValueError
from accel_ckpt.format.tagged_json import decode, encode
from accel_ckpt.parts import Part


def round_trip(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def same(a, b):
    """Equal in type and value, down to the bits of floats."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, collections.abc.Mapping):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    return a == b


surrogates = st.text(st.characters(exclude_categories=()))  # lone surrogates included
keys = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    surrogates,
    st.binary(),
    st.tuples(st.integers(), surrogates),
)
plain_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.byte_string_dtypes(),
    hnp.unicode_string_dtypes(),
)
leaves = st.one_of(
    keys,
    st.floats(),
    st.complex_numbers(),
    st.dates(),
    st.datetimes(),
    st.timedeltas(),
    st.builds(bytearray, st.binary()),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 5)),
    st.frozensets(st.integers()),
    st.sets(surrogates),
    hnp.arrays(plain_dtypes, hnp.array_shapes(min_dims=0, min_side=0)),
    plain_dtypes.flatmap(lambda dtype: hnp.arrays(dtype, ()).map(lambda array: array[()])),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.device("cpu"), torch.channels_last]
    ),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(surrogates, inner),
        st.dictionaries(keys, inner),
        st.dictionaries(keys, inner).map(collections.OrderedDict),
        st.lists(inner).map(lambda items: collections.deque(items, maxlen=5)),
    ),
    max_leaves=12,
)


@given(trees)
def test_round_trip_is_exact(tree):
    assert same(round_trip(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        -math.nan,
        math.inf,
        -math.inf,
        -0.0,
        struct.unpack(">d", bytes.fromhex("7ff8000000001234"))[0],
        2**53 + 1,
        -(2**200),
        10**6000,
        True,
        1,
        1.0,
        "",
        "!",
        "\ud83d\ude00",
        "\U0001f600",
        {"!": 1},
        {"!": "tuple", "v": []},
        {1: 2, "1": 3},
        {True: 0},
        {None: 1},
        {(1, 2): 3},
        collections.Counter({"a": 2, "b": -1}),
        collections.defaultdict(list, {1: [2]}),
        collections.deque([1], 3),
        datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=30))),
        datetime.timedelta(days=-1, microseconds=7),
        pathlib.Path("a/b"),
        pathlib.PurePath("c"),
        slice(1, None, 2),
        np.float32(0.1),
        np.bool_(True),
        np.str_(""),
        np.dtype("<f4"),
        np.array("x"),
        np.array([], dtype="U0"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_particular_values(value):
    assert same(round_trip(value), value)


def test_maxlen_and_factories_are_kept():
    assert round_trip(collections.deque([1], maxlen=3)).maxlen == 3
    assert round_trip(collections.defaultdict(list)).default_factory is list


def test_arrays_come_back_writable():
    array = round_trip({"a": np.zeros(3)})["a"]
    array += 1
    assert array.sum() == 3


class Color(enum.Enum):
    RED = 1


class Text(str):
    __slots__ = ()


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Color.RED,
        Text("x"),
        Point(1, 2),
        print,
        types.SimpleNamespace(),
        np.array([None]),
        iter([]),
        np.zeros(2, dtype=[("a", "i4")]),
        collections.defaultdict(lambda: 0),
        torch.Generator(),
        torch.ones(1),
        np.ma.masked_array([1]),
        datetime.datetime.now(__import__("zoneinfo").ZoneInfo("UTC")),
        ValueError("x"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_anything_else_is_refused_with_its_path_and_type(value):
    with pytest.raises(UnsupportedValueError) as error:
        encode({"outer": [0, (value,)]})
    assert "['outer'][1][0]" in str(error.value)
    assert type(value).__qualname__ in str(error.value)


def test_cycles_are_refused_but_repeats_are_not():
    loop = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(UnsupportedValueError, match=r"\['a'\]\[0\] contains itself"):
        encode(loop)
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


@pytest.mark.parametrize(
    "data",
    [
        {"!": "os.system", "v": "true"},
        {"!": ["list"]},
        {"!": "float", "v": "zz"},
        {"!": "tuple", "v": None},
        {"!": "numpy.array", "v": "", "dtype": "O", "shape": [1]},
        {"!": "torch.dtype", "v": "load"},
        {"!": "numpy.array", "v": "AAAA", "dtype": "<i4", "shape": [5]},
        {"!": "bytes", "v": "§"},
        {"!": "tensor", "v": "x"},
        {"!": "defaultdict", "v": [], "factory": "eval"},
        {"!": "dict", "v": [[[1], 2]]},
        {"!": "datetime", "v": "soon"},
    ],
    ids=lambda d: str(d["!"]),
)
def test_damaged_tags_are_errors(data):
    with pytest.raises(CorruptCheckpointError):
        decode(data)


@pytest.mark.parametrize("collection", [list, tuple])
def test_parts_of_one_tensor_are_one_leaf(collection):
    parts = collection(Part.of_flat(torch.arange(5.0), 2, (3, 4)))
    stored = []
    tree = encode({"state": parts, "empty": collection()}, lambda path, leaf: stored.append(leaf) or "name")
    assert len(parts) > 1
    assert [leaf is parts for leaf in stored] == [True]
    assert tree["state"] == {"!": "tensor", "v": "name"}
