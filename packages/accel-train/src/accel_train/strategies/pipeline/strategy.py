"""Pipeline parallelism: each rank holds stages of the model, whose parameters may be sharded or divided further."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from accel_state.operations.collectives import broadcast, reduce
from accel_train.errors import IncompatibleOptionsError, PrepareError
from accel_train.offload.tensors import Kinded, tensors_of_model
from accel_train.optimizer_parameters import parameters_of
from accel_train.plugins import (
    FullyShardedDataParallelPlugin,
    PipelineParallelConfig,
    TorchTensorParallelPlugin,
)
from accel_train.ranks import Ranks
from accel_train.strategies.base import ModelSteps, Parts, Strategy, StrategyOptions
from accel_train.strategies.capabilities import Capabilities
from accel_train.strategies.fsdp2.divider import Divider, Units, check_plugin, mixed_precision_policy
from accel_train.strategies.fsdp2.initial_values import Start, read_parts
from accel_train.strategies.fsdp2.strategy import FSDP2Strategy
from accel_train.strategies.gradients import combine_norms, scale_down
from accel_train.strategies.pickling import refuse_pickles_of_stages
from accel_train.strategies.pipeline.cut import Cut, cut_model
from accel_train.strategies.pipeline.foresight import Foresight
from accel_train.strategies.pipeline.model import PipelineModel
from accel_train.strategies.pipeline.schedules import SCHEDULES, StageLayout
from accel_train.strategies.pipeline.stages import make_stages
from accel_train.strategies.pipeline.states import PipelineStates, UndividedModel
from accel_train.strategies.pipeline.trial import try_cut
from accel_train.strategies.relink import step_both_kinds
from accel_train.strategies.shared_buffers import saved_buffers, share_in_evaluation
from accel_train.strategies.state_adapter import StateAdapter
from accel_train.strategies.tensor_parallel import (
    TensorParallelStrategy,
    complete_gradients,
)
from accel_train.strategies.wrappers import check_is_divided

__all__ = ["PipelineStrategy"]


class PipelineStrategy(Strategy):
    """Pipeline parallelism. Inside a stage, FSDP may shard parameters, and the script may divide tensors."""

    name: ClassVar[str] = "pp"
    capabilities: ClassVar[Capabilities] = Capabilities(
        precisions=frozenset({"no", "bf16", "fp16"}),
        needs_process_group=True,
        hides_gradients=True,
        dimensions=frozenset({"pp", "dp_replicate", "dp_shard", "tp"}),
    )
    adapter: ClassVar[type[StateAdapter]] = PipelineStates

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        self.pipeline: PipelineParallelConfig = options.pipeline or PipelineParallelConfig()
        mesh = options.mesh.submesh("pp")
        if mesh is None:
            raise IncompatibleOptionsError(
                "strategy 'pp' needs stages on several ranks. Give ParallelismConfig(pp_size=…)."
            )
        self.pipeline_group: Any = mesh.get_group()
        self._rank: int = mesh.get_local_rank()
        config = options.config
        sharding = isinstance(config, FullyShardedDataParallelPlugin)
        self._sharding = config if sharding else FullyShardedDataParallelPlugin()
        if sharding:
            check_plugin(config, self.precision)
        schedule = SCHEDULES.get(self.pipeline.schedule or "")
        recomputed = self._sharding.activation_checkpointing
        if schedule is not None and schedule.halves and not isinstance(recomputed, bool):
            raise IncompatibleOptionsError(
                f"activation_checkpointing={recomputed!r} keeps results for one backward, and schedule="
                f"{schedule.name!r} runs two, of inputs and of weights. Use activation_checkpointing=True, or another "
                "schedule."
            )
        for name in ("checkpoint", "param_init_fn"):
            if getattr(self.pipeline, name) is not None and self._origin is self._sharding:
                raise IncompatibleOptionsError(
                    f"PipelineParallelConfig({name}=…) and FullyShardedDataParallelPlugin(…) both say how a model on "
                    "the meta device gets its values. Leave one of them out."
                )
        self._layout = _layout(self.pipeline, mesh.size())
        self._made: list[tuple[PipelineModel, UndividedModel]] = []
        self._gone: dict[int, weakref.ref[Tensor]] = {}  # parameters of other stages

    @classmethod
    def check_degrees(cls, config: Any, degrees: Mapping[str, int]) -> None:
        """A plugin of FSDP or of tensor parallelism is for what is inside a stage."""
        if isinstance(config, FullyShardedDataParallelPlugin):
            FSDP2Strategy.check_degrees(config, degrees)
        elif isinstance(config, TorchTensorParallelPlugin):
            TensorParallelStrategy.check_degrees(config, degrees)

    @property
    def shards(self) -> bool:
        """Whether FSDP divides the parameters of stages."""
        return self.options.mesh.degrees["dp_shard"] > 1

    @property
    def divided(self) -> list[nn.Module]:
        """The stages of this rank that FSDP divides."""
        return [stage for engine, _ in self._made for stage in engine.stages] if self.shards else []

    # Preparing

    def prepare(self, parts: Parts, steps: ModelSteps) -> Parts:
        """Divide models into stages; optimizers keep the parameters of this rank's."""
        for model in parts.models:
            self._check_cut(self.plain(model), alone=len(parts.models) + len(self._made) == 1)
        prepared = super().prepare(parts, steps)
        for optimizer in parts.optimizers:
            self._keep_own(optimizer)
            step_both_kinds(optimizer)
        return prepared

    def prepare_model(self, model: nn.Module, steps: ModelSteps) -> nn.Module:
        """Cut a model into stages, keep those of this rank, and shard them."""
        plain = self.plain(model)
        if getattr(getattr(plain, "config", None), "output_router_logits", False):
            raise PrepareError(
                f"The configuration of {type(plain).__name__} has output_router_logits=True, and a stage of a pipeline "
                "knows the routers of its own layers alone. Set it to False before the model is built."
            )
        function = self.pipeline.loss_function
        if isinstance(function, nn.Module) and any(p.requires_grad for p in function.parameters()):
            raise PrepareError(
                f"loss_function={type(function).__name__} has trained parameters, and only the last stage calls it: on "
                f"other ranks they would stay as they are. Put them into {type(plain).__name__}, or freeze them."
            )
        check_is_divided(plain, self.options.requested_tp_size)
        start = self._start(plain)  # the models are alike, so all ranks get the same errors
        cut = cut_model(plain, self.pipeline, self._layout.stages)
        units = Units.of(plain, self._sharding) if self.shards else None
        foresight = self._foresight(plain, cut, units, steps)
        whole = UndividedModel.of(plain)
        before = dict(plain.named_parameters(remove_duplicate=False))
        fill = None if start is None else start.fill
        stages = make_stages(plain, cut, self._layout.held(self._rank), self.pipeline.loss_function, fill)
        self._note_gone(before, plain)
        refuse_pickles_of_stages(plain, self._layout.ranks)
        del before
        if start is not None:
            steps.place(plain)
        for stage in stages:
            steps.convert(stage.module)
            if units is not None:
                # Gathered once in a call: replicas may cut their batches into other numbers of micro-batches, and half
                # a backward looks for the parameters that computed the outputs.
                Divider(self._sharding, self.precision, self.options.mesh.holders, units).divide(
                    stage, stays=True
                )
            for layer in stage.layers:
                steps.compile_in_place(layer)
        checkpoint = self._origin.checkpoint
        if start is None and checkpoint is not None:
            offloads = self.shards and isinstance(self._sharding.offload_policy, CPUOffloadPolicy)
            home = torch.device("cpu") if offloads else self.options.device
            read_parts(nn.ModuleList(stages), checkpoint, self.options.device, home, named=plain)
        engine = PipelineModel(
            plain, stages, self._layout, self._rank, self.pipeline_group, self.pipeline, self.options.device
        )
        if self.loss.size > 1:
            first = dist.get_process_group_ranks(self.loss.group)[0]
            send = partial(broadcast, from_process=first, group=self.loss.group)
            share_in_evaluation(engine, engine, saved_buffers, send=send)
        engine.foresight = foresight
        engine.scale = lambda factor: self.scale_gradients(list(engine.parameters()), factor)
        engine.loss_scale = self._settle_scale
        engine.free = self.gathered.free
        self._made = [made for made in self._made if made[1].module is not plain]
        self._made.append((engine, whole))
        for stage in stages:
            self.precision.after_sharding(stage, stage)
        return engine

    def _check_cut(self, model: nn.Module, *, alone: bool) -> None:
        """See that a model can be cut, before any is.

        Args:
            model: the script's model.
            alone: it is the only one.

        Raises:
            PrepareError: it cannot, and perhaps it need not be: it is frozen, or not the only one.
        """
        try:
            cut = cut_model(model, self.pipeline, self._layout.stages)
            if not cut.chain:
                try_cut(model, cut)
        except PrepareError as error:
            if alone and any(parameter.requires_grad for parameter in model.parameters()):
                raise
            raise PrepareError(
                f"{error} Or leave {type(model).__name__} whole on each rank: with prepare_model(model, "
                "evaluation_mode=True) if it is only evaluated. If it is trained beside another model, prepare it, "
                "and its optimizer, with an Accelerator of its own, without pp_size; or with a pp_handler that is made "
                "for it, because one PipelineParallelConfig cuts all models of an Accelerator."
            ) from error

    def _foresight(
        self, model: nn.Module, cut: Cut, units: Units | None, steps: ModelSteps
    ) -> Foresight | None:
        """What tells a rehearsal about the stages of other ranks; None: these ranks exist."""
        rehearsal = self.options.rehearsal
        if rehearsal is None:
            return None
        loss = self.pipeline.loss_function
        if units is None:
            return Foresight(model, cut, loss, steps.convert, rehearsal, None)
        policy = mixed_precision_policy(self._sharding, self.precision)
        policies = policy, replace(policy, output_dtype=None)
        return Foresight(model, cut, loss, steps.convert, rehearsal, policies, units.gathered, units.whole)

    @property
    def _origin(self) -> FullyShardedDataParallelPlugin | PipelineParallelConfig:
        """What says how a model on the meta device gets its values."""
        plugin = self._sharding
        return plugin if plugin.checkpoint is not None or plugin.param_init_fn is not None else self.pipeline

    def _start(self, model: nn.Module) -> Start | None:
        """How the tensors of all stages get their values; None: each rank reads those of its own from files."""
        return Start.of(
            model,
            self._origin.checkpoint,
            device=None,  # foreign stages never come to the device
            syncs=bool(self._sharding.sync_module_states),
            init=self._origin.param_init_fn,
            groups=[self.pipeline_group, *([self.loss.group] if self.loss.size > 1 else [])],
            told_by="PipelineParallelConfig",
        )

    def _note_gone(self, before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        """Remember the parameters that are in other stages now."""
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        kept = {id(parameter) for name, parameter in before.items() if name in names}
        for parameter in before.values():
            key = id(parameter)
            if key not in kept:
                self._gone[key] = weakref.ref(parameter, partial(_forget, self._gone, key))

    def _keep_own(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave parameters of other stages out of an optimizer."""
        for group in optimizer.param_groups:
            held: list[Tensor] = group["params"]
            kept = []
            for parameter in held:
                gone = self._gone.get(id(parameter))
                if gone is not None and gone() is parameter:
                    optimizer.state.pop(parameter, None)
                else:
                    kept.append(parameter)
            group["params"][:] = kept

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The script's model, with this rank's modules."""
        return model.given if isinstance(model, PipelineModel) else model

    def is_outdated(self, model: nn.Module) -> bool:
        """False: parameters that are added afterwards are in no stage."""
        return False

    def whole_of(self, model: nn.Module) -> UndividedModel | None:
        """What a prepared model was before it was divided; None: it was prepared for evaluation alone."""
        plain = self.plain(model)
        return next((whole for _, whole in self._made if whole.module is plain), None)

    def release(self) -> None:
        """Forget the prepared models."""
        super().release()
        self._made.clear()

    def state_tensors(self, owner: nn.Module | torch.optim.Optimizer) -> Iterator[Kinded]:
        """The tensors of this rank's stages, or of an optimizer."""
        return tensors_of_model(owner) if isinstance(owner, PipelineModel) else super().state_tensors(owner)

    # One micro-batch

    def begin_micro_batch(self, models: Sequence[nn.Module], *, last: bool, loss_factor: float) -> None:
        """Reduce gradients only in the last micro-batch of a window."""
        for engine, _ in self._made:
            engine.loss_factor = loss_factor
            engine.reduces = last or self.options.sync_each_batch

    def end_micro_batch(self, models: Sequence[nn.Module], *, last: bool) -> None:
        """Reduce again."""
        for engine, _ in self._made:
            engine.loss_factor, engine.reduces = 1.0, True

    def backward(
        self, models: Sequence[nn.Module], loss: Tensor, *, pending: bool, kwargs: dict[str, Any]
    ) -> None:
        """Run backward through all stages, or account for gradients that calling the model has computed."""
        super().backward(models, loss, pending=pending, kwargs=kwargs)
        for engine, _ in self._made:
            engine.run_backward()
            engine.losses.account()
            complete_gradients(engine, self.loss if engine.reduces else None)

    def replicas_of(self, optimizer: torch.optim.Optimizer) -> Ranks | None:
        """The ranks that hold the same stages, unless it steps what is in no prepared model."""
        known = {id(p) for engine, _ in self._made for p in engine.parameters()}
        own = all(id(p) in known for p in parameters_of(optimizer) if p.requires_grad)
        return self.loss if own else None

    # Complete gradients

    def clip_grad_norm_(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the norm of the gradients of all stages; returns the norm before, a 0-d tensor."""
        norm = self.gradient_norm(parameters, norm_type)
        scale_down(parameters, norm, max_norm)
        return norm

    def gradient_norm(self, parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        """Norm of the gradients of all stages, a 0-d tensor; changes nothing."""
        own = super().gradient_norm(parameters, norm_type)
        if parameters and all(parameter.grad is None for parameter in parameters):
            own = own.to(parameters[0].dtype)  # that of the other stages, so that all ranks return the same
        return combine_norms(own, norm_type, self.pipeline_group, self.options.device)

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> tuple[bool, Any]:
        """Step an optimizer.

        Raises:
            AccumulationError: a loss went to `loss.backward()`, so that gradients did not go through all stages; or to
                no backward, although the call of the model has computed its gradients.
        """
        for engine, _ in self._made:
            engine.check_losses()
            engine.accumulated = False
        self.precision.share_found(optimizer, lambda value: reduce(value, "max", group=self.pipeline_group))
        return super().step(optimizer, closure)

    def _settle_scale(self) -> float:
        """The loss scale of gradients that a call of a model is about to compute."""
        self.precision.settle_scale(any(engine.accumulated for engine, _ in self._made))
        return self.precision.loss_scale

    def zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """Drop gradients; also those of calls whose loss then cannot go through backward."""
        for engine, _ in self._made:
            engine.drop_gradients()
        super().zero_grad(optimizer, set_to_none)


def _forget(known: dict[int, Any], key: int, reference: object) -> None:
    known.pop(key, None)


def _layout(config: PipelineParallelConfig, ranks: int) -> StageLayout:
    """Which rank holds which stage.

    Raises:
        IncompatibleOptionsError: the schedule does not take this number of stages on a rank.
    """
    each = config.stages_per_rank
    if config.schedule is None:
        return StageLayout(ranks, ranks * (each or 1))
    schedule = SCHEDULES[config.schedule]
    each = each or schedule.stages_per_rank
    if each != schedule.stages_per_rank and not (schedule.any_stages and each > 1):
        takes = "2 or more" if schedule.any_stages else str(schedule.stages_per_rank)
        raise IncompatibleOptionsError(
            f"stages_per_rank={each}, and the schedule {schedule.name!r} takes {takes} on each rank. Change one of "
            "them."
        )
    return StageLayout(ranks, ranks * each, schedule.turns)
