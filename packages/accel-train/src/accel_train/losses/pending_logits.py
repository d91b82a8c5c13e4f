"""The logits of a model while it computes its loss: not computed, but taken by the cross entropy in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from accel_ckpt.parts import is_sharded
from accel_train.errors import LossError
from accel_train.losses.cross_entropy import Head, Step, autocast_dtype, head_cross_entropy

__all__ = ["PendingLogits"]


@dataclass(frozen=True)
class _Cast:
    """Cast logits to a dtype."""

    dtype: torch.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        return rows.to(self.dtype)


@dataclass(frozen=True, eq=False)
class PendingLogits:
    """What a head returns in place of logits: what they follow from.

    It has what models and losses of transformers use between the head and `F.cross_entropy`: operations that scale and
    cap logits are noted, those that choose and arrange rows are applied to the hidden states. Anything else is refused.

    Attributes:
        hidden: hidden states (…, H).
        weight: of the head, (V, H).
        bias: of the head, (V,) or None.
        chunk_size: rows of logits that the loss computes at a time.
        in_forward: whether the forward of the model that made these runs.
        vocabulary: V; the weight may be divided again after the forward.
        dtype: of the logits.
        steps: elementwise operations on the product of hidden states and weight.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chunk_size: int
    in_forward: Callable[[], bool]
    vocabulary: int
    dtype: torch.dtype
    steps: tuple[Step, ...] = ()

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk_size: int,
        in_forward: Callable[[], bool],
    ) -> PendingLogits:
        """The logits `F.linear(hidden, weight, bias)`, here and now."""
        low = autocast_dtype(hidden.device.type)
        dtype = hidden.dtype if low is None or hidden.dtype == torch.float64 else low
        return cls(hidden, weight, bias, chunk_size, in_forward, weight.shape[0], dtype)

    # What is known without values

    @property
    def shape(self) -> torch.Size:
        """(…, V)."""
        return torch.Size((*self.hidden.shape[:-1], self.vocabulary))

    @property
    def device(self) -> torch.device:
        """Where they would be."""
        return self.hidden.device

    def size(self, dim: int | None = None) -> Any:
        """As `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    # Elementwise operations

    def _with(self, step: Step, *numbers: Any) -> PendingLogits:
        if any(isinstance(number, Tensor) and (number.dim() or number.requires_grad) for number in numbers):
            _refuse("an operation with another tensor")
        dtype = step(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return replace(self, dtype=dtype, steps=(*self.steps, step))

    def __mul__(self, other: Any) -> PendingLogits:
        return self._with(lambda rows: rows * other, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> PendingLogits:
        return self._with(lambda rows: rows / other, other)

    def tanh(self) -> PendingLogits:
        """As `Tensor.tanh`."""
        return self._with(torch.tanh)

    def to(self, *args: Any, **kwargs: Any) -> PendingLogits:
        """As `Tensor.to`, on the same device."""
        example = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        if example.device != self.device:
            _refuse(f"a copy on {example.device}")
        return self if example.dtype == self.dtype else self._with(_Cast(example.dtype))

    def float(self) -> PendingLogits:
        """As `Tensor.float`."""
        return self.to(torch.float32)

    # Operations on rows

    def contiguous(self) -> PendingLogits:
        """Themselves."""
        return self

    def view(self, *shape: int) -> PendingLogits:
        """As `Tensor.view`, if the last dimension stays the vocabulary."""
        arranged = torch.empty(self.shape, device="meta").reshape(*shape).shape
        if arranged[-1:] != self.shape[-1:]:
            _refuse(f"the shape {tuple(arranged)}, which cuts the vocabulary")
        return replace(self, hidden=self.hidden.reshape(*arranged[:-1], self.hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> PendingLogits:
        parts = index if isinstance(index, tuple) else (index,)
        mask = len(parts) == 1 and type(parts[0]) is Tensor and parts[0].dtype == torch.bool
        rows = mask or all(type(part) in (slice, int, EllipsisType) for part in parts)
        whole = mask or parts[-1] in (..., slice(None)) or (len(parts) < len(self.shape) and ... not in parts)
        if not rows or not whole:
            _refuse("a part of the vocabulary")
        return replace(self, hidden=self.hidden[index])

    # The loss

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute a cross entropy, and refuse other functions of torch."""
        if func is functional.cross_entropy and isinstance(args[0], PendingLogits):
            return _cross_entropy(*args, **(kwargs or {}))
        if func is torch.tanh:
            return args[0].tanh()
        return _refuse(f"{getattr(func, '__name__', func)!r}")

    # What hooks of a head whose weight is divided over the vocabulary ask: each rank has its part anyway

    placements = ()

    def redistribute(self, *args: Any, **kwargs: Any) -> PendingLogits:
        """Themselves."""
        return self

    to_local = redistribute

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of Python ask for these
            raise AttributeError(name)
        return _refuse(f"{name!r}")

    def __repr__(self) -> str:
        return f"PendingLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


def _cross_entropy(
    logits: PendingLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    one_each = len(logits.shape) == 2 and target.dim() == 1 and target.dtype == torch.int64
    if not one_each or weight is not None or size_average is not None or reduce is not None:
        _refuse("a cross entropy that is not one of a token for each row")
    if not logits.in_forward() or not _is_whole(logits.weight, logits.hidden.device):
        _refuse("a loss after the model's forward, or where the weight of the head is no longer whole")
    steps = logits.steps
    if steps[-1:] == (_Cast(torch.float32),) and logits.hidden.dtype != torch.float64:
        steps = steps[:-1]  # the loss computes in float32 at least, with less memory
    loss: Tensor = head_cross_entropy(
        logits.hidden,
        logits.weight,
        target,
        logits.bias,
        Head(steps, autocast_dtype(logits.device.type)),
        chunk_size=logits.chunk_size,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    # Autocast computes cross entropies in float32.
    return loss if autocast_dtype(logits.device.type) else loss.to(logits.dtype)


def _refused(name: str) -> Callable[..., NoReturn]:
    def refused(self: PendingLogits, *args: Any) -> NoReturn:
        _refuse(f"{name!r}")

    return refused


for _name in (
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "__neg__",
    "__setitem__",
    "__iter__",
    "__array__",
):
    setattr(PendingLogits, _name, _refused(_name))


def _refuse(what: str) -> NoReturn:
    raise LossError(
        f"The logits of a model with use_chunked_loss were used for {what}. In a forward with labels and gradients "
        "they are not computed: the model may scale and cap them, and take their cross entropy. For logits call the "
        "model under torch.no_grad() or without labels, or call remove() of what use_chunked_loss returned."
    )


def _is_whole(weight: Any, device: torch.device) -> bool:
    """Whether a weight has its values: neither FSDP, nor an engine, nor a device map has taken them away."""
    local = weight.to_local() if is_sharded(weight) else weight
    return bool(local.device == device) and (local.is_meta or local.untyped_storage().size() > 0)
