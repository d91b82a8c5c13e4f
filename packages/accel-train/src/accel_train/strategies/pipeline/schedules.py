"""Schedules: in which order the ranks of a pipeline compute which stage of which micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from accel_ckpt.parts import reshard
from accel_train.strategies.pipeline.exchange import Exchange, Form, wait
from accel_train.strategies.pipeline.stages import Stage, tensors_of

__all__ = [
    "FORWARD_FIRST",
    "SCHEDULES",
    "Forwarded",
    "Fused",
    "MicroBatch",
    "PipelineSchedule",
    "StageLayout",
    "run_backward",
    "run_forward",
]

MicroBatch: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of the model for one micro-batch."""


@dataclass(frozen=True)
class StageLayout:
    """Which rank of a pipeline holds which stage.

    Attributes:
        ranks: number of ranks.
        stages: number of stages, a multiple of it.
        turns: the stages of a rank lie as in a V (0 and 3, 1 and 2), not one round after the other (0 and 2, 1 and 3).
    """

    ranks: int
    stages: int
    turns: bool = False

    def owner(self, stage: int) -> int:
        """The rank that holds a stage."""
        lap, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.turns and lap % 2 else place

    def held(self, rank: int) -> list[int]:
        """The stages of a rank, ascending."""
        return [stage for stage in range(self.stages) if self.owner(stage) == rank]


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule.

    Attributes:
        name: as in `PipelineParallelConfig.schedule`.
        kind: torch's class that runs forward and backward; None: `run_forward` and `run_backward` do, one after the
            other, with the script's loss in between.
        stages_per_rank: of each rank by default.
        any_stages: other numbers of stages are possible.
        turns: see `StageLayout`.
    """

    name: str
    kind: Any
    stages_per_rank: int
    any_stages: bool
    turns: bool = False

    @property
    def halves(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self.name.endswith("zero_bubble")

    def takes(self, micro_batches: int, layout: StageLayout) -> bool:
        """Whether the schedule can run this number of micro-batches."""
        if self.name == "1f1b":
            return micro_batches >= layout.stages
        if self.name.startswith("interleaved"):
            return micro_batches % max(1, micro_batches // layout.ranks) == 0
        return True


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule("gpipe", None, 1, any_stages=False),
        PipelineSchedule("1f1b", schedules.Schedule1F1B, 1, any_stages=False),
        PipelineSchedule("interleaved_1f1b", schedules.ScheduleInterleaved1F1B, 2, any_stages=True),
        PipelineSchedule("looped_bfs", schedules.ScheduleLoopedBFS, 2, any_stages=True),
        PipelineSchedule(
            "interleaved_zero_bubble", schedules.ScheduleInterleavedZeroBubble, 2, any_stages=True
        ),
        PipelineSchedule("zbv_zero_bubble", schedules.ScheduleZBVZeroBubble, 2, any_stages=False, turns=True),
    )
}

FORWARD_FIRST = PipelineSchedule("gpipe", schedules.ScheduleGPipe, 1, any_stages=False)
"""For batches with too few rows for "1f1b": it computes the same, and keeps no more activations of so few."""


@dataclass
class Forwarded:
    """What a forward through this rank's stages leaves for backward.

    Attributes:
        outputs: of the last stage, by micro-batch; empty on other ranks.
        saved: inputs and outputs of each stage and micro-batch, in training.
    """

    outputs: list[Any] = field(default_factory=list)
    saved: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)


def run_forward(
    stages: Sequence[Stage],
    layout: StageLayout,
    rank: int,
    exchange: Exchange,
    micro_batches: Sequence[MicroBatch],
    forms: dict[int, list[Form]],
    *,
    trains: bool,
) -> Forwarded:
    """Run all micro-batches through this rank's stages, one stage after the other.

    Args:
        stages: of this rank, ascending.
        layout: which rank holds which stage.
        rank: this rank of the pipeline.
        exchange: sends to the other ranks.
        micro_batches: the arguments, alike on all ranks.
        forms: of what each stage receives, as far as they are known; completed. Ranks know the same ones.
        trains: keep what backward needs.
    """
    found = Forwarded()
    passed: dict[tuple[int, int], list[Tensor]] = {}
    works: list[Any] = []
    for stage in stages:
        number = stage.index
        for place, (inputs, named) in enumerate(micro_batches):
            received: list[Any] = list(inputs)
            if not stage.is_first:
                if layout.owner(number - 1) == rank:
                    received = [tensor.detach() for tensor in passed.pop((number, place))]
                else:
                    received = exchange.receive(layout.owner(number - 1), forms.get(number))
                    forms.setdefault(number, [Form.of(tensor) for tensor in received])
                for tensor in floating(received) if trains else ():
                    tensor.requires_grad_()
            output = stage(*received, **named)
            if stage.is_last:
                found.outputs.append(output)
                kept: list[Tensor] = []
            else:
                kept = tensors_of(output, f"Stage {number} of the pipeline")
                if layout.owner(number + 1) == rank:
                    passed[number + 1, place] = kept
                else:
                    known = number + 1 in forms
                    works += exchange.send(kept, layout.owner(number + 1), described=not known)
                forms.setdefault(number + 1, [Form.of(tensor) for tensor in kept])
            if trains:
                found.saved[number, place] = ([] if stage.is_first else received), kept
    wait(works)
    return found


def run_backward(
    stage: Stage,
    layout: StageLayout,
    exchange: Exchange,
    saved: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]],
    outputs: Sequence[tuple[list[Tensor], list[Tensor]]],
    before_last: Callable[[], None],
) -> None:
    """Run backward of all micro-batches through this rank's only stage.

    Args:
        stage: the stage.
        layout: which rank holds which stage.
        exchange: sends to the other ranks.
        saved: what `run_forward` kept; emptied.
        outputs: on the last stage, of each micro-batch outputs and their gradients.
        before_last: called before the backward of the last micro-batch.
    """
    works: list[Any] = []
    count = len(saved)
    for place in range(count):
        inputs, kept = saved.pop((stage.index, place))
        if stage.is_last:
            tensors, gradients = outputs[place]
        else:
            tensors = list(floating(kept))
            gradients = exchange.receive(
                layout.owner(stage.index + 1), [Form.of(tensor) for tensor in tensors]
            )
        pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if t.requires_grad]
        if place == count - 1:
            before_last()
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        if not stage.is_first:
            sent = [torch.zeros_like(t) if t.grad is None else t.grad for t in floating(inputs)]
            works += exchange.send(sent, layout.owner(stage.index - 1), described=False)
    wait(works)


def floating(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that can have gradients."""
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


