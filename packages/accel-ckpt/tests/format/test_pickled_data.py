"""NumPy's arrays and torch's tensors in pickles: honest ones come back, crafted ones are refused."""

import datetime
import io
import os
import pickle

import numpy as np
import pytest
import torch

from accel_ckpt import CorruptCheckpointError, UnsafeCheckpointError
from accel_ckpt.foreign.pickles import unpickle
from accel_ckpt.format.pickled_data import plain_data

np_module = np._core if np.__version__ >= "2" else np.core


class Call:
    """Pickles as a call of a function, followed by a state."""

    def __init__(self, function, *arguments, state=None):
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.parts


def saved(value):
    file = io.BytesIO()
    torch.save(value, file, pickle_protocol=2)
    file.seek(0)
    return file


def read(value):
    return unpickle(saved({"value": value}), "the file")["value"]


def dtype(code, *state):
    return Call(np.dtype, code, False, True, state=state)


def array(kind, shape, raw, fortran=False):
    return Call(
        np_module.multiarray._reconstruct, np.ndarray, (0,), b"b", state=(1, shape, kind, fortran, raw)
    )


PLAIN = (3, "<", None, None, None, -1, -1, 0)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.zeros(0),
        np.zeros((2, 0, 3), dtype=np.float32),
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"]),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array([np.datetime64("2020-01-02")]),
        np.array([np.timedelta64(25, "25s")]),
        np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "<i2"), ("b", "<f8")]),
        np.array(
            [(1, (2.0, 3))], dtype=np.dtype([("a", "<i2"), ("b", [("c", "<f4"), ("d", "u1")])], align=True)
        ),
        np.array([(1, [[1, 2], [3, 4]], "x")], dtype=[("a", "<f4"), ("b", ">i2", (2, 2)), ("c", "U3", (1,))]),
        np.float32(1.5),
        np.int64(-3),
        np.bool_(True),
        np.str_("x"),
        np.datetime64("2020-01-02T03:04", "m"),
        np.dtype(">f4"),
    ],
    ids=repr,
)
def test_numpy_values_come_back_as_they_were(value):
    found = read([value, (value,)])
    value = pickle.loads(pickle.dumps(value, 2))  # NumPy gives arrays the byte order of the machine
    for each in (found[0], found[1][0]):
        assert type(each) is type(value)
        if isinstance(value, np.dtype):
            assert each == value
        else:
            assert each.dtype == value.dtype
            assert np.array_equal(each, value)


def test_the_random_state_of_numpy_comes_back():
    state = np.random.RandomState(3).get_state()
    kind, keys, *rest = read(state)
    assert (kind, keys.tolist(), rest) == (state[0], state[1].tolist(), list(state[2:]))


