"""Plain data as tagged JSON, with an exact round trip.

JSON's own types stand for themselves: ``None``, booleans, integers, finite floats, strings, lists, and
dictionaries with string keys. Everything else is an object with the key ``"!"`` that names its type. Tensors,
and bytes and arrays above a size, are not written into the JSON: they are handed to a *sink*, which returns
the name they are stored under.

Nothing in the format names a class to import, so reading it cannot run code.
"""

from __future__ import annotations

import base64
import collections
import datetime
import math
import pathlib
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from accel_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedValueError
from accel_ckpt.parts import Leaf, is_divided, shape_of
from accel_ckpt.tensor_storage import DTYPE_NAMES, why_not_plain

__all__ = ["Json", "Sink", "Source", "Tree", "decode", "encode"]

Json: TypeAlias = Any
"""Data that ``json.dumps`` can write."""
Tree: TypeAlias = Any
"""Nested dictionaries and lists of tensors and plain data."""
Sink: TypeAlias = Callable[[tuple[Any, ...], Leaf], str]
"""Stores a tensor, whole or divided, found at a path inside the object; returns the name that finds it again."""
Source: TypeAlias = Callable[[str], Any]
"""Returns the tensor that a sink stored under a name, or something with ``read()`` that does."""

TAG = "!"
# Bytes and arrays above this go to the sink: base64 costs a third more space and two copies.
INLINE_BYTES = 4096
_PLAIN = 1 << 63  # integers below this magnitude are written as they are without another look
_PLAIN_DIGITS = 4000  # Python refuses to parse decimal integers above 4300 digits
_NUMPY_KINDS = "biufcmMSU"
_FACTORIES = {kind.__name__: kind for kind in (int, float, list, dict, set, str, tuple, bool)}
_TORCH_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_LAYOUTS = {
    str(v): v
    for v in (
        torch.strided,
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.channels_last_3d,
    )
}


def encode(value: Any, sink: Sink | None = None) -> Json:
    """Turn plain data into data that ``json.dumps`` can write.

    Args:
        value: nested plain data. Supported are JSON's types and: tuples, sets, frozensets, dictionaries with
            any supported keys, ``OrderedDict``, ``defaultdict`` of a builtin type, ``Counter``, ``deque``,
            bytes, bytearrays, complex numbers, ranges, slices, NaN and infinities, dates, times, timedeltas,
            paths, NumPy scalars, arrays and dtypes (not of objects or records), and torch dtypes, sizes,
            devices and memory formats.
        sink: takes tensors, large arrays and large bytes. Without one tensors are refused and the rest is
            inline.

    Raises:
        UnsupportedValueError: a value is none of these (subclasses included); names its path and type.
    """
    return Encoder(sink).encode(value, ())


def decode(data: Json, source: Source | None = None) -> Any:
    """Turn the output of ``encode`` back into the same data.

    Args:
        data: the result of ``json.loads``.
        source: finds the tensors that the sink stored.

    Raises:
        CorruptCheckpointError: ``encode`` does not write such data.
        CheckpointError: raised by the source.
    """
    if isinstance(data, list):
        return [decode(item, source) if type(item) in (dict, list) else item for item in data]
    if not isinstance(data, dict):
        return data
    tag = data.get(TAG)
    if tag is None:
        return {k: decode(item, source) if type(item) in (dict, list) else item for k, item in data.items()}
    decoder = _DECODERS.get(tag) if isinstance(tag, str) else None
    if decoder is None:
        raise CorruptCheckpointError(
            f"the tag {tag!r} is not one this version knows ({', '.join(sorted(_DECODERS))}); "
            "the file is damaged or was written by a newer version"
        )
    try:
        return decoder(data.get("v"), data, source)
    except CheckpointError:  # what the source says of its file is exact already
        raise
    except (
        LookupError,
        TypeError,
        RuntimeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        struct.error,
    ) as error:
        raise CorruptCheckpointError(f"a value tagged {tag!r} cannot be read: {error}") from error


def show_path(path: Iterable[Any]) -> str:
    """Format a path inside an object as Python code."""
    return (
        "".join(f"[{part!r}]" if not isinstance(part, _Inside) else str(part) for part in path)
        or "(the object itself)"
    )


class _Inside(str):
    """A step of a path that is not an index: a key, a member of a set."""

    __slots__ = ()


