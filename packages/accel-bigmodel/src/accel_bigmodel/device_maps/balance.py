"""Budgets that spread a model evenly over the accelerators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from accel_bigmodel.device_maps.budget import HOST_PLACES, DeviceKey, Size, Sizes, memory_budgets
from accel_bigmodel.device_maps.model_outline import class_names, get_module_leaves
from accel_ckpt.modules.sizes import DType, compute_module_sizes

__all__ = ["get_balanced_memory"]

# Share of its free memory that a single device keeps for activations when no budget was given.
_KEPT_OF_A_SINGLE_DEVICE = 0.1
# An even share does not end at a layer boundary, so each device gets this many layers more.
_EXTRA_LAYERS = 1.25


def get_balanced_memory(
    model: nn.Module,
    max_memory: Sizes | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
    low_zero: bool = False,
    *,
    reserve: Size | Sizes | None = None,
) -> dict[DeviceKey, float]:
    """Compute budgets for ``infer_auto_device_map`` that spread the model evenly over the accelerators.

    Each accelerator except the last gets its share of the model plus 1.25 times the larger of an unsplittable block and
    the mean layer, but never more than its maximum. A single accelerator keeps a tenth free if neither a budget nor a
    reserve is given.

    Args:
        model: on any device, also meta.
        max_memory: the maximum of each device, as for ``get_max_memory``; devices with 0 are not counted.
        no_split_module_classes: classes whose modules stay whole.
        dtype: dtype that the weights will have.
        special_dtypes: dtypes of single tensors by name.
        low_zero: give device 0 only what the others cannot take, to keep it free for other work.
        reserve: bytes to leave free, as for ``get_max_memory``.

    Raises:
        DeviceMapError: from ``get_max_memory``.
    """
    budgets = memory_budgets(max_memory, reserve=reserve)
    counted = [device for device in budgets if device not in HOST_PLACES and budgets[device] > 0]
    if not counted:
        return budgets
    if len(counted) == 1:
        low_zero = False
        if max_memory is None and reserve is None and counted[0] != "mps":
            budgets[counted[0]] = int(budgets[counted[0]] * (1 - _KEPT_OF_A_SINGLE_DEVICE))
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    share = sizes[""] // (len(counted) - 1 if low_zero else len(counted))
    share += int(_EXTRA_LAYERS * max(_block(model, sizes, no_split_module_classes), _mean_leaf(sizes)))
    indices = sorted(device for device in counted if isinstance(device, int))
    for index in indices[:-1]:
        if not (low_zero and index == 0):
            budgets[index] = min(share, budgets[index])
    if low_zero and 0 in indices:
        others = sum(budgets[index] for index in indices if index != 0)
        budgets[0] = min(max(0, sizes[""] - others), budgets[0])
    return budgets


def _block(model: nn.Module, sizes: Mapping[str, int], classes: str | Iterable[str] | None) -> int:
    """Bytes of the largest unsplittable block; of each class only the first block counts."""
    wanted = class_names(classes)
    first: dict[str, int] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name in sizes and name and kind in wanted:
            first.setdefault(kind, sizes[name])
    return max(first.values(), default=0)


def _mean_leaf(sizes: Mapping[str, int]) -> int:
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    leaves = get_module_leaves(modules)
    return int(sum(modules[name] for name in leaves) / max(len(leaves), 1))
