"""Fully sharded data parallelism: every rank holds a part of each parameter, gradient and optimizer state."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from accel_ckpt.modules.experts import Experts, find_experts
from accel_ckpt.parts import is_sharded
from accel_state.enums import DistributedType
from accel_state.log import get_logger
from accel_state.world.process import PartialState
from accel_train.errors import IncompatibleOptionsError, PrepareError
from accel_train.mesh import Mesh
from accel_train.optimizer_parameters import parameters_of
from accel_train.plugins import FullyShardedDataParallelPlugin
from accel_train.ranks import Ranks
from accel_train.strategies.base import (
    Capabilities,
    ModelSteps,
    Parts,
    PrecisionVerbs,
    Strategy,
    StrategyOptions,
)
from accel_train.strategies.fsdp2.activations import checkpoint_blocks, policy_of
from accel_train.strategies.fsdp2.changes import Watch
from accel_train.strategies.fsdp2.expert_lists import ListedExperts, divide_list
from accel_train.strategies.fsdp2.expert_tokens import Tokens
from accel_train.strategies.fsdp2.experts import StackedExperts, check_experts, divide
from accel_train.strategies.fsdp2.first_forward import allow_inference_first
from accel_train.strategies.fsdp2.same_blocks import SameBlocks
from accel_train.strategies.fsdp2.start import (
    Held,
    Start,
    agree,
    check_files,
    lay_out,
    place_whole,
    read_parts,
    widen,
)
from accel_train.strategies.fsdp2.units import covering_shared, find_units, ignored_parameters
from accel_train.strategies.fsdp2.zero_grad import let_zero_grad_reach_parts
from accel_train.strategies.gradients import average
from accel_train.strategies.relink import link_parts, step_both_kinds
from accel_train.strategies.shared_buffers import saved_buffers, share_in_evaluation
from accel_train.strategies.state_adapter import SavedModel, StateAdapter
from accel_train.strategies.wrappers import is_sharded_by_script

__all__ = ["FSDP2States", "FSDP2Strategy", "mixed_precision_policy"]

_logger = get_logger(__name__)


class FSDP2States(StateAdapter):
    """Saves and loads parameters and optimizer states as `DTensor`s."""

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
        saves_windows=False,
        dimensions=frozenset({"dp_replicate", "dp_shard", "cp", "sp", "tp", "ep"}),
    )
    distributed_type: ClassVar[DistributedType | None] = DistributedType.FSDP
    adapter: ClassVar[type[StateAdapter]] = FSDP2States

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        self.plugin: FullyShardedDataParallelPlugin = options.config or FullyShardedDataParallelPlugin()
        self._watches: list[Watch] = []  # one for each divided model
        self._blocks: list[SameBlocks] = []  # likewise
        self._tokens: list[Tokens] = []  # one for each layer with divided experts
        self._whole: list[
            nn.Parameter
        ] = []  # that every rank holds: those of ignored modules, and added ones
        self._checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._holds_back = False
        self._check_policy()
        for translation in self.plugin.translations:
            _logger.warning_once("FSDP version 1: %s", translation)

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
        by_script = is_sharded_by_script(plain, self.batch)
        self.check_plan(plain)
        lists = [] if by_script else self._divide(plain)
        prepared = steps.compile(model)
        watch = Watch(plain, self._find_whole, lists)
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
        start = self._start(agree(model), model)  # the models are alike, so all ranks get the same errors
        experts = self._find_experts(model)
        of_module = {each.module: each for each in experts}
        inside = {id(module) for each in experts for module in each.module.modules()}
        units = [unit for unit in find_units(model, plugin) if id(unit) not in inside]
        whole = ignored_parameters(model, plugin.ignored_modules)
        blocks, (units, shared) = units, covering_shared(model, units, whole)
        if shared:
            _warn_of_shared(model, shared)
        options: dict[str, Any] = {
            "mesh": self.options.mesh.holders,
            "offload_policy": plugin.offload_policy,
            "ignored_params": set(whole),
        }
        if plugin.activation_checkpointing:
            recomputed = policy_of(plugin.activation_checkpointing)
            checkpoint_blocks(model, blocks, bool(plugin.activation_checkpointing_offload), recomputed)
        reshard = plugin.reshard_after_forward
        formats = _formats(model)
        policy = mixed_precision_policy(plugin, self.precision)
        inner_policy = replace(policy, output_dtype=None)
        widened = 0
        for unit in [*of_module, *units, model]:
            if self.precision.dtypes.compute is not None:
                widened += widen(unit)
            if start is not None:
                start.fill(unit)
            lay_out(unit)
            listed = unit in of_module and bool(of_module[unit].members)
            if not listed:  # those are gathered in the dtype of computation
                self.precision.before_sharding(unit, whole)
            if unit in of_module:
                self._divide_experts(of_module[unit], inner_policy, options)
                continue
            # Torch's default keeps the outermost unit gathered: its backward comes right after its forward.
            after = None if unit is model and reshard else reshard
            # What a unit returns goes into the next one, or into what is outside of all units and casts no inputs.
            options["mp_policy"] = policy if unit is model else inner_policy
            fully_shard(unit, reshard_after_forward=after, **options)
        for module, name, quant_state in formats:
            cast(Any, module._parameters[name]).quant_state = quant_state
        if widened:
            _logger.warning(
                f"{widened} trained parameters of {type(model).__name__} have less than 32 bits; their parts, and the "
                "optimizer's states, are kept in float32, because small updates would be lost"
            )
        if start is None and plugin.checkpoint is not None:
            offloads = isinstance(options["offload_policy"], CPUOffloadPolicy)
            home = torch.device("cpu") if offloads else self.options.device
            read_parts(model, plugin.checkpoint, self.options.device, home)
        else:
            place_whole(whole, self.options.device)
        if plugin.forward_prefetch:
            _prefetch(units)
        allow_inference_first(model)
        let_zero_grad_reach_parts(model)
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
            and self.plugin.offload_policy is not None
            and self.options.device.type != "cpu"
        ):
            raise PrepareError(
                f"{listed.name} of {type(model).__name__} is a list of modules, and with ep_size={mesh['ep'].size()} "
                "the parts of their parameters stay on the device, which cpu_offload=True contradicts. Leave out one "
                "of the two, or stack the parameters of the experts."
            )
        return experts

    def _divide_experts(
        self, experts: Experts, policy: MixedPrecisionPolicy, options: Mapping[str, Any]
    ) -> None:
        """Give a rank its experts of one layer."""
        mesh = self.options.mesh.experts
        assert mesh is not None
        ep = mesh["ep"]
        tokens = Tokens(experts.name, experts.count, ep.get_group(), self.options.mesh.alike)
        self._tokens.append(tokens)
        if experts.members:
            replica = self.options.mesh.replica
            parts = divide_list(experts, replica)
            options["ignored_params"].update(parts)
            ListedExperts(experts, tokens, replica, ep.get_local_rank(), policy, self.options.device)
            return
        divide(experts, ep)
        replicas = mesh["dp_replicate"].size() > 1
        fully_shard(
            experts.module,
            # torch makes the mesh of a number of ranks from those of one rank's experts, which differ among ranks.
            reshard_after_forward=self.plugin.reshard_after_forward is not False,
            **{
                **options,
                "mesh": mesh["dp_replicate", "efsdp"] if replicas else mesh["efsdp"],
                # Weights of routes keep their dtype, and tokens have that of the layer before.
                "mp_policy": replace(policy, cast_forward_inputs=False),
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

    def _start(self, held: list[Held], model: nn.Module) -> Start | None:
        """How tensors get their values; None: each rank reads its parts from files."""
        makes = bool(held[0].meta)
        checkpoint = self.plugin.checkpoint
        if makes and checkpoint is not None:
            check_files(model, checkpoint)
            return None
        if checkpoint is not None:
            _logger.warning(
                f"checkpoint={str(checkpoint)!r} is not read for {held[0].kind}, which has values already; build the "
                "model on the meta device to have each rank read its parts"
            )
        sends = bool(self.plugin.sync_module_states) or any(rank.meta for rank in held)
        start = Start(self.options.device, sends, makes, self.plugin.param_init_fn, self.loss)
        start.check(model)
        return start

    def _check_policy(self) -> None:
        """Check that a policy of the script goes with the precision, which autocasts and scales losses."""
        policy = self.plugin.mixed_precision_policy
        if policy is None:
            return
        given, name = policy.param_dtype, self.precision.name
        if given is torch.float16 and self.precision.scaler is None:
            raise IncompatibleOptionsError(
                f"mixed_precision_policy computes in float16, whose small gradients are lost unless losses are scaled, "
                f"and mixed_precision={name!r} scales none. Pass Accelerator(mixed_precision='fp16')."
            )
        compute = self.precision.dtypes.compute
        if {given, compute} == {torch.float16, torch.bfloat16}:
            raise IncompatibleOptionsError(
                f"mixed_precision_policy gathers parameters in {given}, and mixed_precision={name!r} computes in "
                f"{compute}. Leave one of them out."
            )

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
        """False: offloaded parameters are on another device than buffers, and `Watch` finds added parameters."""
        return False

    def expert_tokens(self) -> dict[str, Tensor]:
        """How many tokens each divided expert has got in training since this was last called, by layer. Collective."""
        return {tokens.name: tokens.total(self.options.device) for tokens in self._tokens}

    def release(self) -> None:
        """Forget the models and the parameters that it averages."""
        self._watches.clear()
        self._blocks.clear()
        self._whole.clear()
        self._tokens.clear()


def mixed_precision_policy(
    plugin: FullyShardedDataParallelPlugin, precision: PrecisionVerbs
) -> MixedPrecisionPolicy:
    """The dtypes in which FSDP gathers parameters and reduces gradients: the plugin's, else those of the precision."""
    if plugin.mixed_precision_policy is not None:
        policy: MixedPrecisionPolicy = plugin.mixed_precision_policy
        return policy
    dtypes = precision.dtypes
    if dtypes.compute is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtypes.compute, reduce_dtype=dtypes.reduce or torch.float32)


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


def _warn_of_shared(model: nn.Module, shared: Sequence[tuple[str, str]]) -> None:
    here, there = shared[0]
    _logger.warning(
        f"{here!r} and {there!r} of {type(model).__name__} are one parameter, which must be gathered for all of its "
        f"uses. {len(shared)} of the blocks share parameters, so they are not sharded as units; they are gathered "
        "together with the modules around them"
    )


def _formats(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """What bitsandbytes notes at 4-bit weights of their format, and looks for there when a state dict is made."""
    places = [(module, name, p) for module in model.modules() for name, p in module._parameters.items()]
    found = [(module, name, getattr(parameter, "quant_state", None)) for module, name, parameter in places]
    return [(module, name, quant_state) for module, name, quant_state in found if quant_state is not None]


def _prefetch(units: Sequence[nn.Module]) -> None:
    """Gather each unit's successor while it computes in forward."""
    for unit, following in itertools.pairwise(units):
        assert isinstance(unit, FSDPModule)
        assert isinstance(following, FSDPModule)
        unit.set_modules_to_forward_prefetch([following])
