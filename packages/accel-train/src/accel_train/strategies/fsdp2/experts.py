"""Which experts of mixture-of-experts layers can be divided among ranks, and what a rank then computes of a layer.

Routers, attention and everything else stay as FSDP2 has them. A rank computes its experts for the tokens of all ranks
of its group; `accel_train.strategies.fsdp2.expert_tokens` sends them.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from accel_ckpt.modules.experts import Experts
from accel_ckpt.parts import is_sharded
from accel_state.seeding import get_rng_state, set_rng_state
from accel_train.errors import PrepareError
from accel_train.strategies.fsdp2.expert_tokens import Tokens

__all__ = ["StackedExperts", "check_experts", "divide"]

_ROWS = 4  # of the check that an output is a weighted sum
_MANY = 16  # rows that one expert gets, and experts that are compared at once

_Check = Callable[[], Iterator[tuple[Tensor, Tensor]]]


def check_experts(model: nn.Module, experts: Sequence[Experts], ranks: int) -> None:
    """Check that the experts of a model can be divided, before anything is changed.

    Args:
        model: the model, without wrappers.
        experts: what `find_experts` returns.
        ranks: of a group that holds all experts together.

    Raises:
        PrepareError: there are none, their number cannot be divided, tensor parallelism has divided them, or what a
            layer returns cannot be computed from parts: it is not the weighted sum of what its experts return, an
            expert does not compute each token by itself, or a rank's experts return something else than in the whole.
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
        _check_parts(each, kind, ranks)


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
        _set_count(self._module, tokens.here)
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
        _set_count(self._module, self._count)  # whole_parameters()
        try:
            whole: Tensor = self._compute(hidden_states, indices, weights)
        finally:
            _set_count(self._module, self._tokens.here)
        return whole

    def _expert(self, rows: Tensor, which: Tensor, counts: Sequence[int]) -> Tensor:
        """Each row's expert of this rank. Without rows one of zeros is computed, so that gradients are reduced."""
        empty = rows.shape[0] == 0
        if empty:
            rows = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
            which = which.new_zeros(1)
        ones = torch.ones((rows.shape[0], 1), dtype=rows.dtype, device=rows.device)
        with _parameters_as(self._module, self._local):
            results: Tensor = self._compute(rows, which.unsqueeze(1), ones)
        return results[:0] if empty else results

    def _local(self, parameter: Tensor) -> Tensor:
        """This rank's part of a `DTensor`; gradients are those of the `DTensor`, times the share of this rank.

        Experts get gradients for the tokens of all ranks of a group, and FSDP averages over the ranks that hold the
        same experts only. It has a divisor of its own, which only NCCL knows, and which it applies twice to 16 and to
        64 bits where one rank holds an expert (PyTorch 2.13).
        """
        to_local = getattr(parameter, "to_local", None)
        return parameter if to_local is None else _scaled_gradient(to_local(), self._tokens.share)


def _set_count(module: nn.Module, count: int) -> None:
    if hasattr(module, "num_experts"):
        module.num_experts = count  # type: ignore[assignment] # a number of the script, no tensor


