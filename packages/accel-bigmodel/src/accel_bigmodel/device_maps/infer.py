"""Inferring device maps: which part of a model goes to which device.

A map is a dictionary from names of modules (or tensors) to devices: the index of an accelerator, ``"mps"``, ``"cpu"``
or ``"disk"``. Inference is a pure function of the model's shapes and the budgets.

The maps are those of Accelerate 1.15 wherever those are valid. They differ where Accelerate's map

- leaves a tensor without a device: direct buffers of a module that was split;
- keeps no room for an offloaded layer on the accelerator that computes: when the first one stays empty, or when the
  layer is a direct parameter (such as stacked experts) instead of a module;
- exceeds a budget, including one for the disk;
- cannot be computed, because a tied parameter is a direct one or is in two children of the same parent.

Booleans count the byte that they take, not an eighth of it.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from accel_bigmodel.device_maps.balance import get_balanced_memory
from accel_bigmodel.device_maps.budget import HOST_PLACES, DeviceKey, Size, Sizes, memory_budgets
from accel_bigmodel.device_maps.checks import execution_device
from accel_bigmodel.device_maps.contiguous import assign_in_order
from accel_bigmodel.device_maps.device_usage import Usage, main_device_of
from accel_bigmodel.device_maps.explain import DeviceMapExplanation, explanation_of
from accel_bigmodel.device_maps.greedy import Assignment, assign_greedily
from accel_bigmodel.device_maps.model_outline import Outline
from accel_bigmodel.errors import DeviceMapError
from accel_ckpt.modules.sizes import DType
from accel_ckpt.modules.ties import find_tied_parameters
from accel_state.messages import warn

__all__ = [
    "check_tied_parameters_in_config",
    "clean_device_map",
    "explain_device_map",
    "infer_auto_device_map",
    "resolve_device_map",
]

MODES = ("auto", "balanced", "balanced_low_0", "sequential")
Device = TypeVar("Device", DeviceKey, torch.device, DeviceKey | torch.device)
logger = logging.getLogger(__name__)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Sizes | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    *,
    reserve: Size | Sizes | None = None,
    strict: bool = False,
) -> dict[str, DeviceKey]:
    """Infer a device map that fills the accelerators in order, then host memory, then the disk.

    The order of the model's parts is kept, tied parts go to one device, and devices through which offloaded layers pass
    keep room for the largest of them: the accelerator that computes with offloaded layers, and the host for layers on
    disk. If greedy assignment does not achieve that, the best partition of the layers in order is searched.

    Args:
        model: on any device, also meta; only names, shapes and dtypes are used.
        max_memory: bytes or sizes by device, as for ``get_max_memory``. The disk has no limit unless one is given.
        no_split_module_classes: classes whose modules stay whole, for example because of residual connections.
        dtype: dtype that the weights will have; floating-point tensors count with at most its size.
        special_dtypes: dtypes of single tensors by name.
        verbose: print the map as a table with reasons.
        clean_result: merge parts on one device into their common module.
        offload_buffers: the buffers of offloaded modules will be offloaded too; without it, a warning is given if no
            accelerator has room for them.
        fallback_allocation: before leaving a device without any part, search for a later part that fits.
        reserve: bytes to leave free for activations and the KV cache, as for ``get_max_memory``.
        strict: refuse budgets that leave every accelerator of ``max_memory`` empty. Without it the CPU computes, and
            the memory that an accelerator would have needed is logged.

    Raises:
        DeviceMapError: no map fits the budgets; the message says what is missing. Or see ``get_max_memory``.
    """
    budgets = _with_disk(memory_budgets(max_memory, reserve=reserve))
    outline = Outline.of(model, no_split_module_classes, dtype, special_dtypes)
    device_map = _infer(outline, budgets, fallback_allocation, strict, offload_buffers)
    if clean_result:
        clean_device_map(device_map)
    if verbose:
        print(explanation_of(outline, device_map, budgets))
    return device_map


def _infer(
    outline: Outline, budgets: Mapping[DeviceKey, float], fallback: bool, strict: bool, offload_buffers: bool
) -> dict[str, DeviceKey]:
    """The map of ``infer_auto_device_map`` before merging, for parsed budgets."""
    _warn_if_untied(outline)
    _warn_if_no_class_is_there(outline)
    device_map = _choose(outline, budgets, fallback, strict)
    if not offload_buffers:
        _warn_about_buffers(Usage.of(outline, device_map), budgets)
    return device_map


def _choose(
    outline: Outline, budgets: Mapping[DeviceKey, float], fallback: bool, strict: bool
) -> dict[str, DeviceKey]:
    offered = [device for device, size in budgets.items() if device not in HOST_PLACES and size > 0]
    refuse_empty = strict and bool(offered) and outline.sizes[""] > 0
    greedy = assign_greedily(outline, budgets, fallback)
    problems = _problems(outline, greedy, budgets)
    if problems or (refuse_empty and main_device_of(greedy.device_map) == "cpu"):
        found = assign_in_order(outline, budgets)
    else:
        found = greedy.device_map
    if found is None or (refuse_empty and main_device_of(found) == "cpu"):
        raise DeviceMapError(_nothing_fits(outline, greedy, problems))
    _log_devices_left_empty(greedy)
    return found


def _nothing_fits(outline: Outline, greedy: Assignment, problems: Sequence[str]) -> str:
    largest, names = outline.largest(outline.roots())
    text = "; ".join(problems)
    if not text:
        needs = " or ".join(
            f"{size} bytes on {device!r}"
            for device, size in greedy.too_small.items()
            if device not in HOST_PLACES
        )
        text = (
            "no accelerator can hold a layer beside the largest of the offloaded layers, which pass through it; the "
            f"first part needs {needs}"
        )
    return (
        f"no device map of {type(outline.model).__name__} fits these budgets: {text}. Its largest layer, "
        f"{names[0]!r}, takes {largest} bytes of {outline.sizes['']}. Give the devices more in max_memory, lower the "
        "reserve, load with a smaller dtype, or allow more classes to be split; cpu_offload and disk_offload need "
        "room for the largest layer only"
    )


def _problems(outline: Outline, placed: Assignment, budgets: Mapping[DeviceKey, float]) -> list[str]:
    if not placed.complete:
        full = ", ".join(f"{device!r}: {int(size)}" for device, size in budgets.items() if size < math.inf)
        return [f"the parts in order do not fit the devices ({full} bytes)"]
    return Usage.of(outline, placed.device_map).complaints(budgets)


def _log_devices_left_empty(placed: Assignment) -> None:
    if placed.too_small:
        needs = ", ".join(
            f"{device!r} with at least {size} bytes" for device, size in placed.too_small.items()
        )
        logger.info(
            "Some devices got no part of the model because of insufficient memory. The next part in order would have "
            "fitted %s. max_memory sets the memory of a device.",
            needs,
        )


def _warn_about_buffers(usage: Usage, budgets: Mapping[DeviceKey, float]) -> None:
    accelerators = [device for device in budgets if device not in HOST_PLACES]
    if not accelerators or usage.buffers == 0:
        return
    if all(usage.room(device, budgets) < usage.buffers for device in accelerators):
        warn(
            f"the buffers of the offloaded modules take {usage.buffers} bytes, and no accelerator has that much left "
            "in its budget; offload_buffers=True offloads them too",
        )


def _warn_if_untied(outline: Outline) -> None:
    if not find_tied_parameters(outline.model) and check_tied_parameters_in_config(outline.model):
        logger.warning(
            "The configuration of %s declares tied weights, but none of its parameters are tied. Call its "
            "tie_weights() before the map is inferred, otherwise they are counted and assigned twice.",
            type(outline.model).__name__,
        )


def _warn_if_no_class_is_there(outline: Outline) -> None:
    """Warn if no class exists in the model; some may belong to other models that a script supports."""
    classes = {type(module).__name__ for module in outline.model.modules()}
    if outline.no_split and outline.no_split.isdisjoint(classes):
        name = min(outline.no_split)
        close = difflib.get_close_matches(name, classes, n=1)
        logger.warning(
            "%s has no module of the classes in no_split_module_classes (%s), so any of its modules may be split.%s",
            type(outline.model).__name__,
            ", ".join(sorted(outline.no_split)),
            f" Is {close[0]!r} meant by {name!r}?" if close else "",
        )


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a transformers model should have tied weights, according to its configuration or its modules."""
    if "PreTrainedModel" not in [base.__name__ for base in type(model).__mro__]:
        return False
    config = getattr(model, "config", None)
    if config is None:
        return any(hasattr(module, "_tie_weights") for module in model.modules())
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    outputs = getattr(model, "get_output_embeddings", lambda: None)
    words = getattr(text, "tie_word_embeddings", False) and outputs() is not None
    both = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return bool(words or both or any(hasattr(module, "_tie_weights") for module in model.modules()))


