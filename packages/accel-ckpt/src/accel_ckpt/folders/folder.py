"""The interface of folders of checkpoints, for saving, loading and pruning, and the steps of every commit.

A checkpoint exists completely or not at all. A save is a `Transaction` of these steps, each of which succeeds on all
ranks or fails on all of them:

begin (check the destination, remove leftovers of dead saves, reserve a scratch folder) → every rank writes its files
there → all ranks report → the leading rank writes the manifest last, and the checkpoint gets its name.

`local.py` does this with folders of a file system, `objects/` with object storage, which has neither renames nor
locks. `find.py` decides which of the two a path needs.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, TypeVar

from accel_ckpt.coordination.ranks import Coordinator, broadcast, gather_together, run_together
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import CheckpointSaveError
from accel_ckpt.folders.weight_switch import Writers, explained
from accel_ckpt.format.forms import OTHERS, check_form, checksum, natural
from accel_ckpt.format.layout import Layout
from accel_ckpt.format.manifest import Manifest
from accel_ckpt.format.saved_tensors import FileChecks
from accel_ckpt.format.state_files import model_stem, sorted_parts
from accel_ckpt.format.writer import FileRecord

__all__ = ["Contribution", "Folder", "OpenFolder", "Transaction", "check_regular", "files_below"]

T = TypeVar("T")
R = TypeVar("R")

_RECORD = {"size": natural, "xxh3": checksum, "header": natural, "blocks": [checksum]}
_CONTRIBUTION = {"files": {OTHERS: _RECORD}, "models": [[str]]}


@dataclass(frozen=True, slots=True)
class Contribution:
    """The files that one rank wrote."""

    files: Mapping[str, FileRecord]
    models: tuple[tuple[str, ...], ...] = ()
    """Per model, the files of its whole tensors; from the ranks that write models."""
    layout: Layout = field(default_factory=Layout)
    """How ranks divide tensors; of use on the ranks that write a manifest, and not sent."""

    def to_plain(self) -> dict[str, Any]:
        """Convert to plain data, for the other ranks."""
        return {"files": {name: asdict(record) for name, record in self.files.items()}, "models": self.models}

    @classmethod
    def from_plain(cls, data: Any) -> Contribution:
        """Convert back from the `to_plain` of another rank.

        Raises:
            CorruptCheckpointError: the data have another form.
        """
        check_form(data, _CONTRIBUTION, "what a rank says that it wrote")
        files = {
            name: FileRecord(**{k: record[k] for k in _RECORD}) for name, record in data["files"].items()
        }
        return cls(files, tuple(map(tuple, data["models"])))


class Transaction(ABC):
    """One rank's part in a commit: begun, then completed or aborted, perhaps in another thread.

    Every method but `abort` is collective; one that raises has aborted the transaction, on all ranks.

    Args:
        directory: the final path, absolute.
        token: unique identifier of this save; replaced by the leading rank's.
        leader: whether this rank coordinates the save.
        coordinator: the ranks.
        disk: the file system to write to.
    """

    runs_thread_pools: ClassVar[bool] = False
    """Whether the end of the program must wait for it before thread pools end."""

    def __init__(
        self, directory: Path, token: str, leader: bool, coordinator: Coordinator, disk: Disk
    ) -> None:
        self.directory = directory
        self.token = token
        self.leader = leader
        self.coordinator = coordinator
        """The ranks; a background thread may put one here that does not need the training group."""
        self.disk = disk
        self.scratch = directory
        """The folder to which this rank writes until the checkpoint is complete; known once it is begun."""
        self.nbytes: int | None = None
        """Bytes that this rank will write, where they are known before."""
        self.prepared: list[Any] = []
        """The results of `prepare` of all ranks, from `begin`."""
        self.one_leader = True
        """Whether one rank writes the manifest of what all have written."""
        self._own = Contribution({})
        self._complete = False

    def begin(self, prepare: Callable[[], Any], *, one_folder: bool = True) -> None:
        """Reserve the scratch folder.

        Args:
            prepare: called on every rank in the same exchange; the results of all ranks (plain data) are `prepared`.
            one_folder: all ranks save to the same folder.

        Raises:
            CheckpointSaveError: the destination cannot be written, or ranks name different ones.
        """

        def open_and_prepare() -> tuple[str, Any]:
            with explained(self._failure):
                self._open()
            return str(self.directory), prepare()

        answers = self.together(open_and_prepare)
        names = sorted({name for name, _ in answers})
        if one_folder and len(names) > 1:
            self.abort()
            raise CheckpointSaveError(
                f"ranks save to different folders: {names}; give the same one on all ranks"
            )
        self.one_leader = one_folder
        self._join(broadcast(self.token, self.coordinator))
        self.prepared = [prepared for _, prepared in answers]

    def together(self, step: Callable[[], T]) -> list[T]:
        """Run a step on every rank and return the results of all ranks (plain data); abort if one fails."""
        return self._on_all_ranks(run_together, step)

    def _gathered(self, step: Callable[[], T]) -> list[T] | None:
        """Run a step on every rank; ranks that write a manifest get the results of all. Abort if one fails."""
        return self._on_all_ranks(gather_together if self.one_leader else run_together, step)

    def _on_all_ranks(self, run: Callable[..., R], step: Callable[[], Any]) -> R:
        doing = f"saving the checkpoint {self.directory}"
        try:
            return run(step, self.coordinator, doing=doing, error=CheckpointSaveError)
        except BaseException:  # also when the user interrupts
            self.abort()
            raise

    def complete(self, write: Callable[[Path], Contribution]) -> Path:
        """Write this rank's files; when all ranks have written, give the checkpoint its name, which is returned.

        Args:
            write: writes this rank's files into the given folder, with `disk`, and returns a description of them. It
                may leave more files there; they become part of the checkpoint.

        Raises:
            CheckpointSaveError: this rank or another one failed; an earlier checkpoint is unchanged.
        """
        try:
            answers = self._gathered(lambda: self._report(write))
            self.together(lambda: self._conclude(answers))
            self._complete = True
        finally:
            self.abort()  # after a success nothing is left to remove, and what this rank holds is released
        return self.directory

    @abstractmethod
    def abort(self) -> None:
        """Remove what this rank reserved and wrote, unless the checkpoint is complete. Not collective."""

    @abstractmethod
    def _open(self) -> None:
        """Check the destination, remove what dead saves left, reserve the scratch."""

    @abstractmethod
    def _join(self, token: str) -> None:
        """Write where the leading rank, whose token this is, has reserved the scratch."""

    @abstractmethod
    def _write(self, write: Callable[[Path], Contribution]) -> Contribution:
        """Write this rank's files; files that hooks added become part of the result."""

    @abstractmethod
    def _publish(self, parts: Sequence[Contribution]) -> None:
        """Write the manifest and give the checkpoint its name; on leading ranks."""

    def _report(self, write: Callable[[Path], Contribution]) -> dict[str, Any]:
        with explained(self._failure):
            written = self._write(write)
        if self.leader:
            self._own = written
        return written.to_plain()

    def _models(self, files: Iterable[str]) -> tuple[tuple[str, ...], ...]:
        """For each model the files that hold its tensors, whole ones and parts."""
        own = self._own.models
        parts = sorted_parts(files, [model_stem(index, True) for index in range(len(own))])
        return tuple((*whole, *more) for whole, more in zip(own, parts, strict=True))

    def _conclude(self, answers: Sequence[Any] | None) -> None:
        if not self.leader:
            return
        assert answers is not None, "brought to the leader"
        parts = [
            self._own if rank == self.coordinator.rank else Contribution.from_plain(answer)
            for rank, answer in enumerate(answers)
        ]
        with explained(self._failure):
            self._publish(parts)

    def _failure(self, error: OSError) -> CheckpointSaveError:
        return CheckpointSaveError(
            f"saving the checkpoint {self.directory} failed: {error}; what was there before is unchanged"
            f"{self._room(error)}"
        )

    def _room(self, error: OSError) -> str:
        """If the error is that a disk is full: what was needed, what is free, and what to do."""
        return ""