OBJECT_FIELD = dtype("V8", 3, "|", None, ("a",), {"a": (Call(np.dtype, "O"), 0)}, 8, 1, 0)
CRAFTED = {
    "an object field without its flag": array(OBJECT_FIELD, (1,), b"\x41" * 8),
    "objects": array(Call(np.dtype, "O"), (1,), b"\x41" * 8),
    "a field behind the end": array(
        dtype("V8", 3, "|", None, ("a",), {"a": (dtype("f8", *PLAIN), 4)}, 8, 1, 0), (1,), b"\x41" * 8
    ),
    "a field before the beginning": array(
        dtype("V8", 3, "|", None, ("a",), {"a": (dtype("f8", *PLAIN), -8)}, 8, 1, 0), (1,), b"\x41" * 8
    ),
    "a negative size": array(dtype("S4", 3, "|", None, None, None, -4, 1, 0), (1,), b""),
    "a size that is no multiple": array(dtype("U1", 3, "<", None, None, None, 3, 4, 0), (1,), b"abc"),
    "a dtype that is an array": array(
        dtype("V8", 3, "|", (dtype("u1", *PLAIN), (2**40,)), None, None, 8, 1, 0), (1,), b"\x41" * 8
    ),
    "a dtype of arrays of objects": array(
        dtype("V8", 3, "|", (Call(np.dtype, "O"), (1,)), None, None, 8, 1, 0), (1,), b"\x41" * 8
    ),
    "a dtype of arrays of a negative size": array(
        dtype("V8", 3, "|", (dtype("u1", *PLAIN), (-8,)), None, None, 8, 1, 0), (1,), b"\x41" * 8
    ),
    "an array of a dtype that is an array": array(
        dtype("V8", 3, "|", (dtype("f8", *PLAIN), (1,)), None, None, 8, 1, 0), (1,), b"\x41" * 8
    ),
    "an array of a code that is an array": array(Call(np.dtype, "(1,)f8"), (1,), b"\x41" * 8),
    "a scalar that is an array": Call(np_module.multiarray.scalar, Call(np.dtype, "(1,)f8"), b"\x41" * 8),
    "fewer bytes than the shape": array(dtype("f8", *PLAIN), (2,), b"\x41" * 8),
    "a shape whose product overflows": array(dtype("f8", *PLAIN), (2**62, 4), b""),
    "a negative shape": array(dtype("f8", *PLAIN), (-1, -1), b"\x41" * 8),
    "a list for bytes": array(dtype("f8", *PLAIN), (1,), [object]),
    "no dtype": array("f8", (1,), b"\x41" * 8),
    "a byte order": array(dtype("f8", 3, "=" * 9, None, None, None, -1, -1, 0), (1,), b"\x41" * 8),
    "a long name": array(Call(np.dtype, "f8," * 1000), (1,), b""),
    "a scalar of objects": Call(np_module.multiarray.scalar, OBJECT_FIELD, b"\x41" * 8),
    "a short scalar": Call(np_module.multiarray.scalar, dtype("f8", *PLAIN), b"\x41"),
    "much memory": Call(bytes, 10**15),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_numpy_values_are_refused(name):
    with pytest.raises(
        (UnsafeCheckpointError, CorruptCheckpointError), match=r"the file (was not|cannot be) read"
    ):
        read(CRAFTED[name])


def sparse(indices, values, size, layout=torch.sparse_coo):
    return Call(torch._utils._rebuild_sparse_tensor, layout, (indices, values, torch.Size(size)))


def test_a_sparse_tensor_comes_back():
    value = torch.tensor([[0.0, 1], [2, 0]])
    assert torch.equal(read(value.to_sparse()).to_dense(), value)
    assert torch.equal(read(value.to_sparse_csr()).to_dense(), value)


@pytest.mark.parametrize("index", [2, 10**12, -1])
def test_a_sparse_tensor_with_an_index_outside_of_it_is_refused(index):
    # PyTorch 2.15 refuses it itself, when it puts the tensor together.
    kinds = (UnsafeCheckpointError, CorruptCheckpointError)
    words = "indices do not fit it|inconsistent with indices|found negative index|is not satisfied"
    with pytest.raises(kinds, match=words):
        read(sparse(torch.tensor([[index]]), torch.ones(1), [2]))
    compressed = (torch.tensor([0, 1]), torch.tensor([index]), torch.ones(1), torch.Size([1, 2]))
    with pytest.raises(kinds, match=words):
        read(Call(torch._utils._rebuild_sparse_tensor, torch.sparse_csr, compressed))


def test_containers_that_multiply_are_refused():
    bomb = [1]
    for _ in range(60):
        bomb = [bomb, bomb]
    with pytest.raises(UnsafeCheckpointError, match="more than 100000000 times"):
        read(bomb)
    bomb = (1,)
    for _ in range(60):
        bomb = (bomb, bomb)
    with pytest.raises(UnsafeCheckpointError, match="more than 100000000 times"):
        read({"x": bomb})


def test_a_container_that_holds_itself_is_refused():
    circle = []
    circle.append({"x": circle})
    with pytest.raises(UnsafeCheckpointError, match="holds itself"):
        read(circle)


def test_shared_containers_stay_shared():
    inner = [np.arange(2)]
    found = read({"a": inner, "b": (inner,), "c": {1, 2}})
    assert found["a"] is found["b"][0]
    assert type(found["a"][0]) is np.ndarray
    assert found["c"] == {1, 2}


def test_other_values_are_left_alone():
    value = {"a": 1, "b": datetime.timedelta(1), (1, 2): None}
    assert plain_data(value) is value
    with pytest.raises(UnsafeCheckpointError, match="posix"):
        read(Call(os.getcwd))
