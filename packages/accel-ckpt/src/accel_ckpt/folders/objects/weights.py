"""Weights and single files in object storage, for other programs to read: plain objects under plain names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accel_ckpt.disk import Disk
from accel_ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointSaveError
from accel_ckpt.folders.objects.mirror import Mirror, open_remote
from accel_ckpt.folders.objects.store import Store
from accel_ckpt.folders.objects.stores import open_store
from accel_ckpt.folders.objects.uploads import UploadDisk
from accel_ckpt.format.index import find_weights, is_weight_file
from accel_ckpt.format.manifest import MANIFEST_NAME
from accel_ckpt.format.reader import parse_json
from accel_ckpt.format.writer import FileRecord
from accel_ckpt.locations import RemotePath
from accel_state.messages import warn

__all__ = ["check_weights_folder", "fetch_file", "fetch_weights", "publish_weights", "write_object"]


def check_weights_folder(directory: RemotePath) -> None:
    """Refuse to write weights over a training state.

    Raises:
        CheckpointSaveError: there is a training state, or the storage cannot be read.
    """
    store = open_store(directory)
    try:
        store.read(MANIFEST_NAME)
    except CheckpointNotFoundError:
        return
    except CheckpointError as error:
        raise CheckpointSaveError(f"saving weights to {directory} failed: {error}") from error
    raise CheckpointSaveError(
        f"{directory} is a training state, whose files are listed in its {MANIFEST_NAME}; save the model "
        "to another folder"
    )


def publish_weights(
    directory: RemotePath,
    writers: Mapping[str, Callable[[Path, Disk], FileRecord]],
    index: tuple[str, str] | None,
) -> tuple[str, ...]:
    """Replace the weights below a URI: each object in one step, the index last, older weights removed.

    Args:
        directory: where.
        writers: file name → writes it to the path and disk that it is given.
        index: name and text of the index, if there is to be one.

    Returns:
        The names of the objects written, the index included.

    Raises:
        CheckpointSaveError: the storage refuses, or does not answer.
    """
    store = open_store(directory)
    try:
        there = [name for name in store.sizes() if is_weight_file(name)]
        # Without an index a half-replaced set of shards cannot be taken for a whole one.
        store.delete(name for name in there if name.endswith(".json"))
        _upload(store, writers)
        written = [*writers]
        if index is not None:
            store.put(index[0], index[1].encode())
            written.append(index[0])
    except CheckpointSaveError:
        raise
    except CheckpointError as error:
        raise CheckpointSaveError(f"saving weights to {directory} failed: {error}") from error
    _remove_old(
        store, [name for name in there if name not in written and not name.endswith(".json")], written
    )
    return tuple(written)


def _remove_old(store: Store, names: Sequence[str], written: Sequence[str]) -> None:
    """Remove what an earlier save left.

    Raises:
        CheckpointSaveError: it stays, and readers would load it: they prefer safetensors.
    """
    try:
        store.delete(names)
    except CheckpointError as error:
        left = f"{', '.join(names)} of an earlier save in {store.uri()} could not all be removed: {error}"
        misleads = [name for name in names if name.endswith(".safetensors")]
        if misleads and not any(name.endswith(".safetensors") for name in written):
            raise CheckpointSaveError(
                f"the new weights are saved, but readers choose {misleads[0]}. {left}. Remove them, or save elsewhere"
            ) from error
        warn(left, once=True)


def write_object(place: RemotePath, write: Callable[[Path, Disk], FileRecord]) -> None:
    """Replace one object, in one step.

    Raises:
        CheckpointSaveError: the storage refuses, or does not answer.
    """
    try:
        _upload(open_store(place.parent), {place.name: write})
    except CheckpointSaveError:
        raise
    except CheckpointError as error:
        raise CheckpointSaveError(f"saving {place} failed: {error}") from error


def _upload(store: Store, writers: Mapping[str, Callable[[Path, Disk], FileRecord]]) -> None:
    folder = Path("/")  # of names; nothing is made there
    disk = UploadDisk(store, folder)
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
    sizes = {name: size for name, size in store.sizes().items() if "/" not in name or name == MANIFEST_NAME}
    if MANIFEST_NAME in sizes:
        manifest, mirror, _ = open_remote(place, verify=True)
        models = [name for names in manifest.models for name in names]
        indexes = [name for name in manifest.files if name.endswith(".index.json")]
        mirror.fetch([*models, *indexes])
        return mirror.folder, mirror
    if sizes and place.name not in sizes:
        mirror = Mirror(store, {name: FileRecord(size, "") for name, size in sizes.items()}, "", verify=False)
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
