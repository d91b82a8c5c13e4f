"""The usual mistakes of a new training loop, looked for in its first windows and not again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_ckpt.parts import is_sharded
from accel_state.messages import warn
from accel_state.operations.collectives import reduce
from accel_train.data.active_loaders import ActiveLoaders
from accel_train.errors import AccumulationError, NoGradientError
from accel_train.mesh import Mesh
from accel_train.optimizer_parameters import parameter_ids, parameters_of
from accel_train.strategies.base import Strategy
from accel_train.strategies.gradients import local_part

__all__ = ["FirstWindows", "check_trains", "compare_whole_gradients", "explain_no_gradient"]

_MICRO_BATCHES = 16
_EQUAL_LOSSES = 2
_SINGLE_STEPS = 3  # in a row; a window may be cut short by the end of an epoch
_OWN_STEPS = 2
_COMPARED = 4096  # elements of a gradient
_DIFFERENCE = 0.1  # of a gradient's norm; that of rounding is far less, that of a summand about 1


class FirstWindows:
    """Watches the first micro-batches.

    Args:
        strategy: says which ranks read different samples.
        ledger: which loaders were iterated.
        models: the prepared models.
        optimizers: the prepared optimizers.
    """

    def __init__(
        self,
        strategy: Strategy,
        ledger: ActiveLoaders,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._strategy = strategy
        self._ledger = ledger
        self._models = models
        self._optimizers = optimizers
        self._values: dict[tuple[nn.Module, ...], list[tuple[nn.Parameter, int]]] = {}
        self._reached: set[int] = set()  # parameters that had a gradient in a window
        self._seen = 0
        self._equal = 0
        self._loss: Tensor | None = None
        self._compares = strategy.batch.size > 1
        self._own_steps = 0  # of optimizers whose prepared ones do not step
        self._versions: dict[int, int] = {}
        self._outside = 0  # backward passes outside of accumulate() since the last step
        self._single = 0  # steps in a row after one of them

    @property
    def over(self) -> bool:
        """Whether nothing is looked for any more."""
        return self._seen >= _MICRO_BATCHES

    def forget(self) -> None:
        """Drop the models and parameters that were seen."""
        self._values.clear()
        self._reached.clear()

    def entered(self, models: tuple[nn.Module, ...], opens: bool) -> None:
        """A micro-batch begins; `opens`: the first of its window.

        Raises:
            AccumulationError: parameters of no prepared optimizer changed in an open window.
        """
        self._seen += 1
        if self._strategy.capabilities.prepares_together:
            return  # engines step for themselves
        if opens:
            trained = (p for model in models or self._models for p in model.parameters() if p.requires_grad)
            self._values[models] = [(parameter, parameter._version) for parameter in trained]
            return
        held = parameter_ids(*self._optimizers)
        changed = [
            p
            for p, version in self._values.get(models, ())
            if p._version != version and id(p) in self._reached
        ]
        if any(id(parameter) not in held for parameter in changed):
            raise AccumulationError(
                f"{len(changed)} parameters changed inside an accumulation window, before its gradients were complete, "
                "and no prepared optimizer has them: an optimizer that was not prepared steps in every micro-batch. "
                "Pass it to prepare() and use the returned one: `optimizer = accelerator.prepare(optimizer)`."
            )

    def before_backward(self) -> None:
        """Warn of prepared optimizers that step by themselves: the script has dropped what `prepare()` returned."""
        if self._own_steps >= _OWN_STEPS or self._strategy.capabilities.prepares_together:
            return
        for optimizer in self._optimizers:
            if not getattr(optimizer, "may_be_unused", False):
                continue
            held = [*parameters_of(optimizer)]
            version = sum(parameter._version for parameter in held)
            before = self._versions.pop(id(optimizer), version)
            # Gradients that are gone were used; a script may change weights in other ways.
            if version == before or any(parameter.grad is not None for parameter in held):
                continue
            if not parameter_ids(*(each for each in self._optimizers if each is not optimizer)).isdisjoint(
                map(id, held)
            ):
                continue  # another prepared optimizer may have stepped them
            self._own_steps += 1
            if self._own_steps == _OWN_STEPS and self._strategy.loss.rank == 0:
                warn(
                    f"Parameters of {type(optimizer.optimizer).__name__} change, and step() of the optimizer that "  # type: ignore[attr-defined]
                    "prepare() returned is never called: the script steps the optimizer that it passed, and perhaps "
                    "reads a loader that is not divided among ranks. Use what prepare() returns: `model, optimizer, "
                    "loader = accelerator.prepare(model, optimizer, loader)`.",
                )
                return

    def after_backward(self) -> None:
        """Note the versions of parameters that have a gradient now, and of optimizers that have never stepped."""
        for optimizer in self._optimizers:
            if getattr(optimizer, "may_be_unused", False):
                held = [*parameters_of(optimizer)]
                if any(parameter.grad is not None for parameter in held):
                    self._versions[id(optimizer)] = sum(parameter._version for parameter in held)

    def saw_backward_outside(self) -> None:
        """A backward outside of `accumulate()` begins."""
        self._outside += 1

    def saw_step(self, num_steps: int) -> None:
        """Warn if losses are divided by the length of a window, and each is stepped alone."""
        passes, self._outside = self._outside, 0
        if num_steps == 1 or not passes:
            return
        self._single = self._single + 1 if passes == 1 else 0
        if self._single == _SINGLE_STEPS:
            warn(
                "The optimizer steps after each backward() outside of accumulate(), and gradient_accumulation_steps="
                f"{num_steps} divides each loss by {num_steps}: every update has 1/{num_steps} of its gradient. Put "
                "the body of the loop into `with accelerator.accumulate(model):`, or use "
                "gradient_accumulation_steps=1. If the losses make up for it, ignore this.",
            )

    def saw_backward(self, models: tuple[nn.Module, ...]) -> None:
        """A backward of a window has ended. What has no gradient is changed by the script, as a target network."""
        self._reached |= {id(p) for p, _ in self._values.get(models, ()) if p.grad is not None}

    def expect_equal_losses(self) -> None:
        """Losses are over the samples of all ranks, so that equal ones tell nothing."""
        self._compares = False

    def saw_loss(self, loss: Any) -> None:
        """The last backward of a window begins."""
        self._seen += 1
        self._compares = self._compares and not self._ledger.clock
        if self._compares and isinstance(loss, Tensor) and loss.numel() == 1:
            self._loss = loss.detach()

    def about_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the last loss of all ranks; a collective until a prepared loader is iterated or losses differ.

        A backward or a step of a module that is not prepared may be that of one rank alone.

        Warns if ranks that read for themselves compute the same losses. Losses of zero tell nothing: equal rewards, of
        which no advantage remains, give them.
        """
        loss, self._loss = self._loss, None
        if not self._compares or loss is None or not self._trains(optimizer):
            return
        value = loss.reshape(()).to("cpu", torch.float64)
        low, high = (-reduce(torch.stack([-value, value]), "max", group=self._strategy.batch.group)).tolist()
        self._compares = low == -high
        self._equal += self._compares and low != 0
        if self._equal == _EQUAL_LOSSES:
            self._compares = False
            if self._strategy.batch.rank == 0:
                warn(
                    f"{self._strategy.batch.size} ranks computed equal losses in each of their first {_EQUAL_LOSSES} "
                    "steps, and no data loader is prepared: they seem to train on the same samples. Pass the loader "
                    "to prepare(), which gives each rank its part: `loader = accelerator.prepare(loader)`.",
                )

    def _trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer steps a prepared model; an engine's holds what the engine makes of it."""
        held = parameter_ids(optimizer)
        return self._strategy.capabilities.prepares_together or any(
            id(parameter) in held for model in self._models for parameter in model.parameters()
        )


