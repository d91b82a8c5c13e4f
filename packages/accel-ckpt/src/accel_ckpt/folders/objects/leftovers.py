"""Objects of saves: the marks of saves under way, and removal of what dead saves left.

```
run/checkpoint_3/manifest.json               the last object that a save writes: a checkpoint exists when it does
run/checkpoint_3/files-<token>/…             what it lists; every save has a folder of its own, so no object of a
                                             checkpoint is ever overwritten
run/.accel-saving/checkpoint_3.<token>.json  a *mark*: a save or a removal is under way, and by which process
```

A mark is written before anything else and removed after everything else, so whatever a dead process left is found by
reading the marks, without looking through all checkpoints. A later save removes it, and the mark once there is nothing.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from accel_ckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from accel_ckpt.folders.objects.store import Store, in_parallel
from accel_ckpt.folders.objects.stores import open_store
from accel_ckpt.format.index import inside
from accel_ckpt.format.manifest import MANIFEST_NAME, Manifest
from accel_ckpt.format.writer import BLOCK_HASHED
from accel_ckpt.locations import RemotePath
from accel_state.host.process_identity import has_ended, process_identity
from accel_state.messages import warn

__all__ = [
    "Mark",
    "check_sizes",
    "clean_leftovers",
    "files_folder",
    "is_files_folder",
    "new_token",
    "open_manifest",
    "read_manifest",
    "remove_unlisted",
    "unfinished",
]

logger = logging.getLogger(__name__)

_MARKS = ".accel-saving"
_MARK = re.compile(r"(?P<name>(?!\.{1,2}\.[0-9a-f]{12}\.json$)[^/]*)\.(?P<token>[0-9a-f]{12})\.json")
_HOME = r"(files-([0-9a-f]{12}))"
_FILES = re.compile(_HOME + r"/.+")
_FOREIGN_AGE = 24 * 3600
"""Seconds; whether a process of another machine lives cannot be seen, so its mark is judged by its age."""


def new_token() -> str:
    """Make a unique identifier of a save."""
    return secrets.token_hex(6)


def files_folder(token: str) -> str:
    """The folder of the files of one save, below the checkpoint's."""
    return f"files-{token}"


def is_files_folder(name: str) -> bool:
    """Whether a folder has a name of those that `files_folder` gives."""
    return re.fullmatch(_HOME, name) is not None


@dataclass(frozen=True)
class Mark:
    """The mark of a save or a removal that is under way.

    Args:
        directory: the checkpoint.
        token: identifier of the save.
    """

    directory: RemotePath
    token: str

    @property
    def _key(self) -> str:
        return f"{_MARKS}/{_below(self.directory)}.{self.token}.json"

    def write(self) -> None:
        """Write the mark, with the process that saves or removes."""
        content = {**process_identity(), "began": time.time()}
        open_store(_base(self.directory)).put(self._key, json.dumps(content).encode())

    def remove(self) -> None:
        """Remove the mark, when nothing is left to do."""
        open_store(_base(self.directory)).delete([self._key])


def _base(directory: RemotePath) -> RemotePath:
    """Where marks of a checkpoint are: beside it, or in it, if it is a whole bucket."""
    return directory.parent if len(directory.parts) > 2 else directory


def _below(directory: RemotePath) -> str:
    return directory.name if len(directory.parts) > 2 else ""


def read_manifest(store: Store) -> Manifest:
    """Read the manifest of the checkpoint at the root of a store.

    Raises:
        CheckpointNotFoundError: there is no manifest.
        CorruptCheckpointError: the manifest is damaged.
        CheckpointVersionError: a newer version wrote it.
    """
    return open_manifest(store)[0]


