"""The interface of a library that computes linear layers in fp8."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["Fp8Layers"]


class Fp8Layers:
    """A library's layers in the place of a model's, and what they need while it trains. Here: none."""

    def convert(self, model: nn.Module) -> nn.Module:
        """Replace layers by the library's; returns `model`, or the layer that replaces it."""
        return model

    def wrap(self, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward of `model` that computes in fp8."""
        return forward

    def before_sharding(self, module: nn.Module, whole: Collection[nn.Parameter]) -> None:
        """See `Precision.before_sharding`."""

    def after_sharding(self, model: nn.Module, prepared: nn.Module) -> None:
        """See `Precision.after_sharding`."""

    def values_changed(self, model: nn.Module) -> None:
        """See `Precision.values_changed`."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has changed parameters."""

    @property
    def has_state(self) -> bool:
        """Whether the layers learn anything beside the parameters."""
        return False

    def state_dict(self) -> dict[str, Any] | None:
        """The state that layers have besides parameters, such as scales; None if there is none."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state_dict` returned."""
