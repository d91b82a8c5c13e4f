"""Checks that the replicas of a model that ddp trains stay equal: same gradients and learning rates on all ranks.

DDP averages a gradient only if its reducer took part: in a backward pass of a forward through its wrapper. Gradients
that are computed another way silently stay on this rank. They can still be averaged later, until something else than a
sum was done with them, because averaging gradients that are averaged already changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from accel_ckpt.parts import is_sharded
from accel_state.messages import warn
from accel_state.operations.collectives import reduce
from accel_train.errors import AccumulationError, PrepareError
from accel_train.optimizer_parameters import parameter_ids, parameters_of
from accel_train.ranks import Ranks
from accel_train.strategies.gradients import average
from accel_train.strategies.transparent_ddp import TransparentDDP

__all__ = ["Difference", "Replicas", "differing", "differing_rates"]

#: Backward passes for each model after which gradients are compared.
_FIRST_BACKWARDS = 4
_NONE = -1.0  # the norm of no gradient


@dataclass(frozen=True)
class Difference:
    """A value that differs between ranks: its place in a list, and the lowest and the highest of any rank."""

    place: int
    lowest: float
    highest: float


@dataclass(eq=False)
class _Watched:
    """A wrapper, and what it averages."""

    wrapped: TransparentDDP
    names: list[str]
    parameters: list[nn.Parameter]
    dtype: torch.dtype  # of the first
    late: bool = False  # gradients came past the reducer once, and are averaged after every backward
    unsaid: str = ""  # they came past it, and no optimizer has stepped with them: perhaps they are dropped
    looked_at: list[nn.Parameter] = field(default_factory=list)  # by which it is seen whether a backward came
    marks: list[tuple[Tensor, int] | None] = field(default_factory=list)  # of their gradients before it
    was_armed: bool = False
    unchecked: bool = False  # whether every parameter gets a gradient is not known before its first backward

    def __post_init__(self) -> None:
        self._hooked = get_gradient_edge(
            self.parameters[0]
        ).node  # by which the reducer hears of its gradient

    def note(self) -> None:
        """A backward begins. One that the reducer waits for changes every gradient, others may change any."""
        wrapped = self.wrapped
        self.looked_at, self.marks = [], []
        if not (wrapped.require_backward_grad_sync and wrapped.averages):
            return
        self.was_armed = wrapped.armed and self._is_hooked()
        every = not self.was_armed or wrapped.find_unused_parameters or wrapped.static_graph
        self.looked_at = self.parameters if every else self.parameters[:1]
        self.marks = _marks(self.looked_at)
        if self.unsaid and self.parameters[0].grad is None:
            self.unsaid = ""  # dropped by model.zero_grad()

    def _is_hooked(self) -> bool:
        """Whether the reducer hears of gradients. A cast of the model makes torch forget that, also one back."""
        first = self.parameters[0]
        return not first.requires_grad or get_gradient_edge(first).node is self._hooked

    def was_reached(self) -> bool:
        """Whether the backward that ended has changed gradients that are to be reduced; the next needs a forward."""
        marks, self.marks = self.marks, []
        after = _marks(self.looked_at)
        reached = any(not _same(here, there) for here, there in zip(marks, after, strict=True))
        if reached:
            self.wrapped.armed = False
        return reached

    def is_stepped_by(self, optimizer: torch.optim.Optimizer) -> bool:
        held = parameter_ids(optimizer)
        return any(id(parameter) in held for parameter in self.parameters)

    @property
    def has_sparse_gradients(self) -> bool:
        return any(getattr(module, "sparse", False) for module in self.wrapped.module.modules())

    @property
    def owner(self) -> str:
        return type(self.wrapped.module).__name__


def _marks(parameters: list[nn.Parameter]) -> list[tuple[Tensor, int] | None]:
    """The gradients themselves: of one that ddp replaced by its bucket, the next may have the `id`."""
    return [None if (grad := p.grad) is None else (grad, grad._version) for p in parameters]


def _same(before: tuple[Tensor, int] | None, after: tuple[Tensor, int] | None) -> bool:
    """Whether a gradient is the one that it was, unchanged."""
    if before is None or after is None:
        return before is after
    return before[0] is after[0] and before[1] == after[1]


class Replicas:
    """Watches the models that ddp trains.

    Args:
        ranks: the ranks that hold a replica.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._watched: list[_Watched] = []
        self._to_compare = 0  # backward passes
        self._unchecked = False  # whether any model is

    def add(self, wrapped: TransparentDDP) -> None:
        """Add a model that was wrapped, perhaps again."""
        named = _reduced(wrapped)
        unchecked = not wrapped.find_unused_parameters and not wrapped.static_graph
        self._unchecked |= unchecked
        self._watched = [item for item in self._watched if item.wrapped.module is not wrapped.module]
        names, parameters = list(named), list(named.values())
        self._watched.append(_Watched(wrapped, names, parameters, parameters[0].dtype, unchecked=unchecked))
        self._to_compare = _FIRST_BACKWARDS * len(self._watched)

    def clear(self) -> None:
        """Forget all models."""
        self._watched.clear()
        self._to_compare = 0
        self._unchecked = False

    def have_all(self, parameters: Iterable[Tensor]) -> bool:
        """Whether these models have all trained ones of some parameters."""
        known = {id(parameter) for item in self._watched for parameter in item.parameters}
        return all(id(parameter) in known for parameter in parameters if parameter.requires_grad)

    def is_outdated(self, wrapped: DistributedDataParallel) -> bool:
        """Whether a wrapper averages other parameters than those that are trained now."""
        known = next((item for item in self._watched if item.wrapped is wrapped), None)
        return known is not None and {id(p) for p in known.parameters} != {
            id(p) for p in _reduced(wrapped).values()
        }

    # Around backward

    def before_backward(self) -> None:
        """Record the gradients that exist."""
        for item in self._watched:
            item.note()

    def after_backward(self) -> None:
        """Average gradients that the reducers missed; a collective after the first backward passes, and when needed.

        Models that the backward did not reach take no part: only one rank may have run it.
        """
        reached = [item for item in self._watched if item.was_reached()]
        if reached and (self._to_compare > 0 or any(item.late or not item.was_armed for item in reached)):
            self._make_up(reached)

    def _make_up(self, reached: Sequence[_Watched]) -> None:
        """Average what came past the reducers of models.

        A reduction that has begun and not ended is left alone: another backward, or a check before the step, ends it.
        """
        due = [item for item in reached if _unended(item.wrapped) is None]
        for item in due:
            if item.late:
                average(item.parameters, self._ranks)
        unproven = [item for item in due if not item.late]
        suspected = any(not item.was_armed for item in reached)
        if not unproven or not (suspected or self._to_compare > 0):
            return
        self._to_compare -= 1
        found = {
            difference.place: difference
            for difference in differing([p.grad for item in unproven for p in item.parameters], self._ranks)
        }
        start = 0
        for item in unproven:
            places = [place for place in found if start <= place < start + len(item.parameters)]
            if places:
                self._average_late(item, found[places[0]], places[0] - start, len(places))
            start += len(item.parameters)

    def _average_late(self, item: _Watched, first: Difference, place: int, count: int) -> None:
        item.unsaid = (
            f"ddp did not average {count} of {len(item.parameters)} gradients of {item.owner} in backward, the first "
            f"of {item.names[place]!r} ({_described(first)}). {_cause(item.wrapped)}"
        )
        if not item.has_sparse_gradients:
            average(item.parameters, self._ranks)

    # Before a step

    def forget_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when an optimizer's gradients are dropped, such as a discriminator's after the generator's loss."""
        for item in self._watched:
            if item.unsaid and item.is_stepped_by(optimizer):
                item.unsaid = ""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that reductions are finished, and warn of gradients that were averaged late; see `check_finished`.

        Raises:
            AccumulationError: the reducer missed sparse gradients.
        """
        self.check_finished()
        for item in self._watched:
            if item.unsaid and item.is_stepped_by(optimizer):
                self._say(item)

    def _say(self, item: _Watched) -> None:
        what, item.unsaid = item.unsaid, ""
        if item.has_sparse_gradients:
            raise AccumulationError(f"{what} Sparse gradients cannot be averaged afterwards.")
        item.late = True
        if self._ranks.index == 0:
            warn(
                f"{what} They are averaged now, and after every backward from here on: results are right, and each "
                "backward reduces twice.",
            )

    def check_finished(self) -> None:
        """Check that every reduction that has begun is finished; costs less than a microsecond for each model.

        Raises:
            PrepareError: parameters were frozen or cast since the model was prepared, or took no part in the loss.
        """
        for item in self._watched:
            if item.parameters[0].dtype is not item.dtype and not item.late:
                raise PrepareError(
                    f"{item.owner} was cast from {item.dtype} to {item.parameters[0].dtype} after prepare(), by which "
                    "ddp lost its parameters: their gradients are not averaged. Cast it before prepare(), or prepare "
                    "it again."
                )
            error = _unended(item.wrapped)
            if error is not None:
                _unfinished(item, error)

    def check_used(self, optimizer: torch.optim.Optimizer) -> None:
        """Name parameters without a gradient, which DDP waits for: its next forward would fail without names.

        Raises:
            PrepareError: some parameters of the optimizer's models took no part in the first backward.
        """
        if not self._unchecked:
            return
        for item in self._watched:
            if not (item.unchecked and item.is_stepped_by(optimizer)):
                continue
            named = [(n, p) for n, p in item.wrapped.module.named_parameters() if p.requires_grad]
            unused = [name for name, parameter in named if parameter.grad is None]
            if len(unused) == len(named):
                continue  # it had no backward yet
            item.unchecked = False
            self._unchecked = any(other.unchecked for other in self._watched)
            if unused:
                raise PrepareError(
                    f"{len(unused)} of {len(named)} parameters of {item.owner} took no part in the loss, and ddp waits "
                    f"for the gradient of every parameter: {', '.join(unused[:5])}{', …' if len(unused) > 5 else ''}. "
                    "If that is intended, pass "
                    "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]), or "
                    "freeze them with requires_grad_(False) before prepare()."
                )

    def check_step(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        """Check that all ranks are about to take the same step; a collective.

        Args:
            optimizer: the optimizer that is about to step.
            models: the prepared modules, without wrappers.

        Raises:
            AccumulationError: learning rates or gradients differ.
            PrepareError: gradients of parameters that ddp does not know differ, or a reduction is not finished.
        """
        self.check_used(optimizer)
        self.check_finished()
        trained = {id(p) for model in models for p in model.parameters()}
        parameters = [p for p in parameters_of(optimizer) if id(p) in trained]
        if not parameters:
            return  # of a module that is not prepared, perhaps on one rank alone
        for found in differing_rates(optimizer, self._ranks):
            raise AccumulationError(
                f"The learning rate of group {found.place} of {type(optimizer).__name__} is {found.lowest:g} on one "
                f"rank and {found.highest:g} on another, so their copies of the model would drift apart. Give every "
                "rank the same: a prepared scheduler does, if it is stepped on all of them."
            )
        self.check_equal(parameters, models)

    def check_equal(self, parameters: Sequence[Tensor], models: Sequence[nn.Module]) -> None:
        """Check before a step that ranks have the same gradients; a collective.

        Args:
            parameters: parameters of the optimizer.
            models: the prepared modules, without wrappers; other parameters are not checked.

        Raises:
            AccumulationError: gradients differ.
            PrepareError: gradients of parameters that ddp does not know differ.
        """
        named = {id(p): (name, model) for model in models for name, p in model.named_parameters()}
        ignored = {
            id(p)
            for item in self._watched
            for name, p in item.wrapped.module.named_parameters()
            if name in item.wrapped.parameters_to_ignore or not item.wrapped.averages
        }
        known = [p for p in parameters if id(p) in named and id(p) not in ignored and not is_sharded(p)]
        if not known:
            return
        found = differing([p.grad for p in known], self._ranks)
        if not found:
            return
        name, model = named[id(known[found[0].place])]
        where = f"{name!r} of {type(model).__name__} ({_described(found[0])})"
        if not any(p is known[found[0].place] for item in self._watched for p in item.parameters):
            raise PrepareError(
                f"Ranks are about to step with different gradients of {where}, which ddp does not average: it was "
                "added or unfrozen after prepare(), or the model was prepared for evaluation. Prepare the model "
                "again, which also gives all ranks the same values: `model = accelerator.prepare(model)`."
            )
        wrapped = next(item.wrapped for item in self._watched if item.wrapped.module is model)
        raise AccumulationError(
            f"Ranks are about to step with different gradients of {len(found)} of {len(known)} parameters, the first "
            f"{where}, so their copies would drift apart. {_cause(wrapped)} Or gradients were changed after "
            "accelerator.backward(), or the loss went to loss.backward()."
        )


def _reduced(wrapped: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that a wrapper made now would average, by name."""
    return {
        name: parameter
        for name, parameter in wrapped.module.named_parameters()
        if parameter.requires_grad and name not in wrapped.parameters_to_ignore
    }