@contextlib.contextmanager
def _parameters_as(module: nn.Module, seen: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a module see something else in the place of each parameter."""
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (each._parameters, dict(each._parameters)) for each in module.modules() if each._parameters
    ]
    try:
        for table, whole in tables:
            for name, parameter in whole.items():
                if parameter is not None:
                    table[name] = seen(parameter)
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


def _check_parts(experts: Experts, kind: str, ranks: int) -> None:
    """Check, with random tokens, that a layer can be computed in parts; where there are no values yet, nothing is.

    Nothing of the model and of the global random state is different afterwards.

    Raises:
        PrepareError: it cannot, or not be tried.
    """
    tried = experts.members[0] if experts.members else experts.module
    if experts.count < 2 or any(each.is_meta for each in tried.parameters()):
        return
    random_state = get_rng_state()
    try:
        with torch.no_grad(), _undisturbed(tried):
            _try_parts(experts, tried, f"{experts.name} of {kind}", ranks)
    finally:
        set_rng_state(random_state)


def _try_parts(experts: Experts, tried: nn.Module, name: str, ranks: int) -> None:
    """Try it in evaluation mode, and in training mode unless a layer draws random numbers there."""
    generator = torch.Generator().manual_seed(0)
    _draw_buffers(tried, experts.count, generator)
    tried.eval()
    rows = _sized_rows(experts, tried, name, generator)
    one = _one_expert(experts, tried)
    checks: dict[str, _Check] = {
        f"An expert of {name} returns something else for a token if it computes other tokens with it, so tokens of "
        "several ranks cannot be computed together. A limit of tokens for each expert may be the reason, or a norm "
        "over tokens. Leave out ep_size, or compute each token by itself": lambda: _rows_apart(one, rows)
    }
    if not experts.members:
        checks |= {
            f"What {name} returns for a token is not the sum of weight x expert(token), so it cannot be computed on "
            "several ranks. Leave out ep_size": lambda: _experts_apart(tried, rows, experts.count, generator),
            f"{name} returns something else on a rank that has {experts.count // ranks} of its {experts.count} "
            "experts: only its parameters and num_experts are divided. Something with an entry for each expert that "
            "is no parameter may be the reason, such as a buffer or a list, or a number of experts with another name. "
            "Make it a parameter whose first of two or more dimensions is that of experts, or leave out ep_size": (
                lambda: _ranks_apart(tried, rows, experts.count, ranks)
            ),
        }
    _compare(checks, tried)
    tried.train()
    for each in tried.modules():
        if isinstance(each, nn.modules.dropout._DropoutNd):
            each.eval()  # it draws other numbers for parts
    if not _draws(one, rows):
        _compare(checks, tried)


def _compare(checks: dict[str, _Check], tried: nn.Module) -> None:
    """Raise the message of the first check whose pairs differ, or which fails."""
    parameters = list(tried.parameters())
    bound = max(map(_bound, parameters))
    mode = "training" if tried.training else "evaluation"
    for message, check in checks.items():
        failure = None
        try:
            if all(_are_close(whole, parts, bound) for whole, parts in check()):
                continue
        except Exception as error:  # other rows, or the whole module, can be computed
            failure = error
        what = "" if failure is None else f": {type(failure).__name__}: {failure!s:.200}"
        raise PrepareError(f"{message}. It was tried with random tokens in {mode} mode{what}.") from failure


def _bound(parameter: Tensor) -> float:
    """How much the norm of a result may differ."""
    if parameter.dtype not in (torch.float32, torch.float64):
        return 5e-2
    return 1e-4 if parameter.dtype is torch.float64 or parameter.device.type == "cpu" else 5e-3  # for TF32


def _are_close(whole: Tensor, parts: Tensor, bound: float) -> bool:
    difference = torch.linalg.norm((whole - parts).float())
    return bool(difference <= bound * torch.linalg.norm(whole.float()) + 1e-12)


def _sized_rows(experts: Experts, tried: nn.Module, name: str, generator: torch.Generator) -> Tensor:
    """Random tokens of a size that can be computed."""
    parameters = list(tried.parameters())
    inner = 0 if experts.members else 1  # behind that of experts
    error = None
    for features in sorted({size for each in parameters for size in each.shape[inner:]}):
        rows = torch.randn((_MANY, features), generator=generator).to(parameters[0])
        try:
            if experts.members:
                _one_expert(experts, tried)(rows).float()
            else:
                list(_experts_apart(tried, rows, experts.count, generator))
        except Exception as failure:  # another dimension is that of a token
            error = failure
            continue
        return rows
    raise PrepareError(
        f"{name} cannot be tried with random tokens, of any size that its parameters have: "
        f"{type(error).__name__}: {error!s:.200}. If it computes on an accelerator only, move the model there "
        "before prepare(); else leave out ep_size."
    ) from error


def _one_expert(experts: Experts, tried: nn.Module) -> Callable[[Tensor], Tensor]:
    """Computes one expert of rows."""

    def listed(rows: Tensor) -> Tensor:
        with _undisturbed(tried):
            result: Tensor = tried(rows)
        return result

    def stacked(rows: Tensor) -> Tensor:
        return _chosen(tried, rows, torch.full((len(rows),), experts.count - 1))

    return listed if experts.members else stacked


def _chosen(module: nn.Module, rows: Tensor, which: Tensor) -> Tensor:
    """The result of each row's expert."""
    return _forward(module, rows, which[:, None], rows.new_ones((len(rows), 1)))


def _forward(module: nn.Module, rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    with _undisturbed(module):
        result: Tensor = module.forward(rows, indices.to(rows.device), weights)
    return result


def _experts_apart(
    module: nn.Module, rows: Tensor, count: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """What a module returns for two experts of each token, and the weighted sum of what it returns for one."""
    rows = rows[:_ROWS]
    weights = torch.rand((_ROWS, 2), generator=generator).to(rows)
    indices = (torch.arange(_ROWS)[:, None] + torch.tensor([[0, 1]])).remainder(count)
    first, second = (
        _chosen(module, rows, indices[:, place]) * weights[:, place : place + 1] for place in range(2)
    )
    yield _forward(module, rows, indices, weights), first + second


def _rows_apart(compute: Callable[[Tensor], Tensor], rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What an expert returns for all tokens, and for each by itself."""
    yield compute(rows), torch.cat([compute(row) for row in torch.split(rows, 1)])


def _ranks_apart(module: nn.Module, rows: Tensor, count: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What a module returns for one expert of each token, and what the last rank does, which has these experts.

    Tokens of different experts, at most 16 of them because the weights of large models take long to read; and of one.
    """
    here = count // ranks
    first = count - here
    experts = torch.arange(first, count)
    for which in (experts[-_MANY:], experts[-1:].expand(_MANY)):
        some = rows[: len(which)]
        yield _chosen(module, some, which), _chosen_here(module, some, which - first, first, here)


def _chosen_here(module: nn.Module, rows: Tensor, which: Tensor, first: int, here: int) -> Tensor:
    """The result of each row's expert of a rank, computed as `StackedExperts` does there."""
    with _undisturbed(module), _parameters_as(module, lambda each: each[first : first + here]):
        _set_count(module, here)
        return _chosen(module, rows, which)


def _draws(compute: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    """Whether random numbers are drawn, or whether that cannot be found out."""
    before = _pytree.tree_leaves(get_rng_state())
    try:
        first, second = compute(rows), compute(rows)
    except Exception:  # such as what needs gradients
        return True
    after = _pytree.tree_leaves(get_rng_state())
    return not torch.equal(first, second) or not all(
        torch.equal(old, new) if isinstance(old, Tensor) else old == new
        for old, new in zip(before, after, strict=True)
    )


def _draw_buffers(module: nn.Module, count: int, generator: torch.Generator) -> None:
    """Give copies of buffers with an entry for each expert other entries; they may be alike now, and change later."""
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.is_floating_point() and count in buffer.shape:
                each._buffers[name] = (torch.rand(buffer.shape, generator=generator) + 0.5).to(buffer)


@contextlib.contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Let a module compute with copies of its buffers, lists and tables; afterwards it is as before."""
    kept = [(vars(each), dict(vars(each))) for each in module.modules()]
    try:
        for now, before in kept:
            now.update(
                {name: copy.copy(each) for name, each in before.items() if type(each) in (list, dict, set)}
            )
            now["_buffers"] = {
                name: None if each is None else each.clone() for name, each in before["_buffers"].items()
            }
        yield
    finally:
        for now, before in kept:
            now.clear()
            now.update(before)
