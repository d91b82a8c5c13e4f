"""Every value of a checkpoint's files, changed one at a time, with all checksums right: as an enemy would write them.

A *site* is one value: a field of a JSON file, of a safetensors header, of a manifest, or an opcode of a pickle. Its
*mutations* are values of other types, and extreme ones of its own type.
"""

from __future__ import annotations

import io
import json
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

__all__ = ["Site", "mutations", "rewrite_manifest", "sites"]

_OTHERS: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 62, 10**30, 1.5, "", "x", "../x", [], [[1]], {}, {"!": "tensor", "v": "x"},
    {"!": "set", "v": [[]]}, {"!": "tuple", "v": [1, 2]}, "\ud800",
)  # fmt: skip
_GONE = object()


class Site(NamedTuple):
    """One value of one file.

    Args:
        where: file and path inside it, for messages.
        change: writes the file with another value in its place.
        value: what is there.
    """

    where: str
    change: Callable[[Any], None]
    value: Any


def mutations(value: Any) -> Iterator[Any]:
    """Values to put in the place of one, the last being that there is none."""
    for other in _OTHERS:
        if type(other) is not type(value) or other != value:
            yield other
    if isinstance(value, int) and not isinstance(value, bool):
        yield from (value + 1, -value - 1)
    if isinstance(value, list) and value:
        yield from (value[:-1], [*value, value[-1]], value * 3)
    yield _GONE


def sites(folder: Path) -> Iterator[Site]:
    """All values of all files of a folder."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".json":
            yield from _of_json(folder, path)
        elif path.suffix == ".safetensors":
            yield from _of_header(folder, path)
        elif path.is_file() and zipfile.is_zipfile(path):
            yield from _of_archive(path)
        elif path.is_file() and path.read_bytes()[:1] == b"\x80":
            yield from _of_pickle(path)


def _of_json(folder: Path, path: Path) -> Iterator[Site]:
    text = path.read_text()
    for place, value in _places(json.loads(text)):

        def change(new: Any, place: tuple[Any, ...] = place) -> None:
            changed = json.dumps(_with(json.loads(text), place, new))
            path.write_text(changed)
            rewrite_manifest(folder)

        yield Site(f"{path.name}{list(place)}", change, value)


def _of_header(folder: Path, path: Path) -> Iterator[Site]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    for place, value in _places(header):

        def change(new: Any, place: tuple[Any, ...] = place) -> None:
            changed = json.dumps(_with(json.loads(json.dumps(header)), place, new)).encode()
            path.write_bytes(struct.pack("<Q", len(changed)) + changed + body)
            rewrite_manifest(folder)

        yield Site(f"{path.name}{list(place)}", change, value)


def _of_archive(path: Path) -> Iterator[Site]:
    content = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in members if name.endswith("data.pkl"))

    def write(pickled: bytes) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for member, data in members.items():
                archive.writestr(member, pickled if member == name else data)

    yield from _opcodes(path, members[name], write)


def _of_pickle(path: Path) -> Iterator[Site]:
    def write(pickled: bytes) -> None:
        path.write_bytes(pickled)

    yield from _opcodes(path, path.read_bytes(), write)


# What stands in the place of a value in a pickle, as opcodes.
_PICKLED: tuple[bytes, ...] = (
    b"N", b"\x88", b"K\x00", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\x00", b"G\x7f\xf8" + b"\x00" * 6,
    b"X\x00\x00\x00\x00", b"X\x04\x00\x00\x00../x", b"]", b"}", b")", b"K\x01K\x02\x86",
)  # fmt: skip
_VALUES = frozenset({
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "BINBYTES", "SHORT_BINBYTES", "BINGET", "GLOBAL",
})  # fmt: skip


def _opcodes(path: Path, pickled: bytes, write: Callable[[bytes], None]) -> Iterator[Site]:
    found = list(pickletools.genops(pickled))
    ends = [position for _, _, position in found[1:]] + [len(pickled)]
    for (opcode, argument, start), end in zip(found, ends, strict=True):
        if opcode.name in _VALUES:

            def change(new: Any, start: int = start, end: int = end) -> None:
                write(pickled[:start] + new + pickled[end:])

            yield Site(f"{path.name} {opcode.name} {str(argument)[:40]} at {start}", change, bytes)


def pickle_mutations() -> tuple[bytes, ...]:
    """What takes the place of a value in a pickle."""
    return _PICKLED


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
    try:
        manifest = json.loads(path.read_text())
        for name, record in manifest["files"].items():
            file = folder / name
            if isinstance(record, dict) and file.is_file() and "/" not in name:
                content = file.read_bytes()
                if type(record.get("size")) is int and record["size"] >= 0:
                    record["size"] = len(content)
                if isinstance(record.get("xxh3"), str) and len(record["xxh3"]) == 16:
                    record["xxh3"] = xxhash.xxh3_64_hexdigest(content)
    except (KeyError, TypeError, AttributeError, ValueError):
        pass  # the mutation is in the list of files
    if "manifest_xxh3" not in manifest:
        return
    manifest["manifest_xxh3"] = "0" * 16
    raw = ("{" + ",".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in manifest.items()) + "}").encode()
    path.write_bytes(
        raw.replace(b'"' + b"0" * 16 + b'"', b'"' + xxhash.xxh3_64_hexdigest(raw).encode() + b'"', 1)
    )
