"""Logits that are not computed before something needs them: a cross entropy takes them in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from accel_ckpt.parts import is_sharded
from accel_train.errors import LossError
from accel_train.losses.cross_entropy import Head, Step, autocast_dtype, autocast_to, head_cross_entropy

__all__ = ["LazyLogits", "ModelCall", "Product"]


class ModelCall(Protocol):
    """The call of a model in which its head was called."""

    @property
    def chunk_size(self) -> int:
        """Rows of logits that a loss computes at a time."""
        ...

    def check(self) -> None:
        """Raise a `LossError` if the head's weight may have other values than in this call."""
        ...

    def report(self, operation: str) -> None:
        """Told the name of an operation that needed all logits."""
        ...


@dataclass(frozen=True)
class Product:
    """A call of `F.linear` that has not been computed.

    Attributes:
        hidden: hidden states (…, H).
        weight: (V, H).
        bias: (V,) or None.
        autocast: the dtype of autocast at the call, None without.
        differentiated: whether gradients were recorded at the call.
        version: how often the weight had been changed in place.
        shape: of the weight.
        call: the call of the model.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    autocast: torch.dtype | None
    differentiated: bool
    version: int | None
    shape: torch.Size
    call: ModelCall

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: ModelCall) -> Product:
        """`F.linear` with these arguments, here and now."""
        return cls(
            hidden,
            weight,
            bias,
            autocast_dtype(hidden.device.type),
            torch.is_grad_enabled(),
            _version(weight),
            weight.shape,
            call,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        low = self.autocast is not None and self.hidden.dtype != torch.float64
        return cast(torch.dtype, self.autocast) if low else self.hidden.dtype

    @property
    def _size(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self.shape[0])

    def compute(self) -> Tensor:
        """All logits.

        Raises:
            LossError: the weight is not what it was at the call.
        """
        self.check_weight()
        recorded = self.differentiated and torch.is_grad_enabled()
        with autocast_to(self.hidden.device.type, self.autocast), torch.set_grad_enabled(recorded):
            return functional.linear(self.hidden, self.weight, self.bias)

    def check_weight(self) -> None:
        """Check that the weight still has the values of the call.

        Raises:
            LossError: FSDP2 or an engine has divided it again, or an optimizer has changed it.
        """
        self.call.check()
        local = cast(Any, self.weight).to_local() if is_sharded(self.weight) else self.weight
        emptied = bool(local.numel()) and local.untyped_storage().size() == 0
        if emptied or self.weight.shape != self.shape or self.weight.device != self.hidden.device:
            raise LossError(
                f"The logits {self._size} were not computed in the model's forward, and the weight of the head is no "
                "longer whole: it is divided among ranks or offloaded again. Use them inside forward, or call remove() "
                "of what use_chunked_loss returned for steps that need logits."
            )
        if self.version != _version(self.weight):
            raise LossError(
                f"The logits {self._size} were not computed before the weight of the head "
                "changed, as in optimizer.step(). Use them before, or call remove() of what "
                "use_chunked_loss returned for steps that need logits."
            )


class LazyLogits(Tensor):
    """Logits by the hidden states that they follow from.

    They have the shape, dtype and device of logits and no storage. Operations on rows are applied to the hidden states,
    elementwise ones are noted, and a cross entropy computes chunks. Any other operation computes all logits first.

    Attributes:
        needs_weights: of the model, when they are used; see `GatheredUnits`.
    """

    needs_weights: ClassVar[bool] = True
    _product: Product
    _steps: tuple[Step, ...]
    _divided: bool  # a DTensor takes its place, whose vocabulary is divided among ranks
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls: Any, product: Product, steps: tuple[Step, ...], dtype: torch.dtype, divided: bool
    ) -> LazyLogits:
        """Logits that `steps` make of a product."""
        shape = (*product.hidden.shape[:-1], product.weight.shape[0])
        sources = (product.hidden, product.weight, product.bias)
        self: LazyLogits = Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=dtype,
            device=product.hidden.device,
            requires_grad=product.differentiated and any(t is not None and t.requires_grad for t in sources),
        )
        self._product, self._steps, self._divided, self._value = product, steps, divided, None
        if self.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return self

    @classmethod
    def of(cls, product: Product) -> LazyLogits:
        """The logits of a product."""
        return cls(product, (), product.dtype, is_sharded(product.hidden))

    def materialised(self, operation: str) -> Tensor:
        """All logits.

        Args:
            operation: what needs them.

        Raises:
            LossError: the weight is not what it was when the head was called.
        """
        if self._value is None:
            value = self._product.compute()
            self._product.call.report(operation)
            if is_sharded(value) and not self._divided:
                value = _whole(value)
            for step in self._steps:
                value = step(value)
            self._value = value
        return self._value

    def cross_entropy(self, labels: Tensor, ignore_index: int, reduction: str, smoothing: float) -> Tensor:
        """What `F.cross_entropy` gives for these logits."""
        self._product.check_weight()
        product, steps = self._product, self._steps
        if steps[-1:] == (_to_float32,) and product.dtype in (torch.float16, torch.bfloat16):
            steps = steps[:-1]  # the loss does it, with less memory
        loss: Tensor = head_cross_entropy(
            product.hidden,
            product.weight,
            labels,
            product.bias,
            Head(steps, product.autocast),
            chunk_size=product.call.chunk_size,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=smoothing,
        )
        # Autocast computes cross entropies in float32.
        return loss if autocast_dtype(product.hidden.device.type) else loss.to(self.dtype)

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> LazyLogits:
        """The same logits of other rows."""
        with torch.set_grad_enabled(self._product.differentiated and torch.is_grad_enabled()):
            hidden = change(self._product.hidden)
        return LazyLogits(replace(self._product, hidden=hidden), self._steps, self.dtype, self._divided)

    def with_step(self, step: Step, dtype: torch.dtype) -> LazyLogits:
        """What an elementwise operation makes of these logits."""
        return LazyLogits(self._product, (*self._steps, step), dtype, self._divided)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and dtype; printing computes nothing."""
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    # What the hooks of a head whose weight is divided over the vocabulary ask of a DTensor

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """DTensor in the place of one, for `isinstance`."""
        if object.__getattribute__(self, "_divided"):
            from torch.distributed.tensor import DTensor

            return DTensor
        return LazyLogits

    @property
    def placements(self) -> tuple[Any, ...]:
        """The vocabulary is divided."""
        from torch.distributed.tensor import Shard

        return (Shard(self.dim() - 1),)

    def redistribute(self, *args: Any, placements: Any = None, **kwargs: Any) -> Any:
        """Whole logits, or divided ones as they are, are not computed for it."""
        if placements is not None and not args and len(placements) == 1:
            if placements[0].is_replicate():
                return LazyLogits(self._product, self._steps, self.dtype, False)
            if any(placements[0].is_shard(dim) for dim in (-1, self.dim() - 1)):
                return self
        return cast(Any, self.materialised("redistribute")).redistribute(
            *args, placements=placements, **kwargs
        )

    def to_local(self, *args: Any, **kwargs: Any) -> Tensor:
        """Whole logits are no DTensor; of divided ones, this rank's."""
        if not self._divided:
            return self
        return cast(Tensor, cast(Any, self.materialised("to_local")).to_local(*args, **kwargs))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply, note or compute an operation."""
        kwargs = kwargs or {}
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        known = _KNOWN.get(func)
        if known is not None and args and type(args[0]) is LazyLogits and args[0]._value is None:
            result = known(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*_computed(args, func), **_computed(kwargs, func))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute what an operation below `__torch_function__` needs, such as a collective."""
        return func(*_computed(args, func), **_computed(kwargs or {}, func))


