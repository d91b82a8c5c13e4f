"""The states of an `Accelerator` that are in host memory between phases of training."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accel_state.host.devices import empty_cache
from accel_state.log import get_logger
from accel_state.world.process import release_completed_collectives
from accel_train.errors import ArgumentTypeError, OffloadedStatesError, OptionError
from accel_train.loop.observers import StepObserver
from accel_train.loop.optimizer import AcceleratedOptimizer
from accel_train.offload.host_copies import HostCopies, HostMemory, Offloaded
from accel_train.offload.refusal import is_refused
from accel_train.offload.report import OffloadReport
from accel_train.offload.tensors import KINDS, HoldsTensors, of_kind, tensors_in
from accel_train.optimizer_parameters import parameters_of
from accel_train.strategies.base import Strategy

__all__ = ["Offloading"]

_logger = get_logger(__name__)


@dataclass(eq=False)
class _Moved:
    """States of one object.

    Attributes:
        owner: a prepared model or optimizer; None: what belongs to none of them, such as the loss scale.
        kinds: of its states.
        states: moves them back.
        hooks: refuse calls of a model.
    """

    owner: nn.Module | AcceleratedOptimizer | None
    kinds: frozenset[str]
    states: Offloaded
    hooks: list[RemovableHandle]


class Offloading(StepObserver):
    """Moves states to host memory and back, and refuses what needs them meanwhile.

    It observes steps only while something is in host memory, so a step without it costs nothing.

    Args:
        strategy: moves them.
        models: the prepared models.
        optimizers: the prepared optimizers.
        observers: the observers of steps.
    """

    def __init__(
        self,
        strategy: Strategy,
        models: Sequence[nn.Module],
        optimizers: Sequence[AcceleratedOptimizer],
        observers: list[StepObserver],
    ) -> None:
        self._strategy = strategy
        self._models = models
        self._optimizers = optimizers
        self._observers = observers
        self._memory = {pinned: HostMemory(pinned) for pinned in (False, True)}
        self._moved: list[_Moved] = []
        self._since = 0  # nodes of autograd with lower numbers were made before

    # There and back

    def offload(
        self, objects: Sequence[object], include: Collection[str], pinned: bool, registered: Sequence[object]
    ) -> OffloadReport:
        """See `Accelerator.offload_states`.

        Args:
            objects: prepared models and optimizers; empty: all of them, and what belongs to none of them.
            include: kinds of states.
            pinned: whether the host memory is pinned.
            registered: objects that the script registered for checkpointing.
        """
        kinds = _checked(include)
        models, optimizers = self._known(objects)
        wanted: list[tuple[nn.Module | AcceleratedOptimizer | None, frozenset[str]]] = [
            *((model, kinds & {"parameters", "gradients"}) for model in models),
            *((optimizer, kinds & {"optimizer"}) for optimizer in optimizers),
        ]
        if not objects:
            wanted.append((None, kinds & {"optimizer"}))
        todo = [(owner, left) for owner, names in wanted if (left := names - self._kinds_away(owner))]
        new_models = [owner for owner, _ in todo if isinstance(owner, nn.Module)]
        new_optimizers = [owner.optimizer for owner, _ in todo if isinstance(owner, AcceleratedOptimizer)]
        self._strategy.check_offload(new_models, new_optimizers, kinds)
        _free_idle_memory(self._strategy.options.device)
        moved = self._move(todo, self._memory[pinned], registered)
        if moved and not self._moved:
            self._observers.insert(0, self)
        self._moved += moved
        self._since = _next_node()
        empty_cache()  # for other processes
        report = OffloadReport.of(item.states for item in moved)
        _logger.info(f"offload_states: {report}")
        return report

    def _move(
        self,
        todo: Sequence[tuple[nn.Module | AcceleratedOptimizer | None, frozenset[str]]],
        memory: HostMemory,
        registered: Sequence[object],
    ) -> list[_Moved]:
        moved: list[_Moved] = []
        try:
            for owner, kinds in todo:
                if owner is None:
                    states: Offloaded = HostCopies(of_kind("optimizer", self._further(registered)), memory)
                else:
                    inner = owner.optimizer if isinstance(owner, AcceleratedOptimizer) else owner
                    states = self._strategy.offload_states(inner, kinds, memory)
                moved.append(_Moved(owner, kinds, states, []))
        except BaseException:
            for item in moved:
                item.states.reload()
            raise
        for item in moved:
            item.hooks += _refuse_calls(item)
        return moved

    def _further(self, registered: Sequence[object]) -> Iterator[Tensor]:
        scaler = self._strategy.precision.scaler
        yield from tensors_in({} if scaler is None else vars(scaler))
        for item in registered:
            if isinstance(item, HoldsTensors):
                yield from tensors_in(list(item.held_tensors()))

    def reload(self, objects: Sequence[object]) -> None:
        """See `Accelerator.reload_states`."""
        models, optimizers = self._known(objects)
        owners = {id(item) for item in (*models, *optimizers)}
        back = [item for item in self._moved if not objects or id(item.owner) in owners]
        for item in back:
            item.states.check_reload([other.states for other in back])
        for number, item in enumerate(back):
            try:
                item.states.reload()
            except OffloadedStatesError as error:
                error.add_note(f"{number} of {len(back)} objects were reloaded before, and can be used.")
                raise
            for hook in item.hooks:
                hook.remove()
            self._moved.remove(item)
        if not self._moved and self in self._observers:
            self._observers.remove(self)

    def _known(self, objects: Sequence[object]) -> tuple[list[nn.Module], list[AcceleratedOptimizer]]:
        """The models and optimizers among some objects; all prepared ones without any.

        Raises:
            ArgumentTypeError: an object is not prepared.
        """
        if not objects:
            return list(self._models), list(self._optimizers)
        for item in objects:
            if not any(item is known for known in (*self._models, *self._optimizers)):
                raise ArgumentTypeError(
                    "offload_states() and reload_states() take models and optimizers that prepare() returned, got "
                    f"{type(item).__name__}. Pass those, or nothing for all."
                )
        return (
            [model for model in self._models if any(model is item for item in objects)],
            [optimizer for optimizer in self._optimizers if any(optimizer is item for item in objects)],
        )

    def _kinds_away(self, owner: object) -> frozenset[str]:
        return frozenset().union(*(item.kinds for item in self._moved if item.owner is owner))

    # Refusing what needs them

    def refuse(self, what: str, model: nn.Module | None = None) -> None:
        """Refuse a call while states are in host memory; with a model, while its parameters are.

        Raises:
            OffloadedStatesError: they are.
        """
        if not self._moved:
            return
        if model is None or any(
            "parameters" in item.kinds and self._strategy.plain(item.owner) is self._strategy.plain(model)
            for item in self._moved
            if isinstance(item.owner, nn.Module)
        ):
            raise _error(what, "states that it needs")

    def before_backward(self, loss: Any, num_items: int | Tensor | None, kwargs: Mapping[str, Any]) -> None:
        """Refuse a loss that was computed before; a forward of what is in host memory would have been refused.

        Models that are not trained have no part in backward, so nothing is looked at if only those are away.
        """
        trained = any(
            isinstance(item.owner, nn.Module) and any(p.requires_grad for p in item.owner.parameters())
            for item in self._moved
        )
        if trained and isinstance(loss, Tensor) and _oldest(loss) < self._since:
            raise _error(
                "backward() of a loss that was computed before offload_states()", "states that it may need"
            )

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step of an optimizer whose states, parameters or gradients are in host memory."""
        away = any(item.owner is optimizer for item in self._moved)
        if away or any(is_refused(p) or is_refused(p.grad) for p in parameters_of(optimizer)):
            raise _error(
                f"step() of {type(getattr(optimizer, 'optimizer', optimizer)).__name__}",
                "states that it needs",
            )