def files_below(folder: Path) -> Iterator[str]:
    """Relative names of the files in a folder, links to folders included."""
    for root, directories, names in os.walk(folder):
        links = [name for name in directories if Path(root, name).is_symlink()]
        for name in (*names, *links):
            yield PurePosixPath(Path(root, name).relative_to(folder)).as_posix()


def check_regular(path: Path) -> None:
    """Refuse what a save hook wrote and no checkpoint can hold.

    Raises:
        CheckpointSaveError: it is a link, or no file.
    """
    if path.is_symlink() or not path.is_file():
        raise CheckpointSaveError(f"{path} is not a regular file, and cannot be part of a checkpoint")


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """A complete checkpoint, opened for reading; the sizes of all its files are checked, perhaps by another rank."""

    directory: Path
    """The path or URI of the checkpoint."""
    manifest: Manifest
    text: bytes
    """Of the manifest."""
    files: Path
    """The folder of its files on this machine; files exist there once `checks` was called for them."""
    checks: FileChecks
    """Called before anything is read: compares checksums, or fetches what will be read."""
    checksum: Callable[[str], str | None]
    """Name of a file → its checksum, or None if contents are not compared; raises for files that are not listed."""
    check_content: Callable[[], None]
    """Reads every file and compares its checksum."""


