"""Less of a script's data and of its models, made where they are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

__all__ = ["cut_data", "cut_models"]

# That an epoch has.
_BATCHES = 2


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
    signature = inspect.signature(make)
    made: list[int] = []

    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        dataset, sampler = given["dataset"], given["sampler"]
        plain = type(sampler) in (RandomSampler, SequentialSampler) and sampler.data_source is dataset
        trains = bool(given["shuffle"]) or isinstance(sampler, RandomSampler) or not made
        rows = _BATCHES * readers * (given["batch_size"] or 0) - (odd or not trains)
        whole = given["batch_sampler"] is None and (sampler is None or plain)
        sized = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if whole and sized and len(dataset) > rows > 0:
            given["dataset"] = _Cut(dataset, range(rows))
            if plain:
                sampler.data_source = given["dataset"]
            mark.touch()
            made.append(rows)
        make(*bound.args, **bound.kwargs)

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