def _checked(include: Collection[str]) -> frozenset[str]:
    names = frozenset([include] if isinstance(include, str) else include)
    if not names or names - set(KINDS):
        raise OptionError(
            f"offload_states(include={include!r}): give some of {', '.join(map(repr, KINDS))}; by default all."
        )
    return names


def _free_idle_memory(device: torch.device) -> None:
    """Free cycles of objects, and tensors of collectives, before the memory that is in use moves."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        release_completed_collectives()


def _refuse_calls(moved: _Moved) -> list[RemovableHandle]:
    """Let a model and its modules refuse to be called, before hooks of engines that gather or broadcast run."""
    if not isinstance(moved.owner, nn.Module):
        return []

    def refuse(module: nn.Module, inputs: Any) -> None:
        if "parameters" in moved.kinds:
            raise _error(f"{type(module).__name__} was called", "its states")
        if torch.is_grad_enabled():
            raise _error(f"{type(module).__name__} was called with gradients on", "its gradients")

    return [module.register_forward_pre_hook(refuse, prepend=True) for module in moved.owner.modules()]


def _error(what: str, states: str) -> OffloadedStatesError:
    return OffloadedStatesError(
        f"{what}: {states} are in host memory since accelerator.offload_states(). Call accelerator.reload_states() "
        "first."
    )


def _next_node() -> int:
    """The number of the node of autograd that is made next in this thread."""
    with torch.enable_grad():
        made = torch.zeros((), requires_grad=True).clone().grad_fn
    assert made is not None
    return int(made._sequence_nr()) + 1


def _oldest(loss: Tensor) -> int:
    """The lowest number of a node in the graph of a loss."""
    oldest = _next_node()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        oldest = min(oldest, node._sequence_nr())
        waiting += [following for following, _ in node.next_functions]
    return oldest
