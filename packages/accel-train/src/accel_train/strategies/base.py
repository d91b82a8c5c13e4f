"""Strategies: how ranks cooperate.

`Strategy` is the null object: one process, nothing wrapped, nothing reduced. Its methods do what plain PyTorch does. A
subclass overrides the methods in which its engine differs. Its `StateAdapter` saves and loads its state.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from accel_state.enums import DistributedType
from accel_state.world.rehearsal import Rehearsal
from accel_train.mesh import Mesh
from accel_train.offload.host_copies import HostCopies, HostMemory, Offloaded
from accel_train.offload.tensors import Kinded, of_kind, tensors_in, tensors_of_model
from accel_train.precision.base import Precision
from accel_train.ranks import Ranks
from accel_train.strategies.capabilities import Capabilities
from accel_train.strategies.equal_states import AveragesWeights
from accel_train.strategies.gathered_units import GatheredUnits
from accel_train.strategies.gradients import (
    any_divided,
    any_nonfinite,
    clip_by_norm,
    local_part,
    multiply,
    total_norm,
)
from accel_train.strategies.local_training import LocalTraining
from accel_train.strategies.state_adapter import StateAdapter
from accel_train.strategies.uneven_inputs import UnevenInputs
from accel_train.strategies.wrappers import inside_compiled

__all__ = [
    "DefersSync",
    "DividesSteps",
    "ModelSteps",
    "Parts",
    "Strategy",
    "StrategyOptions",
]


@dataclass(frozen=True)
class StrategyOptions:
    """The options that a strategy is created with.

    Attributes:
        device: device of this rank.
        mesh: degrees of parallelism, and the groups of ranks in each dimension.
        precision: scales, unscales and steps.
        config: the plugin whose type selected the strategy; for "ddp" `DistributedDataParallelKwargs`.
        ddp: the script's `DistributedDataParallelKwargs`, or its defaults, for strategies that average as "ddp" does.
        pipeline: the script's `PipelineParallelConfig`; None: there are no stages.
        sync_each_batch: reduce gradients in every micro-batch, not only in the last one of a window.
        by_degrees: a script or a launcher set the degrees of the mesh.
        rehearsal: this process is one rank of a simulated world, and observes itself; None: other ranks exist.
    """

    device: torch.device
    mesh: Mesh
    precision: Precision
    config: Any = None
    sync_each_batch: bool = False
    by_degrees: bool = False
    ddp: Any = None
    pipeline: Any = None
    rehearsal: Rehearsal | None = None

    @property
    def requested_tp_size(self) -> int:
        """Among how many ranks a script or a launcher wants models to be divided by a plan; 1: it says nothing."""
        return self.mesh.degrees["tp"] if self.by_degrees else 1


class ModelSteps(Protocol):
    """Steps of preparing a model; a strategy calls them in the order that its engine needs."""

    def convert(self, model: nn.Module) -> nn.Module:
        """Apply the precision: wrap `forward`, or replace layers."""
        ...

    def place(self, model: nn.Module) -> nn.Module:
        """Move parameters and buffers to this rank's device, unless the script moves them itself."""
        ...

    def compile(self, model: nn.Module) -> nn.Module:
        """Compile with the options of the dynamo plugin; without one return `model` itself."""
        ...

    def compile_in_place(self, model: nn.Module) -> None:
        """Compile like `compile`, but without a wrapper, for engines that need the module itself."""
        ...


@dataclass
class Parts:
    """The objects of one `prepare()` call, by kind; models and optimizers without our wrappers.

    `schedule_steps` is the number of scheduler steps per optimizer step.
    """

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    schedule_steps: int = 1