def check_trains(
    optimizer: torch.optim.Optimizer, models: Iterable[nn.Module], optimizers: Iterable[Any]
) -> None:
    """Warn of parameters that an optimizer holds in vain, while gradients of a prepared model wait for an optimizer.

    Such an optimizer was built from a copy of the model, or before a part of the model was replaced, as by
    `parallelize_module`, `resize_token_embeddings` or a new head. It is a warning, because scripts step such an
    optimizer to test something else, and Accelerate lets them.

    Args:
        optimizer: about to step for the first time.
        models: the prepared ones, without wrappers.
        optimizers: the prepared ones.
    """
    held = [*parameters_of(optimizer)]
    trained = {id(parameter) for model in models for parameter in model.parameters()}
    stale = [p for p in held if p.grad is None and p.requires_grad and id(p) not in trained]
    if not stale:
        return
    known = parameter_ids(*optimizers)
    waiting = [
        (name, model)
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and id(parameter) not in known
    ]
    if not waiting:
        return
    name, model = waiting[0]
    whose = f"{type(optimizer).__name__} holds {len(held)} parameters"
    shape = tuple(stale[0].shape)
    if len(stale) == len(held):
        whose += f", the first of shape {shape}. None of them belongs to a prepared model or has a gradient"
        effect = "its steps train nothing. Build it from the parameters() of the model that is prepared, not of a copy."
    else:
        whose += f". {len(stale)} of them, the first of shape {shape}, are in no prepared model and have no gradient"
        effect = (
            "the optimizer was probably built before a part of the model was replaced, and the new part is not "
            "trained. Build it after the last change of the model."
        )
    warn(
        f"{whose}, while {name!r} of {type(model).__name__} has one and is in no prepared optimizer "
        f"({len(waiting)} such parameters): {effect}",
    )