def open_manifest(store: Store, raw: bytes | None = None) -> tuple[Manifest, bytes]:
    """The manifest of a checkpoint, and its text.

    Args:
        store: of the checkpoint.
        raw: the text, where it is known.
    """
    try:
        raw = store.read(MANIFEST_NAME) if raw is None else raw
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{store.uri()} holds no {MANIFEST_NAME}: there is no checkpoint, or not a complete one. {error}"
        ) from error
    manifest = Manifest.decode(raw, store.uri(MANIFEST_NAME))
    for name, record in manifest.files.items():
        inside(Path("/checkpoint"), name)
        count = -(-record.size // BLOCK_HASHED) if type(record.size) is int else -1
        if count < 0 or not isinstance(record.xxh3, str):
            raise CorruptCheckpointError(
                f"{store.uri(MANIFEST_NAME)} gives {name!r} the size {record.size!r} and the checksum {record.xxh3!r}"
            )
        if record.blocks and len(record.blocks) != max(count, 1):
            raise CorruptCheckpointError(
                f"{store.uri(MANIFEST_NAME)} lists {len(record.blocks)} blocks of {name!r}, which has "
                f"{record.size} bytes"
            )
    return manifest, raw


def check_sizes(store: Store, manifest: Manifest) -> None:
    """Check that every file exists with its size.

    Raises:
        CorruptCheckpointError: an object is missing or has another size; names it.
    """
    prefix = f"{manifest.folder}/" if manifest.folder else ""
    found = store.sizes(manifest.folder)
    for name, record in manifest.files.items():
        size = found.get(prefix + name)
        if size != record.size:
            what = "is missing" if size is None else f"has {size} bytes"
            raise CorruptCheckpointError(
                f"{store.uri(prefix + name)} {what}, but the manifest of the checkpoint says {record.size} bytes; load "
                "another checkpoint"
            )


def remove_unlisted(directory: RemotePath, alive: set[str]) -> list[str]:
    """Remove objects of a checkpoint's saves, except those that its manifest lists and those of running saves.

    Args:
        directory: the checkpoint.
        alive: identifiers of running saves.

    Returns:
        The names of the objects, and those of unfinished uploads.

    Raises:
        CorruptCheckpointError: the manifest cannot be read, so it is not known which objects it lists.
    """
    store = open_store(directory)
    try:
        manifest = read_manifest(store)
        kept = {manifest.folder, *map(files_folder, alive)}
        plain = set(manifest.files) if not manifest.folder else set()
    except CheckpointNotFoundError:
        kept, plain = {*map(files_folder, alive)}, set()

    def is_left(name: str) -> bool:
        match = _FILES.fullmatch(name)
        return match is not None and match[1] not in kept and name not in plain

    doomed = [name for name in store.sizes() if is_left(name)]
    store.delete(doomed)

    def is_dead(
        name: str,
    ) -> bool:  # the files that a manifest lists are complete, so no upload belongs to them
        match = _FILES.fullmatch(name)
        return match is not None and match[2] not in alive

    return doomed + store.abandon_uploads("files-", is_dead)


def clean_leftovers(directory: RemotePath) -> list[RemotePath]:
    """Remove leftovers of dead saves and removals in the folder that holds a checkpoint, with a warning for each.

    Objects of a running save stay. Whether a save of another machine is running cannot be known; its objects stay for a
    day.

    Returns:
        The checkpoints with leftovers.
    """
    base = _base(directory)
    store = open_store(base)
    over = unfinished(store)
    marks = {name: match for name in over if (match := _parsed(name))}
    dead = {name for name, is_over in over.items() if is_over}
    alive = {match["token"] for name, match in marks.items() if name not in dead}
    cleaned = []
    for about in sorted({marks[name]["name"] for name in dead}):
        target = base / about if about else base
        try:
            if not remove_unlisted(target, alive):
                store.delete(name for name in dead if marks[name]["name"] == about)
                continue
            # The marks stay for another look: a request of the dead process may still be on its way.
            warn(f"a save that did not finish left objects in {target}; they are removed")
            cleaned.append(target)
        except CheckpointError as error:
            warn(f"what a dead save or a removal left in {target} stays: {error}", once=True)
    return cleaned


def unfinished(store: Store) -> dict[str, bool]:
    """The marks below a folder of checkpoints, and whether the process of each is known to have ended."""
    marks = [name for name in store.sizes(_MARKS) if _parsed(name)]
    return dict(zip(marks, in_parallel(lambda name: _is_over(store, name), marks), strict=True))


def _parsed(mark: str) -> re.Match[str] | None:
    return _MARK.fullmatch(mark.removeprefix(f"{_MARKS}/"))


def _is_over(store: Store, name: str) -> bool:
    """Whether the process of a mark has ended, as far as can be known."""
    try:
        content = json.loads(store.read(name))
        owner = {"machine": content["machine"], "pid": int(content["pid"]), "born": content["born"]}
        return has_ended(owner) or time.time() - float(content["began"]) > _FOREIGN_AGE
    except CheckpointNotFoundError:
        return False  # its save has just ended
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        logger.info("%s is no mark of a save: %r", store.uri(name), error)
        return False
    except CheckpointError as error:
        logger.info("%s cannot be read: %s", store.uri(name), error)
        return False
