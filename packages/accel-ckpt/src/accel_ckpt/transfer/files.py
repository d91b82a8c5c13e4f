"""Transfers through a folder: each update is a folder of safetensors files, which appears when it is complete."""

from __future__ import annotations

import fnmatch
import os
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from accel_ckpt.coordination.ranks import Coordinator, default_coordinator, run_together
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import CheckpointNotFoundError, CheckpointSaveError, StateMismatchError, TransferError
from accel_ckpt.format.memory import own_memory
from accel_ckpt.loading.weights import WeightSource, open_weights
from accel_ckpt.modules.names import listed
from accel_ckpt.parts import Leaf, fill_part, parts_of, shape_of
from accel_ckpt.saving.save_gathered import save_gathered_model
from accel_ckpt.transfer.offers import OfferedWeights

__all__ = ["WeightFolder"]

_UPDATE = re.compile(r"update-(\d{8,})")


class WeightFolder:
    """A folder in which a training publishes its weights, one subfolder per update.

    Every update is a model as `save_model` writes it: safetensors files of whole weights, and an index if there are
    several. So engines that load a folder can read it without accel-ckpt.

    Args:
        folder: on a file system that trainers and receivers share.
        keep: number of updates that stay; older ones are removed.
        disk: the file system to write to.

    Raises:
        ValueError: `keep` is less than 1.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2, disk: Disk = LOCAL) -> None:
        if keep < 1:
            raise ValueError(
                f"keep={keep} would remove every update; keep at least 1, or 2 for slow receivers"
            )
        self._folder = Path(folder)
        self._keep = keep
        self._disk = disk

    def updates(self) -> list[int]:
        """The numbers of the complete updates, in order."""
        if not self._folder.is_dir():
            return []
        found = (_UPDATE.fullmatch(entry.name) for entry in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match is not None)

    def path(self, update: int) -> Path:
        """The folder of an update."""
        return self._folder / f"update-{update:08d}"

    def publish(
        self,
        offers: OfferedWeights,
        *,
        max_shard_size: int | str = "5GB",
        coordinator: Coordinator | None = None,
    ) -> int:
        """Write the weights' current values as the next update. Collective on the ranks that offer them.

        Weights are gathered one after the other, and the first rank writes them. The update gets its name when it is
        complete and on the disk.

        Args:
            offers: the weights.
            max_shard_size: bytes per file, or a size such as ``"5GB"``.
            coordinator: the ranks; by default all of this process's world.

        Returns:
            The number of the update.

        Raises:
            CheckpointSaveError: it could not be written. Earlier updates are unchanged.
        """
        ranks = coordinator or default_coordinator()
        doing = f"publishing weights in {self._folder}"
        partial = self._folder / ".partial"

        def begin() -> int:
            if ranks.rank:
                return 0
            self._folder.mkdir(parents=True, exist_ok=True)
            if partial.exists():  # of a training that ended while it wrote
                self._disk.remove_tree(partial)
            return max(self.updates(), default=0) + 1

        update: int = run_together(begin, ranks, doing=doing, error=CheckpointSaveError)[0]
        save_gathered_model(offers.state(), partial, max_shard_size, coordinator=ranks, disk=self._disk)

        def commit() -> None:
            if ranks.rank:
                return
            self._disk.sync_directory(partial)
            self._disk.rename(partial, self.path(update))
            self._disk.sync_directory(self._folder)
            for old in self.updates()[: -self._keep]:
                self._disk.remove_tree(self.path(old))

        run_together(commit, ranks, doing=doing, error=CheckpointSaveError)
        return update

    def receive(
        self,
        wants: Mapping[str, Leaf],
        *,
        after: int = 0,
        ignored: Collection[str] = (),
        timeout: float = 300.0,
    ) -> int:
        """Fill tensors from the newest update, as soon as there is one that is newer than the last. Not collective.

        Only what this rank wants is read.

        Args:
            wants: by name, what this rank wants of a weight and where to, as for `WeightTransfer`.
            after: number of the last update that was received.
            ignored: names of weights that this engine does not have, or patterns.
            timeout: seconds to wait for an update.

        Returns:
            The number of the update.

        Raises:
            StateMismatchError: the update has other names, shapes or dtypes; nothing was filled.
            TransferError: there was no new update in time.
        """
        deadline = time.monotonic() + timeout
        while True:
            newest = max(self.updates(), default=0)
            if newest > after:
                source = self._open(newest)
                if source is None:
                    continue
                _check(source, wants, ignored, self.path(newest))
                for name, leaf in wants.items():
                    fill_part(leaf, own_memory(source.tensor(name)))
                source.finish()
                return newest
            if time.monotonic() >= deadline:
                raise TransferError(
                    f"no update after {after} appeared in {self._folder} within {timeout:g} s; the training must call "
                    "publish() with the same folder"
                )
            time.sleep(0.05)

    def _open(self, update: int) -> WeightSource | None:
        """The weights of an update; None if newer ones have replaced it."""
        try:
            return open_weights(self.path(update))
        except (CheckpointNotFoundError, FileNotFoundError):
            if self.path(update).exists():
                raise
            return None


def _check(source: WeightSource, wants: Mapping[str, Leaf], ignored: Collection[str], path: Path) -> None:
    """Refuse an update that does not fit what is wanted."""
    problems = [f"{name!r} is wanted and not there" for name in wants if name not in source.about]
    problems += [
        f"{name!r} is there and not wanted (name it in `ignored` if this engine does not have it)"
        for name in source.about
        if name not in wants and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)
    ]
    for name, leaf in wants.items():
        if name not in source.about:
            continue
        about = source.about[name]
        dtypes = {part.tensor.dtype for part in parts_of(leaf)}
        if tuple(about.shape) != shape_of(leaf) or dtypes - {about.dtype}:
            problems.append(
                f"{name!r} is {list(about.shape)} in {about.dtype} there, and wanted as {list(shape_of(leaf))} in "
                f"{listed(sorted(map(str, dtypes)))}"
            )
    if problems:
        raise StateMismatchError(
            f"the weights in {path} are not those that are wanted: {listed(problems, 8)}"
        )
