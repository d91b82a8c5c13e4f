"""Cross entropy of a linear head, computed in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from accel_train.errors import ArgumentTypeError, LossError, OptionError
from accel_train.losses.vocabulary import VocabularyShard, local_head

__all__ = ["DEFAULT_CHUNK_SIZE", "Head", "chunked_cross_entropy", "head_cross_entropy"]

DEFAULT_CHUNK_SIZE = 1024
_LOW = (torch.float16, torch.bfloat16)

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Head:
    """How logits follow from hidden states, beyond the product with the weight.

    Attributes:
        steps: elementwise operations on the logits, in this order.
        dtype: what the product is computed in; None: in the dtype of its factors. Under autocast the dtype of autocast.
    """

    steps: tuple[Step, ...] = ()
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class _Options:
    head: Head
    chunk_size: int
    ignore_index: int
    label_smoothing: float
    vocabulary: VocabularyShard | None
    differentiated: bool


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Cross entropy of the logits `hidden @ weight.T + bias`, of which at most `chunk_size` rows exist at a time.

    As `F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, -2), labels.flatten())`, with its gradients for
    hidden states, weight and bias, which forward computes along with the loss. Labels are not shifted. Under autocast
    the products are computed in autocast's dtype. The loss and its gradient for the logits are in float32 at least, and
    so are sums of gradients over chunks. With float16 products backward computes the logits again, because only it
    knows the loss scale.

    Call it inside the model's `forward`, where DDP and FSDP2 see that the head is used, and its weight is whole. If the
    weight is divided over the vocabulary (a `DTensor` with `Shard(0)`, as by `ColwiseParallel`), each rank computes the
    logits of its tokens, and only a few numbers per row are communicated. Under `torch.compile` it is a graph break.

    Args:
        hidden: hidden states (…, H), floating.
        weight: the head's weight (V, H).
        labels: the right tokens (…), int64, one per hidden state.
        bias: (V,).
        chunk_size: rows of logits that are alive at a time. A chunk takes about `chunk_size * V` numbers, two or three
            times (logits in float32, and their gradient).
        ignore_index: label of the rows that do not count.
        reduction: "mean" over rows that count, or "sum", which suits `accelerator.backward(loss, num_items=…)`.
        label_smoothing: share of each label that is spread over the vocabulary, from 0 to 1, as in `F.cross_entropy`.
        scale: the logits are multiplied with it (Cohere, Granite).
        softcap: then the logits become `softcap * tanh(logits / softcap)` (Gemma 2).

    Returns:
        The loss, a scalar in float32, or float64 for float64 inputs. The mean of no rows is nan, as in torch.

    Raises:
        OptionError: a value or shape that cannot be used.
        ArgumentTypeError: the labels are not int64.
        LossError: the weight is divided in another way; in backward, it is differentiated twice.
    """
    steps: list[Step] = []
    if scale != 1.0:
        steps.append(lambda logits: logits * scale)
    if softcap is not None:
        if not softcap > 0:
            raise OptionError(
                f"chunked_cross_entropy(softcap={softcap}): the bound of the logits is greater than 0, such as 30.0."
            )
        steps.append(lambda logits: torch.tanh(logits / softcap) * softcap)
    loss: Tensor = head_cross_entropy(
        hidden,
        weight,
        labels,
        bias,
        Head(tuple(steps), autocast_dtype(hidden.device.type)),
        chunk_size=chunk_size,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast computes in, None without autocast."""
    # The meta device, on which memory is estimated, has no autocast, and torch raises when it is asked.
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_to(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast to a dtype, or none; the counterpart of `autocast_dtype`."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, dtype, enabled=dtype is not None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def head_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    head: Head,
    *,
    chunk_size: int,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """`chunked_cross_entropy` of any head."""
    _check(hidden, weight, labels, chunk_size, reduction, label_smoothing)
    hidden, weight, bias, vocabulary = local_head(hidden, weight, bias)
    labels = labels.reshape(-1).to(hidden.device)
    counts = labels != ignore_index
    if vocabulary is not None and bool((counts & ((labels < 0) | (labels >= vocabulary.total))).any()):
        raise OptionError(
            f"The labels are from {int(labels[counts].min())} to {int(labels[counts].max())}, expected 0 to "
            f"{vocabulary.total - 1}, or ignore_index={ignore_index}."
        )
    options = _Options(head, chunk_size, ignore_index, label_smoothing, vocabulary, torch.is_grad_enabled())
    rows = hidden.reshape(-1, hidden.shape[-1])
    divisor = counts.sum() if reduction == "mean" else None
    loss: Tensor = _ChunkedCrossEntropy.apply(rows, weight, bias, labels, divisor, options)  # type: ignore[no-untyped-call]
    return loss


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int, reduction: str, smoothing: float
) -> None:
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise OptionError(f"chunk_size={chunk_size!r}: a chunk has at least 1 row of logits, such as 1024.")
    if reduction not in ("mean", "sum"):
        raise OptionError(
            f"reduction={reduction!r}: chunks are added up, so it is 'mean' or 'sum'. For a loss per token use "
            "torch.nn.functional.cross_entropy."
        )
    if not 0 <= smoothing <= 1:
        raise OptionError(f"label_smoothing={smoothing}: a share from 0 to 1, such as 0.1.")
    if labels.dtype != torch.int64:
        raise ArgumentTypeError(f"The labels have dtype {labels.dtype}, expected torch.int64 (tokens).")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise OptionError(
            f"The hidden states have the shape {tuple(hidden.shape)} and the head's weight {tuple(weight.shape)}, "
            "expected (…, H) and (V, H). A weight without elements is divided among ranks at this moment: call the "
            "loss inside the model's forward."
        )
    one_list = 1 in (labels.dim(), hidden.dim() - 1)  # of which shape it was flattened is not known
    if labels.shape != hidden.shape[:-1] and (not one_list or labels.numel() != hidden.shape[:-1].numel()):
        raise OptionError(
            f"There are {labels.numel()} labels (shape {tuple(labels.shape)}) for {hidden.shape[:-1].numel()} hidden "
            f"states (shape {tuple(hidden.shape)}), expected one label for each, of shape {tuple(hidden.shape[:-1])}."
        )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the losses of all rows that count, divided by `divisor`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        divisor: Tensor | None,
        options: _Options,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels, divisor)
        ctx.options = options
        dtype = options.head.dtype or weight.dtype
        needed = ctx.needs_input_grad[:3]
        # What is small in float16 becomes 0 unless it is multiplied with the loss scale first.
        at_once = dtype != torch.float16 and options.differentiated and any(needed)
        loss, ctx.gradients = _sum_up(
            hidden, weight, bias, labels, options, needed if at_once else (False,) * 3
        )
        if not at_once:
            ctx.gradients = None
        return loss if divisor is None else loss / divisor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise LossError(
                "chunked_cross_entropy has no second derivative (backward was called with create_graph=True). Compute "
                "this loss with torch.nn.functional.cross_entropy; of a model, after remove() of what "
                "use_chunked_loss returned."
            )
        hidden, weight, bias, labels, divisor = ctx.saved_tensors
        (factor,) = grads
        if divisor is not None:
            factor = torch.where(
                divisor > 0, factor / divisor, 0
            )  # as torch, though the mean of no rows is nan
        # They are handed over, so that nothing keeps a second copy. A graph that is kept computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = _sum_up(
                hidden, weight, bias, labels, ctx.options, ctx.needs_input_grad[:3], factor=factor
            )
        else:
            gradients = tuple(None if g is None else g.mul_(factor) for g in gradients)
        inputs = (hidden, weight, bias)
        return (
            *(None if g is None else g.to(like.dtype) for g, like in zip(gradients, inputs, strict=True)),
            None,
            None,
            None,
        )


def _sum_up(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    options: _Options,
    needed: tuple[bool, ...],
    factor: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The sum of the losses, and its gradients times `factor` for those of hidden, weight and bias that need one."""
    with autocast_to(hidden.device.type, None), torch.no_grad():
        x, w, b = (_cast(tensor, options.head.dtype) for tensor in (hidden, weight, bias))
        assert x is not None
        assert w is not None
        wide = _wide(w.dtype)
        loss = torch.zeros((), dtype=wide, device=x.device)
        # Each row of the first is written once, so it needs no wider dtype, unless ranks add theirs up.
        per_row = wide if options.vocabulary is not None else x.dtype
        hidden_grad = torch.empty(x.shape, dtype=per_row, device=x.device) if needed[0] else None
        weight_grad = torch.zeros(w.shape, dtype=wide, device=x.device) if needed[1] else None
        bias_grad = torch.zeros(w.shape[:1], dtype=wide, device=x.device) if needed[2] else None
        for begin in range(0, len(x), options.chunk_size):
            part = slice(begin, begin + options.chunk_size)
            losses, wide_gradient = _chunk(x[part], w, b, labels[part], options, factor, any(needed))
            loss += losses.sum()
            if wide_gradient is None:
                continue
            if bias_grad is not None:
                bias_grad += wide_gradient.sum(0, dtype=wide)
            gradient = wide_gradient.to(w.dtype)
            if hidden_grad is not None:
                hidden_grad[part] = gradient @ w
            if weight_grad is not None:
                if weight_grad.dtype == gradient.dtype:
                    weight_grad.addmm_(gradient.T, x[part])
                else:
                    weight_grad += gradient.T @ x[part]
            del gradient, wide_gradient  # before the next chunk's is made
        if hidden_grad is not None and options.vocabulary is not None:
            options.vocabulary.sum(hidden_grad)
        return loss, (hidden_grad, weight_grad, bias_grad)


def _chunk(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    labels: Tensor,
    options: _Options,
    factor: Tensor | None,
    needed: bool,
) -> tuple[Tensor, Tensor | None]:
    """The losses of some rows, and the gradient of their sum for the product's result.

    With p = softmax(logits) and a smoothing of s, the gradient for the logits is p - (1 - s) onehot(label) - s / V.
    """
    product = functional.linear(x, w, b)
    steps = options.head.steps
    with torch.set_grad_enabled(needed and bool(steps)):
        start = product.requires_grad_(torch.is_grad_enabled())
        end = start
        for step in steps:
            end = step(end)
        wide = _wide(end.dtype)
        end = end.to(wide)
    logits = end.detach()
    vocabulary, smoothing = options.vocabulary, options.label_smoothing

    counts = labels != options.ignore_index
    tokens = torch.where(counts, labels, 0)
    here = counts
    if vocabulary is not None:
        tokens = tokens - vocabulary.start
        here = counts & (tokens >= 0) & (tokens < len(w))
        tokens = torch.where(here, tokens, 0)
    size = len(w) if vocabulary is None else vocabulary.total

    top = logits.amax(1) if len(w) else logits.new_full((len(x),), -torch.inf)
    if vocabulary is not None:
        top = vocabulary.maximum(top)
    right = torch.where(here, logits.gather(1, tokens[:, None])[:, 0], 0) if len(w) else torch.zeros_like(top)
    spread = logits.sum(1) if smoothing else torch.zeros_like(top)
    # What steps computed may be needed for their gradients.
    exps = torch.sub(logits, top[:, None], out=None if steps else logits).exp_()
    sums = exps.sum(1)
    if vocabulary is not None:
        right, spread, sums = vocabulary.sum(torch.stack([right, spread, sums]))
    normal = top + sums.log()
    losses = normal - (1 - smoothing) * right - (smoothing / size) * spread
    losses = torch.where(counts, losses, 0)
    if not needed:
        return losses, None

    gradient = exps.div_(sums[:, None])
    if len(w):
        gradient.scatter_add_(1, tokens[:, None], (here.to(wide) * (smoothing - 1))[:, None])
    if smoothing:
        gradient.sub_(smoothing / size)
    gradient.mul_(
        counts.to(wide)[:, None] if factor is None else torch.where(counts, factor, 0).to(wide)[:, None]
    )
    if steps:
        (gradient,) = torch.autograd.grad(end, start, gradient)
    return losses, gradient


def _cast(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """As autocast does, which leaves float64 alone."""
    if tensor is None or dtype is None or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _LOW else dtype
