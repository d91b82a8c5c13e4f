"""Exceptions of accel-ckpt.

AccelError
└── CheckpointError (RuntimeError)
    ├── CheckpointNotFoundError (FileNotFoundError)  there is no checkpoint, file or part of that name
    ├── CheckpointSaveError (OSError)        a save failed; what was there before is still there
    ├── SaveInProgressError                  another save is still running, and the caller did not want to wait
    ├── CorruptCheckpointError (ValueError)  a file is truncated, changed, or not what its header says
    ├── FileChangedError                     a file was changed in place while it was mapped into memory
    ├── CheckpointVersionError (ValueError)  written in a format that this version does not know
    ├── MissingPartError (KeyError)          a part of a training state was not saved
    ├── ObjectStorageError (OSError)         object storage refuses a request, or does not answer
    ├── UnsafeCheckpointError (ValueError)   a file would run code, or a name leaves the folder
    ├── UnsupportedValueError (TypeError)    a value that cannot be saved without pickling
    ├── NameCollisionError (ValueError)      two tensors would be saved under one name
    ├── StateMismatchError (ValueError)      checkpoint and model, or optimizer, disagree
    ├── TransferError                        weights could not be sent to another process
    └── UninitializedTensorError (ValueError)  a tensor would be left on the meta device
"""

from __future__ import annotations

from typing import ClassVar

from accel_state.errors import AccelError

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "CheckpointVersionError",
    "CorruptCheckpointError",
    "FileChangedError",
    "MissingPartError",
    "NameCollisionError",
    "ObjectStorageError",
    "SaveInProgressError",
    "StateMismatchError",
    "TransferError",
    "UninitializedTensorError",
    "UnsafeCheckpointError",
    "UnsupportedValueError",
]


class CheckpointError(AccelError, RuntimeError):
    """Root of the errors about checkpoints."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, file or part of the given name."""

    exit_code: ClassVar[int] = 2


class CheckpointSaveError(CheckpointError, OSError):
    """A save failed; earlier checkpoints are unchanged."""


class SaveInProgressError(CheckpointError):
    """Another save is still running in the background, and the caller did not want to wait for it."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """A file is truncated or changed, or its header does not describe its content."""


class FileChangedError(CheckpointError):
    """A file was changed in place while its content was in use."""


class ObjectStorageError(CheckpointError, OSError):
    """Object storage refuses a request, or does not answer it, also after retries."""


class CheckpointVersionError(CheckpointError, ValueError):
    """A checkpoint was written in a format that this version does not know."""


class MissingPartError(CheckpointError, KeyError):
    """A part of a training state was not saved."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument
        return str(self.args[0]) if self.args else ""


class UnsafeCheckpointError(CheckpointError, ValueError):
    """Reading a file would run code from it, or a name in it leaves the checkpoint's folder."""


class UnsupportedValueError(CheckpointError, TypeError):
    """A value cannot be saved exactly without pickling; the message gives the path to it and its type."""


class NameCollisionError(CheckpointError, ValueError):
    """Two different tensors would be saved under one name."""


class StateMismatchError(CheckpointError, ValueError):
    """Checkpoint and model, or checkpoint and optimizer, disagree about names or shapes."""


class TransferError(CheckpointError):
    """Weights could not be sent to another process, or received from one."""


class UninitializedTensorError(CheckpointError, ValueError):
    """A tensor would be left on the meta device, without values."""
