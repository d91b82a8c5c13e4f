"""Megatron-core: its engine runs whole micro-batches, forward and backward; the loop stays the script's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel_ckpt import NamedModel
from accel_state.enums import DistributedType
from accel_train.errors import ArgumentTypeError, IncompatibleOptionsError, OptionError, PrepareError
from accel_train.mesh import Mesh
from accel_train.optimizer_parameters import parameter_ids, parameters_of
from accel_train.strategies.base import ModelSteps, Parts, StrategyOptions
from accel_train.strategies.capabilities import Capabilities
from accel_train.strategies.engines import EngineStates, EngineStrategy
from accel_train.strategies.megatron.build import Built, build, empty_out
from accel_train.strategies.megatron.engine import MegatronEngine
from accel_train.strategies.megatron.gradients import MegatronGradients, make_optimizer, regrouped
from accel_train.strategies.megatron.options import divide_other, gradient_options, optimizer_options
from accel_train.strategies.megatron.placeholders import MegatronLMDummyScheduler, make_scheduler
from accel_train.strategies.megatron.plugin import MegatronLMPlugin
from accel_train.strategies.megatron.runtime import (
    Groups,
    random_states,
    restore_random_states,
    start,
)
from accel_train.strategies.megatron.state import MegatronState
from accel_train.strategies.state_adapter import SavedModel, StateAdapter, leaf_misfits

__all__ = ["MegatronStates", "MegatronStrategy"]


@dataclass
class _Trained:
    """An engine, and what it was made of; without optimizer it is only evaluated."""

    engine: MegatronEngine
    model: nn.Module
    state: MegatronState
    optimizer: torch.optim.Optimizer | None = None
    gradients: MegatronGradients | None = None
    groups: list[list[Tensor]] | None = None


class MegatronStates(EngineStates):
    """Saves and loads the state of this rank's stage, by the names of the script's model."""

    strategy: MegatronStrategy

    def model_state(self, model: nn.Module, named: NamedModel | None = None) -> dict[str, Any]:
        """This rank's share of the weights, by the script's names; in float32 if the optimizer updates such copies."""
        item = self.strategy.of_model(model)
        return super().model_state(model, named) if item is None else item.state.model_state()

    def misfits(self, model: nn.Module, weights: SavedModel, strict: bool) -> list[str]:
        """The reasons why saved weights cannot be loaded into a model."""
        item = self.strategy.of_model(model)
        if item is None:
            return super().misfits(model, weights, strict)
        own = item.state.model_state()
        return leaf_misfits(own, weights, strict, own.keys() - _without_tied(own, weights.about).keys())

    def load_model_state(self, model: nn.Module, weights: SavedModel, strict: bool) -> None:
        """Load weights; each rank reads its share."""
        item = self.strategy.of_model(model)
        if item is None:
            super().load_model_state(model, weights, strict)
            return
        own = _without_tied(item.state.model_state(), weights.about)
        with torch.no_grad():
            weights.fill({name: leaf for name, leaf in own.items() if name in weights.about})
        item.state.after_loading()

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module | NamedModel]
    ) -> Any:
        """An optimizer's state by parameter name; without its tensors if the plugin says `no_save_optim`."""
        item = self.strategy.of_optimizer(optimizer)
        if item is None:
            return super().optimizer_state(optimizer, models)
        return item.state.optimizer_state(optimizer, saves=not self.strategy.plugin.no_save_optim)

    def check_optimizer_state(
        self, optimizer: torch.optim.Optimizer, tree: Any, models: Sequence[nn.Module]
    ) -> None:
        """Check that `load_optimizer_state` can load a state."""
        item = self.strategy.of_optimizer(optimizer)
        if item is None:
            super().check_optimizer_state(optimizer, tree, models)
        else:
            item.state.check_optimizer_state(tree, loads=not self.strategy.plugin.no_load_optim)

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, tree: Any, models: Sequence[nn.Module]
    ) -> None:
        """Load an optimizer's state, unless the plugin says `no_load_optim`."""
        item = self.strategy.of_optimizer(optimizer)
        if item is None:
            super().load_optimizer_state(optimizer, tree, models)
        elif not self.strategy.plugin.no_load_optim:
            item.state.load_optimizer_state(optimizer, tree)

    def rank_state(self, model: nn.Module) -> dict[str, Any]:
        """The states of the generators for dropout of tensors that this rank divides."""
        return {} if self.strategy.of_model(model) is None else {"random_states": random_states()}

    def load_rank_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load what `rank_state` returned; gradients that wait are dropped."""
        super().load_rank_state(model, state)
        if self.strategy.of_model(model) is not None:
            restore_random_states(state.get("random_states", {}))


class MegatronStrategy(EngineStrategy[_Trained]):
    """One model, divided by Megatron-core's layers among tensor and pipeline ranks, with replicas of the whole.

    The given model's weights are converted; the names in checkpoints and exports are those of the given model, so a
    state can be loaded by every other strategy and by every division.
    """

    name: ClassVar[str] = "megatron"
    capabilities: ClassVar[Capabilities] = Capabilities(
        precisions=frozenset({"no", "bf16"}),
        device_types=frozenset({"cuda"}),
        hides_gradients=True,
        saves_windows=False,
        max_models=1,
        prepares_together=True,
        computes_precision=True,
        skips_steps=False,
        requires=("megatron-core>=0.16",),
    )
    distributed_type: ClassVar[DistributedType | None] = DistributedType.MEGATRON_LM
    stepper: ClassVar[str] = "Megatron's optimizer"
    adapter: ClassVar[type[StateAdapter]] = MegatronStates

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        self.plugin: MegatronLMPlugin = options.config or MegatronLMPlugin()
        self._groups: Groups | None = None
        self._factor = 1.0

    @classmethod
    def make_mesh(cls, config: Any, device: torch.device, world_size: int, rank: int) -> Mesh:
        """Ranks of one tensor, context or pipeline group read the same samples; the others are data parallel."""
        plugin: MegatronLMPlugin = config or MegatronLMPlugin()
        tp, pp, cp = plugin.tp_degree or 1, plugin.pp_degree or 1, plugin.context_parallel_size or 1
        together = tp * pp * cp
        if world_size % together:
            context = "" if cp == 1 else f" times context_parallel_size={cp}"
            raise IncompatibleOptionsError(
                f"tp_degree={tp} times pp_degree={pp}{context} does not divide the {world_size} processes. Start a "
                f"multiple of {together} processes, or change a degree."
            )
        if together == 1:
            return Mesh.of_world(world_size, rank)
        degrees = {"pp": pp, "dp_replicate": world_size // together, "cp": cp, "tp": tp}
        return Mesh(degrees, device.type, world_size, rank)

    # Preparing

    def prepare(self, parts: Parts, steps: ModelSteps) -> Parts:
        """Create an engine for the model with its optimizer; without one it is only evaluated."""
        if not parts.models:
            return parts
        [model] = parts.models
        plain = self.plain(model)
        optimizer = self._optimizer_of(plain, parts.optimizers)
        self._check_batches(parts.loaders)
        self._groups = start(self.plugin, self.options.device)
        compute = self.precision.dtypes.compute
        built = build(self.plugin, plain, self._groups, self.options.device, compute)
        prepare_chunks = self.plugin.custom_prepare_model_function
        if prepare_chunks is not None:
            [built.module] = prepare_chunks([built.module])
        made = (
            self._evaluate_only(plain, built, compute)
            if optimizer is None
            else self._train(plain, built, optimizer, compute)
        )
        self.made.append(made)
        schedulers = [self._scheduler_of(made, given) for given in parts.schedulers]
        return Parts([made.engine], parts.optimizers, schedulers, parts.loaders)

    def _optimizer_of(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> torch.optim.Optimizer | None:
        if not optimizers:
            return None
        if len(optimizers) > 1:
            raise PrepareError(
                f"{type(model).__name__} comes with {len(optimizers)} optimizers, and Megatron's engine has one. Put "
                "the parameters into groups of one optimizer."
            )
        [optimizer] = optimizers
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(p) not in own for p in parameters_of(optimizer)):
            raise PrepareError(
                f"{type(optimizer).__name__} holds parameters that {type(model).__name__} does not have. Build the "
                "optimizer from this model's parameters(), and pass both to one prepare() call."
            )
        return optimizer

    def _check_batches(self, loaders: Sequence[Any]) -> None:
        count = self.plugin.num_micro_batches or 1
        for loader in loaders:
            size = getattr(loader, "batch_size", None)
            if isinstance(size, int) and size % count:
                raise IncompatibleOptionsError(
                    f"num_micro_batches={count} does not divide the batches of {size} samples that a loader yields. "
                    "Change one of them: each batch of a rank is cut into that many micro-batches."
                )

    def _wrapped(self, built: Built) -> Any:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        options = gradient_options(self.plugin)
        other = divide_other(self.plugin, self._kinds())["gradients"]
        module = built.module
        if self.precision.dtypes.compute is not None:
            module = Float16Module(built.config, module)
        chunk = DistributedDataParallel(
            config=built.config,
            ddp_config=DistributedDataParallelConfig(**{**options, **other}),
            module=module,
        )
        if built.architecture is None:
            chunk.broadcast_params()  # the script has drawn them, on each rank alone
        return chunk

    def _kinds(self) -> dict[str, type]:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import TransformerConfig

        return {
            "transformer": TransformerConfig,
            "optimizer": OptimizerConfig,
            "gradients": DistributedDataParallelConfig,
        }

    def _train(
        self, model: nn.Module, built: Built, optimizer: torch.optim.Optimizer, compute: torch.dtype | None
    ) -> _Trained:
        assert self._groups is not None, "started"
        options = optimizer_options(self.plugin, optimizer, compute)
        options |= divide_other(self.plugin, self._kinds())["optimizer"]
        groups = regrouped(built, model, optimizer)
        chunk = self._wrapped(built)
        own = make_optimizer(optimizer, groups, options, chunk)
        engine = MegatronEngine(chunk, built, self._groups, self.plugin, model, trained=True)
        gradients = MegatronGradients(chunk, own, self.plugin, engine.losses)
        state = MegatronState(built, self._groups, chunk, own)
        state.use_groups(groups)
        engine.before_backward, engine.scale = gradients.before_backward, gradients.scale
        empty_out(model)
        return _Trained(engine, model, state, optimizer, gradients, [list(group) for group in groups])

    def _evaluate_only(self, model: nn.Module, built: Built, compute: torch.dtype | None) -> _Trained:
        from megatron.core.transformer.module import Float16Module

        assert self._groups is not None, "started"
        chunk = built.module if compute is None else Float16Module(built.config, built.module)
        state = MegatronState(built, self._groups, chunk, None)
        engine = MegatronEngine(chunk, built, self._groups, self.plugin, model, trained=False)
        empty_out(model)
        return _Trained(engine, model, state)

    def _scheduler_of(self, made: _Trained, given: Any) -> Any:
        if not isinstance(given, MegatronLMDummyScheduler):
            return given
        if made.optimizer is None or given.optimizer is not made.optimizer:
            raise PrepareError(
                "MegatronLMDummyScheduler is of another optimizer than the one that is prepared with it. Build it "
                "from this optimizer."
            )
        return make_scheduler(given, self.plugin)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The script's model; its values are in the engine, its configuration and names are its own."""
        return model.given if isinstance(model, MegatronEngine) else model

    def release(self) -> None:
        """Forget the engine."""
        self.made.clear()

    # One micro-batch

    def begin_micro_batch(self, models: Sequence[nn.Module], *, last: bool, loss_factor: float) -> None:
        """Pass the factor of the loss to the engine, which computes gradients in forward."""
        for item in self.made:
            item.engine.loss_factor = loss_factor

    def backward(
        self, models: Sequence[nn.Module], loss: Tensor, *, pending: bool, kwargs: dict[str, Any]
    ) -> None:
        """Compute gradients, or account for those that calling the model has computed.

        Raises:
            ArgumentTypeError: an argument of `Tensor.backward` is given.
            PrepareError: the model was prepared without its optimizer, or the loss does not come from it.
        """
        if kwargs:
            raise ArgumentTypeError(
                f"backward({sorted(kwargs)[0]}=…) is not known to Megatron's engine, whose schedule runs backward by "
                "itself. Leave it out."
            )
        if not any(item.gradients is not None for item in self.made):
            raise PrepareError(
                "backward() was called, but no model was prepared with its optimizer, which Megatron needs to train "
                "it. Pass both to one call: `accelerator.prepare(model, optimizer)`."
            )
        if not loss.requires_grad:
            raise PrepareError(
                "The loss depends on no parameter of the prepared model: it was computed in torch.no_grad(), or with "
                "model.eval(). Call model.train(), and use the loss that the model returns."
            )
        loss.backward()  # type: ignore[no-untyped-call]
        for item in self.made:
            item.engine.losses.account()

    # Complete gradients

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply waiting gradients."""
        wanted = {id(parameter) for parameter in parameters}
        for item in self.made:
            if item.gradients is not None and item.gradients.waiting and wanted & self._ids(item):
                item.gradients.scale(factor)

    def _ids(self, item: _Trained) -> set[int]:
        known = {id(parameter) for parameter in item.engine.parameters()}
        # The optimizer may hold copies, or parts.
        assert item.optimizer is not None, "trained"
        return known | parameter_ids(item.optimizer)

    def _clipped(self, parameters: Sequence[Tensor]) -> MegatronGradients | None:
        """The engine of parameters, of which all must be given."""
        wanted = {id(parameter) for parameter in parameters}
        for item in self.made:
            if item.gradients is None or wanted.isdisjoint(self._ids(item)):
                continue
            trained = {id(p) for p in item.engine.parameters() if p.requires_grad}
            missing = len(trained - wanted)
            if missing and len(wanted) < len(trained):
                raise OptionError(
                    f"Clipping was given {len(wanted)} parameters, {missing} fewer than the model trains, and "
                    "Megatron's optimizer clips all of them together. Pass model.parameters()."
                )
            return item.gradients
        return None

    def clip_grad_norm_(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the norm of the gradients of all stages and ranks; returns the norm before clipping, a 0-d tensor."""
        found = self._clipped(parameters)
        if found is None:
            return torch.zeros((), device=self.options.device)
        return found.clip(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp every gradient element."""
        found = self._clipped(parameters)
        if found is not None:
            found.limit(clip_value)


def _without_tied(own: dict[str, Any], about: Any) -> dict[str, Any]:
    """What must be filled: of two names for one tensor the one that was saved."""
    seen: dict[int, str] = {}
    kept: dict[str, Any] = {}
    for name, leaf in own.items():
        first = seen.setdefault(id(leaf), name)
        if first == name:
            kept[name] = leaf
        elif first not in about and name in about:
            kept.pop(first, None)
            kept[name] = leaf
    return kept
