"""The part of `Accelerator` with the lists of what is prepared and registered, under Accelerate's names."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from typing import Any, TypeVar

from torch import nn

from accel_train.loop.optimizer import AcceleratedOptimizer
from accel_train.loop.scheduler import AcceleratedScheduler
from accel_train.setup.prepared import Prepared

__all__ = ["ClientListsView"]

T = TypeVar("T")


class ClientListsView:
    """Lists that clients of Accelerate read and write; what is not in them is not part of a state."""

    _prepared: Prepared

    @property
    def _models(self) -> MutableSequence[nn.Module]:
        return self._prepared.models_view()

    @_models.setter
    def _models(self, models: Iterable[nn.Module]) -> None:
        _replace(self._models, models)

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self._prepared.optimizers

    @_optimizers.setter
    def _optimizers(self, optimizers: Iterable[AcceleratedOptimizer]) -> None:
        _replace(self._prepared.optimizers, optimizers)

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self._prepared.schedulers

    @_schedulers.setter
    def _schedulers(self, schedulers: Iterable[AcceleratedScheduler]) -> None:
        _replace(self._prepared.schedulers, schedulers)

    @property
    def _dataloaders(self) -> list[Any]:
        return self._prepared.loaders

    @_dataloaders.setter
    def _dataloaders(self, loaders: Iterable[Any]) -> None:
        _replace(self._prepared.loaders, loaders)

    @property
    def _custom_objects(self) -> MutableSequence[Any]:
        return self._prepared.registered_view()

    @_custom_objects.setter
    def _custom_objects(self, objects: Iterable[Any]) -> None:
        _replace(self._custom_objects, objects)


def _replace(items: MutableSequence[T], values: Iterable[T]) -> None:
    """Give a list other items; it stays the object that others hold."""
    items[:] = list(values)