def _computed(tree: Any, func: Any) -> Any:
    return tree_map_only(LazyLogits, lambda logits: logits.materialised(_name(func)), tree)


def _name(func: Any) -> str:
    name = str(getattr(func, "__name__", func))
    return str(func.__self__.__name__) if name == "__get__" else name


def _version(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version


def _whole(value: Any) -> Tensor:
    from torch.distributed.tensor import Replicate

    return cast(Tensor, value.redistribute(placements=[Replicate()]).to_local())


def _refuse_gradient(gradient: Tensor | None) -> None:
    if gradient is None:  # a node of the graph passes on that the logits were not used
        return
    raise LossError(
        "A gradient was computed for logits that use_chunked_loss has put off, not for the hidden states behind them. "
        "A loss that is a torch.autograd.Function of its own takes them in this way. Call remove() of what "
        "use_chunked_loss returned, or compute the loss with torch.nn.functional.cross_entropy."
    )


def _elementwise(func: Any, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Note an operation with numbers."""
    others = (*args, *kwargs.values())
    if any(isinstance(other, Tensor) and (other.dim() or other.requires_grad) for other in others):
        return NotImplemented
    given = torch.empty(0, dtype=logits.dtype, device=logits.device)
    example = func(given, *args, **kwargs)
    if example is given:  # a cast that casts nothing
        return logits
    if type(example) is not Tensor or example.device != logits.device or example.shape != (0,):
        return NotImplemented
    if func is Tensor.float:
        return logits.with_step(_to_float32, example.dtype)
    return logits.with_step(lambda rows: cast(Tensor, func(rows, *args, **kwargs)), example.dtype)


def _to_float32(rows: Tensor) -> Tensor:
    return rows.float()


def _unchanged(func: Any, logits: LazyLogits) -> LazyLogits:
    return logits


def _cloned(func: Any, logits: LazyLogits, *, memory_format: Any = None) -> LazyLogits:
    """Another tensor of the same logits; DDP makes one of each output when it looks for unused parameters."""
    return logits.with_rows(lambda hidden: hidden)


def _reshaped(func: Any, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Note an operation after which the rows are the same ones in the same order."""
    example = torch.empty(logits.shape, dtype=logits.dtype, device="meta")
    result = func(example, *args, **kwargs)
    if result.dtype != logits.dtype or result.shape[-1:] != logits.shape[-1:]:
        return NotImplemented
    return logits.with_rows(lambda hidden: hidden.reshape(*result.shape[:-1], hidden.shape[-1]))


def _indexed(func: Any, logits: LazyLogits, index: Any) -> Any:
    """Note which rows are selected, as in `logits[..., :-1, :]`."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if len(parts) == 1 and type(parts[0]) is Tensor and parts[0].dtype == torch.bool:
        return (
            logits.with_rows(lambda hidden: hidden[index])
            if parts[0].dim() < logits.dim()
            else NotImplemented
        )
    if not all(type(part) in (slice, int, EllipsisType) for part in parts):
        return NotImplemented
    last = len(parts) == logits.dim() or any(part is ... for part in parts[:-1])
    if last and parts[-1] is not ... and parts[-1] != slice(None):
        return NotImplemented
    return logits.with_rows(lambda hidden: hidden[index])


def _cross_entropy(
    func: Any,
    logits: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute the loss in chunks, if it is that of one token per row."""
    old = size_average is not None or reduce is not None
    rows = logits.dim() == 2 and type(target) is Tensor and target.dim() == 1 and len(target) == len(logits)
    if old or not rows or weight is not None or reduction == "none" or target.dtype != torch.int64:
        return NotImplemented
    return logits.cross_entropy(target, ignore_index, reduction, label_smoothing)


def _functions(*names: str) -> list[Any]:
    """The functions and methods of these names, of which an operator calls one or the other."""
    return [getattr(owner, name) for owner in (torch, Tensor) for name in names if hasattr(owner, name)]


_KNOWN: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        _functions(
            *("mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__"),
            *("add", "__add__", "__radd__", "sub", "__sub__", "neg", "__neg__", "tanh", "clamp"),
            *("to", "type", "float", "double", "half", "bfloat16"),
        ),
        _elementwise,
    ),
    Tensor.contiguous: _unchanged,
    Tensor.clone: _cloned,
    **dict.fromkeys(_functions("view", "reshape"), _reshaped),
    Tensor.__getitem__: _indexed,
    functional.cross_entropy: _cross_entropy,
}

# They ask for what is known without values.
_DESCRIBING = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "grad", "is_leaf"),
            *("is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_quantized", "is_nested"),
            *("nbytes", "itemsize", "_backward_hooks", "_base"),
        )
    ),
    *_functions("is_floating_point", "is_complex", "numel", "is_inference"),
    *(
        getattr(Tensor, name)
        for name in (
            *(
                "size",
                "dim",
                "nelement",
                "ndimension",
                "element_size",
                "get_device",
                "stride",
                "is_contiguous",
            ),
            *("__len__", "__hash__", "register_hook", "untyped_storage"),
        )
    ),
}