class Encoder:
    """Encodes several values with one sink; a tensor met in two of them is stored once."""

    def __init__(self, sink: Sink | None) -> None:
        self.sink = sink
        self.open: set[int] = set()  # containers being encoded: meeting one again is a cycle
        self.stored: dict[int, tuple[Leaf, Json]] = {}  # one object met twice is stored once

    def encode(self, value: Any, path: tuple[Any, ...]) -> Json:
        kind = type(value)
        # Most values are of JSON's own types, and in the range in which they stand for themselves.
        if (
            value is None
            or kind is bool
            or (kind is int and -_PLAIN < value < _PLAIN)
            or (kind is float and math.isfinite(value))
            or (kind is str and value.isascii())
        ):
            return value
        handler = Encoder.tensor if kind not in _NEVER_DIVIDED and is_divided(value) else _ENCODERS.get(kind)
        if handler is None and isinstance(value, np.generic):
            handler = Encoder.numpy_scalar
        if handler is None and isinstance(value, np.dtype):
            handler = Encoder.numpy_dtype
        if handler is None and isinstance(value, pathlib.PurePath):
            handler = Encoder.path
        if handler is None:
            raise self.refuse(value, path)
        if kind not in _CONTAINERS or handler is Encoder.tensor:
            return handler(self, value, path)
        if id(value) in self.open:
            raise UnsupportedValueError(
                f"the value at {show_path(path)} contains itself, which JSON cannot express"
            )
        self.open.add(id(value))
        try:
            return handler(self, value, path)
        finally:
            self.open.discard(id(value))

    @staticmethod
    def refuse(value: Any, path: tuple[Any, ...], why: str = "") -> UnsupportedValueError:
        kind = type(value)
        return UnsupportedValueError(
            f"the value at {show_path(path)} is of type {kind.__module__}.{kind.__qualname__}, which cannot be "
            f"saved without pickling{why}; convert it to numbers, strings, lists, tuples, dicts, arrays or tensors"
        )

    def items(self, values: Iterable[Any], path: tuple[Any, ...]) -> list[Json]:
        return [self.encode(item, (*path, index)) for index, item in enumerate(values)]

    def pairs(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> list[Json]:
        return [
            [self.encode(key, (*path, _Inside(f"[key {key!r}]"))), self.encode(item, (*path, key))]
            for key, item in value.items()
        ]

    def integer(self, value: int, path: tuple[Any, ...]) -> Json:
        return value if value.bit_length() < _PLAIN_DIGITS * 3 else _tag("int", hex(value))

    def float(self, value: float, path: tuple[Any, ...]) -> Json:
        return value if np.isfinite(value) else _tag("float", struct.pack(">d", value).hex())

    def string(self, value: str, path: tuple[Any, ...]) -> Json:
        return value if _is_unicode(value) else _tag("str", _base64(value.encode("utf-8", "surrogatepass")))

    def dictionary(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Json:
        if _are_names(value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        return _tag("dict", self.pairs(value, path))

    def default_dictionary(self, value: collections.defaultdict[Any, Any], path: tuple[Any, ...]) -> Json:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and _FACTORIES.get(name) is not factory:
            raise self.refuse(value, path, f": its default factory {factory!r} is not a builtin type")
        return _tag("defaultdict", self.pairs(value, path), factory=name)

    def members(self, value: set[Any] | frozenset[Any], path: tuple[Any, ...]) -> Json:
        inside = [self.encode(item, (*path, _Inside(f"[member {item!r}]"))) for item in value]
        return _tag(
            type(value).__name__, sorted(inside, key=repr)
        )  # sets have no order: sorted, files are equal

    def raw(self, value: bytes | bytearray, path: tuple[Any, ...]) -> Json:
        if self.sink is None or len(value) <= INLINE_BYTES:
            return _tag(type(value).__name__, _base64(value))
        return _tag(type(value).__name__, None, tensor=self.sink(path, _as_tensor(value)))

    def numpy_scalar(self, value: np.generic[Any], path: tuple[Any, ...]) -> Json:
        self.check_dtype(value, value.dtype, path)
        content = value.tobytes()[: value.dtype.itemsize]  # NumPy pads the empty string
        return _tag("numpy.scalar", _base64(content), dtype=value.dtype.str)

    def numpy_dtype(self, value: np.dtype[Any], path: tuple[Any, ...]) -> Json:
        self.check_dtype(value, value, path)
        return _tag("numpy.dtype", value.str)

    def path(self, value: pathlib.PurePath, path: tuple[Any, ...]) -> Json:
        return _tag("path" if isinstance(value, pathlib.Path) else "purepath", self.string(str(value), path))

    def array(self, value: np.ndarray[Any, Any], path: tuple[Any, ...]) -> Json:
        self.check_dtype(value, value.dtype, path)
        about = {"dtype": value.dtype.str, "shape": list(value.shape)}
        if self.sink is None or value.nbytes <= INLINE_BYTES:
            return _tag("numpy.array", _base64(value.tobytes()), **about)
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return _tag("numpy.array", None, tensor=self.sink(path, _as_tensor(flat)), **about)

    def check_dtype(self, value: Any, dtype: np.dtype[Any], path: tuple[Any, ...]) -> None:
        if dtype.kind not in _NUMPY_KINDS:
            raise self.refuse(value, path, f": its NumPy dtype is {dtype}")

    def tensor(self, value: Leaf, path: tuple[Any, ...]) -> Json:
        if self.sink is None:
            raise self.refuse(value, path, " here, where there is no place for tensors")
        known = self.stored.get(id(value))
        if known is None:
            known = (value, self.store(value, self.sink, path))
            self.stored[id(value)] = known
        return known[1]

    @staticmethod
    def store(value: Leaf, sink: Sink, path: tuple[Any, ...]) -> Json:
        if is_divided(value):
            try:
                shape_of(value)
            except ValueError as error:
                raise UnsupportedValueError(
                    f"the value at {show_path(path)} cannot be saved: {error}"
                ) from error
            return _tag("tensor", sink(path, value))
        assert isinstance(value, torch.Tensor), "the only leaf that is not divided"
        if (reason := why_not_plain(value)) is not None:
            raise UnsupportedValueError(f"the tensor at {show_path(path)} {reason}")
        if value.dtype in DTYPE_NAMES:
            return _tag("tensor", sink(path, value))
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
        return _tag("tensor", sink(path, flat), dtype=str(value.dtype), shape=list(value.shape))


def _tag(name: str, value: Json, **more: Json) -> Json:
    return {TAG: name, "v": value, **more}


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def _unbase64(value: Any) -> bytes:
    return base64.b64decode(value, validate=True)


def _is_unicode(value: str) -> bool:
    # Two lone surrogates in a row would come back from JSON as one character.
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _are_names(keys: Collection[Any]) -> bool:
    """Whether JSON keeps these keys of a dictionary as they are."""
    if not set(map(type, keys)) <= {str} or TAG in keys:
        return False
    return all(map(str.isascii, keys)) or all(map(_is_unicode, keys))


def _as_tensor(value: bytes | bytearray | np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy())


def _stored_bytes(value: Any, data: Json, source: Source | None) -> bytes:
    if "tensor" not in data:
        return _unbase64(value)
    return _stored(data["tensor"], source).numpy().tobytes()


def _stored(name: Any, source: Source | None) -> torch.Tensor:
    found = _referred(name, source)
    return found if isinstance(found, torch.Tensor) else found.read()


def _referred(name: Any, source: Source | None) -> Any:
    if source is None:
        raise CorruptCheckpointError(f"the data refers to a tensor {name!r}, but no tensors belong to it")
    return source(name)


def _read_tensor(value: Any, data: Json, source: Source | None) -> Any:
    if "dtype" not in data:
        return _referred(value, source)
    return _stored(value, source).view(_TORCH_DTYPES[data["dtype"]]).view(data["shape"])


def _read_float(value: str) -> float:
    result: float = struct.unpack(">d", bytes.fromhex(value))[0]
    return result


def _read_array(value: Any, data: Json, source: Source | None) -> np.ndarray[Any, Any]:
    return _array_over(_stored_bytes(value, data, source), data["dtype"], data["shape"])


def _read_scalar(value: Any, data: Json, source: Source | None) -> Any:
    return _array_over(_unbase64(value), data["dtype"], ())[()]


def _array_over(content: bytes, dtype_name: str, shape: Iterable[int]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype_name)
    if dtype.kind not in _NUMPY_KINDS:
        raise CorruptCheckpointError(f"the NumPy dtype {dtype_name!r} is not plain data")
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(content):
        raise CorruptCheckpointError(
            f"an array of {list(shape)} {dtype} needs {expected} bytes, {len(content)} are stored"
        )
    return np.ndarray(tuple(shape), dtype, bytearray(content))  # a bytearray, so that the array is writable


def _read_pairs(value: Any, source: Source | None) -> list[tuple[Any, Any]]:
    return [(decode(key, source), decode(item, source)) for key, item in value]


def _read_default(value: Any, data: Json, source: Source | None) -> collections.defaultdict[Any, Any]:
    factory = None if data["factory"] is None else _FACTORIES[data["factory"]]
    return collections.defaultdict(factory, _read_pairs(value, source))


def _read_counter(value: Any, data: Json, source: Source | None) -> collections.Counter[Any]:
    counter: collections.Counter[Any] = collections.Counter()
    for key, count in _read_pairs(value, source):
        counter[key] = count
    return counter


_CONTAINERS = frozenset({
    list, tuple, dict, set, frozenset, collections.OrderedDict, collections.defaultdict, collections.Counter,
    collections.deque, slice,
})  # fmt: skip

_NEVER_DIVIDED = frozenset({int, float, str, dict})
_ENCODERS: dict[type, Callable[[Encoder, Any, tuple[Any, ...]], Json]] = {
    int: Encoder.integer,
    float: Encoder.float,
    str: Encoder.string,
    list: Encoder.items,
    tuple: lambda e, v, p: _tag("tuple", e.items(v, p)),
    dict: Encoder.dictionary,
    collections.OrderedDict: lambda e, v, p: _tag("OrderedDict", e.pairs(v, p)),
    collections.defaultdict: Encoder.default_dictionary,
    collections.Counter: lambda e, v, p: _tag("Counter", e.pairs(v, p)),
    collections.deque: lambda e, v, p: _tag("deque", e.items(v, p), maxlen=v.maxlen),
    set: Encoder.members,
    frozenset: Encoder.members,
    bytes: Encoder.raw,
    bytearray: Encoder.raw,
    complex: lambda e, v, p: _tag("complex", struct.pack(">dd", v.real, v.imag).hex()),
    range: lambda e, v, p: _tag("range", [v.start, v.stop, v.step]),
    slice: lambda e, v, p: _tag("slice", e.items((v.start, v.stop, v.step), p)),
    datetime.timedelta: lambda e, v, p: _tag("timedelta", [v.days, v.seconds, v.microseconds]),
    datetime.datetime: lambda e, v, p: _datetime(e, v, p),
    datetime.date: lambda e, v, p: _tag("date", v.isoformat()),
    torch.dtype: lambda e, v, p: _tag("torch.dtype", str(v)),
    torch.Size: lambda e, v, p: _tag("torch.Size", list(v)),
    torch.device: lambda e, v, p: _tag("torch.device", str(v)),
    torch.memory_format: lambda e, v, p: _tag("torch.layout", str(v)),
    torch.layout: lambda e, v, p: _layout(e, v, p),
    torch.Tensor: Encoder.tensor,
    torch.nn.Parameter: Encoder.tensor,
    np.ndarray: Encoder.array,
}

_DECODERS: dict[str, Callable[[Any, Json, Source | None], Any]] = {
    "int": lambda v, d, s: int(v, 16),
    "float": lambda v, d, s: _read_float(v),
    "str": lambda v, d, s: _unbase64(v).decode("utf-8", "surrogatepass"),
    "tuple": lambda v, d, s: tuple(decode(item, s) for item in v),
    "dict": lambda v, d, s: dict(_read_pairs(v, s)),
    "OrderedDict": lambda v, d, s: collections.OrderedDict(_read_pairs(v, s)),
    "defaultdict": _read_default,
    "Counter": _read_counter,
    "deque": lambda v, d, s: collections.deque((decode(item, s) for item in v), d["maxlen"]),
    "set": lambda v, d, s: {decode(item, s) for item in v},
    "frozenset": lambda v, d, s: frozenset(decode(item, s) for item in v),
    "bytes": _stored_bytes,
    "bytearray": lambda v, d, s: bytearray(_stored_bytes(v, d, s)),
    "complex": lambda v, d, s: complex(*struct.unpack(">dd", bytes.fromhex(v))),
    "range": lambda v, d, s: range(*v),
    "slice": lambda v, d, s: slice(*(decode(item, s) for item in v)),
    "timedelta": lambda v, d, s: datetime.timedelta(*v),
    "datetime": lambda v, d, s: datetime.datetime.fromisoformat(v).replace(fold=d["fold"]),
    "date": lambda v, d, s: datetime.date.fromisoformat(v),
    "path": lambda v, d, s: pathlib.Path(decode(v)),
    "purepath": lambda v, d, s: pathlib.PurePath(decode(v)),
    "torch.dtype": lambda v, d, s: _TORCH_DTYPES[v],
    "torch.Size": lambda v, d, s: torch.Size(v),
    "torch.device": lambda v, d, s: torch.device(v),
    "torch.layout": lambda v, d, s: _LAYOUTS[v],
    "tensor": lambda v, d, s: _read_tensor(v, d, s),
    "numpy.dtype": lambda v, d, s: np.dtype(v),
    "numpy.scalar": _read_scalar,
    "numpy.array": _read_array,
}


def _layout(encoder: Encoder, value: torch.layout, path: tuple[Any, ...]) -> Json:
    if str(value) not in _LAYOUTS:
        raise encoder.refuse(value, path)
    return _tag("torch.layout", str(value))


def _datetime(encoder: Encoder, value: datetime.datetime, path: tuple[Any, ...]) -> Json:
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        raise encoder.refuse(value, path, f": its time zone {value.tzinfo!r} is not a fixed offset")
    return _tag("datetime", value.isoformat(), fold=value.fold)
