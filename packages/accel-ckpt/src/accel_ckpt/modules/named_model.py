"""A module whose canonical names are computed once and used by all steps of a save or a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from torch import nn

from accel_ckpt.modules.names import by_prefix, own_versions, prefixed_modules, refuse_collisions
from accel_ckpt.modules.versions import with_versions
from accel_ckpt.parts import reshard

__all__ = ["NamedModel", "named_models"]

T = TypeVar("T")


class NamedModel:
    """A module and the canonical names of its tensors. The tree of modules is walked once, at the first use.

    Args:
        module: wrapped or not; its submodules must not change while this object is in use.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._names: dict[str, str] = {}  # own name → canonical, once they are asked for

    @cached_property
    def _modules(self) -> list[tuple[str, str, nn.Module]]:
        return prefixed_modules(self.module)

    @cached_property
    def _prefixes(self) -> dict[str, str]:
        return {prefix: canonical for prefix, canonical, _ in self._modules}

    @cached_property
    def _versions(self) -> dict[str, int]:
        return own_versions(self._modules)

    def _sharded(self) -> nn.Module:
        """The module, with this rank's parts in the place of what a forward may have left gathered."""
        reshard(self.module)
        return self.module

    def canonical(self, named: Mapping[str, T]) -> dict[str, T]:
        """Rename a mapping by the module's own names to canonical names.

        Raises:
            NameCollisionError: two names become the same.
        """
        if unknown := named.keys() - self._names.keys():
            self._names |= {name: by_prefix(name, self._prefixes) for name in unknown}
            refuse_collisions(list(self._names.items()))
        return {self._names[name]: value for name, value in named.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state dict, whose tensors are the module's own."""
        return with_versions(self.canonical(self._sharded().state_dict()), self._versions)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by every name that they have."""
        return self.canonical(dict(self._sharded().named_parameters(remove_duplicate=False)))

    def buffers(self) -> dict[str, Any]:
        """Buffers by name, including those that a state dict leaves out."""
        return self.canonical(dict(self._sharded().named_buffers()))


def named_models(models: Sequence[nn.Module | NamedModel]) -> list[NamedModel]:
    """Return the models, each as a ``NamedModel``."""
    return [model if isinstance(model, NamedModel) else NamedModel(model) for model in models]
