"""Modules that wrap or divide a model: recognising them, and finding the module inside."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from accel_ckpt.parts import fsdp_modules, sharded_parameters
from accel_train.errors import PrepareError
from accel_train.ranks import Ranks

__all__ = [
    "check_division",
    "check_is_divided",
    "innermost",
    "inside_compiled",
    "is_compiled_module",
    "reduced_by_fsdp",
]


def is_compiled_module(module: Any) -> bool:
    """Whether `module` is what `torch.compile(model)` returns."""
    # Importing torch._dynamo takes a second; nothing is compiled before it has been imported.
    return "torch._dynamo" in sys.modules and isinstance(module, torch._dynamo.OptimizedModule)


def inside_compiled(model: nn.Module) -> nn.Module:
    """The module inside the wrapper of `torch.compile`; `model` itself if it has no such wrapper."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # see above
    compiled = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    return cast(nn.Module, model._orig_mod) if compiled else model


def innermost(model: nn.Module, *unwraps: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The module inside all wrappers, in whatever order they were put on.

    Args:
        model: a wrapper or a module.
        unwraps: each returns the module inside one kind of wrapper, and other modules as they are.
    """
    while True:
        inner = model
        for unwrap in unwraps:
            inner = unwrap(inner)
        if inner is model:
            return model
        model = inner


def check_division(model: nn.Module, batch: Ranks) -> list[Any]:
    """Check that ranks which share a tensor read the same samples, except the ranks among which FSDP divides it.

    Args:
        model: without wrappers.
        batch: the ranks that read different samples.

    Returns:
        The modules that the script has divided with `fully_shard`, which reduces their gradients by itself.

    Raises:
        PrepareError: they do not; the message says how many ranks must.
    """
    units = [*fsdp_modules(model)]
    for unit in units:
        unit.reshard()  # a forward may have left whole weights in place of a rank's parts
    divided = sharded_parameters(model)
    if not divided:
        return units
    engine = reduced_by_fsdp(model)
    partly: dict[str, int] = {}  # how many ranks FSDP averages a gradient over, where these are not all
    for name, parameter in divided.items():
        differing = _differing(parameter, batch)
        wrong = [size for size, _ in differing]
        if id(parameter) in engine:
            averaged = math.prod(wrong)
            if averaged != batch.size:
                partly[name] = averaged
            wrong = [size for size, divides in differing if divides][1:]  # FSDP divides a tensor once
            if wrong and "ep" in _names_of_mesh(parameter):
                raise PrepareError(
                    f"{name!r} of {type(model).__name__} is divided by fully_shard, and once more among ranks that "
                    "read different samples, as transformers divides experts if ep_size is smaller than fsdp_size: "
                    "over which ranks its gradients are averaged is not known. Load the model without "
                    "distributed_config, and pass "
                    f"Accelerator(parallelism_config=ParallelismConfig(ep_size={wrong[-1]}))."
                )
        if wrong:
            raise PrepareError(
                f"{type(model).__name__} is divided among ranks already ({name!r} is a DTensor), and not by "
                "fully_shard alone: ranks that share a tensor must read the same samples, and here each reads its own. "
                f"Set the group size before the model is built: Accelerator(torch_tp_plugin=TorchTensorParallelPlugin("
                f"tp_size={wrong[-1]}))."
            )
    for name, averaged in partly.items():
        raise PrepareError(
            f"fully_shard has divided {name!r} of {type(model).__name__} among {averaged} ranks that read different "
            f"samples, and there are {batch.size}: gradients would be averaged over only a part of them. Pass "
            "fully_shard the mesh of all of them; with tensor parallelism it is "
            "accelerator.torch_device_mesh['dp_replicate']."
        )
    return units


def check_is_divided(model: nn.Module, tp_size: int) -> None:
    """Check that requested tensor parallelism divides parameters of a model.

    Raises:
        PrepareError: no parameter is divided.
    """
    if tp_size > 1 and not sharded_parameters(model):
        raise PrepareError(
            f"tp_size is {tp_size}, and no parameter of {type(model).__name__} is divided: every rank of a group would "
            "compute the same. Divide it before prepare(), with parallelize_module(model, "
            'accelerator.torch_device_mesh["tp"], plan), or load it with transformers: from_pretrained(…, '
            f"distributed_config=DistributedConfig(tp_size={tp_size}))."
        )


def reduced_by_fsdp(model: nn.Module) -> set[int]:
    """The parameters that `fully_shard` divides and whose gradients it reduces, by `id`."""
    return {id(p) for unit in fsdp_modules(model) for p in sharded_parameters(unit).values()}


def _names_of_mesh(parameter: Any) -> tuple[str, ...]:
    return parameter.device_mesh.mesh_dim_names or ()


def _differing(parameter: Any, batch: Ranks) -> list[tuple[int, bool]]:
    """Of the dimensions of a tensor's mesh over ranks that read different samples: size, and whether they divide it."""
    found = []
    for dimension, placement in enumerate(parameter.placements):
        if parameter.device_mesh.size(dimension) == 1:
            continue
        ranks = dist.get_process_group_ranks(parameter.device_mesh.get_group(dimension))
        if len({batch.index_of[rank] for rank in ranks}) > 1:
            found.append((len(ranks), not placement.is_replicate()))
    return found
