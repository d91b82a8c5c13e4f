"""Experts in lists, one module each, divided among ranks.

Their parameters stay divided among all ranks of a replica, as FSDP2 divides them, so names, optimizers and saved states
are those of FSDP2. In a forward each rank gathers its own experts only, and computes them for the tokens of all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_leaves, tree_map

from accel_ckpt.modules.experts import Experts
from accel_ckpt.parts import is_sharded
from accel_state.operations.collectives import gather_object
from accel_train.errors import PrepareError
from accel_train.strategies.fsdp2.activations import CheckpointedForward
from accel_train.strategies.fsdp2.expert_tokens import Tokens
from accel_train.strategies.provenance import Provenance

__all__ = ["ListedExperts", "divide_list"]


def divide_list(experts: Experts, mesh: Any) -> list[nn.Parameter]:
    """Divide the parameters of experts among all ranks of a replica.

    Args:
        experts: with values, which are the same on all ranks.
        mesh: the ranks of a replica, behind the replicas if there are several.

    Returns:
        The parameters, which are `DTensor`s now.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    found: list[nn.Parameter] = []
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    for module in (module for member in experts.members for module in member.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                part = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
                found.append(nn.Parameter(part, parameter.requires_grad))
                module._parameters[name] = found[-1]
    return found


class ListedExperts:
    """Computes the divided experts of a list: as its ``forward``, or in that of the module which calls its members.

    A script calls the members one after the other, with the tokens of this rank, and skips those without tokens. So the
    forward of the module around them runs twice: first the members only note what they are called with and return
    zeros; then all noted tokens are sent and computed together, and in the second run the members return the results.

    Args:
        experts: after `divide_list`; modules are changed in place.
        tokens: sends them.
        mesh: as for `divide_list`.
        rank: this rank's number among those that hold all experts together.
        policy: the dtypes in which parameters are gathered and gradients reduced.
        device: where this rank computes.
    """

    def __init__(
        self,
        experts: Experts,
        tokens: Tokens,
        mesh: Any,
        rank: int,
        policy: MixedPrecisionPolicy,
        device: torch.device,
    ) -> None:
        self._name = experts.name
        self._tokens = tokens
        self._device = device
        self._slots = [_slots(member) for member in experts.members]
        self._own = range(rank * tokens.here, (rank + 1) * tokens.here)
        self._members = experts.members
        self._gather = _Gather(
            group=mesh.get_group(mesh.ndim - 1),
            replicas=mesh.get_group(0) if mesh.ndim > 1 else None,
            index=mesh.get_local_rank(mesh.ndim - 1),
            ranks=mesh.size(mesh.ndim - 1),
            own=self._own,
            experts=experts.count,
            factor=tokens.repeats / mesh.size(),
            policy=policy,
        )
        self._computes = [member.forward for member in experts.members]
        self._calls: list[tuple[int, Tensor]] = []
        self._results: list[Tensor] | None = None
        self._running = False
        self._values: Provenance | None = None  # in a run that follows what members return
        self._followed: set[tuple[bool, int]] = (
            set()
        )  # members that one has seen, in training and in evaluation
        self._used: set[int] = set()  # experts that this rank called in its last forward, some without tokens
        self._form: tuple[int, torch.dtype] | None = None  # of the rows that members are called with
        if experts.caller is None:
            self._forward: Callable[..., Any] = experts.module.forward
            experts.module.forward = self._routed
        else:
            self._caller = experts.caller
            forward: Any = experts.caller.forward
            owner: Any = forward if isinstance(forward, CheckpointedForward) else experts.caller
            self._forward = owner.forward
            owner.forward = self._called
            for number, member in enumerate(experts.members):
                member.forward = _Member(self, number)

    @property
    def _divided(self) -> bool:
        """Whether ranks hold parts, outside of a forward; else this is inside of ``whole_parameters()``."""
        table, name = self._slots[0][0]
        return is_sharded(table[name])

    @torch._disable_dynamo  # type: ignore[attr-defined]  # lazily: torch.compiler.disable imports for a second
    def _routed(self, hidden_states: Tensor, indices: Tensor, weights: Tensor) -> Any:
        """The forward of a list that takes routes."""
        if not self._divided:
            return self._forward(hidden_states, indices, weights)
        with self._own_parameters():
            result = self._tokens.route(hidden_states, indices, weights, self._compute)
            self._used = {number for number, count in enumerate(self._tokens.sent) if count}
            return result

    # Sizes of what is sent depend on data, and the two runs on what members note.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module that calls the members.

        Raises:
            PrepareError: it changes tensors in place, or calls other members when it runs again.
        """
        if not self._divided:
            return self._forward(*args, **kwargs)
        try:
            self._running = True
            with self._own_parameters():
                return self._twice(args, kwargs)
        finally:
            self._running = False
            self._calls, self._results = [], None

    def _twice(self, args: Sequence[Any], kwargs: Any) -> Any:
        watched = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        watched += self._caller.buffers()
        watched = [each for each in watched if not each.is_inference()]
        before, drawn = [each._version for each in watched], self._random_states()
        self._forward(*args, **kwargs)
        if before != [each._version for each in watched]:
            raise PrepareError(
                f"{type(self._caller).__name__}, which holds {self._name}, changes one of its inputs or buffers in "
                "place. With ep_size its forward runs twice: first to learn which tokens each expert gets. Let it "
                "change a copy, or give the list of experts a forward(hidden_states, indices, weights), which runs "
                "once."
            )
        self._used = {number for number, _ in self._calls}
        seen = {(self._caller.training, number) for number in self._used}
        if not seen <= self._followed:
            self._follow(drawn, args, kwargs)
            self._followed |= seen
        calls = self._calls
        results = self._computed(calls)
        drawn_since = self._random_states()
        self._set_random_states(drawn)
        self._calls, self._results = [], results[: len(calls)]
        output = self._forward(*args, **kwargs)
        self._set_random_states(drawn_since)
        if _described(self._calls) != _described(calls):
            self._refuse_other_calls()
        return output if calls else _depending_on(results[0], output)

    def _follow(self, drawn: Sequence[Tensor], args: Sequence[Any], kwargs: Any) -> None:
        """The first run once more, in which a member that gets what another one returned is refused."""
        self._set_random_states(drawn)
        before, self._calls = self._calls, []
        try:
            with (
                torch.no_grad(),
                Provenance() as self._values,
            ):  # a recomputed forward keeps the same number of tensors
                self._forward(*args, **kwargs)
        finally:
            self._values = None
        if _described(self._calls) != _described(before):
            self._refuse_other_calls()
        self._calls = before

    def call(self, number: int, args: Sequence[Any], kwargs: Any) -> Any:
        """The forward of one member.

        Raises:
            PrepareError: it is called with something else than one tensor, or by another module.
        """
        if not self._running and not self._divided:
            return self._computes[number](*args, **kwargs)
        if not self._running:
            raise PrepareError(
                f"{self._name}.{number} was called outside of the forward of {type(self._caller).__name__}, which "
                "holds it. With ep_size only that forward can call it, because other ranks have parts of it; or call "
                "it inside accelerator.whole_parameters(model)."
            )
        values = (*args, *kwargs.values())
        if len(values) != 1 or not isinstance(values[0], Tensor):
            raise PrepareError(
                f"{self._name}.{number} was called with {len(args)} arguments and the keywords {list(kwargs)}; with "
                "ep_size experts take one tensor, whose last dimension is that of a token's features."
            )
        [tokens] = values
        rows = tokens.reshape(-1, tokens.shape[-1])
        place = len(self._calls)
        self._calls.append((number, rows))
        if self._results is None:
            zeros = self._zeros_like_result(tokens)
            if self._values is not None:
                if self._values.reaches(tokens):
                    raise PrepareError(
                        f"{type(self._caller).__name__} calls {self._name}.{number} with values that were computed "
                        "from what another member returned. With ep_size all members compute together, after a first "
                        "run that notes their tokens, so none can wait for another. Leave out ep_size, or move a "
                        "shared expert out of the list."
                    )
                self._values.mark(zeros)
            return zeros
        if place >= len(self._results) or len(self._results[place]) != len(rows):
            self._refuse_other_calls()
        result = self._results[place]
        return result.view(*tokens.shape[:-1], result.shape[-1])

    def _refuse_other_calls(self) -> None:
        raise PrepareError(
            f"{type(self._caller).__name__} called other members of {self._name}, or with other tokens, when its "
            "forward ran again. With ep_size it runs twice, first to learn which tokens each expert gets, so that must "
            "not depend on what experts return, or on an earlier call. Give the list of experts a "
            "forward(hidden_states, indices, weights), which runs once."
        )

    @torch.no_grad()
    def _zeros_like_result(self, tokens: Tensor) -> Tensor:
        none = self._expert(0, tokens.detach()[..., :0, :] if tokens.dim() > 1 else tokens.detach()[None][:0])
        return none.new_zeros((*tokens.shape[:-1], none.shape[-1]))

    def _computed(self, calls: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """The result of each noted call; of none, one without rows. Collective."""
        sizes = [len(rows) for _, rows in calls]
        own = torch.cat([rows for _, rows in calls]) if calls else None
        if self._form is None:
            self._form = self._agreed_form(own)
        width, dtype = self._form
        rows = torch.zeros((0, width), dtype=dtype, device=self._device) if own is None else own
        if torch.is_grad_enabled() and not rows.requires_grad:
            rows = rows.detach().requires_grad_()  # so that all ranks send gradients back, or none does
        numbers = torch.tensor([number for number, _ in calls], dtype=torch.int64)
        number = numbers.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)).to(self._device)
        return list(torch.split(self._tokens.each(rows, number, self._compute), sizes or [0]))

    def _agreed_form(self, rows: Tensor | None) -> tuple[int, torch.dtype]:
        """Features and dtype of the rows of any rank, for ranks that have none. Collective, in the first forward."""
        own = None if rows is None else (rows.shape[-1], str(rows.dtype).removeprefix("torch."))
        known = [form for form in gather_object([own]) if form is not None]
        if not known:
            raise PrepareError(
                f"{type(self._caller).__name__} called no member of {self._name} in its first forward, on any rank, so "
                "it is not known which tokens they take. Begin with a batch that has tokens."
            )
        width, dtype = known[0]
        return int(width), getattr(torch, dtype)

    def _compute(self, rows: Tensor, which: Tensor, counts: Sequence[int]) -> Tensor:
        """Each row's expert of this rank. Without rows one of zeros is computed, so that gradients are reduced."""
        if not sum(counts):
            return self._expert(0, torch.cat([rows, rows.new_zeros((1, rows.shape[1]))]))[:0]
        order = torch.argsort(which, stable=True)
        pieces = torch.split(rows[order], list(counts))
        results = torch.cat([self._expert(place, piece) for place, piece in enumerate(pieces) if len(piece)])
        return torch.empty_like(results).index_copy(0, order, results)

    def _expert(self, place: int, rows: Tensor) -> Tensor:
        """One of this rank's experts."""
        member = self._members[self._own[place]]
        compute = member.forward.compute if isinstance(member.forward, _Member) else member
        result: Tensor = compute(rows)
        return result

    @contextlib.contextmanager
    def _own_parameters(self) -> Iterator[None]:
        """Let this rank's experts see their whole parameters. Collective; so is the backward."""
        held = [[table[name] for table, name in slots] for slots in self._slots]
        kinds = [any(parameter.requires_grad for parameter in each) for each in zip(*held, strict=True)]
        whole: dict[tuple[int, int], Tensor] = {}
        use = _Use()
        for trained in (True, False):  # of frozen ones no gradient is computed
            places = [place for place, kind in enumerate(kinds) if kind is trained]
            if places:
                shapes = [held[0][place].shape for place in places]
                parts = [parameters[place].to_local() for parameters in held for place in places]
                found = _Gathered.apply(self._gather, use, shapes, *parts)  # type: ignore[no-untyped-call]
                whole |= zip(itertools.product(self._own, places), found, strict=True)
        try:
            for (expert, place), values in whole.items():
                table, name = self._slots[expert][place]
                table[name] = values
            yield
            use.experts = self._used
        finally:
            for expert, place in whole:
                table, name = self._slots[expert][place]
                table[name] = held[expert][place]

    def _random_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    def _set_random_states(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)


class _Member:
    """The ``forward`` of a member of a list."""

    def __init__(self, experts: ListedExperts, number: int) -> None:
        self._experts = experts
        self._number = number
        self.compute = experts._computes[number]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._experts.call(self._number, args, kwargs)


@dataclass(frozen=True)
class _Gather:
    """Who has which rows of the parameters of experts, and who computes which experts.

    Attributes:
        group: the ranks of a replica, among which parameters are divided.
        replicas: the ranks of other replicas that hold the same parts; None: there are none.
        index: this rank's number in `group`.
        ranks: how many ranks `group` has.
        own: the experts that this rank computes; its neighbours in `group` compute the others.
        experts: how many experts there are.
        factor: what sums of gradients over all replicas are multiplied by.
        policy: the dtypes in which parameters are gathered and gradients reduced.
    """

    group: Any
    replicas: Any
    index: int
    ranks: int
    own: range
    experts: int
    factor: float
    policy: MixedPrecisionPolicy

    @property
    def holders(self) -> int:
        """How many neighbours compute all experts together."""
        return self.experts // len(self.own)

    def rows(self, shape: torch.Size, rank: int) -> slice:
        """The rows of a parameter that a rank holds."""
        size = -(-shape[0] // self.ranks)
        return slice(min(rank * size, shape[0]), min((rank + 1) * size, shape[0]))

    def sizes(self, shapes: Sequence[torch.Size], rank: int) -> list[int]:
        """Elements that a rank holds of each parameter of one expert."""
        rows = [self.rows(shape, rank) for shape in shapes]
        return [
            (each.stop - each.start) * math.prod(shape[1:]) for each, shape in zip(rows, shapes, strict=True)
        ]

    def gather(self, parts: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """The whole parameters of this rank's experts. Collective.

        Args:
            parts: this rank's, of all experts.
            shapes: of the parameters of one expert.
        """
        here, low = len(self.own), self.policy.param_dtype
        dtype = low or _widest(parts)
        flat = torch.cat([part.reshape(-1).to(dtype) for part in parts])
        mine = sum(self.sizes(shapes, self.index)) * here
        sent = flat.view(self.holders, mine)[torch.arange(self.ranks) % self.holders].flatten()
        coming = [sum(self.sizes(shapes, rank)) * here for rank in range(self.ranks)]
        received = sent.new_empty(sum(coming))
        dist.all_to_all_single(received, sent, coming, [mine] * self.ranks, group=self.group)
        pieces = [
            torch.split(values, self.sizes(shapes, rank) * here)
            for rank, values in enumerate(torch.split(received, coming))
        ]
        own = parts[self.own.start * len(shapes) : self.own.stop * len(shapes)]
        return [
            torch.cat([of_rank[place] for of_rank in pieces])
            .view(shapes[place % len(shapes)])
            .to(low or part.dtype)
            for place, part in enumerate(own)
        ]

    def reduce(
        self,
        gradients: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        dtypes: Sequence[torch.dtype],
        use: _Use,
    ) -> list[Tensor | None]:
        """The gradients of this rank's parts of all experts; None for experts that no rank called. Collective.

        Args:
            gradients: of the whole parameters of this rank's experts.
            shapes: of the parameters of one expert.
            dtypes: of the parts of all experts.
            use: of the forward.
        """
        here, experts = len(self.own), self.experts
        dtype = self.policy.reduce_dtype or _widest(gradients)
        used = torch.tensor([float(number in use.experts) for number in range(experts)], dtype=dtype)
        used = used.to(gradients[0].device)
        rows = [
            [gradient[self.rows(gradient.shape, rank)] for gradient in gradients]
            for rank in range(self.ranks)
        ]
        sent = torch.cat([each.reshape(-1).to(dtype) for of_rank in rows for each in (*of_rank, used)])
        going = [sum(self.sizes(shapes, rank)) * here + experts for rank in range(self.ranks)]
        mine = going[self.index]
        received = sent.new_empty(mine * self.ranks)
        dist.all_to_all_single(received, sent, [mine] * self.ranks, going, group=self.group)
        # First come the experts of all neighbours, then the same ones from the next neighbours.
        total = received.view(self.ranks // self.holders, self.holders, mine).sum(0)
        if self.replicas is not None:
            dist.all_reduce(total, group=self.replicas)
        summed = (total[:, :-experts] * self.factor).flatten()
        found = torch.split(summed, self.sizes(shapes, self.index) * experts)
        everywhere: Any = use.experts
        if len(everywhere) < experts:  # else the host need not wait for the device
            everywhere = set(total[:, -experts:].sum(0).nonzero().flatten().tolist())
        parts: list[Tensor | None] = []
        for place, own in enumerate(dtypes):
            expert, kind = divmod(place, len(shapes))
            size = self.rows(shapes[kind], self.index)
            values = found[place].view(size.stop - size.start, *shapes[kind][1:]).to(own)
            parts.append(values if expert in everywhere else None)
        return parts


@dataclass
class _Use:
    """The numbers of the experts that this rank calls in a forward, some without tokens."""

    experts: Collection[int] = ()


class _Gathered(torch.autograd.Function):
    """Whole parameters of this rank's experts, from all ranks' parts of all experts; gradients go back."""

    @staticmethod
    def forward(ctx: Any, gather: _Gather, use: _Use, shapes: Sequence[torch.Size], *parts: Tensor) -> Any:
        ctx.gather, ctx.use, ctx.shapes = gather, use, shapes
        ctx.dtypes = [part.dtype for part in parts]
        return tuple(gather.gather(parts, shapes))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduced = ctx.gather.reduce(gradients, ctx.shapes, ctx.dtypes, ctx.use)
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *(each if need else None for each, need in zip(reduced, needed, strict=True))


def _depending_on(nothing: Tensor, output: Any) -> Any:
    """An output whose backward goes through a tensor without elements, so that this rank takes part in collectives."""
    done = False

    def join(value: Any) -> Any:
        nonlocal done
        if done or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        done = True
        return value + nothing.sum().to(value.dtype)

    return tree_map(join, output)


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, [each.dtype for each in tensors])


def _slots(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The places of a module's parameters."""
    return [
        (each._parameters, name)
        for each in module.modules()
        for name, parameter in each._parameters.items()
        if parameter is not None
    ]


def _described(calls: Sequence[tuple[int, Tensor]]) -> list[tuple[int, tuple[int, ...]]]:
    return [(number, tuple(rows.shape)) for number, rows in calls]