@torch.no_grad()
def compare_whole_gradients(
    optimizer: torch.optim.Optimizer, models: Iterable[nn.Module], mesh: Mesh
) -> None:
    """Warn of parameters that a plan of tensor parallelism leaves whole, and that get other gradients on other ranks.

    The input of such a parameter is divided: a norm over the heads of a rank, for example. Each rank then has a summand
    of its gradient, and steps with that. Collective, once for an optimizer.

    Args:
        optimizer: about to step for the first time.
        models: the prepared ones, without wrappers.
        mesh: with several ranks of tensor parallelism. FSDP may shard what they hold alike over other ranks.
    """
    names = {id(parameter): name for model in models for name, parameter in model.named_parameters()}
    holders = mesh.holders
    whole = [
        parameter
        for parameter in parameters_of(optimizer)
        if parameter.requires_grad
        and id(parameter) in names
        and (not is_sharded(parameter) or getattr(parameter, "device_mesh", None) == holders)
    ]
    if not whole:
        return
    values = torch.stack([_sample(parameter.grad) for parameter in whole])
    low, high = reduce(torch.stack([-values, values]), "max", group=mesh.alike.group)
    differ = (low + high).amax(1) > _DIFFERENCE * high[:, 0]
    first = next(
        (parameter for parameter, differs in zip(whole, differ.tolist(), strict=True) if differs), None
    )
    if first is not None and mesh.alike.index == 0 == mesh.batch.index:  # of stages each
        warn(
            f"{int(differ.sum())} of {len(whole)} parameters that tensor parallelism leaves whole have other gradients "
            f"on other ranks, the first {names[id(first)]!r}: their values will drift apart. What they compute with is "
            "divided, so each rank has a summand of their gradient; or ranks draw other random numbers there. Add "
            "their modules to the plan of parallelize_module, for a norm over the heads of a rank as "
            "SequenceParallel(sequence_dim=2), or let transformers divide the model.",
        )


def _sample(gradient: Tensor | None) -> Tensor:
    """The norm of the first elements, and their sum with weights that differ; zeros without a gradient."""
    if gradient is None or gradient.is_sparse:
        return torch.zeros(2, dtype=torch.float64)
    part = local_part(gradient).flatten()[:_COMPARED].to("cpu", torch.float64)
    weights = torch.arange(part.numel(), dtype=torch.float64).cos()
    return torch.stack([torch.linalg.vector_norm(part), part @ weights])


def explain_no_gradient(loss: Any, error: RuntimeError) -> None:
    """Raise a clearer error than torch's for a loss without a gradient.

    Args:
        loss: the loss of the backward pass.
        error: the error that torch raised.

    Raises:
        NoGradientError: the loss has no gradient.
    """
    if "does not require grad" in str(error) and not loss.requires_grad:
        raise NoGradientError(
            f"backward() got a loss of shape {tuple(loss.shape)} that depends on nothing that requires a gradient. "
            "Results of gather() and reduce() have none: a loss over the samples of all ranks needs "
            "accelerator.gather_with_grad(). Otherwise the model is frozen, or a pipeline in evaluation mode, or "
            "the loss was computed under torch.no_grad() or from detached tensors."
        ) from error