def _cause(wrapped: DistributedDataParallel) -> str:
    if not getattr(wrapped, "_lazy_init_ran", True):
        return (
            "What prepare() returned was never called: the loss was computed with the original model, with "
            "unwrap_model(model), or with a part or a method of it. Call what prepare() returned, and put methods "
            "that compute a loss into its forward()."
        )
    return (
        "A backward pass ran of which ddp did not know: a second one of one forward, the second of two after two "
        "forwards, one of a forward under no_sync(), or one through a part or a method of the unwrapped model. Add "
        "the losses up and call backward() once; compute all of them in forward() of what prepare() returned. If the "
        "model was cast after prepare(), as by half() for an evaluation, prepare it again, also after a cast back."
    )


def _unended(wrapped: DistributedDataParallel) -> RuntimeError | None:
    """What torch's next forward would raise because a reduction waits for gradients."""
    try:
        wrapped.reducer._check_reducer_finalized()
    except RuntimeError as error:
        return error
    return None


def _unfinished(item: _Watched, error: RuntimeError) -> NoReturn:
    """Say why a reduction that has begun waits for ever."""
    pairs = list(zip(item.names, item.parameters, strict=True))
    frozen = [name for name, parameter in pairs if not parameter.requires_grad]
    if frozen:
        raise PrepareError(
            f"Parameter {frozen[0]!r} of {item.owner} (of {len(frozen)}) was trained when the model was prepared and "
            "is frozen now, and ddp waits for its gradient: those of other parameters are not averaged. Prepare the "
            "model again after freezing: `model = accelerator.prepare(model)`; or let ddp look for unused parameters: "
            "DistributedDataParallelKwargs(find_unused_parameters=True)."
        ) from error
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    unused = [item.names[int(n)] for n in numbers[1].split() if int(n) < len(pairs)] if numbers else []
    raise PrepareError(
        f"{len(unused) or 'Some'} of {len(pairs)} parameters of {item.owner} took no part in the last backward of this "
        f"step{': ' + ', '.join(unused[:5]) if unused else ''}{', …' if len(unused) > 5 else ''}. ddp waits for the "
        "gradient of each, and those of other parameters are not averaged. If a branch may leave them out, pass "
        "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]); if the dtype or "
        "the storage of parameters was changed after prepare(), prepare the model again."
    ) from error


