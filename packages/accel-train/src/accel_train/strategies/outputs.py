"""Outputs of models that an engine computes, read like those of transformers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor

__all__ = ["EngineOutput"]


class EngineOutput(OrderedDict[str, Any]):
    """Output of a model, read like outputs of transformers: by key, attribute or index, without values of None.

    Attributes:
        loss: loss of this rank's batch, if labels were given.
        logits: logits of this rank's batch, on every rank.
    """

    def __init__(self, loss: Tensor | None = None, logits: Tensor | None = None, **others: Any) -> None:
        found = {"loss": loss, "logits": logits, **others}
        super().__init__((name, value) for name, value in found.items() if value is not None)

    def __getattr__(self, name: str) -> Any:
        if name in ("loss", "logits"):
            return self.get(name)
        if name in self:
            return self[name]
        raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]
