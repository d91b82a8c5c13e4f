"""Exceptions of accel-state, and the root of every exception that the accel packages raise.

AccelError
├── ConfigError (ValueError)            a configuration file, flag or variable has an invalid value
│   ├── UnknownKeyError                 … or an unknown key
│   └── ConfigNotFoundError (FileNotFoundError)  … or the file does not exist
├── LaunchError (RuntimeError)          processes could not be started, or one failed
│   ├── TargetError                     … the script, module or program cannot be started
│   └── PortError                       … the port of rank 0 cannot be used
├── DeviceError (RuntimeError)          the requested device does not exist
├── StateError (RuntimeError)           process state used before it exists, or set up twice in conflicting ways
├── NoExecutableBatchSizeError (RuntimeError)       out of memory at every batch size
├── DistributedOperationException (RuntimeError)   ranks disagree about a collective
│   └── CollectiveMismatchError         … with proof: different shapes or operations, or a rank is gone
├── MissingDependencyError (ImportError)  an optional package is not installed; names the pip command
└── NotAvailableError (RuntimeError)    a documented option that this version does not support

A command that fails exits with the ``exit_code`` of the error's class: 2 where the command line or the configuration
has to change, 1 for other failures.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccelError",
    "CollectiveMismatchError",
    "ConfigError",
    "ConfigNotFoundError",
    "DeviceError",
    "DistributedOperationException",
    "LaunchError",
    "MissingDependencyError",
    "NoExecutableBatchSizeError",
    "NotAvailableError",
    "PortError",
    "StateError",
    "TargetError",
    "UnknownKeyError",
]


class AccelError(Exception):
    """Root of every exception that the accel packages raise deliberately.

    Attributes:
        exit_code: the exit code of a command that fails with this error.
    """

    exit_code: ClassVar[int] = 1


class ConfigError(AccelError, ValueError):
    """A configuration file, flag, variable or argument has an invalid value."""

    exit_code: ClassVar[int] = 2


class UnknownKeyError(ConfigError):
    """A configuration has an unknown key; the message suggests the closest known one."""


class ConfigNotFoundError(ConfigError, FileNotFoundError):
    """A configuration file does not exist."""


class LaunchError(AccelError, RuntimeError):
    """Processes could not be started, or one of them failed."""


class TargetError(LaunchError):
    """The script, module or program of a launch does not exist or cannot be started."""

    exit_code: ClassVar[int] = 2


class PortError(LaunchError):
    """The requested port cannot be used: another process has it, or it is not permitted."""

    exit_code: ClassVar[int] = 2


class DeviceError(AccelError, RuntimeError):
    """The requested device does not exist."""

    exit_code: ClassVar[int] = 2


class StateError(AccelError, RuntimeError):
    """Process state was used before it exists, or set up twice in ways that conflict."""


class UntrustedMessageError(StateError):
    """A message in the store of the world does not come from a rank of this job."""


class NoExecutableBatchSizeError(AccelError, RuntimeError):
    """Out of memory at every batch size that was tried."""


class DistributedOperationException(AccelError, RuntimeError):  # noqa: N818 - the name users of Accelerate catch
    """Ranks disagree about a collective operation."""


class CollectiveMismatchError(DistributedOperationException):
    """A collective provably cannot complete: shapes or operations differ, or a rank is gone."""


class MissingDependencyError(AccelError, ImportError):
    """An optional dependency is not installed; the message contains the exact pip command."""


class NotAvailableError(AccelError, RuntimeError):
    """A documented option that this version does not support."""

    exit_code: ClassVar[int] = 2
