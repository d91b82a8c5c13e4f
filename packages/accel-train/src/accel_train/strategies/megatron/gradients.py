"""Megatron's optimizer, which wraps the script's own, and the gradients that it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_ckpt import NamedModel
from accel_train.errors import AccumulationError, IncompatibleOptionsError, OptionError, PrepareError
from accel_train.strategies.computed_loss import ComputedLosses
from accel_train.strategies.megatron.build import Built
from accel_train.strategies.megatron.plugin import MegatronLMPlugin

__all__ = ["MegatronGradients", "make_optimizer", "regrouped"]


def regrouped(built: Built, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    """Assign the stage's parameters to the groups of the script's optimizer that their values come from.

    Parameters that the script does not train, or that are in no group, are frozen.

    Raises:
        PrepareError: the optimizer holds other parameters, or has state already.
        IncompatibleOptionsError: parameters that Megatron keeps in one tensor are in several groups.
    """
    name = type(optimizer).__name__
    if optimizer.state:
        raise PrepareError(
            f"{name} has stepped already, and Megatron keeps its states in other tensors. Prepare it before the first "
            "step, then load its state with load_state()."
        )
    groups = optimizer.param_groups
    found: list[list[nn.Parameter]] = [[] for _ in groups]
    if built.architecture is None:
        if len(groups) > 1:
            raise IncompatibleOptionsError(
                f"{name} has {len(groups)} groups of the given model's parameters, and "
                "custom_model_provider_function builds another model. Use one group."
            )
        found[0] = [parameter for parameter in built.module.parameters() if parameter.requires_grad]
        return found
    place_of = {id(p): place for place, group in enumerate(groups) for p in group["params"]}
    places: dict[str, int | None] = {
        known: place_of.get(id(p)) if p.requires_grad else None for known, p in _parameters(model).items()
    }
    for rule, parameter in built.parameters():
        names = list(rule.parts(parameter.detach(), built.dims))
        wanted = {places[known] for known in names}
        if len(wanted) > 1:
            listed = ", ".join(f"{known} in {_group(places[known])}" for known in names)
            raise IncompatibleOptionsError(
                f"Megatron keeps {listed} in one tensor. Put them into the same group of the optimizer."
            )
        [place] = wanted
        if place is None:
            parameter.requires_grad_(False)
        else:
            found[place].append(parameter)
    return found


def _parameters(model: nn.Module) -> Mapping[str, nn.Parameter]:
    return NamedModel(model).parameters()


def _group(place: int | None) -> str:
    return "no group (or frozen)" if place is None else f"group {place}"


def make_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[nn.Parameter]],
    options: Mapping[str, Any],
    chunk: Any,
) -> Any:
    """Create Megatron's optimizer, which steps the script's own with the stage's parameters.

    Args:
        optimizer: the script's optimizer; from now on it holds the stage's parameters, or Megatron's copies of them.
        groups: the stage's parameters, by its groups.
        options: options of `OptimizerConfig`.
        chunk: the stage inside Megatron's data-parallel wrapper.
    """
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = list(parameters)
    config = OptimizerConfig(**options)
    model_parallel = parallel_state.get_model_parallel_group()
    made: Any
    if config.use_distributed_optimizer:
        made = DistributedOptimizer(
            optimizer,
            config,
            None,
            None,
            model_chunks=[chunk],
            per_model_buffers={0: chunk.buffers},
            data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            data_parallel_group_gloo=None,
            data_parallel_group_idx=torch.distributed.get_rank(model_parallel),
            distributed_optimizer_instance_id=0,
        )
        made.grad_stats_parallel_group = parallel_state.get_intra_distributed_optimizer_instance_group()
    elif config.bf16:
        made = Float16OptimizerWithFloat16Params(optimizer, config, None, None)
        made.grad_stats_parallel_group = model_parallel
    else:
        made = FP32Optimizer(optimizer, config, None)
        made.grad_stats_parallel_group = model_parallel
    made.tp_group = parallel_state.get_tensor_model_parallel_group()
    return made


class MegatronGradients:
    """Gradients of one engine, from the first backward to the step. They are reduced when they are first used.

    Args:
        chunk: the stage inside Megatron's data-parallel wrapper.
        optimizer: Megatron's optimizer.
        plugin: has the norm to which every step clips.
        losses: of calls that have computed gradients.
    """

    def __init__(self, chunk: Any, optimizer: Any, plugin: MegatronLMPlugin, losses: ComputedLosses) -> None:
        self._losses = losses
        self._chunk = chunk
        self._optimizer = optimizer
        self._plugin = plugin
        self.waiting = False
        self._complete = False

    def before_backward(self) -> bool:
        """Called before a backward; returns whether it is the first since the last step.

        Raises:
            AccumulationError: gradients are reduced already, and would be reduced twice.
        """
        if self._complete:
            raise AccumulationError(
                "A backward follows the use of reduced gradients, such as clipping, without a step between them. Step, "
                "or drop them with optimizer.zero_grad(), before the next forward."
            )
        first = not self.waiting
        self.waiting = True
        return first

    def complete(self) -> None:
        """Reduce waiting gradients; all ranks must call."""
        if self.waiting and not self._complete:
            from megatron.core.distributed import finalize_model_grads

            finalize_model_grads([self._chunk])
            self._complete = True

    def scale(self, factor: float | Tensor) -> None:
        """Multiply waiting gradients."""
        self._chunk.scale_gradients(factor)

    def norm(self) -> Tensor:
        """Norm of the reduced gradients of all stages and ranks."""
        self.complete()
        self._optimizer.prepare_grads()
        found = self._optimizer.get_grad_norm()
        return torch.as_tensor(found, dtype=torch.float32, device=next(self._chunk.parameters()).device)

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Clip the norm; returns the norm before clipping.

        Raises:
            OptionError: Megatron's optimizer does not compute this norm.
        """
        if norm_type != 2:
            raise OptionError(
                f"norm_type is {norm_type!r}, and Megatron's optimizer computes the 2-norm of what its ranks hold. "
                "Leave norm_type out."
            )
        found = self.norm()
        # The same small number as torch.nn.utils.clip_grad_norm_
        self.scale((max_norm / (found + 1e-6)).clamp(max=1.0))
        return found

    def limit(self, value: float) -> None:
        """Clamp every element of the reduced gradients."""
        self.complete()
        for parameter in self._chunk.parameters():
            if parameter.requires_grad:
                parameter.main_grad.clamp_(-value, value)

    def step(self) -> bool:
        """Step, and drop the gradients; returns whether it stepped.

        Raises:
            AccumulationError: the loss of a call did not go through backward, although its gradients are computed.
        """
        self._losses.check("use pp_degree=1 and no num_micro_batches")
        self.complete()
        stepped, _, _ = self._optimizer.step()
        self.drop()
        return bool(stepped)

    def drop(self) -> None:
        """Drop waiting gradients."""
        self._losses.drop()
        self._chunk.zero_grad_buffer()
        self._optimizer.zero_grad(set_to_none=True)
        self.waiting = self._complete = False