def _described(difference: Difference) -> str:
    if difference.lowest == _NONE:
        return "not every rank has one"
    return f"its norm is {difference.lowest:.6g} on one rank and {difference.highest:.6g} on another"


@torch.no_grad()
def differing(gradients: Sequence[Tensor | None], ranks: Ranks) -> list[Difference]:
    """Find the gradients that differ between ranks, with their norms; one small collective.

    Norms and sums are compared, up to differences that the order of a summation can cause.

    Args:
        gradients: in the same order on all ranks; None for a missing gradient.
        ranks: the ranks that compare.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    device = present[0].device if present else torch.device("cpu")
    dtype = torch.float32 if device.type == "mps" else torch.float64
    norms = torch.full((len(gradients),), _NONE, dtype=dtype, device=device)
    sums = torch.zeros_like(norms)
    for place, gradient in enumerate(gradients):
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            values = torch.view_as_real(values) if values.is_complex() else values
            norms[place] = torch.linalg.vector_norm(values, dtype=dtype)
            sums[place] = values.sum(dtype=dtype)
    wide = max((_slack(g) for g in present), default=0.0)
    roots = torch.tensor([1.0 if g is None else math.sqrt(g.numel()) for g in gradients], dtype=dtype)
    highest, lowest = _extremes(torch.stack([norms, sums]), ranks)
    allowed = wide * highest[0].clamp(min=0)
    apart = (highest[0] - lowest[0] > allowed) | (highest[1] - lowest[1] > allowed * roots)
    return [
        Difference(place, lowest[0, place].item(), highest[0, place].item())
        for place in apart.nonzero().flatten().tolist()
    ]


def differing_rates(optimizer: torch.optim.Optimizer, ranks: Ranks) -> list[Difference]:
    """Find the groups of an optimizer whose learning rates differ between ranks; one small collective."""
    rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
    highest, lowest = _extremes(torch.tensor(rates, dtype=torch.float64), ranks)
    return [
        Difference(place, low, high)
        for place, (low, high) in enumerate(zip(lowest.tolist(), highest.tolist(), strict=True))
        if low != high
    ]


def _slack(gradient: Tensor) -> float:
    return 1e-12 if gradient.dtype in (torch.float64, torch.complex128) else 1e-6


def _extremes(values: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The highest and the lowest value of any rank, on the host; what is not finite compares as one large number."""
    largest = torch.finfo(values.dtype).max / 4
    finite = torch.where(values.isfinite(), values, torch.full_like(values, largest))
    together: Tensor = reduce(torch.stack([finite, -finite]), "max", group=ranks.group)
    highest, lowest = together.cpu()
    return highest, -lowest
