"""Less of a script's data and of its models, made where they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

__all__ = ["cut_data", "cut_models"]

_BATCHES = 2
"""That an epoch has."""


class _Cut(Subset[Any]):
    """The first samples of a dataset, with the attributes of the dataset."""

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.dataset, name)


def cut_data(odd: bool, mark: Path, readers: int) -> None:
    """Let each epoch of loaders that the script makes end after two batches.

    Loaders that train have whole batches: the first, and those that shuffle. Of others the last batch lacks a sample,
    so that ranks cannot divide it. Loaders of streams, and with a sampler of the script's own, stay as they are.

    Args:
        odd: loaders that train lack a sample, too.
        mark: a file that is made if a loader was cut.
        readers: how many ranks have such a batch each.
    """
    make: Callable[..., None] = DataLoader.__init__
    made: list[int] = []

    def init(
        self: Any,
        dataset: Any,
        batch_size: Any = 1,
        shuffle: Any = None,
        sampler: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        plain = type(sampler) in (RandomSampler, SequentialSampler) and sampler.data_source is dataset
        trains = bool(shuffle) or isinstance(sampler, RandomSampler) or not made
        rows = _BATCHES * readers * (batch_size or 0) - (odd or not trains)
        whole = not args and kwargs.get("batch_sampler") is None and (sampler is None or plain)
        if (
            whole
            and hasattr(dataset, "__getitem__")
            and hasattr(dataset, "__len__")
            and len(dataset) > rows > 0
        ):
            dataset = _Cut(dataset, range(rows))
            if plain:
                sampler.data_source = dataset
            mark.touch()
            made.append(rows)
        make(self, dataset, batch_size, shuffle, sampler, *args, **kwargs)

    DataLoader.__init__ = init  # type: ignore[method-assign] # this process runs nothing but the script


def cut_models(layers: int) -> None:
    """Keep so many blocks of each stack of equal ones: neighbours in a list whose parameters have the same shapes.

    Models of transformers are made without memory first, so those that it does not hold can be cut, too.
    """
    make: Callable[..., None] = nn.ModuleList.__init__

    def init(self: Any, modules: Iterable[nn.Module] | None = None) -> None:
        kept: list[nn.Module] = []
        before, alike = None, 0
        for block in modules or ():  # made one after the other, if the script does not hold all
            kind = (type(block), *(tuple(value.shape) for value in block.parameters()))
            alike = alike + 1 if kind == before and any(block.children()) else 1
            before = kind
            if alike <= layers:
                kept.append(block)
        make(self, kept)

    nn.ModuleList.__init__ = init  # type: ignore[method-assign] # this process runs nothing but the script
