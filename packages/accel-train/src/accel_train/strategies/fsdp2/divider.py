"""Dividing the units of a model among ranks, one after the other, as the plugin and the precision ask."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from accel_state.log import get_logger
from accel_train.errors import IncompatibleOptionsError
from accel_train.plugins import FullyShardedDataParallelPlugin
from accel_train.precision.base import Precision
from accel_train.strategies.fsdp2.activations import checkpoint_blocks, policy_of
from accel_train.strategies.fsdp2.first_forward import allow_inference_first
from accel_train.strategies.fsdp2.initial_values import lay_out, widen
from accel_train.strategies.fsdp2.units import covering_shared, find_units, ignored_parameters
from accel_train.strategies.fsdp2.zero_grad import let_zero_grad_reach_parts

__all__ = ["Divider", "Units", "check_plugin", "mixed_precision_policy"]

_logger = get_logger(__name__)


@dataclass(frozen=True)
class Units:
    """Which modules of a model are gathered as units, by their names: a model may lose modules before it is divided.

    Attributes:
        model: the model.
        gathered: the units, inner ones first; the model around them is one too.
        kept: modules and parameters that every rank keeps whole.
    """

    model: nn.Module
    gathered: Sequence[str]
    kept: Sequence[tuple[str, str]]

    @classmethod
    def of(
        cls, model: nn.Module, plugin: FullyShardedDataParallelPlugin, apart: Collection[int] = ()
    ) -> Units:
        """Find the units of a model, and let its blocks recompute activations if the plugin asks for that.

        Args:
            model: the whole model.
            plugin: decides.
            apart: modules, by `id`, that are divided in another way.

        Raises:
            PrepareError: the model has no module that the plugin names, or no blocks; nothing was changed.
        """
        blocks = [unit for unit in find_units(model, plugin) if id(unit) not in apart]
        whole = ignored_parameters(model, plugin.ignored_modules)
        gathered, shared = covering_shared(model, blocks, whole)
        if plugin.activation_checkpointing:
            recomputed = policy_of(plugin.activation_checkpointing)
            checkpoint_blocks(model, blocks, bool(plugin.activation_checkpointing_offload), recomputed)
        if shared:
            _warn_of_shared(model, shared)
        names = {id(module): name for name, module in model.named_modules()}
        kept = [
            (names[id(module)], name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in whole
        ]
        return cls(model, [names[id(unit)] for unit in gathered], kept)

    @property
    def whole(self) -> set[nn.Parameter]:
        """The parameters that every rank keeps whole; those on the meta device become others when they get values."""
        if not self.kept:
            return set()
        modules = dict(self.model.named_modules())
        found = (modules[owner]._parameters.get(name) for owner, name in self.kept if owner in modules)
        return {parameter for parameter in found if parameter is not None}

    def inside(self, part: nn.Module) -> list[nn.Module]:
        """The units in a part of the model."""
        modules = dict(self.model.named_modules())
        own = set(map(id, part.modules()))
        found = [modules[name] for name in self.gathered if name in modules]
        return [unit for unit in found if id(unit) in own and next(unit.parameters(), None) is not None]


class Divider:
    """Divides modules with `fully_shard`.

    Args:
        plugin: options.
        precision: the dtypes of computation, unless the plugin has a policy.
        mesh: the ranks; None: all of the world.
        units: which modules are units, and which parameters are not divided.
        fill: gives a unit its values, just before it is divided; None: it has them, or gets them later.

    Attributes:
        inner_policy: the dtypes of units inside a model.
        apart: parameters that are divided in another way.
    """

    def __init__(
        self,
        plugin: FullyShardedDataParallelPlugin,
        precision: Precision,
        mesh: DeviceMesh | None,
        units: Units,
        fill: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self._plugin, self._precision, self._units, self._fill = plugin, precision, units, fill
        self._policy = mixed_precision_policy(plugin, precision)
        # What a unit returns goes into the next one, or into what is outside of all units and casts no inputs.
        self.inner_policy = replace(self._policy, output_dtype=None)
        self.apart: set[nn.Parameter] = set()
        self._mesh = mesh
        self._widened = 0

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `fully_shard` for a unit that has begun."""
        return {
            "mesh": self._mesh,
            "offload_policy": self._plugin.offload_policy,
            "ignored_params": self._units.whole | self.apart,
        }

    def begin(self, unit: nn.Module, gathered: bool = True) -> None:
        """Give a unit the values, dtypes and layout with which it is divided.

        Args:
            unit: a module.
            gathered: FSDP gathers it, perhaps in another form than that in which it is stored.
        """
        if self._precision.dtypes.compute is not None:
            self._widened += widen(unit)
        if self._fill is not None:
            self._fill(unit)
        lay_out(unit)
        if gathered:
            self._precision.before_sharding(unit, self._units.whole)

    def divide(self, model: nn.Module, *, stays: bool = False) -> None:
        """Divide units, inner ones first, and then the module around them.

        Args:
            model: the model, or a part of one that is called by itself.
            stays: a forward leaves units gathered, whatever the plugin says.
        """
        units = self._units.inside(model)
        formats = _formats(model)
        reshard = False if stays else self._plugin.reshard_after_forward
        for unit in [*units, model]:
            self.begin(unit)
            # Torch's default keeps the outermost unit gathered: its backward comes right after its forward.
            after = None if unit is model and reshard else reshard
            policy = self._policy if unit is model else self.inner_policy
            fully_shard(unit, reshard_after_forward=after, mp_policy=policy, **self.options)
        for module, name, quant_state in formats:
            cast(Any, module._parameters[name]).quant_state = quant_state
        if self._plugin.forward_prefetch:
            _prefetch(units)
        allow_inference_first(model)
        let_zero_grad_reach_parts(model)
        if self._widened:
            kind = type(self._units.model).__name__
            _logger.warning(
                f"{self._widened} trained parameters of {kind} have less than 32 bits; their parts, and the "
                "optimizer's states, are kept in float32, because small updates would be lost"
            )
            self._widened = 0


def check_plugin(plugin: FullyShardedDataParallelPlugin, precision: Precision) -> None:
    """Check that a policy of the script goes with the precision; say how options of version 1 are understood.

    Raises:
        IncompatibleOptionsError: the precision autocasts to another dtype, or scales no losses.
    """
    for translation in plugin.translations:
        _logger.warning_once("FSDP version 1: %s", translation)
    policy = plugin.mixed_precision_policy
    if policy is None:
        return
    given, name = policy.param_dtype, precision.name
    if given is torch.float16 and precision.scaler is None:
        raise IncompatibleOptionsError(
            f"mixed_precision_policy computes in float16, whose small gradients are lost unless losses are scaled, "
            f"and mixed_precision={name!r} scales none. Pass Accelerator(mixed_precision='fp16')."
        )
    compute = precision.dtypes.compute
    if {given, compute} == {torch.float16, torch.bfloat16}:
        raise IncompatibleOptionsError(
            f"mixed_precision_policy gathers parameters in {given}, and mixed_precision={name!r} computes in "
            f"{compute}. Leave one of them out."
        )


def mixed_precision_policy(
    plugin: FullyShardedDataParallelPlugin, precision: Precision
) -> MixedPrecisionPolicy:
    """The dtypes in which FSDP gathers parameters and reduces gradients: the plugin's, else those of the precision."""
    if plugin.mixed_precision_policy is not None:
        policy: MixedPrecisionPolicy = plugin.mixed_precision_policy
        return policy
    dtypes = precision.dtypes
    if dtypes.compute is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtypes.compute, reduce_dtype=dtypes.reduce or torch.float32)


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
