"""What a rehearsal observes of training: steps, loaders, and what this rank holds in memory.

A rehearsed process is one rank of a simulated world (`accel_state.world.rehearsal`). Its training ends after a number
of optimizer steps, and nothing is saved. `accel rehearse` gets a description of what the script prepared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_state.world.rehearsal import Rehearsal
from accel_train.data.active_loaders import ActiveLoaders
from accel_train.data.combined import single_loaders
from accel_train.data.sampling.batches import ShardedBatchSampler, length_of, plan_of
from accel_train.loop.observers import StepObserver

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_train.setup.prepared import Prepared

__all__ = ["NotSaved", "RehearsalEnd", "TrainingRehearsal", "leaves_out"]

_MOST = 16
"""Steps beyond the wanted ones that an optimizer may take while another one has not taken its own."""


class RehearsalEnd(SystemExit):
    """The rehearsal has seen what it was to see; ends the script like `sys.exit()`."""


class TrainingRehearsal(StepObserver):
    """Observes one `Accelerator`.

    Args:
        rehearsal: of this process.

    Attributes:
        ledger: for its loaders; a batch that is read after the last step ends the rehearsal.
    """

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal
        self._prepared: Prepared | None = None
        self._steps: dict[int, int] = {}
        self._memory: dict[str, int] = {}
        self._counted = (0, 0)
        self.ledger = _RehearsedLoaders(self)

    def follow(self, prepared: Prepared) -> None:
        """Observe what is prepared from now on."""
        self._prepared = prepared
        number = sum(1 for title in self._rehearsal.sections if title.startswith("accelerator"))
        self._rehearsal.sections[f"accelerator {number}" if number else "accelerator"] = self._describe

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step.

        Raises:
            RehearsalEnd: all optimizers have taken the steps of the rehearsal.
        """
        taken = self._steps.get(id(optimizer), 0)
        if taken >= self._rehearsal.steps:
            self.end_if_done()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped; its gradients are still there."""
        self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        assert self._prepared is not None, "an optimizer steps after its accelerator was made"
        self._counted = self._count()
        for name, size in _memory(self._prepared.prepared_models, self._prepared.optimizers).items():
            self._memory[name] = max(size, self._memory.get(name, 0))

    def batch_begins(self) -> None:
        """A loader gives a batch.

        If the script fails before its first step, the memory is that of the first batch: during a forward or backward
        FSDP2 has whole parameters in place of this rank's parts.
        """
        here = self._prepared
        if here is not None and self._counted != self._count():
            self._counted = self._count()
            self._memory = _memory(here.prepared_models, here.optimizers)

    def _count(self) -> tuple[int, int]:
        assert self._prepared is not None, "counted after it was made"
        return len(self._prepared.prepared_models), len(list(self._prepared.optimizers))

    def end_if_done(self) -> None:
        """End the script if all optimizers have taken their steps.

        Raises:
            RehearsalEnd: they have, or one waits for another for long.
        """
        assert self._prepared is not None, "there is something to end"
        wanted = self._rehearsal.steps
        taken = [self._steps.get(id(optimizer), 0) for optimizer in self._prepared.optimizers]
        if taken and (min(taken) >= wanted or max(taken) >= wanted + _MOST):
            raise RehearsalEnd(0)

    def _describe(self) -> dict[str, Any]:
        here = self._prepared
        assert here is not None, "described after it was made"
        strategy, accumulation = here.plan.strategy, here.accumulator.num_steps
        return {
            "strategy": strategy.name,
            "precision": here.plan.precision.name,
            "mesh": {name: size for name, size in here.plan.mesh.degrees.items() if size > 1},
            "place in the mesh": _place(here.plan.mesh.device_mesh),
            "ranks that read different samples": strategy.batch.size,
            "gradient accumulation steps": accumulation,
            "optimizer steps taken": max(self._steps.values(), default=0),
            "models": [_model(model) for model in here.models],
            "memory": self._memory or _memory(here.prepared_models, here.optimizers),
            "loaders": [
                _loader(single, accumulation) for loader in here.loaders for single in single_loaders(loader)
            ],
        }


class _RehearsedLoaders(ActiveLoaders):
    """The live loaders, which end the script when it begins another step than the last one."""

    def __init__(self, training: TrainingRehearsal) -> None:
        super().__init__()
        self._training = training

    def yielded(self, loader: object, batch: Any = None) -> None:
        """See the base class."""
        super().yielded(loader, batch)
        self._training.end_if_done()
        self._training.batch_begins()


def leaves_out(prepared: Prepared, operation: str, target: str | Path, *, together: bool = False) -> bool:
    """Whether `operation`, which would write to `target`, is left out because this is a rehearsal.

    Args:
        prepared: of the accelerator that saves.
        operation: name of the method.
        target: where it would write.
        together: whether all ranks have to call it.
    """
    rehearsal = prepared.process.rehearsal
    if rehearsal is None:
        return False
    if together:
        prepared.process.wait_for_everyone()  # so that a call on some ranks only is found
    rehearsal.note(
        f"{operation}({str(target)!r}) wrote nothing: the weights of a rehearsal are those of one rank alone"
    )
    return True


class NotSaved:
    """Stands in for the handle of a save in the background, which a rehearsal leaves out."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def done(self) -> bool:
        """Always true."""
        return True

    def result(self, timeout: float | None = None) -> Path:
        """The folder that a save would have written."""
        return self.directory

    def wait(self) -> None:
        """Return at once."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    part = getattr(tensor, "to_local", None)
    return part() if part is not None else tensor


def _bytes(tensors: Iterable[Tensor]) -> int:
    unique = {id(tensor): tensor for tensor in tensors}
    return sum(part.numel() * part.element_size() for part in map(local, unique.values()))


def _memory(models: Sequence[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
    """Bytes on this rank of what training keeps."""
    with torch.no_grad():
        parameters = [parameter for model in models for parameter in model.parameters()]
        states: dict[Any, Any] = {}
        for optimizer in optimizers:
            states.update(optimizer.state)
        return {
            "parameters": _bytes(parameters),
            "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer": _bytes(
                value for state in states.values() if isinstance(state, dict) for value in _in(state)
            ),
            "buffers": _bytes(buffer for model in models for buffer in model.buffers()),
        }


def _place(mesh: DeviceMesh | None) -> dict[str, int]:
    """The index of this rank in each dimension, such as which rank of a pipeline it is."""
    place = None if mesh is None else mesh.get_coordinate()
    if mesh is None or place is None:
        return {}
    return dict(zip(mesh.mesh_dim_names or (), place, strict=True))


def _in(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def _model(model: nn.Module) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }


def _loader(loader: Any, accumulation: int) -> dict[str, Any]:
    """What this rank reads from a loader in an epoch, and whether all ranks get something."""
    share = loader.share() if hasattr(loader, "share") else None
    batches = length_of(loader)
    total = loader.total_batch_size
    samples = length_of(loader.dataset)
    if share is not None:
        source = plan_of(loader.batch_sampler)
        samples = source.samples if source.source is not None else samples
    elif hasattr(loader.dataset, "total_length"):
        samples = loader.total_dataset_length
    elif hasattr(loader.dataset, "dataset"):
        samples = length_of(loader.dataset.dataset) if samples is not None else None
    found: dict[str, Any] = {
        "class": type(loader).__name__,
        "dataset": type(getattr(loader.dataset, "dataset", loader.dataset)).__name__,
        "samples": samples,
        "batch size of this rank": loader.full_rows,
        "global batch size": total,
        "batches of this rank": batches,
        "optimizer steps per epoch": None if batches is None else -(-batches // accumulation),
        "batches in the last window": None if not batches else (batches - 1) % accumulation + 1,
    }
    return found | _shares(share, samples) | {"problems": _problems(loader, share, samples, total)}


def _shares(share: ShardedBatchSampler | None, samples: int | None) -> dict[str, Any]:
    if share is None or samples is None or share.batch_size is None:
        return {}
    layout = share.layout(samples)
    rows = layout.full * layout.batch
    span = layout.tail_span()
    if span is not None:
        rows += span[1] - span[0]
    given = layout.full * layout.stride
    if layout.tail:
        given += layout.stride if layout.even else layout.tail
    return {"rows of this rank": rows, "rows of all ranks": given}


def _problems(
    loader: Any, share: ShardedBatchSampler | None, samples: int | None, stride: int | None
) -> list[dict[str, str]]:
    """What is wrong with the size of the data in this world; ``kind`` is error or warning."""
    if share is None or samples is None or stride is None:
        return []
    layout = share.layout(samples)
    counts = [replace(layout, rank=rank).batches for rank in (0, layout.ranks - 1)]
    name = type(loader.dataset).__name__
    facts = f"{name} has {samples} samples, and one step of all ranks takes {stride}"
    if not any(counts):
        return [_problem("error", f"{facts}: drop_last drops the only batch, so no rank gets any data")]
    if counts[0] != counts[1]:
        without = sum(replace(layout, rank=rank).batches == 0 for rank in range(layout.ranks))
        if without:
            text = f"{facts}: {without} of {layout.ranks} ranks get no batch (even_batches is off)"
            return [_problem("error", text)]
        text = (
            f"{name}: ranks get different numbers of batches, {counts[0]} and {counts[1]} (even_batches is off); "
            "iterate inside accelerator.join_uneven_inputs(…)"
        )
        return [_problem("warning", text)]
    if layout.tail and layout.even and layout.stride > samples:
        text = f"{facts}: {stride - samples} of its rows are repeated samples"
        return [_problem("warning", text)]
    return []


def _problem(kind: str, text: str) -> dict[str, str]:
    return {"kind": kind, "text": text}