def resolve_device_map(
    model: nn.Module,
    device_map: str | Mapping[str, Device],
    max_memory: Sizes | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
    offload_buffers: bool = False,
    *,
    reserve: Size | Sizes | None = None,
    strict: bool = False,
) -> dict[str, DeviceKey] | dict[str, Device]:
    """Resolve ``device_map``: a copy of a given map, or a map inferred by a named method.

    ``"auto"`` and ``"balanced"`` spread the model evenly over the accelerators, ``"balanced_low_0"`` keeps the first
    one as free as possible, and ``"sequential"`` fills one after another. The other arguments are those of
    ``infer_auto_device_map``.

    Raises:
        DeviceMapError: ``device_map`` is another word; or see ``infer_auto_device_map``.
    """
    if not isinstance(device_map, str | Mapping):
        raise DeviceMapError(
            f"device_map is {device_map!r}; give one of {', '.join(map(repr, MODES))}, or a map from names of modules "
            f"to devices, such as {{'': {device_map!r}}} for everything on one device"
        )
    if isinstance(device_map, Mapping):
        return dict(device_map)
    budgets = _budgets_of_mode(
        model, device_map, max_memory, no_split_module_classes, dtype, special_dtypes, reserve
    )
    outline = Outline.of(model, no_split_module_classes, dtype, special_dtypes)
    return clean_device_map(_infer(outline, _with_disk(budgets), False, strict, offload_buffers))


