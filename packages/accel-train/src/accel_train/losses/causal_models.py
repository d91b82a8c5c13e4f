"""The language models of transformers with a loss that is computed in chunks of tokens."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from accel_ckpt.parts import is_sharded
from accel_train.errors import LossError, OptionError, PrepareError
from accel_train.losses.cross_entropy import DEFAULT_CHUNK_SIZE
from accel_train.losses.pending_logits import PendingLogits
from accel_train.setup.unwrap import plain_module
from accel_train.strategies.wrappers import is_compiled_module

__all__ = ["ChunkedLoss", "use_chunked_loss"]


def use_chunked_loss(model: nn.Module, chunk_size: int = DEFAULT_CHUNK_SIZE) -> ChunkedLoss:
    """Let a language model of transformers compute its loss without the logits of all tokens.

    When the model is called with `labels`, and gradients are recorded, its head (`get_output_embeddings()`) computes
    nothing. It returns a `PendingLogits`, which notes what the model does with logits before the loss: scales, soft
    caps, casts, views, the shift. `F.cross_entropy` then computes chunks, with the same loss and gradients. Other uses
    of these logits are refused, in the model and in `outputs.logits`. Without `labels`, as in `generate`, and under
    `torch.no_grad()`, nothing changes.

        use_chunked_loss(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        loss = model(input_ids=ids, labels=ids).loss

    Call it before or after `prepare`, after anything that replaces the head (`resize_token_embeddings`, PEFT).

    Args:
        model: a model with a head and a loss, such as `LlamaForCausalLM`; it may be inside wrappers.
        chunk_size: rows of logits that are alive at a time, as in `chunked_cross_entropy`.

    Returns:
        A handle; `remove()`, or leaving it as a context, undoes it.

    Raises:
        PrepareError: the model has no head, or takes no labels.
        OptionError: it has a chunked loss already, it is compiled as a whole, or `chunk_size` is not a positive number.
        LossError: now or in a later forward: DeepSpeed's ZeRO stage 3 divides the model. In a later forward: the head
            is another one than now, or computes no `F.linear`; the model does something else with its logits; it was
            compiled as a whole.
    """
    if isinstance(chunk_size, bool) or not isinstance(cast(object, chunk_size), int) or chunk_size < 1:
        raise OptionError(
            f"use_chunked_loss(chunk_size={chunk_size!r}): a chunk has at least 1 row of logits, such as 1024."
        )
    if is_compiled_module(model):
        raise OptionError(_COMPILED)
    plain = plain_module(model)
    owner, head = _head_of(plain)
    if isinstance(head.forward, _HeadForward):
        raise OptionError(
            f"{type(owner).__name__} computes its loss in chunks already. Call remove() of what use_chunked_loss "
            "returned before."
        )
    _refuse_zero_3(head)
    return ChunkedLoss(owner, head, chunk_size)


def _head_of(model: nn.Module) -> tuple[Any, nn.Module]:
    """The module that takes labels, and its head."""
    # PEFT's wrappers would pass the question on to the model inside of them.
    owners: list[Any] = [item for item in model.modules() if hasattr(type(item), "get_output_embeddings")]
    for owner in owners:
        head = owner.get_output_embeddings()
        if isinstance(head, nn.Module) and "labels" in inspect.signature(owner.forward).parameters:
            return owner, head
    raise PrepareError(
        f"{type(model).__name__} has no module with a head (`get_output_embeddings()` returns a module) whose forward "
        "takes `labels`, as LlamaForCausalLM is. In a model of your own, call chunked_cross_entropy(hidden, "
        "head.weight, labels) in forward."
    )


def _refuse_zero_3(head: nn.Module) -> None:
    """Refuse a head whose weight DeepSpeed takes away right after the head's forward, before the loss."""
    if any(
        hasattr(parameter, "ds_id") for parameter in head.parameters()
    ):  # so DeepSpeed tells its parameters
        raise LossError(
            "DeepSpeed's ZeRO stage 3 divides the weight of the head among ranks again before the loss is computed, so "
            "use_chunked_loss cannot be combined with it. Choose stage 1 or 2, or FSDP2, or do not call it."
        )


class ChunkedLoss:
    """What `use_chunked_loss` has changed in a model; a context that undoes it at its end.

    Attributes:
        chunk_size: rows of logits that are alive at a time.
    """

    def __init__(self, owner: nn.Module, head: nn.Module, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self._owner: Any = owner
        self._head = head
        self._labels = list(inspect.signature(owner.forward).parameters).index("labels")
        self._active = False
        # Bound methods, and no functions of their own: a deep copy of the model then has a copy of this, too.
        self._hooks = [
            owner.register_forward_pre_hook(self._begin, with_kwargs=True),
            owner.register_forward_hook(self._end, always_call=True),
        ]
        head.forward = _HeadForward(self, head, head.forward)

    def remove(self) -> None:
        """Let the model compute all logits again."""
        for hook in self._hooks:
            hook.remove()
        self._active = False
        forward = self._head.__dict__.get("forward")
        if not isinstance(forward, _HeadForward):
            return  # something wraps it, such as hooks of a device map; it passes calls on
        if getattr(forward.forward, "__func__", None) is type(self._head).forward:
            del self._head.forward
        else:
            self._head.forward = forward.forward

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels", args[self._labels] if len(args) > self._labels else None)
        self._active = labels is not None and torch.is_grad_enabled()
        if not self._active:
            return
        if _compiles():
            raise LossError(_COMPILED)
        _refuse_zero_3(self._head)
        if self._owner.get_output_embeddings() is not self._head:
            raise LossError(
                f"The head of {type(module).__name__} is another module than when use_chunked_loss was called. Call "
                "it after what replaces the head, such as resize_token_embeddings or PEFT."
            )

    def _end(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        self._active = False

    @property
    def active(self) -> bool:
        """Whether a forward runs whose loss is computed in chunks."""
        return self._active

    def pending(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> PendingLogits:
        """In place of `F.linear` with these arguments."""
        return PendingLogits.of(input, weight, bias, self.chunk_size, lambda: self._active)


class _HeadForward:
    """The forward of a head, which computes nothing while a loss is going to be computed."""

    def __init__(self, loss: ChunkedLoss, head: nn.Module, forward: Callable[..., Any]) -> None:
        self.loss = loss
        self.head = head
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the head returns."""
        if not self.loss.active:
            return self.forward(*args, **kwargs)
        reshard: Any = getattr(self.head, "set_reshard_after_forward", None)
        if reshard is not None:
            # A unit of FSDP2 by itself: its weight is needed until backward, which begins with it.
            reshard(False, recurse=False)
        weight = getattr(self.head, "weight", None)
        if type(self.head).forward is nn.Linear.forward and is_sharded(weight):
            # What divides the vocabulary wraps `forward`, and would make a DTensor of the product.
            return self.loss.pending(args[0], weight, self.head.bias)  # type: ignore[arg-type]
        with _PutOff(self.loss, self.head) as mode:
            result = self.forward(*args, **kwargs)
        if not mode.found:
            raise LossError(
                f"The head {type(self.head).__name__} does not multiply by its weight with F.linear, as one in fp8 "
                "or quantized does, so its loss cannot be computed in chunks. Leave the head in its own dtype, or do "
                "not call use_chunked_loss."
            )
        return result


_COMPILED = (
    "use_chunked_loss cannot be combined with torch.compile of the whole model. Compile its blocks: "
    "TorchDynamoPlugin(use_regional_compilation=True), or compile_regions(model)."
)


def _compiles() -> bool:
    """Whether this code runs inside what `torch.compile` returned, or is being traced by it."""
    if torch.compiler.is_compiling():
        return True
    if "torch._dynamo" not in sys.modules:
        return False
    # After an error in a trace the same code runs untraced. None: compiled code does not surround it.
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


class _PutOff(TorchFunctionMode):
    """Products with the weight of a head are not computed."""

    def __init__(self, loss: ChunkedLoss, head: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        self.weights = {id(parameter) for parameter in head.parameters()}
        self.found = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            pending = self.loss.pending(*args, **kwargs)
            if id(pending.weight) in self.weights:
                self.found = True
                return pending
        return func(*args, **kwargs)
