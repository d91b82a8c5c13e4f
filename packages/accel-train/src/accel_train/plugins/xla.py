"""Training on XLA devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from accel_train.errors import ArgumentTypeError
from accel_train.plugins.base import StrategyPlugin

__all__ = ["XlaPlugin"]


@dataclass(frozen=True)
class XlaPlugin(StrategyPlugin):
    """Options of the strategy "xla".

    Args:
        spmd: one process uses all its XLA devices: each holds the whole model, and batches are divided among them along
            their first dimension. False: one device of this process, unless the script called
            `torch_xla.runtime.use_spmd()`.

    Raises:
        ArgumentTypeError: `spmd` is neither True nor False.
    """

    strategy: ClassVar[str] = "xla"

    spmd: bool = False

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.spmd), bool):
            raise ArgumentTypeError(
                f"XlaPlugin(spmd=…) takes True or False, got {type(self.spmd).__name__}: {self.spmd!r:.80}."
            )
