"""Torch's iterators over a loader, with some of its attributes replaced for one iterator alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["torch_iterator"]


def torch_iterator(loader: DataLoader[Any], replaced: Mapping[str, Any]) -> Iterator[Any]:
    """The iterator that torch makes of a loader; one that lasts over several epochs begins again.

    Args:
        loader: the loader, which stays as it is: users keep seeing their own functions and generators.
        replaced: by name, attributes in the place of the loader's own.
    """
    return DataLoader.__iter__(_View(loader, replaced))  # type: ignore[arg-type]


class _View:
    """A loader as an iterator of torch sees it."""

    _get_iterator = DataLoader._get_iterator

    def __init__(self, loader: DataLoader[Any], replaced: Mapping[str, Any]) -> None:
        self.__dict__.update({**vars(loader), **replaced, "_loader": loader})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)  # a property

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        setattr(self._loader, name, value)  # workers that stay are the loader's
