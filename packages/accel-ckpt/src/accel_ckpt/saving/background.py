"""Asynchronous saves: saving while training continues."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from accel_ckpt.coordination.ranks import default_coordinator, run_together
from accel_ckpt.coordination.store import StoreCoordinator, in_background
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import CheckpointSaveError, SaveInProgressError
from accel_ckpt.folders.folder import Transaction
from accel_ckpt.format.memory import HostBuffers
from accel_ckpt.format.tagged_json import Tree
from accel_ckpt.saving.save_state import StateCollector, StateContent, begin_save
from accel_ckpt.saving.staging import Staging

__all__ = ["BackgroundSaver", "SaveHandle", "WhenBusy"]

WhenBusy = Literal["wait", "refuse"]


class SaveHandle:
    """Handle of a save that runs in the background.

    A failure is raised once: by :meth:`result`, the next save, the next load or the end of the training, whichever
    comes first. Later calls of :meth:`result` raise it again.
    """

    def __init__(
        self, transaction: Transaction, staging: Staging, after: Callable[[], object] | None
    ) -> None:
        self._transaction = transaction
        self._staging = staging
        self._after = after
        self._finished = threading.Event()
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._raised = False
        self._process = os.getpid()
        # A lower priority for this thread made saves longer and stalls of the training no shorter.
        self._thread = threading.Thread(target=self._run, name="accel-save", daemon=True)

    @property
    def directory(self) -> Path:
        """The folder of the checkpoint, once the save is complete."""
        return self._transaction.directory

    def done(self) -> bool:
        """Whether the save has ended: the checkpoint is complete and on the disk, or the save failed."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the end of the save.

        Args:
            timeout: seconds; ``None`` waits as long as it takes.

        Returns:
            The checkpoint's folder.

        Raises:
            TimeoutError: the save is still running.
            CheckpointSaveError: the save failed, here or on another rank; an earlier checkpoint is unchanged.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.directory} is still being saved after {timeout:g} s; ask again later")
        self._raised = True
        if self._failure is not None:
            raise self._failure
        return self.directory

    def wait(self) -> None:
        """Wait for the end of the save, without raising; a failure is raised later, as `SaveHandle` describes."""
        self._finished.wait()

    def _settle(self) -> None:
        """Wait for the end, and raise a failure that was not raised before. An interruption ends the save, too."""
        try:
            self._finished.wait()
        except BaseException:
            self._stopped.set()
            self._finished.wait()
            raise
        if not self._raised:
            self.result()

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        try:
            self._settle()
        except Exception as error:  # there is no caller left to raise it to
            print(
                f"accel: saving {self.directory} in the background failed, and the program ended before the error was "
                f"raised: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )
            if getattr(sys, "last_value", None) is None:  # else the status says already that it failed
                global _end
                _end = _EndWithFailure()

    def _why_stopped(self) -> str | None:
        return f"saving {self.directory} was interrupted" if self._stopped.is_set() else None

    def _run(self) -> None:
        try:
            disk = _Stoppable(self._transaction.disk, self._why_stopped)
            self._transaction.complete(lambda folder: self._staging.write(folder, disk))
            if self._after is not None:
                self._after()
        except BaseException as error:  # raised where the save is asked for
            self._failure = error
        finally:
            self._staging.release()
            self._after = None
            if isinstance(self._transaction.coordinator, StoreCoordinator):
                self._transaction.coordinator.leave()
            self._finished.set()


class BackgroundSaver:
    """Saves training states in the background, one after the other, while training continues.

    The call copies the state to host memory; a thread then writes the copies and completes the checkpoint. The memory
    is kept for the next save. Collective methods must be called on all ranks.

    The ranks are those of the process group. Their threads agree through separate connections to the world's store, so
    nothing in the background interferes with the training's collectives.

    Args:
        disk: the file system to write to.
    """

    def __init__(self, disk: Disk = LOCAL) -> None:
        self._disk = disk
        self._begin()

    def _begin(self) -> None:
        self._waits_early = False
        self._buffers = HostBuffers()
        self._current: SaveHandle | None = None
        self._process = os.getpid()

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        models: Sequence[Mapping[str, Any]],
        shared: Mapping[str, Tree],
        per_rank: Mapping[str, Tree],
        when_busy: WhenBusy = "wait",
        after: Callable[[], object] | None = None,
        **options: Any,
    ) -> SaveHandle:
        """Begin to save a training state. Collective.

        Everything is copied before this method returns, so the checkpoint has the values at the time of the call,
        whatever changes afterwards.

        Args:
            directory: as in :func:`accel_ckpt.save_training_state`, and so are the next three.
            models: full state dicts.
            shared: name → tree.
            per_rank: name → tree.
            when_busy: what to do while an earlier save is running: ``"wait"`` for its end, or ``"refuse"``.
            after: called on every rank, in the background, once the checkpoint is complete.
            options: further arguments of :func:`accel_ckpt.save_training_state`.

        Raises:
            SaveInProgressError: an earlier save is running, and ``when_busy`` is ``"refuse"``.
            CheckpointSaveError: this save cannot begin, or the earlier one failed; nothing is saved then.
            UnsupportedValueError: a value in a tree cannot be saved exactly.
        """
        content = StateContent(models=models, shared=shared, per_rank=per_rank, **options)
        return self.save_collected(directory, content, when_busy=when_busy, after=after)

    def save_collected(
        self,
        directory: str | os.PathLike[str],
        content: StateCollector,
        *,
        when_busy: WhenBusy = "wait",
        after: Callable[[], object] | None = None,
    ) -> SaveHandle:
        """Save like :meth:`save`, with content that is given or that each rank collects. Collective."""
        self.make_room(when_busy)
        ranks = default_coordinator()
        transaction, plan = begin_save(directory, content, ranks, self._disk)
        staged: list[SaveHandle] = []

        def stage() -> None:
            plan.check()
            save = SaveHandle(transaction, Staging(plan, self._buffers), after)
            staged.append(save)
            transaction.coordinator = in_background(f"save/{transaction.token}", ranks, save._why_stopped)

        try:
            transaction.together(stage)
        except BaseException:
            for save in staged:  # another rank could not
                save._staging.release()
            raise
        [save] = staged
        self._current = save
        atexit.register(save._at_exit)
        if transaction.runs_thread_pools and not self._waits_early:
            _before_thread_pools_end(self)
            self._waits_early = True
        save._thread.start()
        return save

    def make_room(self, when_busy: WhenBusy = "wait") -> None:
        """Wait until no save is running. Collective.

        Raises:
            SaveInProgressError: a save is running, and ``when_busy`` is ``"refuse"``.
            CheckpointSaveError: the earlier save failed.
        """
        _check_when_busy(when_busy)
        save = self._own()
        if save is None:
            return
        ranks = default_coordinator()
        if when_busy == "refuse":
            busy = [rank for rank, done in enumerate(ranks.exchange(save.done())) if not done]
            if busy:
                raise _busy(save, f"ranks {busy}")
        run_together(
            self.drain, ranks, doing=f"saving {save.directory} in the background", error=CheckpointSaveError
        )

    def make_room_alone(self, when_busy: WhenBusy = "wait") -> None:
        """Wait until this rank takes part in no save. Not collective.

        The next collective call raises if the save failed.

        Raises:
            SaveInProgressError: a save is running, and ``when_busy`` is ``"refuse"``.
        """
        _check_when_busy(when_busy)
        save = self._own()
        if save is None:
            return
        if when_busy == "refuse" and not save.done():
            raise _busy(save, "rank 0")
        save.wait()

    def drain(self) -> None:
        """Wait for the end of the running save, if there is one. Not collective.

        Raises:
            CheckpointSaveError: the save failed, and the error was not raised before.
        """
        save = self._own()
        if save is None:
            return
        self._current = None
        try:
            save._settle()
        finally:
            atexit.unregister(save._at_exit)

    def _own(self) -> SaveHandle | None:
        if self._process != os.getpid():  # a forked child has neither the thread nor the duty
            self._begin()
        return self._current

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without the saves of this one."""
        return {"_disk": self._disk}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def _check_when_busy(when_busy: str) -> None:
    if when_busy not in ("wait", "refuse"):
        raise ValueError(f"when_busy is {when_busy!r}; it is 'wait' or 'refuse'")


def _busy(save: SaveHandle, ranks: str) -> SaveInProgressError:
    return SaveInProgressError(
        f"{save.directory} is still being saved in the background ({ranks}); wait for its handle's "
        "result(), or pass when_busy='wait'"
    )


class _Stoppable(Disk):
    """A disk to which files are written until the save is to stop."""

    def __init__(self, disk: Disk, why_stopped: Callable[[], str | None]) -> None:
        self._disk = disk
        self._why_stopped = why_stopped

    def open_new(self, path: Path) -> int:
        return self._disk.open_new(path)

    def set_direct(self, descriptor: int, direct: bool) -> bool:
        return self._disk.set_direct(descriptor, direct)

    def write(self, descriptor: int, data: memoryview) -> int:
        reason = self._why_stopped()
        if reason is not None:
            raise CheckpointSaveError(reason)
        return self._disk.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self._disk.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        self._disk.close(descriptor)


class _EndWithFailure:
    """Ends the process with status 1 when the interpreter is torn down, after all that others do at exit.

    An exit function cannot change the status, and cannot see the one that the program gave to ``sys.exit``.
    """

    def __del__(self, leave: Callable[[int], Any] = os._exit) -> None:
        leave(1)


_end: _EndWithFailure | None = None


def _before_thread_pools_end(saver: BackgroundSaver) -> None:
    """Let the end of the program wait for the last save of a saver while thread pools, which fsspec needs, still run.

    Functions of ``atexit`` come after their end.
    """
    known = weakref.ref(saver)

    def wait() -> None:
        saver = known()
        save = None if saver is None else saver._own()
        if save is not None:
            save.wait()

    register: Callable[[Callable[[], None]], None] | None = getattr(threading, "_register_atexit", None)
    if register is not None:  # no public function does it
        register(wait)