class Folder(ABC):
    """A path or URI of a checkpoint, of weights, or of numbered checkpoints, which may not exist yet.

    Args:
        path: as the user gave it, or a URI.
    """

    path: Path
    on_this_machine: ClassVar[bool]
    """Whether it is a path of a file system, not a URI."""

    @property
    @abstractmethod
    def absolute(self) -> Path:
        """The absolute path, which does not depend on the working directory."""

    # Training states

    def begin(
        self,
        coordinator: Coordinator,
        *,
        each_node: bool = False,
        disk: Disk = LOCAL,
        prepare: Callable[[], Any] = lambda: None,
    ) -> Transaction:
        """Begin to save a checkpoint here. Collective; see `Transaction`.

        Args:
            coordinator: the ranks.
            each_node: one rank of every node commits a folder of its node, for file systems that nodes do not share.
            disk: the local file system.
            prepare: called on every rank in the same exchange.

        Raises:
            CheckpointSaveError: the save cannot begin, here or on another rank; nothing is changed.
        """
        transaction = self._transaction(coordinator, each_node, disk)
        transaction.begin(prepare, one_folder=not each_node)
        return transaction

    @abstractmethod
    def _transaction(self, coordinator: Coordinator, each_node: bool, disk: Disk) -> Transaction:
        """A transaction that has not begun."""

    @abstractmethod
    def open(self, verify: bool, manifest: bytes | None = None) -> OpenFolder:
        """Open the checkpoint that is here.

        Args:
            verify: compare checksums of what is read.
            manifest: the text of its manifest, where another rank has read it and compared the sizes of all files.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or it is not complete.
            CheckpointVersionError: a newer version wrote it.
            CorruptCheckpointError: its manifest is damaged, or a file is missing or has another size.
        """

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether a complete checkpoint of this library is here."""

    @abstractmethod
    def has_manifest(self) -> bool:
        """Whether a checkpoint of this library is here, perhaps one that is damaged."""

    @abstractmethod
    def modified(self) -> float | None:
        """When the checkpoint that is here became complete, in seconds since the epoch; None: it is not known."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names of what is in it; none if it does not exist."""

    @abstractmethod
    def unfinished(self) -> dict[str, bool]:
        """What saves and removals that have not finished left in it, and whether each is known to have ended."""

    def _numbered(self, prefix: str) -> list[tuple[int, str]]:
        """The numbers and names of what is named ``<prefix><n>``, in rising order."""
        matches = filter(None, map(re.compile(re.escape(prefix) + r"(\d+)").fullmatch, self.names()))
        return sorted((int(match[1]), match[0]) for match in matches)

    @abstractmethod
    def complete_checkpoints(self, prefix: str) -> list[Path]:
        """The complete checkpoints ``<prefix><number>`` in it, oldest first."""

    @abstractmethod
    def checkpoints_from(self, number: int, prefix: str) -> list[Path]:
        """List everything in it named ``<prefix><n>`` with n of at least `number`, in rising order."""

    @abstractmethod
    def prune_checkpoints(self, keep: int, prefix: str, disk: Disk) -> list[Path]:
        """Remove the oldest complete checkpoints until `keep` are left; warns of those that cannot be removed."""

    # Weights and single files, for other programs to read

    @abstractmethod
    def check_for_weights(self) -> None:
        """Refuse to write weights over a file or a training state.

        Raises:
            CheckpointSaveError: the path is one of these, or cannot be read.
        """

    @abstractmethod
    def publish_weights(
        self, writers: Writers, index: tuple[str, str] | None, disk: Disk = LOCAL
    ) -> tuple[str, ...]:
        """Replace the weights as a whole, see `WeightSwitch`; files of weights that were there are removed.

        Args:
            writers: what writes each file.
            index: name and text of the index, if there is to be one.
            disk: the local file system.

        Returns:
            The names of the files written, the index included.

        Raises:
            CheckpointSaveError: see `WeightSwitch.run`.
        """

    @abstractmethod
    def write_file(self, name: str, write: Callable[[Path, Disk], FileRecord]) -> None:
        """Replace one file in it, in one step."""

    @abstractmethod
    def file(self, name: str) -> AbstractContextManager[Path]:
        """Context with a local copy of a file in it; a mapped file stays readable afterwards.

        Raises:
            CheckpointNotFoundError: there is no such object.
        """

    @abstractmethod
    def local_weights(self) -> tuple[Path, Callable[[], object]]:
        """Make the weights here, also those of a training state, available as local files.

        Returns:
            The local file or folder, and an object that removes it; it exists as long as that object is in use.
        """