@runtime_checkable
class DefersSync(Protocol):
    """A strategy that can skip the reduction of gradients in backward, as `no_sync` asks."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which backward passes of `model` accumulate locally."""
        ...

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which backward reduces gradients even though the forwards ran under `no_sync`."""
        ...


class DividesSteps(ABC):
    """An optimizer whose ranks can divide the computation of a step among them."""

    @abstractmethod
    def divide_among(self, replicas: Ranks | None) -> None:
        """Told before each step; see `Strategy.replicas_of`."""


class Strategy:
    """Base class of all strategies, and itself the strategy of one process.

    Attributes:
        batch: ranks that read different samples.
        draws: ranks that may draw different random numbers while they train.
        loss: ranks over which gradients are averaged when a window ends, and items are summed.
        states: saves and loads the states of what was prepared.
        gathered: units of FSDP that a forward may have left whole.
        weight_averages: averages of the weights of prepared models.
        uneven: runs ranks that have different numbers of batches, and
        local: has the copies of models that ranks train without communication; both only where
            `capabilities.separate_steps`.
    """

    name: ClassVar[str] = "single"
    capabilities: ClassVar[Capabilities] = Capabilities(in_stages=True)
    #: What `Accelerator.distributed_type` answers; None: what the process says (NO, MULTI_CPU, MULTI_GPU, …).
    distributed_type: ClassVar[DistributedType | None] = None
    #: The class of `states`.
    adapter: ClassVar[type[StateAdapter]] = StateAdapter
    uneven: UnevenInputs
    local: LocalTraining

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options
        self.batch: Ranks = options.mesh.batch
        self.draws: Ranks = options.mesh.draws
        self.loss: Ranks = options.mesh.loss
        self.precision = options.precision
        self.states = self.adapter(self)
        self.gathered = GatheredUnits()
        self.weight_averages: list[AveragesWeights] = []

    @classmethod
    def make_mesh(cls, config: Any, device: torch.device, world_size: int, rank: int) -> Mesh:
        """Make the mesh of a run from the strategy's plugin; here all ranks read different samples."""
        return Mesh.of_world(world_size, rank)

    @classmethod
    def check_degrees(cls, config: Any, degrees: Mapping[str, int]) -> None:
        """Refuse degrees of parallelism that contradict the strategy's plugin; called instead of `make_mesh`.

        Raises:
            IncompatibleOptionsError: both set the number of ranks of a dimension, and differ; or the strategy needs
                more ranks.
        """

    # Preparing

    def prepare(self, parts: Parts, steps: ModelSteps) -> Parts:
        """Prepare the objects of one call together.

        Loaders are prepared already. Afterwards, optimizers that hold replaced parameters are relinked by name, and
        schedulers of a replaced optimizer are relinked to the one that was returned in its place.

        Returns:
            As many objects of each kind as were given, in the same order.
        """
        models = [self.prepare_model(model, steps) for model in parts.models]
        for model in models:
            self.gathered.add(model, self.plain)
        return Parts(models, parts.optimizers, parts.schedulers, parts.loaders)

    def prepare_model(self, model: nn.Module, steps: ModelSteps) -> nn.Module:
        """Return the module that the script calls and trains: `model` itself, or a wrapper."""
        return steps.compile(steps.place(steps.convert(model)))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module inside this strategy's wrapper; `model` itself if it is not wrapped."""
        return model

    def needs_all_ranks(self, model: nn.Module) -> bool:
        """Whether preparing `model` is a collective, so that all ranks must call it."""
        return self.capabilities.needs_process_group

    def is_outdated(self, model: nn.Module) -> bool:
        """Whether a prepared `model` must be prepared again, because parameters that were added to it are elsewhere."""
        plain = self.plain(model)
        if getattr(plain, "hf_device_map", None) is not None:
            return False
        return len({tensor.device for tensor in itertools.chain(plain.parameters(), plain.buffers())}) > 1

    def expert_tokens(self) -> dict[str, Tensor]:
        """How many tokens each divided expert has got in training since this was last called, by layer. Collective."""
        return {}

    def release(self) -> None:
        """Forget everything prepared: `free_memory()` was called."""
        self.gathered.clear()
        self.weight_averages.clear()

    # One micro-batch

    def shard_batch(self, batch: Any) -> Any:
        """Cut this rank's part out of a batch that several ranks read, between the loader and the script."""
        return batch

    def begin_micro_batch(self, models: Sequence[nn.Module], *, last: bool, loss_factor: float) -> None:
        """Called when a micro-batch of a window begins.

        Args:
            models: the prepared models that are trained in it.
            last: the window ends with it, so its backward reduces gradients.
            loss_factor: the factor of its loss, before corrections that are only possible when the window ends.
        """

    def end_micro_batch(self, models: Sequence[nn.Module], *, last: bool) -> None:
        """Called when the micro-batch ends; backward passes outside of windows reduce gradients."""

    def backward(
        self, models: Sequence[nn.Module], loss: Tensor, *, pending: bool, kwargs: dict[str, Any]
    ) -> None:
        """Compute gradients. After the last backward of a window they are averaged over `self.loss`.

        Args:
            models: the models that `accumulate()` names, or else all prepared ones. Scripts may train more models than
                they name, so an engine that reduces gradients itself reduces those of all models that it prepared.
            loss: the loss, already multiplied by the factor of its micro-batch.
            pending: gradients of an open window, computed before this call, wait for a step.
            kwargs: arguments of `Tensor.backward`.
        """
        self.precision.backward(loss, pending, kwargs)

    def check_step(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        """Check that all ranks are about to take the same step; a collective if ranks hold replicas.

        Called at the first steps of an optimizer, and then ever more rarely.

        Args:
            optimizer: the optimizer that is about to step.
            models: all prepared models.

        Raises:
            AccumulationError: replicas would drift apart.
            PrepareError: replicas would drift apart because a model has changed since it was prepared.
        """

    def averages(self, kwargs: dict[str, Any]) -> bool:
        """Whether a backward pass with these arguments has its gradients averaged over a window's micro-batches.

        An engine's backward may have an argument which says that the script has scaled the loss itself.
        """
        return True

    # Complete gradients

    def replicas_of(self, optimizer: torch.optim.Optimizer) -> Ranks | None:
        """Ranks that take each step of an optimizer together, with the same gradients; None: there may be none now.

        Each of them holds the same parameters, or the same parts of them.
        """
        return None

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply gradients in place.

        Args:
            parameters: the parameters whose gradients are scaled; a duplicate is scaled once.
            factor: a number, or a 0-d tensor on any device.
        """
        gradients = {id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None}
        multiply([local_part(gradient) for gradient in gradients.values()], factor)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the loss scale of fp16 in an optimizer's gradients; further calls in the same step change nothing."""
        self.precision.unscale_(optimizer)

    def clip_grad_norm_(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the total norm of all gradients; returns the norm before clipping, a plain 0-d tensor."""
        if any_divided(parameters):
            return clip_by_norm(parameters, max_norm, norm_type)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def gradient_norm(self, parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        """Total norm of all gradients, a plain 0-d tensor; changes nothing."""
        if any_divided(parameters):
            return total_norm(parameters, norm_type)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return nn.utils.get_total_norm(gradients, norm_type=norm_type)

    def has_nonfinite_gradients(self, parameters: Sequence[Tensor]) -> Tensor:
        """Whether any gradient, or part of one, on this rank is inf or NaN: a 0-d boolean tensor.

        Not collective: a step guard combines the answers of ranks.
        """
        return any_nonfinite(parameters, self.options.device)

    def clip_grad_value_(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]."""
        if any_divided(parameters):  # torch clamps no whole gradients together with divided ones
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        local_part(parameter.grad).clamp_(-clip_value, clip_value)
        elif any(parameter.grad is not None for parameter in parameters):  # torch fails without any
            nn.utils.clip_grad_value_(parameters, clip_value)

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> tuple[bool, Any]:
        """Step an optimizer.

        Returns:
            Whether it stepped (False: gradients were not finite), and the return value of its `step`.
        """
        self.gathered.free()
        if isinstance(optimizer, DividesSteps):
            optimizer.divide_among(self.replicas_of(optimizer))
        return self.precision.step(optimizer, closure)

    def zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """Drop an optimizer's gradients; False: fill them with zeros instead."""
        self.precision.forget_unscaled(optimizer)
        optimizer.zero_grad(set_to_none)

    # Between phases of training

    def check_offload(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        kinds: Collection[str],
    ) -> None:
        """Check that `offload_states` can move the states of prepared models and optimizers; changes nothing.

        Args:
            models: as `prepare` returned them.
            optimizers: without wrappers.
            kinds: kinds of state, of `accel_train.offload.tensors.KINDS`.

        Raises:
            OffloadedStatesError: it cannot now.
            NotAvailableError: it never can.
        """

    def state_tensors(self, owner: nn.Module | torch.optim.Optimizer) -> Iterator[Kinded]:
        """The tensors of a prepared model, or of an optimizer, with their kinds; memory that caches hold is freed."""
        if isinstance(owner, nn.Module):
            return tensors_of_model(self.plain(owner))
        return of_kind("optimizer", tensors_in(owner.state))

    def offload_states(
        self, owner: nn.Module | torch.optim.Optimizer, kinds: Collection[str], memory: HostMemory
    ) -> Offloaded:
        """Move states of a prepared model, or of an optimizer, to host memory; not a collective.

        Args:
            owner: what `check_offload` has accepted.
            kinds: kinds of state; others stay.
            memory: where copies are.

        Returns:
            What moves them back.

        Raises:
            OffloadedStatesError: it failed; nothing has moved.
        """
        return HostCopies([item for item in self.state_tensors(owner) if item[0] in kinds], memory)

    # Helpers

    def plain(self, model: nn.Module) -> nn.Module:
        """The user's own module inside wrappers of this strategy and of `torch.compile`."""
        while (inner := self.unwrap(inside_compiled(model))) is not model:
            model = inner
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        return self  # a copied optimizer still belongs to its accelerator
