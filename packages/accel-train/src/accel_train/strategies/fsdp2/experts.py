"""Which experts of mixture-of-experts layers can be divided among ranks, and what a rank then computes of a layer.

Routers, attention and everything else stay as FSDP2 has them. A rank computes its experts for the tokens of all ranks
of its group; `accel_train.strategies.fsdp2.expert_tokens` sends them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_ckpt.modules.experts import Experts
from accel_ckpt.parts import is_sharded
from accel_train.errors import PrepareError
from accel_train.strategies.fsdp2.expert_tokens import Tokens

__all__ = ["StackedExperts", "check_experts", "divide"]

_ROWS = 4  # of the check that an output is a weighted sum


def check_experts(model: nn.Module, experts: Sequence[Experts], ranks: int) -> None:
    """Check that the experts of a model can be divided, before anything is changed.

    Args:
        model: the model, without wrappers.
        experts: what `find_experts` returns.
        ranks: of a group that holds all experts together.

    Raises:
        PrepareError: there are none, their number cannot be divided, tensor parallelism has divided them, or what a
            layer returns cannot be computed from parts: it is not the weighted sum of what its experts return, or an
            expert of a list does not compute each token by itself.
    """
    kind = type(model).__name__
    if not experts:
        raise PrepareError(
            f"ep_size is {ranks}, and {kind} has no experts that can be divided: no module named 'experts' that is a "
            "list of modules which are alike and have no buffers, or whose forward takes (hidden_states, indices, "
            "weights) and whose parameters have all experts in their first dimension. "
            f"{_likely(model)}Leave out ep_size, or give the model such a module."
        )
    for each in experts:
        if each.count % ranks:
            raise PrepareError(
                f"{each.name} of {kind} has {each.count} experts, which cannot be divided among ep_size={ranks} ranks. "
                f"Choose an ep_size that divides {each.count}."
            )
        divided = next((name for name, p in each.module.named_parameters() if is_sharded(p)), None)
        if divided is not None:
            raise PrepareError(
                f"{divided!r} of {each.name} of {kind} is divided among ranks already (it is a DTensor), and ep_size="
                f"{ranks} divides experts. Leave experts out of the plan of tensor parallelism, or leave out ep_size."
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
        _check_parts(each, kind)


def divide(experts: Experts, mesh: Any) -> None:
    """Keep this rank's experts of stacked ones; parameters become `DTensor`s over the ranks of ``ep``.

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


class StackedExperts:
    """The ``forward`` of a module whose stacked experts are divided.

    Args:
        experts: after `divide`; the module is changed in place.
        tokens: sends them.
    """

    def __init__(self, experts: Experts, tokens: Tokens) -> None:
        self._module = experts.module
        self._compute = experts.module.forward
        self._count = experts.count
        self._tokens = tokens
        self._count_here(tokens.here)
        experts.module.forward = self

    def __call__(self, hidden_states: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden_states: (tokens, features).
            indices: (tokens, k), numbers of experts.
            weights: (tokens, k).
        """
        if is_sharded(next(self._module.parameters())):
            return self._tokens.route(hidden_states, indices, weights, self._expert)
        self._count_here(self._count)  # whole_parameters()
        try:
            whole: Tensor = self._compute(hidden_states, indices, weights)
        finally:
            self._count_here(self._tokens.here)
        return whole

    def _count_here(self, count: int) -> None:
        if hasattr(self._module, "num_experts"):
            self._module.num_experts = count  # type: ignore[assignment] # a number of the script, no tensor

    def _expert(self, rows: Tensor, which: Tensor, counts: Sequence[int]) -> Tensor:
        """Each row's expert of this rank. Without rows one of zeros is computed, so that gradients are reduced."""
        empty = rows.shape[0] == 0
        if empty:
            rows = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
            which = which.new_zeros(1)
        ones = torch.ones((rows.shape[0], 1), dtype=rows.dtype, device=rows.device)
        with _local_parameters(self._module, self._tokens.share):
            results: Tensor = self._compute(rows, which.unsqueeze(1), ones)
        return results[:0] if empty else results


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


def _check_parts(experts: Experts, kind: str) -> None:
    """Check, with random tokens, that a layer can be computed in parts; where there are no values yet, nothing is.

    Raises:
        PrepareError: it cannot, or not be tried.
    """
    tried = experts.members[0] if experts.members else experts.module
    parameters = list(tried.parameters())
    if experts.count < 2 or any(each.is_meta for each in parameters):
        return
    training = {module: module.training for module in tried.modules()}
    tried.eval()  # dropout draws other numbers for parts
    try:
        found, error = _tried(experts, tried, parameters)
    finally:
        for module, mode in training.items():
            module.training = mode
    if found is None:
        raise PrepareError(
            f"{experts.name} of {kind} cannot be tried with random tokens, of any size that its parameters have: "
            f"{type(error).__name__}: {error!s:.200}. If it computes on an accelerator only, move the model there "
            "before prepare(); else leave out ep_size."
        ) from error
    if found:
        return
    if experts.members:
        raise PrepareError(
            f"An expert of {experts.name} of {kind} returns something else for a token if it computes other tokens "
            "with it, so tokens of several ranks cannot be computed together. Leave out ep_size."
        )
    raise PrepareError(
        f"What {experts.name} of {kind} returns for a token is not the sum of weight x expert(token), so it "
        "cannot be computed on several ranks. Leave out ep_size."
    )


@torch.no_grad()
def _tried(
    experts: Experts, tried: nn.Module, parameters: Sequence[Tensor]
) -> tuple[bool | None, Exception | None]:
    """Whether parts give the same; None: no size of a token can be computed, with the last error."""
    generator = torch.Generator().manual_seed(0)
    like, error = parameters[0], None
    bound = 1e-4 if like.dtype in (torch.float32, torch.float64) else 5e-2
    check = _rows_apart if experts.members else _experts_apart
    inner = 0 if experts.members else 1  # behind that of experts
    for features in sorted({size for each in parameters for size in each.shape[inner:]}):
        rows = torch.randn((_ROWS, features), generator=generator).to(like)
        try:
            together, apart = check(tried, rows, experts.count, generator)
        except Exception as failure:  # another dimension is that of a token
            error = failure
            continue
        difference = torch.linalg.norm((together - apart).float())
        return bool(difference <= bound * torch.linalg.norm(together.float()) + 1e-12), None
    return None, error


def _experts_apart(
    module: nn.Module, rows: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """What a module returns for two experts of each token, and the weighted sum of what it returns for one."""
    weights = torch.rand((_ROWS, 2), generator=generator).to(rows)
    ones = torch.ones_like(weights[:, :1])
    indices = (torch.arange(_ROWS)[:, None] + torch.tensor([[0, 1]])).remainder(count).to(rows.device)
    together = module(rows, indices, weights)
    first, second = (
        module(rows, indices[:, place : place + 1], ones) * weights[:, place : place + 1]
        for place in range(2)
    )
    return together, first + second


def _rows_apart(
    module: nn.Module, rows: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """What an expert returns for all tokens, and for each by itself."""
    return module(rows), torch.cat([module(row) for row in torch.split(rows, 1)])
