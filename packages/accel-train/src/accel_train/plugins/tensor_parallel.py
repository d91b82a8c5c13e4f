"""Options of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accel_train.errors import OptionError
from accel_train.plugins.base import StrategyPlugin

__all__ = ["TorchTensorParallelPlugin"]


@dataclass(frozen=True)
class TorchTensorParallelPlugin(StrategyPlugin):
    """Tensor parallelism: train models whose tensors are divided among groups of ranks that read the same samples.

    The script, or transformers by a `tp_plan`, divides the model; this plugin sets the size of the groups in advance.
    Passing one selects the strategy "tp".

    Attributes:
        tp_size: ranks of one group, neighbours by number; None: all ranks.

    Raises:
        OptionError: `tp_size` is not a whole number of at least 1.
    """

    strategy: ClassVar[str] = "tp"
    argument: ClassVar[str] = "torch_tp_plugin"

    tp_size: int | None = None

    def __post_init__(self) -> None:
        size = self.tp_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise OptionError(f"tp_size is {size!r}; expected a whole number of at least 1, or None.")
