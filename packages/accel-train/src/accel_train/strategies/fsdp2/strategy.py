"""Fully sharded data parallelism: every rank holds a part of each parameter, gradient and optimizer state."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from accel_ckpt.modules.experts import Experts, find_experts
from accel_ckpt.parts import has_divided_parameters, is_sharded
from accel_state.enums import DistributedType
from accel_state.world.process import PartialState
from accel_train.errors import IncompatibleOptionsError, PrepareError
from accel_train.mesh import Mesh
from accel_train.optimizer_parameters import parameters_of
from accel_train.plugins import FullyShardedDataParallelPlugin
from accel_train.ranks import Ranks
from accel_train.strategies.base import (
    ModelSteps,
    Parts,
    Strategy,
    StrategyOptions,
)
from accel_train.strategies.capabilities import Capabilities
from accel_train.strategies.fsdp2.changes import ParameterWatch
from accel_train.strategies.fsdp2.divider import Divider, Units, check_plugin
from accel_train.strategies.fsdp2.expert_lists import ListedExperts, divide_list
from accel_train.strategies.fsdp2.expert_tokens import Tokens
from accel_train.strategies.fsdp2.experts import StackedExperts, check_experts, divide
from accel_train.strategies.fsdp2.initial_values import Start, place_whole, read_parts
from accel_train.strategies.fsdp2.same_blocks import SameBlocks
from accel_train.strategies.fsdp2.unreduced_gradients import FSDPGradients
from accel_train.strategies.gradients import average
from accel_train.strategies.relink import link_parts, step_both_kinds
from accel_train.strategies.shared_buffers import saved_buffers, share_in_evaluation
from accel_train.strategies.state_adapter import SavedModel, StateAdapter
from accel_train.strategies.window_gradients import WindowGradients
from accel_train.strategies.wrappers import check_division, check_is_divided

__all__ = ["FSDP2States", "FSDP2Strategy"]


class FSDP2States(StateAdapter):
    """Saves and loads parameters and optimizer states as `DTensor`s, and whole gradients of open windows."""

    strategy: FSDP2Strategy
    window_gradients: ClassVar[type[WindowGradients]] = FSDPGradients

    def is_divided(self, model: nn.Module) -> bool:
        """True for a model of which FSDP has divided a parameter."""
        return has_divided_parameters(model)

    def load_model_state(self, model: nn.Module, weights: SavedModel, strict: bool) -> None:
        """Load weights for which `misfits` found nothing; drop values that the precision derived from old ones."""
        super().load_model_state(model, weights, strict)
        self.strategy.precision.values_changed(self.strategy.plain(model))


class FSDP2Strategy(Strategy):
    """FSDP2: parameters are gathered unit by unit while they compute; gradients are reduced to the ranks' parts."""

    name: ClassVar[str] = "fsdp2"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_stages=True,
        needs_process_group=True,
        hides_gradients=True,
        dimensions=frozenset({"dp_replicate", "dp_shard", "cp", "sp", "tp", "ep"}),
    )
    distributed_type: ClassVar[DistributedType | None] = DistributedType.FSDP
    adapter: ClassVar[type[StateAdapter]] = FSDP2States

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        self.plugin: FullyShardedDataParallelPlugin = options.config or FullyShardedDataParallelPlugin()
        self._watches: list[ParameterWatch] = []  # one for each divided model
        self._blocks: list[SameBlocks] = []  # likewise
        self._tokens: list[Tokens] = []  # one for each layer with divided experts
        self._whole: list[
            nn.Parameter
        ] = []  # that every rank holds: those of ignored modules, and added ones
        self._checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._holds_back = False
        check_plugin(self.plugin, self.precision)

    @classmethod
    def make_mesh(cls, config: Any, device: torch.device, world_size: int, rank: int) -> Mesh:
        """All ranks read different samples; each replica of the model is divided among `dp_shard` of them."""
        plugin: FullyShardedDataParallelPlugin = config or FullyShardedDataParallelPlugin()
        replicas = plugin.dp_replicate_size
        if replicas is None:
            replicas = PartialState().topology.num_nodes if plugin.is_hybrid else 1
        if world_size % replicas or world_size == replicas:
            raise IncompatibleOptionsError(
                f"dp_replicate_size={replicas}: {world_size} processes cannot hold {replicas} replicas of the model "
                f"that are each divided among several. Choose a number below {world_size} that divides it."
            )
        degrees = {"dp_replicate": replicas, "dp_shard": world_size // replicas}
        _check_groups(plugin, world_size // replicas)
        return Mesh(degrees, device.type, world_size, rank)

    @classmethod
    def check_degrees(cls, config: Any, degrees: Mapping[str, int]) -> None:
        """A replica is sharded over several ranks, and the plugin's number of replicas is that of the degrees."""
        plugin: FullyShardedDataParallelPlugin = config or FullyShardedDataParallelPlugin()
        replicas = plugin.dp_replicate_size
        if replicas not in (None, degrees["dp_replicate"]):
            raise IncompatibleOptionsError(
                f"FullyShardedDataParallelPlugin(dp_replicate_size={replicas}) and a parallelism configuration with "
                f"dp_replicate_size={degrees['dp_replicate']} contradict each other. Leave one of them out."
            )
        holders = math.prod(degrees[name] for name in ("dp_shard", "cp", "sp"))
        if holders == 1:
            raise IncompatibleOptionsError(
                f"FSDP has nothing to shard over: dp_shard_size, cp_size and sp_size of {_named(degrees)} are 1. Set "
                "dp_shard_size, or leave FSDP out, which trains replicas."
            )
        _check_groups(plugin, holders)

    @property
    def divided(self) -> list[nn.Module]:
        """The prepared models, without wrappers."""
        return [watch.model for watch in self._watches]

    # Preparing

    def prepare(self, parts: Parts, steps: ModelSteps) -> Parts:
        """Prepare the objects of one call; optimizers built from gathered parameters get this rank's parts."""
        prepared = super().prepare(parts, steps)
        for optimizer in parts.optimizers:
            self._check_optimizer(optimizer)
        return prepared

    def prepare_model(self, model: nn.Module, steps: ModelSteps) -> nn.Module:
        """Shard units, inner ones first, then the model around them; a model that is sharded already stays as it is."""
        model = steps.convert(model)
        plain = self.plain(model)
        by_script = check_division(plain, self.batch)
        check_is_divided(plain, self.options.requested_tp_size)
        if by_script:
            model, lists = steps.place(model), []  # what the script has left whole
        else:
            lists = self._divide(plain)
        prepared = steps.compile(model)
        watch = ParameterWatch(plain, self._find_whole, lists)
        self._watches.append(watch)
        prepared.register_forward_pre_hook(watch, prepend=True)
        share_in_evaluation(plain, prepared, saved_buffers)
        self._blocks.append(SameBlocks(plain))
        self.precision.after_sharding(plain, prepared)
        self._find_whole()
        return prepared

    def _divide(self, model: nn.Module) -> list[nn.Module]:
        """Divide a model; returns its lists of experts, which FSDP does not gather."""
        plugin = self.plugin
        start = Start.of(
            model,
            plugin.checkpoint,
            device=self.options.device,
            syncs=bool(plugin.sync_module_states),
            init=plugin.param_init_fn,
            groups=[self.loss.group] if self.loss.size > 1 else [],
        )
        experts = self._find_experts(model)
        inside = {id(module) for each in experts for module in each.module.modules()}
        units = Units.of(model, plugin, apart=inside)
        fill = None if start is None else start.fill
        divider = Divider(plugin, self.precision, self.options.mesh.holders, units, fill)
        for each in experts:
            divider.begin(each.module, gathered=not each.members)
            self._divide_experts(each, divider)
        divider.divide(model)
        if start is None and plugin.checkpoint is not None:
            offloads = isinstance(plugin.offload_policy, CPUOffloadPolicy)
            home = torch.device("cpu") if offloads else self.options.device
            read_parts(model, plugin.checkpoint, self.options.device, home)
        else:
            place_whole(units.whole, self.options.device)
        return [each.module for each in experts if each.members]

    def _find_experts(self, model: nn.Module) -> list[Experts]:
        mesh = self.options.mesh.experts
        if mesh is None:
            return []
        experts = find_experts(model)
        check_experts(model, experts, mesh["ep"].size())
        listed = next((each for each in experts if each.members), None)
        if (
            listed is not None
            and isinstance(self.plugin.offload_policy, CPUOffloadPolicy)
            and self.options.device.type != "cpu"
        ):
            raise PrepareError(
                f"{listed.name} of {type(model).__name__} is a list of modules, and with ep_size={mesh['ep'].size()} "
                "the parts of their parameters stay on the device, which cpu_offload=True contradicts. Leave out one "
                "of the two, or stack the parameters of the experts."
            )
        return experts

    def _divide_experts(self, experts: Experts, divider: Divider) -> None:
        """Give a rank its experts of one layer."""
        mesh = self.options.mesh.experts
        assert mesh is not None
        ep = mesh["ep"]
        tokens = Tokens(experts.name, experts.count, ep.get_group(), self.options.mesh.alike)
        self._tokens.append(tokens)
        if experts.members:
            replica = self.options.mesh.replica
            parts = divide_list(experts, replica)
            divider.apart.update(parts)
            ListedExperts(
                experts, tokens, replica, ep.get_local_rank(), divider.inner_policy, self.options.device
            )
            return
        divide(experts, ep)
        replicas = mesh["dp_replicate"].size() > 1
        fully_shard(
            experts.module,
            # torch makes the mesh of a number of ranks from those of one rank's experts, which differ among ranks.
            reshard_after_forward=self.plugin.reshard_after_forward is not False,
            **{
                **divider.options,
                "mesh": mesh["dp_replicate", "efsdp"] if replicas else mesh["efsdp"],
                # Weights of routes keep their dtype, and tokens have that of the layer before.
                "mp_policy": replace(divider.inner_policy, cast_forward_inputs=False),
            },
        )
        StackedExperts(experts, tokens)

    def _find_whole(self) -> None:
        self._whole = [parameter for watch in self._watches for parameter in watch.whole]

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See that an optimizer holds this rank's parts, not the whole values that a forward may leave in the model."""
        gathered = {there: part for watch in self._watches for there, part in watch.gathered().items()}
        link_parts(optimizer, gathered)
        step_both_kinds(optimizer)
        self._checked[optimizer] = _size(optimizer)

    # One micro-batch

    def begin_micro_batch(self, models: Sequence[nn.Module], *, last: bool, loss_factor: float) -> None:
        """Hold back the reduction of all but the last micro-batch: gradients stay whole until then."""
        if not last and not self.options.sync_each_batch:
            self._hold_back(models, True)

    def end_micro_batch(self, models: Sequence[nn.Module], *, last: bool) -> None:
        """Reduce again."""
        if not last and not self.options.sync_each_batch:
            self._hold_back(models, False)

    def backward(
        self, models: Sequence[nn.Module], loss: Tensor, *, pending: bool, kwargs: dict[str, Any]
    ) -> None:
        """Run backward, in which FSDP reduces gradients; gradients that it does not manage are averaged afterwards."""
        for blocks in self._blocks:
            blocks.before_backward()
        super().backward(models, loss, pending=pending, kwargs=kwargs)
        for blocks in self._blocks:
            blocks.after_backward(reduced=not self._holds_back)
        if self._whole and not self._holds_back:
            average([parameter for parameter in self._whole if parameter.requires_grad], self.loss)

    def _hold_back(self, models: Sequence[nn.Module], hold: bool) -> None:
        """Whether backward passes keep whole gradients on this rank."""
        self._holds_back = hold
        for model in models:
            plain = self.plain(model)
            if isinstance(plain, FSDPModule):
                plain.set_requires_gradient_sync(not hold)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Context in which backward passes keep whole gradients on this rank; the next one outside reduces all."""
        self._hold_back([model], True)
        try:
            yield
        finally:
            self._hold_back([model], False)

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Context in which backward passes reduce gradients, even under `no_sync`."""
        before = self._holds_back
        self._hold_back([model], False)
        try:
            yield
        finally:
            self._hold_back([model], before)

    def replicas_of(self, optimizer: torch.optim.Optimizer) -> Ranks | None:
        """All ranks that average gradients, unless it steps what is in no prepared model."""
        whole = set(map(id, self._whole))
        known = all(is_sharded(p) or id(p) in whole for p in parameters_of(optimizer) if p.requires_grad)
        return self.loss if known else None

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> tuple[bool, Any]:
        """Step an optimizer, whose parameters are checked when their number has changed."""
        for blocks in self._blocks:
            blocks.settle()
        if self._checked.get(optimizer) != _size(optimizer):
            self._check_optimizer(optimizer)
        return super().step(optimizer, closure)

    def is_outdated(self, model: nn.Module) -> bool:
        """False: offloaded parameters and buffers are on two devices, and `ParameterWatch` finds added parameters."""
        return False

    def expert_tokens(self) -> dict[str, Tensor]:
        """How many tokens each divided expert has got in training since this was last called, by layer. Collective."""
        return {tokens.name: tokens.total(self.options.device) for tokens in self._tokens}

    def release(self) -> None:
        """Forget the models and the parameters that it averages."""
        super().release()
        self._watches.clear()
        self._blocks.clear()
        self._whole.clear()
        self._tokens.clear()


def _named(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1) or "the mesh"


def _check_groups(plugin: FullyShardedDataParallelPlugin, holders: int) -> None:
    """Check the groups over which parameters are divided again after forward."""
    size = plugin.reshard_after_forward
    if not isinstance(size, bool) and holders % size:
        raise IncompatibleOptionsError(
            f"reshard_after_forward={size} divides parameters among groups of {size} ranks after forward, and each "
            f"replica of the model is divided among {holders}. Give a divisor of {holders}, or True or False."
        )


def _size(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
