"""DeepSpeed: its engine owns the parameters, the optimizer and the step; the loop stays the script's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel_ckpt import NamedModel, Part
from accel_state.enums import DistributedType
from accel_state.errors import NotAvailableError
from accel_train.errors import ArgumentTypeError, IncompatibleOptionsError, OptionError, PrepareError
from accel_train.mesh import Mesh
from accel_train.offload.host_copies import HostMemory, Offloaded
from accel_train.optimizer_parameters import parameters_of
from accel_train.plugins import DeepSpeedPlugin, DeepSpeedPlugins
from accel_train.state_part import StatePart
from accel_train.strategies.base import ModelSteps, Parts, StrategyOptions
from accel_train.strategies.capabilities import Capabilities
from accel_train.strategies.deepspeed.changes import NewParameterGuard
from accel_train.strategies.deepspeed.config import Script, check_known, engine_config
from accel_train.strategies.deepspeed.gradients import DeepSpeedGradients
from accel_train.strategies.deepspeed.loss_scale import LossScales, scale_of
from accel_train.strategies.deepspeed.offload import EngineOffload, check_engine
from accel_train.strategies.deepspeed.placeholders import (
    DummyOptim,
    DummyScheduler,
    map_pytorch_optim_to_deepspeed,
)
from accel_train.strategies.deepspeed.runtime import cast_inputs, make_engine, start
from accel_train.strategies.deepspeed.scheduler import EngineScheduler
from accel_train.strategies.deepspeed.state import DeepSpeedState, gathered_layers, share_of
from accel_train.strategies.deepspeed.window import EngineWindow
from accel_train.strategies.engines import EngineStates, EngineStrategy, EngineWindowGradients
from accel_train.strategies.state_adapter import SavedModel, StateAdapter, leaf_misfits
from accel_train.strategies.window_gradients import OwnGradient, WindowGradients

__all__ = ["DeepSpeedStates", "DeepSpeedStrategy"]


@dataclass
class _Trained:
    """An engine, and what it was made of."""

    engine: Any
    model: nn.Module
    given: torch.optim.Optimizer  # what the script prepared
    optimizer: torch.optim.Optimizer  # what the engine steps
    gradients: DeepSpeedGradients
    window: EngineWindow
    state: DeepSpeedState
    plugin: DeepSpeedPlugin
    groups: list[list[Tensor]]  # parameters, as the script grouped them
    watch: NewParameterGuard


class DeepSpeedWindowGradients(EngineWindowGradients):
    """The gradients of an open window, which DeepSpeed has in `parameter.grad` up to stage 1."""

    strategy: DeepSpeedStrategy

    @property
    def are_plain(self) -> bool:
        """Up to stage 1 gradients are in `parameter.grad` until the step, unless the engine adds them up elsewhere.

        In fp16 they are as other strategies have them if one loss scale, which the state restores, is in all of them.
        """
        scales = [scale for item in self.strategy.made if (scale := scale_of(item.engine)) is not None]
        alike = all(scale.is_dynamic for scale in scales) and len({scale.value for scale in scales}) < 2
        return alike and all(item.window.in_parameters for item in self.strategy.made)

    def set_unreduced(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, OwnGradient | None]
    ) -> None:
        """Tell engines that find gradients in `parameter.grad` that these were restored."""
        for item in self.strategy.made:
            if item.window.in_parameters:
                item.window.take_up()


class DeepSpeedStates(EngineStates):
    """Saves and loads the states of DeepSpeed's engines: parts of flat partitions, and float32 copies of weights."""

    strategy: DeepSpeedStrategy
    window_gradients: ClassVar[type[WindowGradients]] = DeepSpeedWindowGradients

    def model_state(self, model: nn.Module, named: NamedModel | None = None) -> dict[str, Any]:
        """This rank's share of the weights, in float32 if the optimizer updates float32 copies.

        Raises:
            NotAvailableError: DeepSpeed's tensor parallelism divides layers.
        """
        item = self.strategy.of_model(model)
        if item is not None:
            if _divides_layers(item):
                raise NotAvailableError(
                    f"tensor_parallel.autotp_size={_layer_parts(item.plugin)} in {item.plugin.hf_ds_config.origin} "
                    "divides layers in ways that only DeepSpeed knows, so save_state and load_state cannot save or "
                    "load them. Use save_checkpoint() and load_checkpoint() of the prepared model, or, below stage 3, "
                    "save_model() for whole weights."
                )
            return item.state.model_state(named)
        if any(
            self.strategy.plain(engine) is self.strategy.plain(model) for engine in self.strategy.evaluated
        ):
            return _frozen_state(named or NamedModel(self.strategy.plain(model)))
        return super().model_state(model, named)

    def is_divided(self, model: nn.Module) -> bool:
        """Whether this rank holds only a part of a prepared model."""
        item = self.strategy.of_model(model)
        return (item is not None and _divides_layers(item)) or super().is_divided(model)

    def exported_state(self, model: nn.Module) -> dict[str, Any]:
        """The weights that `save_model` and `get_state_dict` gather: in 16 bits below stage 3, and in it on request."""
        item = self.strategy.of_model(model)
        if item is not None and _divides_layers(item) and item.state.stage < 3:
            return gathered_layers(item.model)
        if item is None or not item.state.is_low:
            return self.model_state(model)
        if item.state.stage == 3:
            if not item.plugin.zero3_save_16bit_model:
                return self.model_state(model)
            dtypes = {name: p.dtype for name, p in NamedModel(item.model).parameters().items()}
            state = self.model_state(model)
            return {
                name: _cast(leaf, dtypes[name]) if name in dtypes else leaf for name, leaf in state.items()
            }
        return NamedModel(item.model).state_dict()

    def misfits(self, model: nn.Module, weights: SavedModel, strict: bool) -> list[str]:
        """The reasons why saved weights cannot be loaded into a model."""
        item = self.strategy.of_model(model)
        if item is None or not item.state.is_divided:
            return super().misfits(model, weights, strict)
        return leaf_misfits(self.model_state(model), weights, strict)

    @contextmanager
    def whole_parameters(self, model: nn.Module, *, write_back: bool) -> Iterator[None]:
        """Gather parameters for reading, with stage 3's own `GatheredParameters`; all ranks call the model together.

        Raises:
            PrepareError: `write_back` is set: the engine's optimizer updates its own copies of the values.
        """
        item = self.strategy.of_model(model)
        if item is None:
            with super().whole_parameters(model, write_back=write_back):
                yield
            return
        if write_back or _divides_layers(item):
            raise PrepareError(
                "whole_parameters() under DeepSpeed gathers what ZeRO divides, to be read. Written values would not "
                "reach the float32 copies of its optimizer, and its tensor parallelism is not gathered. Leave "
                "write_back out, or change a saved state and load it with load_state()."
            )
        if item.state.stage < 3:
            yield
            return
        from deepspeed.zero import GatheredParameters

        with GatheredParameters(list(item.model.parameters())):
            yield

    def load_model_state(self, model: nn.Module, weights: SavedModel, strict: bool) -> None:
        """Load weights; each rank reads its share, and the engine derives the weights that it computes with."""
        item = self.strategy.of_model(model)
        if item is None:
            super().load_model_state(model, weights, strict)
            return
        named = NamedModel(item.model)
        parameters = named.parameters()
        about = weights.about
        buffers = {
            name: buffer
            for name, buffer in named.state_dict().items()
            if name not in parameters and name in about and isinstance(buffer, Tensor)
        }
        if buffers:
            weights.fill(buffers)
        known = {name: parameter for name, parameter in parameters.items() if name in about}
        with torch.no_grad():
            item.state.load_model_state(lambda name, leaf: weights.fill({name: leaf}), known)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module | NamedModel]
    ) -> Any:
        """An optimizer's state by parameter name; leaves as in `model_state`."""
        item = self.strategy.of_optimizer(optimizer)
        if item is None:
            return super().optimizer_state(optimizer, models)
        return item.state.optimizer_state(models)

    def check_optimizer_state(
        self, optimizer: torch.optim.Optimizer, tree: Any, models: Sequence[nn.Module]
    ) -> None:
        """Check that `load_optimizer_state` can load a state."""
        item = self.strategy.of_optimizer(optimizer)
        if item is None:
            super().check_optimizer_state(optimizer, tree, models)
        else:
            item.state.check_optimizer_state(tree, models)

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, tree: Any, models: Sequence[nn.Module]
    ) -> None:
        """Load an optimizer's state; whole tensors are divided as the engine divides them."""
        item = self.strategy.of_optimizer(optimizer)
        if item is None:
            super().load_optimizer_state(optimizer, tree, models)
        else:
            item.state.load_optimizer_state(tree, models)

    def parts(self, optimizers: Sequence[Any], named: Sequence[NamedModel]) -> list[StatePart]:
        """The loss scales of fp16."""
        return [LossScales([item.engine for item in self.strategy.made])]

    def rank_state(self, model: nn.Module) -> dict[str, Any]:
        """The gradients that wait elsewhere than in `parameter.grad`.

        Raises:
            AccumulationError: the engine cannot give them.
        """
        item = self.strategy.of_model(model)
        return {} if item is None else item.window.state()

    def rank_state_misfit(self, model: nn.Module, state: Mapping[str, Any]) -> str | None:
        """The same ZeRO stage must keep the same parameters' gradients."""
        item = self.strategy.of_model(model)
        return None if item is None else item.window.misfit(state)

    def load_rank_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Take the gradients of an open window up again; those that wait are dropped."""
        super().load_rank_state(model, state)
        item = self.strategy.of_model(model)
        if item is not None:
            item.window.load(state)


class DeepSpeedStrategy(EngineStrategy[_Trained]):
    """One engine for each model that is prepared with its optimizer; ZeRO stages 0 to 3, with offload.

    The engine accumulates gradients without counting (`managed_gradient_accumulation: false`), and steps when the
    prepared optimizer does.
    """

    name: ClassVar[str] = "deepspeed"
    capabilities: ClassVar[Capabilities] = Capabilities(
        hides_gradients=True,
        prepares_together=True,
        computes_precision=True,
        skips_steps=False,
        precisions=frozenset({"no", "bf16", "fp16"}),
        precisions_on={"cpu": frozenset({"no", "bf16"})},
        requires=("deepspeed>=0.19.5",),
        dimensions=frozenset({"dp_replicate", "dp_shard", "cp", "sp"}),
    )
    distributed_type: ClassVar[DistributedType | None] = DistributedType.DEEPSPEED
    stepper: ClassVar[str] = "DeepSpeed's engine"
    adapter: ClassVar[type[StateAdapter]] = DeepSpeedStates

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        config = options.config or DeepSpeedPlugin()
        self.plugins = config if isinstance(config, DeepSpeedPlugins) else DeepSpeedPlugins({"": config})
        check_known(self.plugin.deepspeed_config, self.plugin.hf_ds_config.origin)
        self.evaluated: list[Any] = []  # engines without optimizer
        for name, plugin in self.plugins.plugins.items():
            if plugin.launched_precision not in (None, self.precision.name):
                raise IncompatibleOptionsError(
                    f"The DeepSpeed plugin {name!r} enables {plugin.launched_precision} in "
                    f"{plugin.hf_ds_config.origin}, but this run computes with "
                    f"mixed_precision={self.precision.name!r}. Set the precision of the run in all plugins."
                )
            plugin.set_mixed_precision(self.precision.name)
        if any(plugin.zero_stage == 3 for plugin in self.plugins.plugins.values()):
            start(options.device)  # models may be divided while they are built, before there is an engine
        self.plugin.set_deepspeed_weakref()

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The configuration for the models that are prepared next."""
        return self.plugins.active

    @classmethod
    def make_mesh(cls, config: Any, device: torch.device, world_size: int, rank: int) -> Mesh:
        """All ranks read different samples, except within one group of DeepSpeed's tensor parallelism."""
        given = config or DeepSpeedPlugin()
        plugin: DeepSpeedPlugin = given.active if isinstance(given, DeepSpeedPlugins) else given
        size = _layer_parts(plugin)
        if world_size % size:
            raise IncompatibleOptionsError(
                f"tensor_parallel.autotp_size={size} in {plugin.hf_ds_config.origin} does not divide the "
                f"{world_size} processes. Choose a number that does."
            )
        if size == 1:
            return Mesh.of_world(world_size, rank)
        return Mesh({"dp_replicate": world_size // size, "tp": size}, device.type, world_size, rank)

    @classmethod
    def check_degrees(cls, config: Any, degrees: Mapping[str, int]) -> None:
        """DeepSpeed's own tensor parallelism is a mesh of its own."""
        given = config or DeepSpeedPlugin()
        plugin: DeepSpeedPlugin = given.active if isinstance(given, DeepSpeedPlugins) else given
        size = _layer_parts(plugin)
        if size > 1:
            raise IncompatibleOptionsError(
                f"DeepSpeed's configuration has tensor_parallel.autotp_size={size}, which cannot be combined with a "
                "parallelism configuration. Leave one of them out."
            )

    # Preparing

    def prepare(self, parts: Parts, steps: ModelSteps) -> Parts:
        """Create an engine for each model with its optimizer; a model without one is only evaluated."""
        paired = _pairs(parts)
        models, optimizers = list(parts.models), list(parts.optimizers)
        schedulers = list(parts.schedulers)
        for place, model in enumerate(parts.models):
            number = paired.get(place)
            if number is None:
                models[place] = self._evaluate_only(model, steps)
                continue
            made = self._train(model, parts, number, steps)
            models[place], optimizers[number] = made.engine, made.optimizer
        for item in self.made:
            schedulers = [_scheduler_of(item, given) for given in schedulers]
        return Parts(models, optimizers, schedulers, parts.loaders)

    def _script(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: Parts) -> Script:
        placeholder = next(
            (
                item
                for item in parts.schedulers
                if isinstance(item, DummyScheduler) and item.optimizer is optimizer
            ),
            None,
        )
        sizes = [size for loader in parts.loaders if (size := _batch_size(loader)) is not None]
        return Script(
            model, optimizer, placeholder, sizes, self.batch.size, self.precision.name, parts.schedule_steps
        )

    def _train(self, model: nn.Module, parts: Parts, number: int, steps: ModelSteps) -> _Trained:
        optimizer = parts.optimizers[number]
        plain = self.plain(model)
        script = self._script(plain, optimizer, parts)
        config = engine_config(self.plugin, script)
        self.plugin.set_moe_leaf_modules(plain)
        groups = [list(group["params"]) for group in optimizer.param_groups if group["params"]]
        _check_trained(groups, optimizer, self.plugin.zero_stage)
        given = self._optimizer_for(optimizer, config)
        engine = make_engine(
            self.options.device,
            model=plain,
            optimizer=given,
            model_parameters=optimizer.groups_for_engine() if isinstance(optimizer, DummyOptim) else None,
            lr_scheduler=script.scheduler and script.scheduler.lr_scheduler_callable,
            config=config,
        )
        cast_inputs(plain, self.precision.dtypes.compute)
        steps.compile_in_place(plain)
        gradients = DeepSpeedGradients(engine, plain)
        made = _Trained(
            engine,
            plain,
            optimizer,
            engine.basic_optimizer,
            gradients,
            EngineWindow(engine, plain, gradients),
            DeepSpeedState(engine, plain, groups),
            self.plugin,
            groups,
            NewParameterGuard(engine, plain, engine.basic_optimizer),
        )
        self.made.append(made)
        self.plugin.tell_of_divided_models()
        return made

    def _optimizer_for(
        self, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]
    ) -> torch.optim.Optimizer | None:
        """The optimizer that the engine steps; None: the optimizer of the configuration."""
        if isinstance(optimizer, DummyOptim):
            return None
        zero = config.get("zero_optimization", {})
        offloads = zero.get("offload_optimizer", {}).get("device", "none") != "none"
        if offloads and config.get("zero_force_ds_cpu_optimizer", True):
            return map_pytorch_optim_to_deepspeed(optimizer)
        return optimizer

    def _evaluate_only(self, model: nn.Module, steps: ModelSteps) -> nn.Module:
        """Under stage 3 an engine without optimizer; else the model on the device, in the engine's precision."""
        plain = self.plain(model)
        if self.plugin.zero_stage == 3 and next(plain.parameters(), None) is not None:
            config = engine_config(self.plugin, self._script(plain, None, Parts()))
            for section in ("optimizer", "scheduler"):
                config.pop(section, None)
            engine = make_engine(self.options.device, model=plain, config=config)
            self.evaluated.append(engine)
            self.plugin.tell_of_divided_models()
            NewParameterGuard(engine, plain)
            cast_inputs(plain, self.precision.dtypes.compute)
            steps.compile_in_place(plain)
            prepared: nn.Module = engine
            return prepared
        placed = steps.place(model)
        compute = self.precision.dtypes.compute
        if compute is not None:
            plain.to(dtype=compute)
            cast_inputs(plain, compute)
        return steps.compile(placed)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module inside DeepSpeed's engine."""
        engines = [*(item.engine for item in self.made), *self.evaluated]
        return model.module if any(model is engine for engine in engines) else model  # type: ignore[return-value]

    def release(self) -> None:
        """Let the engines free what they hold."""
        for item in self.made:
            item.engine.destroy()
        self.made.clear()
        self.evaluated.clear()
        for plugin in self.plugins.plugins.values():
            if not plugin.zero3_init_flag:
                plugin.unset_deepspeed_weakref()

    # One micro-batch

    def backward(
        self, models: Sequence[nn.Module], loss: Tensor, *, pending: bool, kwargs: dict[str, Any]
    ) -> None:
        """Compute gradients, which stay with the engine until the step.

        Raises:
            ArgumentTypeError: the engine's backward does not take an argument.
            PrepareError: the model was prepared without its optimizer, or its parameters have changed since; or the
                loss depends on several models whose engines do not scale it alike.
        """
        unknown = sorted(kwargs.keys() - {"retain_graph", "scale_wrt_gas"})
        if unknown:
            raise ArgumentTypeError(
                f"backward({unknown[0]}=…) is not known to DeepSpeed's engine, which takes retain_graph and "
                "scale_wrt_gas only."
            )
        trained = [item for model in models if (item := self.of_model(model)) is not None]
        if not trained:
            raise PrepareError(
                "backward() was called, but no model was prepared with its optimizer, which DeepSpeed needs to train "
                "it. Pass both to one call: `accelerator.prepare(model, optimizer)`."
            )
        used = trained if len(trained) == 1 else _in_graph(loss, trained)
        if not used:
            raise PrepareError(
                "The loss depends on no parameter of a model that was prepared with its optimizer. Compute it with the "
                "model that prepare() returned."
            )
        if len(used) > 1 and any(item.state.stage == 0 for item in used):
            raise PrepareError(
                f"The loss depends on {len(used)} models, which DeepSpeed trains together with ZeRO stages 1 to 3 "
                "only. Call backward() for the loss of each, or set zero_stage=1."
            )
        for item in used:
            item.watch.check()
        if len(used) > 1:
            _scale_alike(used)
        for item in used:
            loss = item.gradients.before_backward(loss)
        # The other engines of the loss finish their gradients in hooks of their own. The first scales the loss for all.
        for item in used[1:]:
            if scale_of(item.engine) is not None:
                item.engine.scale(loss)  # which tells the engine that the loss is scaled
        used[0].engine.backward(loss, **{**kwargs, "scale_wrt_gas": False})
        for item in used:
            item.gradients.after_backward()

    def averages(self, kwargs: dict[str, Any]) -> bool:
        """Whether the loss is divided by the number of micro-batches: as the engine's own argument says."""
        return bool(kwargs.get("scale_wrt_gas", True))

    # Complete gradients

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply gradients; an engine's gradients in its step."""
        wanted = {id(parameter) for parameter in parameters}
        for item in self.made:
            if item.gradients.waiting and not wanted.isdisjoint(item.gradients.keys):
                item.gradients.scale(factor)

    def _named(self, parameters: Sequence[Tensor]) -> list[_Trained]:
        """The engines of parameters, of which all must be given: partitions hold pieces of several."""
        wanted = {id(parameter) for parameter in parameters}
        found = [item for item in self.made if not wanted.isdisjoint(item.gradients.keys)]
        for item in found:
            missing = item.gradients.keys - wanted
            if missing:
                missing &= {id(parameter) for parameter in item.model.parameters()}  # scripts may remove some
            if missing and not item.gradients.in_parameters:
                raise OptionError(
                    f"Clipping was given {len(wanted)} parameters, {len(missing)} fewer than "
                    f"{type(item.model).__name__} trains, and DeepSpeed keeps the gradients of all of them together. "
                    "Pass model.parameters()."
                )
        return found

    def clip_grad_norm_(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the norm of an engine's gradients in its step; returns the norm before clipping, a plain 0-d tensor."""
        found = self._named(parameters)
        if len(found) > 1:
            raise OptionError(
                "Clipping was given the parameters of several models, and DeepSpeed has an engine for each. Clip them "
                "one by one."
            )
        if not found:
            return torch.zeros((), device=self.options.device)
        return found[0].gradients.clip(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp every gradient element in the engine's step."""
        for item in self._named(parameters):
            if item.gradients.in_parameters:
                item.gradients.complete()
                found = [p.grad for p in item.gradients.parameters if p.grad is not None]
                if found:
                    nn.utils.clip_grad_value_(item.gradients.parameters, clip_value)
            else:
                item.gradients.limit(clip_value)

    # Between phases of training

    def check_offload(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        kinds: Collection[str],
    ) -> None:
        """Check what the engines can move; models without engine move as under other strategies."""
        for model in models:
            if any(model is engine for engine in self.evaluated):
                raise NotAvailableError(
                    f"offload_states() under DeepSpeed cannot move {type(self.plain(model)).__name__}, which stage 3 "
                    "divides for evaluation: its engine has no optimizer. Name the objects that move: "
                    "offload_states(model, optimizer)."
                )
        found = [*map(self.of_model, models), *map(self.of_optimizer, optimizers)]
        for item in found:
            if item is not None:
                stage, waiting = item.state.stage, item.gradients.waiting
                check_engine(item.engine, stage=stage, kinds=kinds, waiting=waiting)

    def offload_states(
        self, owner: nn.Module | torch.optim.Optimizer, kinds: Collection[str], memory: HostMemory
    ) -> Offloaded:
        """Let the engine move states."""
        item = self.of_model(owner) if isinstance(owner, nn.Module) else self.of_optimizer(owner)
        if item is None:
            return super().offload_states(owner, kinds, memory)
        return EngineOffload(item.engine, kinds, self.options.device, memory.pinned)


def _layer_parts(plugin: DeepSpeedPlugin) -> int:
    """In how many parts DeepSpeed's own tensor parallelism divides layers."""
    return int(plugin.get_value("tensor_parallel.autotp_size") or 1)


def _divides_layers(made: _Trained) -> bool:
    return _layer_parts(made.plugin) > 1


def _pairs(parts: Parts) -> dict[int, int]:
    """The optimizer of each model, by their places; checked before an engine is made.

    Raises:
        PrepareError: an optimizer has parameters of none or of several of the models, or a model several optimizers.
    """
    owners = {id(p): place for place, model in enumerate(parts.models) for p in model.parameters()}
    found: dict[int, int] = {}
    for number, optimizer in enumerate(parts.optimizers):
        name = type(optimizer).__name__
        places = {owners.get(id(p)) for p in parameters_of(optimizer)}
        if None in places:
            raise PrepareError(
                f"{name} holds parameters of no model in this prepare() call, and DeepSpeed prepares a model and its "
                "optimizer together. Pass both to one call, and build the optimizer from this model's parameters()."
            )
        if len(places) != 1:
            raise PrepareError(
                f"{name} holds parameters of {len(places)} models, and DeepSpeed has an engine with an optimizer for "
                "each. Build one optimizer per model."
            )
        [place] = places
        assert place is not None
        if place in found:
            raise PrepareError(
                f"{type(parts.models[place]).__name__} comes with two optimizers, and DeepSpeed's engine has one. Put "
                "the parameters into groups of one optimizer."
            )
        found[place] = number
    return found


def _check_trained(groups: Sequence[Sequence[Tensor]], optimizer: torch.optim.Optimizer, stage: int) -> None:
    """Refuse a group without trained parameters, of which stages 1 and 2 cannot make a flat partition.

    Raises:
        PrepareError: there is one.
    """
    if stage not in (1, 2):
        return
    for number, group in enumerate(groups):
        if not any(parameter.requires_grad for parameter in group):
            raise PrepareError(
                f"Group {number} of {type(optimizer).__name__} holds {len(group)} parameters, all frozen, and "
                f"DeepSpeed's ZeRO stage {stage} needs a trained one in each group. Leave the group out of the "
                "optimizer, or set zero_stage=3."
            )


def _in_graph(loss: Tensor, trained: Sequence[_Trained]) -> list[_Trained]:
    """The engines whose parameters a loss depends on, as they were prepared."""
    owners = {key: item for item in trained for key in item.gradients.keys}
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting and len(found) < len(trained):
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        item = owners.get(id(getattr(node, "variable", None)))
        if item is not None:
            found.add(id(item))
        waiting += [following for following, _ in node.next_functions]
    return [item for item in trained if id(item) in found]


def _scale_alike(used: Sequence[_Trained]) -> None:
    """Let the engines of one loss have one loss scale: that of waiting gradients, or the lowest.

    Scales part when one engine skips a step that the other makes.

    Raises:
        PrepareError: they cannot: a scale is fixed, an engine has none, or both have waiting gradients.
    """
    if any(item.gradients.has_factor for item in used):
        raise PrepareError(
            f"The loss depends on {len(used)} models, and gradients of one wait that were multiplied, as for "
            "num_items. Step its optimizer before this backward, or call backward() for the loss of each model."
        )
    scales = [scale_of(item.engine) for item in used]
    values = [None if scale is None else scale.value for scale in scales]
    if len(set(values)) == 1:
        return
    waiting = {value for item, value in zip(used, values, strict=True) if item.gradients.waiting}
    common = min((value for value in waiting or values if value is not None), default=None)
    apart = [scale for scale in scales if scale is None or scale.value != common]
    if len(waiting) > 1 or any(scale is None or not scale.is_dynamic for scale in apart):
        raise PrepareError(
            f"The loss depends on {len(used)} models, whose DeepSpeed engines scale losses by "
            f"{' and '.join('nothing' if value is None else str(value) for value in values)}, and one backward has one "
            "scale. Give all of them the same precision and the same fp16.loss_scale, and step their optimizers "
            "together, or call backward() for the loss of each model."
        )
    for scale in apart:
        assert scale is not None
        scale.load({"cur_scale": common})


def _scheduler_of(made: _Trained, given: Any) -> Any:
    """The scheduler of the engine for a placeholder; others as they are."""
    if isinstance(given, DummyScheduler) and given.optimizer is made.given:
        if made.engine.lr_scheduler is None:
            raise IncompatibleOptionsError(
                "DummyScheduler stands for the section 'scheduler' of the DeepSpeed configuration, and the engine has "
                "made none."
            )
        return EngineScheduler(made.engine.lr_scheduler)
    return given


def _batch_size(loader: Any) -> int | None:
    """Samples per rank of a prepared loader; None where it does not tell."""
    size = getattr(loader, "batch_size", None)
    return int(size) if isinstance(size, int) else None


def _frozen_state(named: NamedModel) -> dict[str, Any]:
    """This rank's share of a model that stage 3 divides for evaluation."""
    parameters: Mapping[str, Any] = named.parameters()
    state = named.state_dict()
    return {
        name: share_of(parameters[name]).parts(parameters[name].ds_tensor) if name in parameters else value
        for name, value in state.items()
    }


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    """A leaf in another dtype."""
    if isinstance(leaf, Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf
    if isinstance(leaf, Part):
        return Part(leaf.tensor.to(dtype), leaf.offsets, leaf.shape)
    return [_cast(part, dtype) for part in leaf]
