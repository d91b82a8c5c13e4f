"""The manifest: what a complete checkpoint consists of. It is the last file written."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import (
    CheckpointNotFoundError,
    CheckpointVersionError,
    CorruptCheckpointError,
)
from accel_ckpt.format.index import inside
from accel_ckpt.format.reader import check_digest, file_digest, parse_json, refuse_irregular
from accel_ckpt.saving.writer import FileRecord, FileWriter

__all__ = ["FORMAT", "MANIFEST_NAME", "VERSION", "Manifest"]

FORMAT = "accel-checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
_BLANK = "0" * 16
_CHECKSUM = re.compile(rb'"manifest_xxh3": "([0-9a-f]{16})"')


@dataclass(frozen=True, slots=True)
class Manifest:
    """Format, world size, and size and checksum of every other file.

    A reader ignores keys it does not know; what an older reader would misread raises ``VERSION`` instead.
    """

    world_size: int
    ranks: tuple[int, ...]
    """Ranks whose own files are here: all of them, or those of one node when every node saves."""
    models: tuple[tuple[str, ...], ...]
    """Per model, the files that hold its tensors."""
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def write(self, directory: Path, disk: Disk = LOCAL) -> FileRecord:
        """Write the manifest into a folder. Its own checksum covers its text with the checksum blanked."""
        payload = {
            "format": FORMAT,
            "version": VERSION,
            "manifest_xxh3": _BLANK,
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "models": [list(names) for names in self.models],
            "files": {name: {"size": r.size, "xxh3": r.xxh3} for name, r in sorted(self.files.items())},
            "tensors": {name: r.tensors for name, r in sorted(self.files.items()) if r.tensors},
        }
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in payload.items())
        raw = f"{{\n{lines}\n}}\n".encode()
        digest = xxhash.xxh3_64_hexdigest(raw)
        with FileWriter(directory / MANIFEST_NAME, disk) as file:
            file.write(raw.replace(_BLANK.encode(), digest.encode(), 1))
            return file.finish()

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointNotFoundError: the folder or its manifest is not there: no checkpoint, or an incomplete
                one.
            CheckpointVersionError: it was written by a newer version.
            CorruptCheckpointError: the manifest is damaged.
        """
        path = directory / MANIFEST_NAME
        if not directory.is_dir():
            raise CheckpointNotFoundError(f"there is no checkpoint folder {directory}")
        refuse_irregular(path)
        try:
            raw = path.read_bytes()
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{directory} holds no {MANIFEST_NAME}: it is not a training state of this library, or is not "
                "complete"
            ) from error
        payload = _parse(path, raw)
        try:
            return cls(
                int(payload["world_size"]),
                tuple(payload["ranks"]),
                tuple(tuple(names) for names in payload["models"]),
                {
                    name: FileRecord(record["size"], record["xxh3"], payload.get("tensors", {}).get(name, {}))
                    for name, record in payload["files"].items()
                },
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CorruptCheckpointError(f"{path} lacks something or has a wrong type: {error!r}") from error

    def check_sizes(self, directory: Path) -> None:
        """Check that every file is there with its size.

        Raises:
            CheckpointNotFoundError: the folder has been removed.
            CorruptCheckpointError: a file is missing or has another size.
            UnsafeCheckpointError: a name leaves the folder.
        """
        for name, record in self.files.items():
            path = inside(directory, name)
            size = _size_of_file(path)
            if size is None:
                if not directory.exists():
                    raise CheckpointNotFoundError(
                        f"{directory} was removed while it was read, as by a training that keeps few checkpoints"
                    )
                raise CorruptCheckpointError(
                    f"{path} is missing, but the manifest of the checkpoint lists it"
                )
            if size != record.size:
                raise CorruptCheckpointError(f"{path} has {size} bytes, but the manifest says {record.size}")

    def check_content(self, directory: Path) -> None:
        """Check sizes, then read every file and check its checksum."""
        self.check_sizes(directory)
        for name, record in self.files.items():
            path = inside(directory, name)
            check_digest(path, file_digest(path), record.xxh3)


def _size_of_file(path: Path) -> int | None:
    """Bytes of a file; None if there is none, also if it goes while this looks."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    payload = parse_json(raw, str(path))
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise CorruptCheckpointError(
            f"{path} is not the manifest of a checkpoint: its format is not {FORMAT!r}"
        )
    version = payload.get("version")
    if type(version) is int and version > VERSION:
        raise CheckpointVersionError(
            f"{path} is of format version {version}; this version of accel-ckpt reads up to {VERSION}. "
            "Upgrade it: pip install --upgrade accel-ckpt"
        )
    match = _CHECKSUM.search(raw)
    blanked = raw if match is None else raw[: match.start(1)] + _BLANK.encode() + raw[match.end(1) :]
    if match is None or xxhash.xxh3_64_hexdigest(blanked) != match.group(1).decode():
        raise CorruptCheckpointError(
            f"{path} does not match its own checksum: it has changed since it was saved"
        )
    return payload
