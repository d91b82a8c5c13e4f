"""Experts of mixture-of-experts layers, divided among ranks: each rank holds some, and tokens are sent to them.

Routers, attention and everything else stay as FSDP2 has them. A rank computes its experts for the tokens of all ranks
of its group, which it receives by an all-to-all and sends back by another one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ckpt.modules.experts import Experts
from accel_train.errors import PrepareError
from accel_train.ranks import Ranks

__all__ = ["Tokens", "check_experts", "divide", "receive_tokens"]

_ROWS = 4  # of the check that an output is a weighted sum


def check_experts(model: nn.Module, experts: Sequence[Experts], ranks: int) -> None:
    """Check that the experts of a model can be divided, before anything is changed.

    Args:
        model: the model, without wrappers.
        experts: what `find_experts` returns.
        ranks: of a group that holds all experts together.

    Raises:
        PrepareError: there are none, their number cannot be divided, or what a layer returns is not the weighted sum of
            what its experts return, so that it cannot be computed from parts.
    """
    kind = type(model).__name__
    if not experts:
        raise PrepareError(
            f"ep_size is {ranks}, and {kind} has no experts that can be divided: no module named 'experts' whose "
            "forward takes (hidden_states, indices, weights) and whose parameters have all experts in their first "
            "dimension. "
            f"{_likely(model)}Leave out ep_size, or give the model such a module."
        )
    for each in experts:
        if each.count % ranks:
            raise PrepareError(
                f"{each.name} of {kind} has {each.count} experts, which cannot be divided among ep_size={ranks} ranks. "
                f"Choose an ep_size that divides {each.count}."
            )
        shared = {id(p) for p in each.module.parameters()}
        outside = [
            name
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) in shared and not name.startswith(f"{each.name}.")
        ]
        if outside:
            raise PrepareError(
                f"{each.name} of {kind} shares the parameter {outside[0]!r} with another module, which has no part of "
                "it if experts are divided. Leave out ep_size, or untie the two."
            )
        if not _is_weighted_sum(each):
            raise PrepareError(
                f"What {each.name} of {kind} returns for a token is not the sum of weight x expert(token), so it "
                "cannot be computed on several ranks. Leave out ep_size."
            )


def divide(experts: Experts, mesh: Any) -> None:
    """Keep this rank's experts; parameters become `DTensor`s over the ranks of ``ep``.

    Args:
        experts: with values, which are the same on all ranks.
        mesh: the dimension ``ep``.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    for module in experts.module.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
                module._parameters[name] = nn.Parameter(part, parameter.requires_grad)
    if hasattr(experts.module, "num_experts"):
        experts.module.num_experts = experts.count // mesh.size()


def receive_tokens(experts: Experts, group: Any) -> Tokens:
    """Have a module compute its rank's experts for the tokens of all ranks of a group.

    Args:
        experts: after `divide`.
        group: the ranks that hold all experts together, in the order of their experts.

    Returns:
        What is called in the place of the module's ``forward``; it counts tokens.
    """
    tokens = Tokens(experts, group)
    experts.module.forward = tokens
    return tokens


