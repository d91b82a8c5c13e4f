"""Gradients inside DeepSpeed's engine: completing them before a step, their norm, and scaling and clipping in the step.

The engine keeps gradients in its own flat partitions, and converts them to float32 and unscales them only inside its
step. So changes of gradients (a correction of the window, clipping) are recorded here and done by a hook that torch's
optimizers run just before they step: each rank then changes the partitions that it owns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.errors import AccumulationError, OptionError
from accel_train.optimizer_parameters import parameters_of
from accel_train.strategies.gradients import multiply

__all__ = ["DeepSpeedGradients"]


class DeepSpeedGradients:
    """The gradients of one engine, from the first backward of a window to its step.

    Args:
        engine: DeepSpeed's engine.
        model: the module that it trains.

    Attributes:
        waiting: a backward has run since the last step.
    """

    def __init__(self, engine: Any, model: nn.Module) -> None:
        self.engine = engine
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.keys = {id(parameter) for parameter in self.parameters}
        self.waiting = False
        self.clip_norm: float = float(engine.gradient_clipping())  # of the configuration
        # In float32 without ZeRO gradients are where torch has them.
        self.in_parameters = engine.optimizer is engine.basic_optimizer
        # DeepSpeed's optimizer for bf16 has whole sums of its own.
        self._sums_in_float32 = hasattr(engine.optimizer, "fp32_groups_gradients")
        # Without ZeRO the engine unscales gradients in its step, and scales no loss in its backward.
        self._scales_loss: bool = engine.fp16_enabled()
        self._lacks_loss_scale = self._scales_loss and not hasattr(engine.optimizer, "scale_if_loss")
        self._steps_base(engine)
        self._reset()

    def _steps_base(self, engine: Any) -> None:
        bases = [engine.basic_optimizer, getattr(engine.optimizer, "backup_optimizer", None)]
        for base in bases:
            if base is not None and not self.in_parameters:
                base.register_step_pre_hook(self._before_step)

    def _reset(self) -> None:
        self.factor: float | Tensor = 1.0
        self._coefficient: Tensor | None = None
        self._limit: float | None = None
        self._complete = False
        self._clipped = False
        self._applied = False

    @property
    def noted(self) -> bool:
        """Whether the gradients are complete, or changes of them are recorded for the step."""
        return self._changes or self._complete

    @property
    def _changes(self) -> bool:
        return self._coefficient is not None or self._limit is not None or self.has_factor

    @property
    def has_factor(self) -> bool:
        """Whether waiting gradients are to be multiplied in the step, so that a further loss is divided before."""
        return not (isinstance(self.factor, float) and self.factor == 1.0)

    def restart(self, waiting: bool) -> None:
        """Forget what is recorded; gradients were replaced, and wait or not."""
        self.waiting = waiting
        self._reset()

    # Noted until the step

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the waiting gradients, in the step."""
        if self.in_parameters:
            multiply([p.grad for p in self.parameters if p.grad is not None], factor)
            return
        self.factor = self.factor * factor

    def before_backward(self, loss: Tensor) -> Tensor:
        """Scale the loss of a backward: for fp16 without ZeRO, and for gradients with a recorded factor."""
        self.waiting = True
        self._complete = False
        if self._lacks_loss_scale:
            loss = loss.float() * self.engine.optimizer.loss_scale
        return loss / self.factor if self.has_factor else loss

    def after_backward(self) -> None:
        """Free 16-bit gradients that the engine has added to its sums, and would keep until the next backward."""
        if self._sums_in_float32:
            for parameter in self.parameters:
                parameter.grad = None

    def limit(self, clip_value: float) -> None:
        """Clamp every element to [-clip_value, clip_value] in the step."""
        self._limit = clip_value if self._limit is None else min(self._limit, clip_value)

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Clip the total norm of all gradients in the step; returns the norm before clipping."""
        norm = self.norm(norm_type)
        bound = min(max_norm, self.clip_norm) if self.clip_norm > 0 and norm_type == 2 else max_norm
        coefficient = (bound / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        if self.in_parameters:
            multiply([p.grad for p in self.parameters if p.grad is not None], coefficient)
        else:
            self._coefficient = coefficient if self._coefficient is None else self._coefficient * coefficient
        self._clipped = True
        return norm

    # Complete gradients

    def complete(self) -> None:
        """Finish the reduction over ranks, once in a window; the step does not repeat it."""
        if self._complete or not self.waiting:
            return
        engine = self.engine
        if engine.zero_optimization_partition_gradients():
            engine.optimizer.finalize_gradient_accumulation_boundary()
        else:
            # Reduces only while the engine believes to be inside its step.
            engine._running_engine_step = True
            try:
                engine.allreduce_gradients()
            finally:
                engine._running_engine_step = False
        self._complete = True

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Compute the total norm of all gradients, a plain 0-d tensor; collective.

        Raises:
            OptionError: the norm cannot be computed from partitions, or not from partitions on NVMe.
        """
        if not self.waiting:
            return torch.zeros(())
        self.complete()
        if self.in_parameters:
            found = [p.grad for p in self.parameters if p.grad is not None]
            return nn.utils.get_total_norm(found, norm_type=norm_type)
        optimizer = self.engine.optimizer
        scale = float(getattr(optimizer, "loss_scale", 1.0) or 1.0)
        raw = self._l2() if norm_type == 2 else self._other_norm(norm_type)
        return (raw / scale) * self.factor

    def _l2(self) -> Tensor:
        """The engine's own norm of what waits in its partitions; -1 is its mark of an overflow."""
        optimizer = self.engine.optimizer
        if self.engine.zero_optimization_stage() == 3:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            norm = combine_grad_norm_groups(optimizer._get_norm_groups())
        elif hasattr(optimizer, "scaled_global_norm"):
            norm = optimizer.scaled_global_norm()
        else:
            return self._other_norm(2.0)
        norm = torch.as_tensor(norm).detach().float()
        return torch.where(norm < 0, torch.full_like(norm, math.inf), norm)

    def _other_norm(self, norm_type: float) -> Tensor:
        if norm_type <= 0:
            raise OptionError(
                f"norm_type is {norm_type!r}, but DeepSpeed's partitions mix tensors and padding, so only norms of a "
                "type above 0 can be computed. Leave norm_type out, or pass a positive one."
            )
        pieces, divided = self._pieces()
        device = self.engine.device
        infinite = math.isinf(norm_type)
        norms = [torch.linalg.vector_norm(piece.float(), norm_type).to(device) for piece in pieces]
        together = torch.stack(norms) if norms else torch.zeros(1, device=device)
        power = together.max() if infinite else (together**norm_type).sum()
        if divided:
            operation = torch.distributed.ReduceOp.MAX if infinite else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(power, operation, group=self.engine.data_parallel_group)
        return power if infinite else power ** (1 / norm_type)

    def _pieces(self) -> tuple[Sequence[Tensor], bool]:
        """What this rank holds of the complete gradients, and whether other ranks hold the rest."""
        optimizer = self.engine.optimizer
        stage = self.engine.zero_optimization_stage()
        if stage == 0:
            return [p.grad for p in self.parameters if p.grad is not None], False
        if self._sums_in_float32:
            return optimizer.get_grads_for_norm(for_clipping=True), False
        offloaded = self.engine.zero_offload_optimizer() is not None
        if not offloaded:
            groups = optimizer.averaged_gradients.values()
            return [piece for group in groups if group is not None for piece in _listed(group)], True
        flat = (
            optimizer.fp32_partitioned_groups_flat
            if stage == 3
            else optimizer.single_partition_of_fp32_groups
        )
        if any(partition.grad is None for partition in flat):
            raise OptionError(
                "For gradients on NVMe only the L2 norm is known. Clip with norm_type=2, or keep optimizer states in "
                "host memory (offload_optimizer_device='cpu')."
            )
        return [partition.grad for partition in flat], True

    # The step

    def _before_step(self, base: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Torch's hook: gradients are float32, averaged over ranks and unscaled."""
        self._applied = True
        found = [p.grad for p in parameters_of(base) if p.grad is not None]
        if not found:
            return
        for multiplier in (self.factor, self._coefficient):
            if isinstance(multiplier, Tensor):
                torch._foreach_mul_(found, multiplier.to(found[0].device, found[0].dtype))
            elif multiplier is not None and multiplier != 1.0:
                torch._foreach_mul_(found, multiplier)
        if self._limit is not None:
            torch._foreach_clamp_max_(found, self._limit)
            torch._foreach_clamp_min_(found, -self._limit)

    def step(self) -> bool:
        """Let the engine step; returns whether it stepped (False: gradients were not finite).

        Raises:
            AccumulationError: the engine has stepped without the recorded changes of the gradients.
        """
        if not self.waiting:
            return True
        changes = self._changes
        with self._reduced_once(), self._clipping(), self._scale_grown_after():
            self.engine.step()
        stepped = bool(self.engine.was_step_applied())
        if changes and stepped and not (self._applied or self.in_parameters):
            raise AccumulationError(
                "DeepSpeed's engine has stepped without torch's hooks, so gradients were neither corrected for their "
                "window nor clipped. An option of its configuration (zenflow, superoffload) replaces the optimizer's "
                "step; leave it out."
            )
        self.waiting = False
        self._reset()
        return stepped

    @contextlib.contextmanager
    def _reduced_once(self) -> Iterator[None]:
        """The step does not repeat a reduction that is complete."""
        if not self._complete:
            yield
            return
        engine, optimizer = self.engine, self.engine.optimizer
        partitions = engine.zero_optimization_partition_gradients()
        if partitions:
            optimizer.finalize_gradient_accumulation_boundary = lambda: None
        else:
            engine.enable_backward_allreduce = False
        try:
            yield
        finally:
            if partitions:
                del optimizer.finalize_gradient_accumulation_boundary
            else:
                engine.enable_backward_allreduce = True

    @contextlib.contextmanager
    def _scale_grown_after(self) -> Iterator[None]:
        """A loss scale grows after the step: the engine would divide gradients of the old scale by the new one."""
        optimizer = self.engine.optimizer
        if not self._scales_loss:
            yield
            return
        update, grows = optimizer._update_scale, []

        def shrink_only(overflow: Any) -> None:
            if overflow:
                update(overflow)  # nothing is divided in a step that is skipped
            else:
                grows.append(overflow)

        optimizer._update_scale = shrink_only
        try:
            yield
        finally:
            del optimizer._update_scale
        for overflow in grows:
            update(overflow)

    @contextlib.contextmanager
    def _clipping(self) -> Iterator[None]:
        """The engine clips as configured, unless the script has clipped; its gradients lack the factor."""
        optimizer = self.engine.optimizer
        if self.in_parameters or not self.clip_norm or not hasattr(optimizer, "clip_grad"):
            yield
            return
        before = optimizer.clip_grad
        optimizer.clip_grad = 0.0 if self._clipped else self.clip_norm / float(self.factor)
        try:
            yield
        finally:
            optimizer.clip_grad = before

    def drop(self) -> None:
        """Drop gradients that wait."""
        if not self.waiting:
            return
        optimizer = self.engine.optimizer
        for parameter in self.parameters:
            parameter.grad = None
        if not self.in_parameters:
            optimizer.zero_grad()
            for name in ("averaged_gradients", "all_grad_tensors"):
                found = getattr(optimizer, name, {})
                for key in found:
                    found[key] = None
            if hasattr(optimizer, "micro_step_id"):
                # What the engine itself sets in a step: the next backward starts from the beginning.
                optimizer.micro_step_id = 0 if self.engine.zero_optimization_stage() == 3 else -1
            if hasattr(optimizer, "reset_cpu_buffers"):
                optimizer.reset_cpu_buffers()
            if hasattr(optimizer, "clear_hp_grads"):
                optimizer.clear_hp_grads()
        self.waiting = False
        self._reset()


def _listed(group: Any) -> list[Tensor]:
    return [group] if isinstance(group, Tensor) else list(group)
