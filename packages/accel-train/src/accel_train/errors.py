"""Exceptions of accel-train.

AccelError
├── OptionError (ValueError)            an argument has a value that cannot be used
│   └── IncompatibleOptionsError        … together with another one
├── ArgumentTypeError (TypeError)       an argument is of a type that cannot be used
├── PrepareError (ValueError)           an object cannot be prepared as asked
├── AmbiguousLoaderError (RuntimeError) several live data loaders could be meant
├── AccumulationError (RuntimeError)    gradient accumulation was used in an invalid way
├── NoGradientError (RuntimeError)      the loss depends on nothing that requires a gradient
├── LossError (RuntimeError)            a loss cannot be computed in the way that was asked for
├── MetricsShapeError (ValueError)      a gathered value does not have one row per sample
├── DividedTensorError (PicklingError)  one rank's part of a tensor would be saved as the whole tensor
├── OffloadedStatesError (RuntimeError) states cannot move to host memory or back, or were used while there
├── StepGuardError (RuntimeError)       too many updates in a row were skipped
├── DataError (ValueError)              a data loader cannot be sharded as asked
├── DispatchError (RuntimeError)        rank 0 could not read, cut or send a batch
├── TrackerError (RuntimeError)         a tracker failed with on_failure="raise"
└── TrackerContractError (NotImplementedError)  a tracker class lacks a required attribute
"""

from __future__ import annotations

import pickle

from accel_state.errors import AccelError

__all__ = [
    "AccumulationError",
    "AmbiguousLoaderError",
    "ArgumentTypeError",
    "DataError",
    "DispatchError",
    "DividedTensorError",
    "IncompatibleOptionsError",
    "LossError",
    "MetricsShapeError",
    "NoGradientError",
    "OffloadedStatesError",
    "OptionError",
    "PrepareError",
    "StepGuardError",
    "TrackerContractError",
    "TrackerError",
]


class OptionError(AccelError, ValueError):
    """An argument has a value that cannot be used."""


class IncompatibleOptionsError(OptionError):
    """Two options exclude each other; the message names both."""


class ArgumentTypeError(AccelError, TypeError):
    """An argument is of a type that cannot be used."""


class PrepareError(AccelError, ValueError):
    """An object cannot be prepared as asked."""


class AmbiguousLoaderError(AccelError, RuntimeError):
    """Several live data loaders could be meant; the message names them."""


class AccumulationError(AccelError, RuntimeError):
    """Gradient accumulation was used in an invalid way; the message says which."""


class DividedTensorError(AccelError, pickle.PicklingError):
    """One rank's part of a tensor would be saved as if it were the whole; the message says what to call."""


class NoGradientError(AccelError, RuntimeError):
    """The loss of a backward pass depends on nothing that requires a gradient."""


class LossError(AccelError, RuntimeError):
    """A loss cannot be computed in the way that was asked for; the message says how it can."""


class OffloadedStatesError(AccelError, RuntimeError):
    """States cannot move to host memory or back, or were used while they are there; the message says what to call."""


class StepGuardError(AccelError, RuntimeError):
    """Too many updates in a row were skipped; the message says why."""


class MetricsShapeError(AccelError, ValueError):
    """A value gathered for metrics does not have one row per sample of the batch."""


class DataError(AccelError, ValueError):
    """A data loader cannot be sharded as asked."""


class DispatchError(AccelError, RuntimeError):
    """Rank 0 could not read, cut or send a batch; the message holds its traceback."""


class TrackerError(AccelError, RuntimeError):
    """A tracker failed, with `init_trackers(on_failure="raise")`; the cause is its own exception."""


class TrackerContractError(AccelError, NotImplementedError):
    """A tracker class lacks a required attribute; the message names it."""