class Tokens:
    """The ``forward`` of a module whose experts are divided: tokens go to their experts, and results come back.

    Attributes:
        name: the module's name in its model.
    """

    def __init__(self, experts: Experts, group: Any) -> None:
        self.name = experts.name
        self._module = experts.module
        self._compute: Callable[..., Tensor] = experts.module.forward
        self._count = experts.count
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._counts: Tensor | None = None

    def __call__(self, hidden_states: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden_states: (tokens, features).
            indices: (tokens, k), numbers of experts.
            weights: (tokens, k).
        """
        k = indices.shape[-1]
        number = indices.reshape(-1)
        order = torch.argsort(number, stable=True)
        sent = number.new_zeros(self._count).scatter_add_(0, number, torch.ones_like(number))
        self._note(sent)
        here = self._count // self._ranks
        received = torch.empty_like(sent)  # from each rank, for each expert of this one
        dist.all_to_all_single(received, sent, group=self._group)
        by_rank = torch.stack([sent.view(self._ranks, here).sum(1), received.view(self._ranks, here).sum(1)])
        sent_sizes, received_sizes = by_rank.tolist()  # the one time that the host waits for the device
        rows = _exchange(hidden_states[order // k], received_sizes, sent_sizes, self._group)
        which = torch.arange(here, device=rows.device).repeat(self._ranks)
        which = which.repeat_interleave(received, output_size=sum(received_sizes))
        results = _exchange(self._expert(rows, which), sent_sizes, received_sizes, self._group)
        placed = torch.empty_like(results).index_copy(0, order, results).view(-1, k, results.shape[-1])
        return (placed * weights.reshape(-1, k, 1)).sum(1).to(hidden_states.dtype)

    def _expert(self, rows: Tensor, which: Tensor) -> Tensor:
        """Each row's expert of this rank. Without rows one of zeros is computed, so that gradients are reduced."""
        empty = rows.shape[0] == 0
        if empty:
            rows = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
            which = which.new_zeros(1)
        ones = torch.ones((rows.shape[0], 1), dtype=rows.dtype, device=rows.device)
        with _local_parameters(self._module, 1 / self._ranks):
            results = self._compute(rows, which.unsqueeze(1), ones)
        return results[:0] if empty else results

    def _note(self, sent: Tensor) -> None:
        # What backward recomputes is not counted again.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._counts = sent.clone() if self._counts is None else self._counts.add_(sent)

    def total(self, ranks: Ranks, device: torch.device) -> Tensor:
        """How many tokens each expert has got from all `ranks` since the last call: (experts,). Collective.

        Args:
            ranks: those whose tokens differ.
            device: where they compute.
        """
        counts, self._counts = self._counts, None
        if counts is None:
            counts = torch.zeros(self._count, dtype=torch.int64, device=device)
        dist.all_reduce(counts, group=ranks.group)
        return counts


@contextlib.contextmanager
def _local_parameters(module: nn.Module, scale: float) -> Iterator[None]:
    """Let a module see this rank's part of each `DTensor`; gradients are those of the `DTensor`, times `scale`.

    Experts get gradients for the tokens of all ranks of a group, and FSDP averages over the ranks that hold the same
    experts only. It has a divisor of its own, which only NCCL knows, and which it applies twice to 16 and to 64 bits
    where one rank holds an expert (PyTorch 2.13).
    """
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (each._parameters, dict(each._parameters)) for each in module.modules() if each._parameters
    ]
    try:
        for table, whole in tables:
            for name, parameter in whole.items():
                to_local = getattr(parameter, "to_local", None)
                if to_local is not None:
                    table[name] = _scaled_gradient(to_local(), scale)
        yield
    finally:
        for table, whole in tables:
            table.update(whole)


def _exchange(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    exchanged: Tensor = _Exchange.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """Rows go to the ranks of a group, some to each; gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        received, sent = ctx.sizes
        return _exchange(gradients[0], sent, received, ctx.group), None, None, None


def _scaled_gradient(tensor: Tensor, scale: float) -> Tensor:
    scaled: Tensor = _ScaledGradient.apply(tensor, scale)  # type: ignore[no-untyped-call]
    return scaled


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.scale, None


def _likely(model: nn.Module) -> str:
    """A module that looks as if it held experts, for the message."""
    for name, module in model.named_modules():
        if re.search(r"expert|moe", f"{name} {type(module).__name__}", re.IGNORECASE) and name:
            return f"{name!r} ({type(module).__name__}) is no such module. "
    return ""


@torch.no_grad()
def _is_weighted_sum(experts: Experts) -> bool:
    """Whether an output is the weighted sum of outputs for single experts; True where there are no values yet."""
    parameters = list(experts.module.parameters())
    like = parameters[0]
    if experts.count < 2 or any(each.is_meta for each in parameters):
        return True
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand((_ROWS, 2), generator=generator).to(like)
    ones = torch.ones_like(weights[:, :1])
    indices = (torch.arange(_ROWS)[:, None] + torch.tensor([[0, 1]])).remainder(experts.count).to(like.device)
    for features in sorted({size for each in parameters for size in each.shape[1:]}):
        rows = torch.randn((_ROWS, features), generator=generator).to(like)
        try:
            together = experts.module(rows, indices, weights)
        except RuntimeError:
            together = None  # another dimension is that of a token
        if together is None:
            continue
        apart = sum(
            experts.module(rows, indices[:, place : place + 1], ones) * weights[:, place : place + 1]
            for place in range(2)
        )
        bound = 1e-4 if like.dtype in (torch.float32, torch.float64) else 5e-2
        difference = torch.linalg.norm((together - apart).float())
        return bool(difference <= bound * torch.linalg.norm(together.float()) + 1e-12)
    return True
