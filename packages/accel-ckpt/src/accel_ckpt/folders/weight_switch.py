"""Replacing weights by other weights: at any time a reader finds all of the old ones, or all of the new ones.

write beside → switch, in one step → remove the old ones. Readers prefer, as transformers does, ``model.safetensors``,
then its index, ``pytorch_model.bin``, its index; which step switches depends on what is there:

- A single file or an index appears in one step, an index after its shards. If readers use files of the names of the
  new shards, an index first names these where they were written; then they get their names, and the index names those.
- While a single file and an index of its format are both there, the index says that it yields to the file.
- What readers would prefer to the new weights is removed when these are complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from accel_ckpt.disk import Disk
from accel_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    ObjectStorageError,
)
from accel_ckpt.format.index import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    changed_index,
    files_of_index,
)
from accel_ckpt.format.writer import FileRecord

__all__ = ["WeightSwitch", "Writers", "explained"]

Writers = Mapping[str, Callable[[Path, Disk], FileRecord]]
"""Name of a file → what writes it to the path and disk that it is given."""

_PREFERRED: Mapping[str, tuple[str, ...]] = {
    SAFE_WEIGHTS_NAME: (),
    SAFE_WEIGHTS_INDEX_NAME: (SAFE_WEIGHTS_NAME,),
    WEIGHTS_NAME: (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME),
    WEIGHTS_INDEX_NAME: (WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME),
}
"""Files that readers prefer to a file, in the order in which they are removed."""
_SINGLE = {SAFE_WEIGHTS_INDEX_NAME: SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME: WEIGHTS_NAME}


@contextmanager
def explained(failure: Callable[[OSError], CheckpointSaveError]) -> Iterator[None]:
    """Turn errors of a file system or of object storage into the error of a save.

    Args:
        failure: makes that error. Errors that say already what is wrong with the save stay as they are.
    """
    try:
        yield
    except (ObjectStorageError, CheckpointNotFoundError) as error:
        raise failure(error) from error
    except CheckpointError:
        raise
    except OSError as error:
        raise failure(error) from error


class WeightSwitch(ABC):
    """One replacement of the weights at a place.

    Args:
        path: the folder or URI.
        writers: what writes each of the new files.
        index: name and text of their index, if there is to be one.
    """

    old = "readers choose the old {}"

    def __init__(self, path: Path, writers: Writers, index: tuple[str, str] | None) -> None:
        self.path = path
        self.writers = writers
        self.index = index
        self.doing = "beginning"
        """The step under way, for messages."""
        self._switched = False

    @abstractmethod
    def there(self) -> Collection[str]:
        """The names of what saves of weights left at the place, before this one or in it."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read a file."""

    @abstractmethod
    def put(self, name: str, text: str) -> None:
        """Replace a small file, in one step."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file."""

    @abstractmethod
    def remove_old(self, names: Sequence[str]) -> None:
        """Remove files of earlier saves in this order, or warn."""

    @abstractmethod
    def write(self, apart: bool) -> str:
        """Write all files, completely.

        Args:
            apart: not yet under their names, which readers use.

        Returns:
            The folder at the place in which they are if `apart`.
        """

    @abstractmethod
    def give_names(self) -> bool:
        """Give the files their names; those that were written apart keep their other names for now.

        Returns:
            False if those that were written apart stay there.
        """

    @abstractmethod
    def sync(self) -> None:
        """Return when names are on the disk."""

    def run(self) -> tuple[str, ...]:
        """Write the new weights, let readers find them, and remove the old ones.

        Returns:
            The names of the new files, the index included.

        Raises:
            CheckpointSaveError: writing failed, or a file stays that readers choose; says which weights they find.
        """
        with explained(self._failure):
            written = self._single() if self.index is None else self._shards(*self.index)
        self.remove_old(sorted(set(self.there()) - {*written}, key=lambda name: not name.endswith(".json")))
        return written

    def _single(self) -> tuple[str, ...]:
        (name,) = self.writers
        index = next(index for index, single in _SINGLE.items() if single == name)
        with suppress(FileNotFoundError, CorruptCheckpointError):
            self.put(index, changed_index(self.read(index), yields_to=name))
        self.write(apart=False)
        self.give_names()
        self._remove_preferred(name)
        return (name,)

    def _shards(self, index: str, text: str) -> tuple[str, ...]:
        apart = not self.used(index).isdisjoint(self.writers)
        home = self.write(apart)
        names = [f"{home}/{name}" for name in self.writers] if apart else [*self.writers]
        there = changed_index(text.encode(), home=home) if apart else text
        if not apart:
            self.give_names()
            self.sync()
        both = _SINGLE[index] in self.there()
        self.put(index, changed_index(there.encode(), yields_to=_SINGLE[index]) if both else there)
        self._remove_preferred(index)
        if apart and self.give_names():
            names, there, both = [*self.writers], text, True
            self.sync()
        if both:
            self.put(index, there)
        self.sync()
        return (*names, index)

    def used(self, index: str) -> set[str]:
        """The files that an index names, if it is there and can be read."""
        try:
            return files_of_index(self.read(index))
        except (FileNotFoundError, CorruptCheckpointError):
            return set()

    def _remove_preferred(self, entry: str) -> None:
        preferred = [name for name in _PREFERRED[entry] if name in self.there()]
        self._switched = not preferred
        self.sync()
        for name in preferred:
            try:
                self.remove(name)
            except OSError as error:
                raise CheckpointSaveError(
                    f"the new weights are in {self.path}, but {self.old.format(name)}, which could not be removed: "
                    f"{error}. Remove it, or save elsewhere"
                ) from error
        self._switched = True

    def _failure(self, error: OSError) -> CheckpointSaveError:
        left = (
            "the new weights are there, complete" if self._switched else "what was there before is unchanged"
        )
        return CheckpointSaveError(
            f"saving weights to {self.path} failed: {error} ({self.doing}); {left}. A save needs room beside the "
            "weights that it replaces"
        )
