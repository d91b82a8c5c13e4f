"""Exceptions of accel-state, and the root of every exception that the accel packages raise.

AccelError
├── ConfigError (ValueError)            a configuration file, flag or variable has a wrong value
│   ├── UnknownKeyError                 … or a key that does not exist
│   └── ConfigNotFoundError (FileNotFoundError)  … or the file is not there
├── LaunchError (RuntimeError)          processes could not be started, or one failed
├── DeviceError (RuntimeError)          the device asked for is not there
├── StateError (RuntimeError)           process state used before it exists, or twice in conflicting ways
├── NoExecutableBatchSizeError (RuntimeError)       memory ran out at every batch size
├── DistributedOperationException (RuntimeError)   ranks disagree about a collective
│   └── CollectiveMismatchError         … and there is proof: other shapes, another operation, a rank gone
├── MissingDependencyError (ImportError)  an optional package is not installed; names the pip command
└── NotAvailableError (RuntimeError)    a documented option whose feature is not in this version
"""

from __future__ import annotations

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
    "StateError",
    "UnknownKeyError",
]


class AccelError(Exception):
    """Root of every exception that the accel packages raise on purpose."""


class ConfigError(AccelError, ValueError):
    """A configuration file, flag, variable or argument has a value that cannot be used."""


class UnknownKeyError(ConfigError):
    """A configuration has a key that does not exist; the message suggests the nearest one."""


class ConfigNotFoundError(ConfigError, FileNotFoundError):
    """A configuration file is not there."""


class LaunchError(AccelError, RuntimeError):
    """Processes could not be started, or one of them failed."""


class DeviceError(AccelError, RuntimeError):
    """The device that was asked for is not there."""


class StateError(AccelError, RuntimeError):
    """Process state was used before it exists, or set up twice in ways that conflict."""


class NoExecutableBatchSizeError(AccelError, RuntimeError):
    """Memory ran out at every batch size that was tried."""


class DistributedOperationException(AccelError, RuntimeError):  # noqa: N818 - the name users of Accelerate catch
    """Ranks disagree about a collective operation."""


class CollectiveMismatchError(DistributedOperationException):
    """Proof that a collective cannot complete: other shapes, another operation, or a rank that is gone."""


class MissingDependencyError(AccelError, ImportError):
    """An optional dependency is not installed; the message holds the exact pip command."""


class NotAvailableError(AccelError, RuntimeError):
    """A documented option whose feature this version does not have yet."""
