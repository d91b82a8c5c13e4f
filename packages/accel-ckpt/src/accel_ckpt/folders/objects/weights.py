"""Weights and single files in object storage, for other programs to read: plain objects under plain names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accel_ckpt.errors import CheckpointError, CheckpointNotFoundError
from accel_ckpt.folders.objects.leftovers import files_folder, is_files_folder, new_token
from accel_ckpt.folders.objects.mirror import Mirror, open_remote
from accel_ckpt.folders.objects.store import Store
from accel_ckpt.folders.objects.stores import open_store
from accel_ckpt.folders.objects.uploads import UploadDisk
from accel_ckpt.folders.weight_switch import WeightSwitch, Writers
from accel_ckpt.format.index import find_weights, is_weight_file
from accel_ckpt.format.manifest import MANIFEST_NAME
from accel_ckpt.format.reader import parse_json
from accel_ckpt.format.writer import FileRecord
from accel_ckpt.locations import RemotePath
from accel_state.messages import warn

__all__ = ["ObjectSwitch", "fetch_file", "fetch_weights", "upload"]


class ObjectSwitch(WeightSwitch):
    """A replacement of weights below a URI.

    Objects cannot be renamed, so shards whose names readers use stay in a folder, where their index names them; the
    next save uses the plain names again.
    """

    old = "readers choose {}"

    def __init__(self, directory: RemotePath, writers: Writers, index: tuple[str, str] | None) -> None:
        super().__init__(directory, writers, index)
        self._store = open_store(directory)

    def there(self) -> set[str]:
        """Objects of weights, also those in folders of saves."""
        return {name for name in self._store.sizes() if _is_of_weights(name)}

    def read(self, name: str) -> bytes:
        """Read an object."""
        return self._store.read(name)

    def put(self, name: str, text: str) -> None:
        """Write an object, in one request."""
        self.doing = f"writing {name}"
        self._store.put(name, text.encode())

    def remove(self, name: str) -> None:
        """Remove an object."""
        self._store.delete([name])

    def remove_old(self, names: Sequence[str]) -> None:
        """Remove objects together, indexes first."""
        try:
            for last in (False, True):
                self._store.delete(name for name in names if name.endswith(".json") != last)
        except CheckpointError as error:
            warn(
                f"{', '.join(names)} of an earlier save in {self.path} could not all be removed: {error}",
                once=True,
            )

    def write(self, apart: bool) -> str:
        """Upload them, apart to a folder of this save."""
        home = files_folder(new_token())
        self.doing = f"writing {', '.join(self.writers)}"
        upload(self._store, self.writers, f"{home}/" if apart else "")
        return home

    def give_names(self) -> bool:
        """Objects cannot be renamed."""
        return False

    def sync(self) -> None:
        """An object that was put is there."""


def _is_of_weights(name: str) -> bool:
    home, _, file = name.rpartition("/")
    return is_weight_file(file) and (not home or is_files_folder(home))


def upload(store: Store, writers: Writers, prefix: str = "") -> None:
    """Write objects, each in one step.

    Args:
        store: where.
        writers: what writes each.
        prefix: of their names.
    """
    folder = Path("/")  # of names; nothing is made there
    disk = UploadDisk(store, folder, prefix)
    try:
        for name, write in writers.items():
            write(folder / name, disk)
        disk.drain()
    except BaseException:
        disk.give_up()
        raise
    disk.release()


def fetch_file(place: RemotePath) -> Mirror:
    """One object as a local file of the same name.

    Raises:
        CheckpointNotFoundError: there is no such object.
    """
    store = open_store(place.parent)
    size = store.sizes(place.name).get(place.name)
    if size is None:
        raise CheckpointNotFoundError(f"there is no object {place}; check the bucket and the name")
    mirror = Mirror(store, {place.name: FileRecord(size, "")}, "", verify=False)
    mirror.fetch([place.name])
    return mirror


def fetch_weights(place: RemotePath) -> tuple[Path, Mirror]:
    """Bring weights to this machine: those of a file, an index or a folder, which may be a training state.

    Returns:
        The local file or folder, and what keeps it there; what is mapped stays readable afterwards.

    Raises:
        CheckpointNotFoundError: there are no weights.
    """
    store = open_store(place)
    sizes = {name: size for name, size in store.sizes().items() if "/" not in name or _is_of_weights(name)}
    if MANIFEST_NAME in sizes:
        manifest, mirror, _ = open_remote(place, verify=True)
        models = [name for names in manifest.models for name in names]
        indexes = [name for name in manifest.files if name.endswith(".index.json")]
        mirror.fetch([*models, *indexes])
        return mirror.folder, mirror
    if sizes and place.name not in sizes:
        mirror = Mirror(store, {name: FileRecord(size, "") for name, size in sizes.items()}, "", verify=False)
        mirror.make(sizes)
        mirror.fetch(name for name in sizes if name.endswith(".index.json"))
        try:
            found = find_weights(mirror.folder)
        except CheckpointError as error:
            mirror.remove()
            raise type(error)(str(error).replace(str(mirror.folder), str(place))) from error
        mirror.fetch(map(mirror.name_of, found.files))
        return mirror.folder, mirror
    if place.suffix != ".json":
        mirror = fetch_file(place)
        return mirror.folder / place.name, mirror
    return _fetch_index(place)


def _fetch_index(place: RemotePath) -> tuple[Path, Mirror]:
    """An index, and the files beside it that it names."""
    store = open_store(place.parent)
    content = parse_json(store.read(place.name), str(place))
    weight_map = content.get("weight_map", content) if isinstance(content, dict) else {}
    named = {name for name in weight_map.values() if isinstance(name, str)} | {place.name}
    sizes = {name: FileRecord(size, "") for name, size in store.sizes().items() if name in named}
    mirror = Mirror(store, sizes, "", verify=False)
    mirror.fetch(sizes)
    return mirror.folder / place.name, mirror
