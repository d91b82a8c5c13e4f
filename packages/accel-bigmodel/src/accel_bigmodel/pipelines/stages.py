"""Chooses where to split a model into stages of about equal bytes, one per rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from accel_bigmodel.containers import is_container
from accel_bigmodel.device_maps.budget import Sizes, size_in_bytes
from accel_bigmodel.device_maps.model_outline import class_names
from accel_bigmodel.errors import DeviceMapError, PipelineError

__all__ = ["check_split_points", "choose_split_points", "generate_device_map"]


@dataclass(frozen=True)
class _Entry:
    """A module or tensor that stays whole; only a module that is called by others can begin a stage."""

    name: str
    size: int
    is_step: bool


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: str | Collection[str] | None = None,
    max_memory: Sizes | None = None,
) -> dict[str, int]:
    """Split a model, in the order of its modules, into one part per process, minimising the largest part.

    Repeated blocks (the children of a ``ModuleList``) stay whole if there are enough of them.

    Args:
        model: on any device, meta included.
        num_processes: number of parts.
        no_split_module_classes: names of classes whose modules stay whole; None: those that a transformers model
            declares.
        max_memory: bytes (or ``"2GB"``) that each process may hold; None: no limit.

    Returns:
        The process of every module or tensor of the model.

    Raises:
        PipelineError: there are fewer parts than processes, a part is larger than its limit, or a limit is not a size.
    """
    whole = _whole_classes(model, no_split_module_classes)
    entries = _entries(model, whole, num_processes)
    starts = _cut(entries, num_processes)
    device_map = {entry.name: sum(index >= start for start in starts) for index, entry in enumerate(entries)}
    if max_memory is not None:
        _check_memory(entries, device_map, max_memory)
    return device_map


def choose_split_points(
    model: nn.Module, parts: int, no_split_module_classes: str | Collection[str] | None = None
) -> list[str]:
    """Choose the modules that begin the second and later parts of ``generate_device_map``."""
    device_map = generate_device_map(model, parts, no_split_module_classes)
    return [next(name for name, part in device_map.items() if part == index) for index in range(1, parts)]


def check_split_points(model: nn.Module, points: Collection[str], parts: int) -> None:
    """Check that ``points`` are modules of the model and make ``parts`` stages.

    Raises:
        PipelineError: they do not; the message says why.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [point for point in points if point not in modules or not point]
    if unknown:
        raise PipelineError(
            f"split_points contains {', '.join(map(repr, unknown))}, which {type(model).__name__} does not have; use "
            "names from model.named_modules()"
        )
    if len({id(modules[point]) for point in points}) < len(points):
        raise PipelineError(f"split_points contains a module twice: {list(points)}")
    if len(points) != parts - 1:
        raise PipelineError(
            f"{len(points)} split points make {len(points) + 1} stages, but there are {parts} processes; give "
            f"{parts - 1} (the first stage begins with the model), or split_points='auto'"
        )


def _whole_classes(model: nn.Module, asked: str | Collection[str] | None) -> frozenset[str]:
    if asked is None:
        asked = getattr(model, "_no_split_modules", None)
    return class_names(asked)


def _entries(model: nn.Module, whole: frozenset[str], parts: int) -> list[_Entry]:
    for blocks_stay_whole in (True, False):
        entries = list(_walk(model, "", whole, blocks_stay_whole, set()))
        places = len(_places(entries))
        if places >= parts:
            return entries
    kept = f" ({', '.join(sorted(whole))} stay whole)" if whole else ""
    raise PipelineError(
        f"{type(model).__name__} has only {places} parts with weights that can form a stage{kept}, but there are "
        f"{parts} processes; start fewer processes"
    )


def _walk(
    module: nn.Module, prefix: str, whole: frozenset[str], blocks_stay_whole: bool, seen: set[int]
) -> Iterator[_Entry]:
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield _Entry(f"{prefix}{name}", tensor.nbytes, is_step=False)
    for name, child in module.named_children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        stays = (
            type(child).__name__ in whole
            or child._modules.keys() <= {"parametrizations"}
            or isinstance(
                child, nn.MultiheadAttention | ParametrizationList
            )  # they do not call each of their submodules exactly once
            or (blocks_stay_whole and isinstance(module, nn.ModuleList))
        )
        if stays:
            is_step = not (is_container(child) or isinstance(child, ParametrizationList))
            yield _Entry(f"{prefix}{name}", _size(child), is_step)
        else:
            yield from _walk(child, f"{prefix}{name}.", whole, blocks_stay_whole, seen)


def _size(module: nn.Module) -> int:
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    return sum(tensor.nbytes for tensor in tensors)


def _places(entries: list[_Entry]) -> list[int]:
    """The entries at which a stage can begin. Entries before the first one belong to the first stage."""
    return [index for index, entry in enumerate(entries) if entry.is_step and entry.size > 0]


def _cut(entries: list[_Entry], parts: int) -> list[int]:
    """The entries that begin the second and later parts, by dynamic programming over the possible starts."""
    places = [0, *_places(entries)[1:]]
    ends = [*places[1:], len(entries)]
    sizes = [sum(entry.size for entry in entries[start:end]) for start, end in zip(places, ends, strict=True)]
    before = [0]
    for size in sizes:
        before.append(before[-1] + size)
    # largest[i]: size of the largest part when the first i pieces are split into as many parts as rounds were done.
    largest: list[float] = list(before)
    choices: list[list[int]] = []
    for part in range(1, parts):
        best: list[float] = [float("inf")] * len(before)
        choice = [0] * len(before)
        for end in range(part + 1, len(before)):
            for start in reversed(range(part, end)):
                last = before[end] - before[start]
                if last > best[end]:  # and it only grows from here
                    break
                cost = max(largest[start], last)
                if cost <= best[end]:
                    best[end], choice[end] = cost, start
        largest = best
        choices.append(choice)
    starts: list[int] = []
    end = len(sizes)
    for choice in reversed(choices):
        end = choice[end]
        starts.insert(0, places[end])
    return starts


def _check_memory(entries: list[_Entry], device_map: Mapping[str, int], max_memory: Sizes) -> None:
    for part in sorted(set(device_map.values())):
        size = sum(entry.size for entry in entries if device_map[entry.name] == part)
        if part not in max_memory:
            raise PipelineError(
                f"max_memory has no entry for process {part}; its keys are {list(max_memory)}"
            )
        try:
            limit = size_in_bytes(max_memory[part], f"max_memory[{part}]")
        except DeviceMapError as error:
            raise PipelineError(str(error)) from error
        if size > limit:
            raise PipelineError(
                f"process {part} would hold {size} bytes, but max_memory gives it {limit}, and the model cannot be "
                "split more evenly; raise the limit, start more processes, or keep fewer classes whole"
            )