def _budgets_of_mode(
    model: nn.Module,
    mode: str,
    max_memory: Sizes | None,
    no_split_module_classes: str | Iterable[str] | None,
    dtype: DType | None,
    special_dtypes: Mapping[str, DType] | None,
    reserve: Size | Sizes | None,
) -> dict[DeviceKey, float]:
    if mode not in MODES:
        raise DeviceMapError(
            f"device_map={mode!r} is not one of {', '.join(map(repr, MODES))}; to put everything on one device give a "
            f"map, such as {{'': {mode!r}}}"
        )
    if mode == "sequential":
        return memory_budgets(max_memory, reserve=reserve)
    return get_balanced_memory(
        model,
        max_memory,
        no_split_module_classes,
        dtype,
        special_dtypes,
        low_zero=mode == "balanced_low_0",
        reserve=reserve,
    )


def explain_device_map(
    model: nn.Module,
    device_map: str | Mapping[str, DeviceKey | torch.device] = "auto",
    max_memory: Sizes | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
    *,
    reserve: Size | Sizes | None = None,
) -> DeviceMapExplanation:
    """Explain a device map: the size, device and reason of each entry; prints as a table.

    Args:
        model: on any device, also meta.
        device_map: a map, or one of the words of ``resolve_device_map``, for which one is inferred.
        max_memory: bytes or sizes by device, as for ``get_max_memory``.
        no_split_module_classes: classes whose modules stay whole.
        dtype: dtype that the weights will have.
        special_dtypes: dtypes of single tensors by name.
        reserve: bytes to leave free, as for ``get_max_memory``.

    Raises:
        DeviceMapError: see ``resolve_device_map``.
    """
    outline = Outline.of(model, no_split_module_classes, dtype, special_dtypes)
    if isinstance(device_map, Mapping):
        places = {name: _key(device) for name, device in device_map.items()}
        given = memory_budgets(max_memory, reserve=reserve)
    else:
        given = _budgets_of_mode(
            model, device_map, max_memory, no_split_module_classes, dtype, special_dtypes, reserve
        )
        places = clean_device_map(_infer(outline, _with_disk(given), False, False, False))
    return explanation_of(outline, places, _with_disk(given))


def _key(device: DeviceKey | torch.device) -> DeviceKey:
    """The key of a device in budgets: ``cuda:1`` is 1."""
    if isinstance(device, int) or device in ("disk", "mps", "cpu"):
        return device
    computes = execution_device(device)
    if computes is None:
        return "cpu"
    return computes.type if computes.type in ("mps", "meta") else computes.index


def _with_disk(budgets: Mapping[DeviceKey, float]) -> dict[DeviceKey, float]:
    return {**budgets, "disk": budgets.get("disk", math.inf)}


def clean_device_map(device_map: dict[str, Device], module_name: str = "") -> dict[str, Device]:
    """Merge the entries below a module into one if they all have the same device; changes and returns the map.

    Args:
        device_map: devices by name.
        module_name: merge only below this module; ``""`` is the whole model.
    """
    prefix = f"{module_name}." if module_name else ""
    below = {name: device for name, device in device_map.items() if name.startswith(prefix)}
    joined = _join(module_name, below)
    result: dict[str, Device] = {}
    for name, device in device_map.items():
        if name not in below:
            result[name] = device
        elif joined:
            result.update(joined)  # all of them, at the position of the first
            joined = {}
    device_map.clear()
    device_map.update(result)
    return device_map


def _join(module_name: str, below: Mapping[str, Device]) -> dict[str, Device]:
    if len(below) < 2:
        return dict(below)
    devices = list(below.values())
    if all(device == devices[0] for device in devices):
        return {module_name: devices[0]}
    depth = module_name.count(".") + 2 if module_name else 1
    children: dict[str, dict[str, Device]] = {}
    for name, device in below.items():
        children.setdefault(".".join(name.split(".")[:depth]), {})[name] = device
    return {name: device for child, part in children.items() for name, device in _join(child, part).items()}
