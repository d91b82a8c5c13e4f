"""Every value of a checkpoint's files, changed one at a time, with all checksums right: as an enemy would write them.

A value is a field of a JSON file, of a safetensors header, of a manifest, or an opcode of a pickle. Its mutations are
values of other types, and extreme ones of its own type.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

__all__ = ["Mutation", "mutated", "rewrite_manifest"]

_OTHERS: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 62, 10**30, 1.5, "", "x", "../x", [], [[1]], {}, {"!": "tensor", "v": "x"},
    {"!": "set", "v": [[]]}, {"!": "tuple", "v": [1, 2]}, "\ud800",
)  # fmt: skip
_GONE = object()


class Mutation(NamedTuple):
    """One value of one file, and what takes its place.

    Args:
        where: file, place and new value, for messages.
        write: changes the file in a copy of the folder.
    """

    where: str
    write: Callable[[Path], None]


def mutated(folder: Path) -> Iterator[Mutation]:
    """Every mutation of every value of all files of a folder."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if path.suffix == ".json":
            yield from _of_json(name, path.read_text())
        elif path.suffix == ".safetensors":
            yield from _of_header(name, path.read_bytes())
        elif zipfile.is_zipfile(path) and path.read_bytes()[:2] == b"PK":
            yield from _of_archive(name, path.read_bytes())
        elif path.read_bytes()[:1] == b"\x80":
            yield from _of_pickle(name, path.read_bytes())


def _others(value: Any) -> Iterator[Any]:
    """Values to put in the place of one, the last being that there is none."""
    for other in _OTHERS:
        if type(other) is not type(value) or other != value:
            yield other
    if isinstance(value, int) and not isinstance(value, bool):
        yield from (value + 1, -value - 1)
    if isinstance(value, list) and value:
        yield from (value[:-1], [*value, value[-1]], value * 3)
    yield _GONE


def _of_json(name: Path, text: str) -> Iterator[Mutation]:
    for place, value in _places(json.loads(text)):
        for new in _others(value):

            def write(folder: Path, place: tuple[Any, ...] = place, new: Any = new) -> None:
                (folder / name).write_text(json.dumps(_with(json.loads(text), place, new)))
                rewrite_manifest(folder)

            yield Mutation(f"{name}{list(place)} -> {new!r}", write)


def _of_header(name: Path, raw: bytes) -> Iterator[Mutation]:
    length = int.from_bytes(raw[:8], "little")
    header, body = raw[8 : 8 + length].decode(), raw[8 + length :]
    for place, value in _places(json.loads(header)):
        for new in _others(value):

            def write(folder: Path, place: tuple[Any, ...] = place, new: Any = new) -> None:
                changed = json.dumps(_with(json.loads(header), place, new)).encode()
                (folder / name).write_bytes(struct.pack("<Q", len(changed)) + changed + body)
                rewrite_manifest(folder)

            yield Mutation(f"{name}{list(place)} -> {new!r}", write)


def _of_archive(name: Path, raw: bytes) -> Iterator[Mutation]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    inner = next(member for member in members if member.endswith("data.pkl"))

    def write(path: Path, pickled: bytes) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for member, data in members.items():
                archive.writestr(member, pickled if member == inner else data)

    yield from _opcodes(name, members[inner], write)


def _of_pickle(name: Path, raw: bytes) -> Iterator[Mutation]:
    yield from _opcodes(name, raw, lambda path, pickled: path.write_bytes(pickled))


# What stands in the place of a value in a pickle, as opcodes.
_PICKLED: tuple[bytes, ...] = (
    b"N", b"\x88", b"K\x00", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\x00", b"G\x7f\xf8" + b"\x00" * 6,
    b"X\x00\x00\x00\x00", b"X\x04\x00\x00\x00../x", b"]", b"}", b")", b"K\x01K\x02\x86",
)  # fmt: skip
_VALUES = frozenset({
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "BINBYTES", "SHORT_BINBYTES", "BINGET", "GLOBAL",
})  # fmt: skip


def _opcodes(name: Path, pickled: bytes, store: Callable[[Path, bytes], Any]) -> Iterator[Mutation]:
    found = list(pickletools.genops(pickled))
    ends = [position for _, _, position in found[1:]] + [len(pickled)]
    for (opcode, argument, start), end in zip(found, ends, strict=True):
        for new in _PICKLED if opcode.name in _VALUES else ():

            def write(folder: Path, start: Any = start, end: int = end, new: bytes = new) -> None:
                store(folder / name, pickled[:start] + new + pickled[end:])

            yield Mutation(f"{name} {opcode.name} {str(argument)[:40]} at {start} -> {new!r}", write)


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if above:
        yield above, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*above, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:3]):  # more items of one list are alike
            yield from _places(item, (*above, index))


def _with(tree: Any, place: tuple[Any, ...], new: Any) -> Any:
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    if new is _GONE:
        del inner[place[-1]]
    else:
        inner[place[-1]] = new
    return tree


def rewrite_manifest(folder: Path) -> None:
    """Make the sizes and checksums in a manifest right, and its own."""
    path = folder / "manifest.json"
    if not path.is_file():
        return
    manifest = json.loads(path.read_text())
    # The mutation may be in the list of files.
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
        for name, record in manifest["files"].items():
            file = folder / name
            if isinstance(record, dict) and file.is_file() and "/" not in name:
                content = file.read_bytes()
                if type(record.get("size")) is int and record["size"] >= 0:
                    record["size"] = len(content)
                if isinstance(record.get("xxh3"), str) and len(record["xxh3"]) == 16:
                    record["xxh3"] = xxhash.xxh3_64_hexdigest(content)
    if "manifest_xxh3" not in manifest:
        return
    manifest["manifest_xxh3"] = "0" * 16
    raw = ("{" + ",".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in manifest.items()) + "}").encode()
    path.write_bytes(
        raw.replace(b'"' + b"0" * 16 + b'"', b'"' + xxhash.xxh3_64_hexdigest(raw).encode() + b'"', 1)
    )
