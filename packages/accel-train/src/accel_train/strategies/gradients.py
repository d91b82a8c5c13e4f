"""Norms over gradients of which ranks hold parts, on one mesh or on several."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ckpt.parts import is_sharded
from accel_train.ranks import Ranks

__all__ = [
    "any_divided",
    "any_nonfinite",
    "average",
    "buckets",
    "clip_by_norm",
    "combine_norms",
    "divide_like_parameter",
    "local_part",
    "multiply",
    "scale_down",
    "total_norm",
]

# As torch's DistributedDataParallel: large enough for the bandwidth, small beside the gradients.
_BUCKET_BYTES = 25 * 1024 * 1024
_Tensor = TypeVar("_Tensor", bound=Tensor)


def any_divided(parameters: Iterable[Tensor]) -> bool:
    """Whether any of them is a `DTensor`."""
    return any(map(is_sharded, parameters))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a `DTensor`, any other tensor itself; in-place changes of it change the tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


@torch.no_grad()
def total_norm(parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """Compute the total norm of all gradients, as if they were whole; a collective of the ranks that hold parts.

    Gradients are grouped by the ranks that they are divided among. Each group's sum of powers is reduced once, so no
    gradient is gathered, whatever meshes there are.

    Args:
        parameters: the parameters whose gradients count; the same on all ranks that hold parts of one.
        norm_type: as in `torch.nn.utils.clip_grad_norm_`.

    Returns:
        A plain 0-d float tensor, equal on all ranks that hold the same parameters.
    """
    divided: dict[Hashable, list[Tensor]] = {}
    for parameter in parameters:
        divided.setdefault(_division_of(parameter), []).append(parameter)
    if not divided:
        return torch.zeros(())
    # A rank without gradients takes part like the others, so dtypes and devices follow from the parameters.
    wide = any(parameter.dtype == torch.float64 for parameter in parameters)
    dtype = torch.float64 if wide else torch.float32
    device = _device_of(parameters[0])
    kind = _kind_of(norm_type)
    whole: list[Tensor] = []
    for members in divided.values():
        power = _power(members, norm_type, _device_of(members[0]), dtype)
        for group in _groups_of(members[0]):
            dist.all_reduce(power, kind.combine, group=group)
        whole.append(kind.join(power).to(device))
    norm = kind.join(torch.stack(whole))
    if norm_type < 0 and all(parameter.grad is None for parameter in parameters):
        return torch.zeros_like(norm)  # of no values, as torch
    return norm if math.isinf(norm_type) or norm_type == 0 else norm ** (1 / norm_type)


@torch.no_grad()
def any_nonfinite(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether any gradient, or this rank's part of a divided one, is inf or NaN.

    Args:
        parameters: the parameters whose gradients are checked.
        device: device of the result, a 0-d boolean tensor.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = local_part(parameter.grad)
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if values.numel():
            by_device.setdefault(values.device, []).append(values)
    found = [
        (~_all_finite(gradients, math.inf)).to(device)
        for where, gradients in by_device.items()
        # On the CPU the other norm takes a seventh of the time. It can overflow, and cannot be finite where an element
        # is not.
        if where.type != "cpu" or not _all_finite(gradients, 2.0)
    ]
    return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool, device=device)


def _all_finite(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Whether each gradient has a finite norm, without copying it.

    With `norm_type` infinity, the largest magnitude, that is exact: it is finite if and only if all elements are.
    """
    return torch.isfinite(torch.stack(torch._foreach_norm(gradients, norm_type))).all()


