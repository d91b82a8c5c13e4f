"""The manifest: the list of all files of a complete checkpoint. It is the last file written."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import CheckpointNotFoundError, CheckpointVersionError, CorruptCheckpointError
from accel_ckpt.format.forms import OTHERS, check_form, checksum, natural, positive
from accel_ckpt.format.index import inside
from accel_ckpt.format.layout import Layout
from accel_ckpt.format.reader import check_digest, file_digest, parse_json, refuse_irregular
from accel_ckpt.format.writer import BLOCK_HASHED, FileRecord, FileWriter
from accel_state.installing import INSTALL

__all__ = ["FORMAT", "MANIFEST_NAME", "VERSION", "Manifest"]

FORMAT = "accel-checkpoint"
VERSION = 2
MANIFEST_NAME = "manifest.json"
_BLANK = "0" * 16
_FOLDER = re.compile(r"files-[0-9a-f]{12}")
_CHECKSUM = re.compile(rb'"manifest_xxh3": "([0-9a-f]{16})"')


def _folder(value: Any) -> bool:
    """The name of a folder of a save, or nothing."""
    return isinstance(value, str) and (not value or _FOLDER.fullmatch(value) is not None)


_FORM = {
    "version": positive,
    "world_size": positive,
    "ranks": [natural],
    "models": [[str]],
    "files": {OTHERS: {"size": natural, "xxh3": checksum, "header": natural}},
    "blocks": {},
    "folder": _folder,
}
_MANY = 512
_NO_LAYOUT = Layout().to_plain()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a checkpoint: format, world size, and size and checksum of every other file.

    A reader ignores keys it does not know; a change that an older reader would misread raises ``VERSION`` instead.
    """

    world_size: int
    ranks: tuple[int, ...]
    """Ranks whose own files are here: all of them, or those of one node when every node saves."""
    models: tuple[tuple[str, ...], ...]
    """Per model, the files that hold its tensors."""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    folder: str = ""
    """Where the files are, below the checkpoint's folder; in object storage each save has a folder of its own."""
    layout: Layout = field(default_factory=Layout)
    """How ranks have divided tensors, where rules say it."""
    version: int = VERSION
    """The format in which it was read; it is written in the newest."""

    def write(self, directory: Path, disk: Disk = LOCAL) -> FileRecord:
        """Write the manifest into a folder."""
        with FileWriter(directory / MANIFEST_NAME, disk) as file:
            file.write(self.encode())
            return file.finish()

    def encode(self) -> bytes:
        """The manifest as a file. Its own checksum covers its text with the checksum blanked."""
        payload = {
            "format": FORMAT,
            "version": VERSION,
            "manifest_xxh3": _BLANK,
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "models": [list(names) for names in self.models],
            "files": {
                name: {"size": r.size, "xxh3": r.xxh3, **({"header": r.header} if r.header else {})}
                for name, r in sorted(self.files.items())
            },
            "layout": self.layout.to_plain(),
        }
        if self.folder:
            payload["folder"] = self.folder
        if any(record.blocks for record in self.files.values()):
            blocks = {name: "".join(r.blocks) for name, r in sorted(self.files.items()) if r.blocks}
            payload["blocks"] = {"size": BLOCK_HASHED, "xxh3": blocks}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in payload.items())
        raw = f"{{\n{lines}\n}}\n".encode()
        digest = xxhash.xxh3_64_hexdigest(raw)
        return raw.replace(_BLANK.encode(), digest.encode(), 1)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointNotFoundError: the folder or its manifest does not exist: there is no checkpoint, or it is
                incomplete.
            CheckpointVersionError: it was written by a newer version.
            CorruptCheckpointError: the manifest is damaged.
            UnsafeCheckpointError: it is a link out of the folder.
        """
        return cls.decode(cls.text(directory), str(directory / MANIFEST_NAME))

    @staticmethod
    def text(directory: Path) -> bytes:
        """Read the text of the manifest of a checkpoint; errors as :meth:`read`, but for what is in it."""
        path = inside(directory, MANIFEST_NAME)
        if directory.is_file():
            raise CheckpointNotFoundError(f"{directory} is a file; pass the folder of the checkpoint")
        if not directory.is_dir():
            raise CheckpointNotFoundError(f"there is no checkpoint folder {directory}")
        refuse_irregular(path)
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{directory} holds no {MANIFEST_NAME}: it is no training state of this library, or not complete"
            ) from error

    @classmethod
    def decode(cls, raw: bytes, what: str) -> Manifest:
        """Parse the text of a manifest.

        Args:
            raw: the text.
            what: its name, for messages.

        Raises:
            CheckpointVersionError: it was written by a newer version.
            CorruptCheckpointError: the manifest is damaged.
        """
        payload = {"version": 1, "blocks": {}, "folder": "", "layout": _NO_LAYOUT, **_parse(what, raw)}
        check_form(payload, {"files": {OTHERS: dict}}, what)
        headers = _header_sizes(payload["files"], payload.get("tensors", {}), what)
        payload["files"] = {
            name: {"header": headers.get(name, 0), **r} for name, r in payload["files"].items()
        }
        check_form(payload, _FORM, what)
        ranks, world_size = payload["ranks"], payload["world_size"]
        if len(set(ranks)) < len(ranks) or max(ranks, default=0) >= world_size:
            raise CorruptCheckpointError(
                f"{what} lists ranks that are none of {world_size}, or twice: {str(ranks)[:80]}. The file is damaged, "
                "or something else wrote it; load another checkpoint"
            )
        blocks = _blocks(payload["blocks"], what)
        return cls(
            world_size,
            tuple(ranks),
            tuple(tuple(names) for names in payload["models"]),
            {
                name: FileRecord(record["size"], record["xxh3"], record["header"], blocks.get(name, ()))
                for name, record in payload["files"].items()
            },
            payload["folder"],
            Layout.from_plain(payload["layout"], world_size, f"{what}['layout']"),
            payload["version"],
        )

    def home(self, directory: Path) -> Path:
        """The folder of the files, in the folder of the checkpoint.

        Raises:
            UnsafeCheckpointError: the folder is a link that leaves the checkpoint.
        """
        return inside(directory, self.folder) if self.folder else directory

    def checksum(self, directory: Path, name: str) -> str:
        """The checksum of a file of the checkpoint in a folder.

        Raises:
            CorruptCheckpointError: the file is not listed.
        """
        if name not in self.files:
            raise CorruptCheckpointError(
                f"{directory / name} is not listed in the manifest of its checkpoint"
            )
        return self.files[name].xxh3

    def check_sizes(self, directory: Path) -> None:
        """Check that every file is there with its size.

        Of very many files, as thousands of ranks write, only the names are looked up, in one listing: every rank of a
        load does this, and compares what it reads with its checksum.

        Raises:
            CheckpointNotFoundError: the folder has been removed.
            CorruptCheckpointError: a file is missing or has another size.
            UnsafeCheckpointError: a name leaves the folder.
        """
        home = self.home(directory)
        there = set(os.listdir(home)) if len(self.files) > _MANY and home.is_dir() else frozenset()
        for name, record in self.files.items():
            if name in there:
                continue
            path = inside(home, name)
            size = _size_of_file(path)
            if size is None:
                if not directory.exists():
                    raise CheckpointNotFoundError(
                        f"{directory} was removed while it was read, perhaps by a training that keeps only a few "
                        "checkpoints"
                    )
                raise CorruptCheckpointError(
                    f"{path} is missing, but the manifest of the checkpoint lists it"
                )
            if size != record.size:
                raise CorruptCheckpointError(f"{path} has {size} bytes, but the manifest says {record.size}")

    def check_content(self, directory: Path) -> None:
        """Check sizes, then read every file and check its checksum."""
        self.check_sizes(directory)
        home = self.home(directory)
        for name, record in self.files.items():
            path = inside(home, name)
            check_digest(path, file_digest(path), record.xxh3)


def _header_sizes(files: Mapping[str, Any], tensors: Any, what: str) -> dict[str, int]:
    """The bytes of headers from the byte ranges of tensors, which manifests of format 1 list."""
    form = {OTHERS: {OTHERS: {"data_offsets": [natural]}}}
    check_form(
        {"tensors": tensors, "files": files}, {"tensors": form, "files": {OTHERS: {"size": natural}}}, what
    )
    return {
        name: max(
            0,
            files[name]["size"]
            - max((max(e["data_offsets"], default=0) for e in entries.values()), default=0),
        )
        for name, entries in tensors.items()
        if name in files
    }


def _size_of_file(path: Path) -> int | None:
    """Bytes of a regular file; None if there is no such file, or it is removed meanwhile."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _blocks(about: Mapping[str, Any], what: str) -> dict[str, tuple[str, ...]]:
    """Checksums of the blocks of files; those of blocks of another size are of no use here."""
    if about.get("size") != BLOCK_HASHED:
        return {}
    check_form(about, {"xxh3": {OTHERS: str}}, f"{what}['blocks']")
    width = len(_BLANK)
    found = {
        name: tuple(joined[at : at + width] for at in range(0, len(joined), width))
        for name, joined in about["xxh3"].items()
    }
    check_form(found, {OTHERS: [checksum]}, f"{what}['blocks']")
    return found


def _parse(path: str, raw: bytes) -> dict[str, Any]:
    payload = parse_json(raw, path)
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise CorruptCheckpointError(
            f"{path} is not the manifest of a checkpoint: its format is not {FORMAT!r}"
        )
    version = payload.get("version")
    if type(version) is int and version > VERSION:
        raise CheckpointVersionError(
            f"{path} is of format version {version}; this version of accel-ckpt reads up to {VERSION}. "
            f"Upgrade it: {INSTALL}"
        )
    match = _CHECKSUM.search(raw)
    blanked = raw if match is None else raw[: match.start(1)] + _BLANK.encode() + raw[match.end(1) :]
    if match is None or xxhash.xxh3_64_hexdigest(blanked) != match.group(1).decode():
        raise CorruptCheckpointError(
            f"{path} does not match its own checksum: it has changed since it was saved"
        )
    return payload