class _TorchStage(PipelineStage):
    """A stage as torch's schedules run it: micro-batches are cut already; the output of the last one is the loss."""

    micro_batches: Sequence[MicroBatch] = ()
    reduces = True

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        inputs, named = self.micro_batches[fwd_chunk_id]
        return super().forward_one_chunk(
            fwd_chunk_id, inputs if self.is_first else (), named, save_forward_output
        )

    def forward_maybe_with_nosync(self, *inputs: Any, **named: Any) -> Any:
        output = self.submod(*inputs, **named)
        if self.is_last:
            return output["loss"]
        return tuple(tensors_of(output, f"Stage {self.stage_index} of the pipeline"))

    def _post_metadata_inference_cleanup(self) -> None:
        """Keep gradients and gathered parameters: shapes are given, so torch has tried nothing out.

        It would drop the gradients of an open window where FSDP has reduced them, and gather once more than replicas
        that know the shapes of their batch.
        """

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.reduces:
            super().perform_reduce_grad(grad_scale_factor)
            return
        reshard(self.submod)  # gradients stay whole on this rank until the window ends


class Fused:
    """A schedule of torch that runs forward and backward of a batch, for one number and shape of micro-batches.

    Args:
        schedule: the schedule.
        stages: of this rank.
        layout: which rank holds which stage.
        count: number of micro-batches.
        forms: of what each stage receives.
        device: of this rank.
        group: the ranks of the pipeline.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        stages: Sequence[Stage],
        layout: StageLayout,
        count: int,
        forms: dict[int, list[Form]],
        device: torch.device,
        group: Any,
    ) -> None:
        self._losses: list[Tensor] = []
        self._factors: Sequence[float] = ()
        self._count = count
        self._stages = [
            _TorchStage(
                stage,
                stage.index,
                layout.stages,
                device,
                input_args=() if stage.is_first else _examples(forms[stage.index]),
                output_args=_examples([Form((), torch.float32)] if stage.is_last else forms[stage.index + 1]),
                group=group,
            )
            for stage in stages
        ]
        given: Any = self._stages[0] if schedule.stages_per_rank == 1 else self._stages
        self._run = schedule.kind(given, count, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Tensor, target: Any) -> Tensor:
        factor = self._factors[len(self._losses)]  # the last stage computes micro-batches in order
        self._losses.append(output.detach())
        return output * factor

    def run(
        self, micro_batches: Sequence[MicroBatch], factors: Sequence[float], *, reduces: bool
    ) -> list[Tensor]:
        """Run forward and backward.

        Args:
            micro_batches: the arguments.
            factors: of the micro-batches' losses.
            reduces: FSDP reduces gradients afterwards.

        Returns:
            The losses, on the rank of the last stage.
        """
        self._factors = factors
        self._losses.clear()
        for stage in self._stages:
            stage.micro_batches, stage.reduces = micro_batches, reduces
        try:
            self._run.step(target=torch.empty(self._count), return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is not None and "failed to run" in str(error).lower():
                raise error.__cause__ from None  # the script's own, which torch puts into one with all tensors
            raise
        finally:
            for stage in self._stages:
                stage.micro_batches = ()
        return list(self._losses)


def _examples(forms: Sequence[Form]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(form.shape, dtype=form.dtype, device="meta", requires_grad=form.dtype.is_floating_point)
        for form in forms
    )