@torch.no_grad()
def clip_by_norm(parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm before."""
    norm = total_norm(parameters, norm_type)
    scale_down(parameters, norm, max_norm)
    return norm


def scale_down(parameters: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients, whose norm is known, so that it is at most `max_norm`."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    multiply([local_part(parameter.grad) for parameter in parameters if parameter.grad is not None], factor)


def combine_norms(norm: Tensor, norm_type: float, group: Any, device: torch.device) -> Tensor:
    """The norm of all gradients together, from those of ranks that hold different parameters. Collective.

    Args:
        norm: of this rank's gradients, a 0-d tensor.
        norm_type: as in `torch.nn.utils.clip_grad_norm_`.
        group: the ranks.
        device: on which they communicate.
    """
    kind = _kind_of(norm_type)
    finite = not math.isinf(norm_type) and norm_type != 0
    # A rank without trained parameters has a float32 zero where others may have float64.
    value = norm.detach().to(device, torch.float32 if device.type == "mps" else torch.float64)
    power = value**norm_type if finite else value.clone()
    dist.all_reduce(power, dist.ReduceOp.SUM if norm_type == 0 else kind.combine, group=group)
    return (power ** (1 / norm_type) if finite else power).to(norm.dtype)


def divide_like_parameter(parameter: Any) -> None:
    """Divide a gradient as its parameter; ranks may have summands of it, as of a norm over a divided sequence."""
    gradient = parameter.grad
    if is_sharded(gradient) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(gradient.device_mesh, parameter.placements)


def multiply(gradients: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors in place, which may be on several devices, in host memory, or sparse.

    Args:
        gradients: the tensors.
        factor: a number, or a 0-d tensor on any device.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, together in by_device.items():
        here = factor.to(device) if isinstance(factor, Tensor) else factor
        for gradient in together:
            if gradient.is_sparse:
                gradient.mul_(here)
        dense = [gradient for gradient in together if not gradient.is_sparse]
        if dense:
            torch._foreach_mul_(dense, here)


@dataclass(frozen=True)
class _Kind:
    """How the values of tensors, or of ranks' parts, make that of all together.

    Attributes:
        combine: the reduction over ranks.
        join: the value of several.
        least: that of no elements.
    """

    combine: Any
    join: Callable[[Tensor], Tensor]
    least: float = 0.0


def _kind_of(norm_type: float) -> _Kind:
    if math.isinf(norm_type):
        if norm_type > 0:
            return _Kind(dist.ReduceOp.MAX, torch.max)
        return _Kind(dist.ReduceOp.MIN, torch.min, math.inf)
    # Type 0 counts tensors that are not zero, as torch's, so a tensor counts once however many ranks hold parts.
    return _Kind(dist.ReduceOp.MAX if norm_type == 0 else dist.ReduceOp.SUM, torch.sum)


def _power(members: list[Tensor], norm_type: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The sum of powers, the largest or least magnitude; of type 0, by tensor, whether it is not zero."""
    kind = _kind_of(norm_type)
    gradients = [None if parameter.grad is None else local_part(parameter.grad) for parameter in members]
    held = {place: values for place, values in enumerate(gradients) if values is not None and values.numel()}
    if norm_type == 0:
        found = torch.zeros(len(members), device=device, dtype=dtype)
        for place, values in held.items():
            found[place] = (values != 0).any()
        return found
    if not held:
        return torch.full((), kind.least, device=device, dtype=dtype)
    norms = torch._foreach_norm(list(held.values()), norm_type, dtype=dtype)
    values = torch.stack([norm.to(device) for norm in norms])
    return kind.join(values if math.isinf(norm_type) else values**norm_type)


def _device_of(parameter: Any) -> torch.device:
    """The device on which the ranks that hold parts of it communicate."""
    mesh = getattr(parameter, "device_mesh", None)
    return torch.device(mesh.device_type) if mesh is not None else parameter.device


def _division_of(parameter: Any) -> Hashable:
    """What tells the ranks that a tensor is divided among from others."""
    mesh = getattr(parameter, "device_mesh", None)
    return None if mesh is None else (mesh, *_divided_dimensions(parameter))


def _groups_of(parameter: Any) -> list[Any]:
    """The process groups over which a tensor's parts add up to the whole."""
    mesh = getattr(parameter, "device_mesh", None)
    return [] if mesh is None else [mesh.get_group(dimension) for dimension in _divided_dimensions(parameter)]


def _divided_dimensions(parameter: Any) -> tuple[int, ...]:
    return tuple(
        dimension for dimension, placement in enumerate(parameter.placements) if not placement.is_replicate()
    )


@torch.no_grad()
def average(parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
    """Average gradients over ranks that hold the same parameters, or the same parts of them.

    A parameter that no rank has a gradient of keeps none.

    Args:
        parameters: the same on every rank, on one device, of one or several dtypes.
        ranks: the ranks to average over.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for members in by_kind.values():
        for bucket in buckets(members):
            _average(bucket, ranks)


def _average(bucket: Sequence[nn.Parameter], ranks: Ranks) -> None:
    """One reduction: which of the gradients there are, and their values."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    local = [local_part(gradient) for gradient in gradients]
    present = local[0].new_tensor([float(p.grad is not None) for p in bucket])
    together = torch.cat([present, *(values.reshape(-1) for values in local)])
    # gloo sends what is in host memory, and all other devices have a backend of their own.
    sent = together.cpu() if together.device.type == "xla" else together
    dist.all_reduce(sent, group=ranks.group)
    counts, *sums = torch.split(
        sent.to(together.device), [len(bucket), *(values.numel() for values in local)]
    )
    for parameter, count, gradient, values, total in zip(
        bucket, counts.tolist(), gradients, local, sums, strict=True
    ):
        if count:
            values.copy_(total.view_as(values) / ranks.size)
            parameter.grad = gradient


def buckets(tensors: Sequence[_Tensor]) -> Iterator[list[_Tensor]]:
    """Group tensors, or parameters of gradients, that are copied and reduced together, so that the copy stays small."""
    bucket: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += local_part(tensor).nbytes
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
