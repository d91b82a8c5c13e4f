"""The prepared model under pipeline parallelism: a call runs all micro-batches through all stages."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from accel_train.errors import AccumulationError, ArgumentTypeError, DataError, PrepareError
from accel_train.plugins.parallelism import PipelineParallelConfig
from accel_train.strategies.computed_loss import ComputedLosses, raw_backward
from accel_train.strategies.outputs import EngineOutput
from accel_train.strategies.pipeline.exchange import Exchange, Form
from accel_train.strategies.pipeline.foresight import Foreseen, Foresight, made_up
from accel_train.strategies.pipeline.schedules import (
    FORWARD_FIRST,
    SCHEDULES,
    Forwarded,
    Fused,
    MicroBatch,
    PipelineSchedule,
    StageLayout,
    run_backward,
    run_forward,
)
from accel_train.strategies.pipeline.stages import TARGET, Stage, counted_labels, loss_kind

__all__ = ["PipelineModel"]

_NAMES = ("loss", "logits", "last_hidden_state")
"""What other ranks get of an output that is a mapping."""
_SINGLE, _SEVERAL = -1, -2
_REFUSED = ("output_hidden_states", "output_attentions", "output_router_logits")
_DROPPED = ("use_cache", "return_dict")
_KEPT_SHAPES = 4


class PipelineModel(nn.Module):
    """This rank's stages of a model. A call returns on every rank what the whole model would.

    With the schedule "gpipe" a call is a forward, and `accelerator.backward` runs the backward of all stages. With
    others, a call in training runs forward *and* backward, and the gradients of the returned loss are computed already:
    `accelerator.backward(loss)` accounts for them.

    Args:
        given: the script's model, with this rank's modules.
        stages: of this rank.
        layout: which rank holds which stage.
        rank: this rank of the pipeline.
        group: the ranks of the pipeline.
        config: options.
        device: of this rank.
    """

    def __init__(
        self,
        given: nn.Module,
        stages: Sequence[Stage],
        layout: StageLayout,
        rank: int,
        group: Any,
        config: PipelineParallelConfig,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._stages = list(stages)
        self._given = [given]  # no child: its modules are in the stages
        self._layout, self._rank, self._group = layout, rank, group
        self._config, self._device = config, device
        self._exchange = Exchange(group, device)
        self._chain = stages[0].chain
        self._loss_kind = "" if self._chain else loss_kind(given)
        self._compares_losses = config.num_micro_batches != 1
        self._signature = inspect.signature(given.forward)
        #: Rows of the longest batch in training; shorter ones may be cut into fewer micro-batches.
        self.most_rows = 0
        self._forms: dict[Any, tuple[dict[int, list[Form]], Foreseen | None]] = {}
        self._fused: dict[Any, tuple[Fused, Foreseen | None]] = {}
        self._passes: list[_Pass] = []
        self.loss_factor = 1.0
        self.reduces = True
        #: Of calls that have computed gradients.
        self.losses = ComputedLosses()
        #: Gradients of earlier calls of the window wait.
        self.accumulated = False
        self.scale: Callable[[float], None] = lambda factor: None
        #: Gives up what FSDP has gathered.
        self.free: Callable[[], None] = lambda: None
        #: In a rehearsal, what other ranks would send; None: they exist.
        self.foresight: Foresight | None = None
        #: The loss scale of the precision.
        self.loss_scale: Callable[[], float] = lambda: 1.0

    @property
    def given(self) -> nn.Module:
        """The script's model."""
        return self._given[0]

    @property
    def config(self) -> Any:
        """The configuration of the script's model."""
        return self.given.config

    def train(self, mode: bool = True) -> PipelineModel:
        """Let all modules of this rank train or evaluate, and those around them in the script's model."""
        super().train(mode)
        self.given.train(mode)
        return self

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Tensors of this rank's stages, under the names of the whole model."""
        found: dict[str, Any] = self.given.state_dict(*arguments, **options)
        return found

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Load what `state_dict` of this rank returned."""
        return self.given.load_state_dict(*arguments, **options)

    def generate(self, *inputs: Any, **named: Any) -> NoReturn:
        """Refused.

        Raises:
            ArgumentTypeError: always.
        """
        raise ArgumentTypeError(
            f"generate() of {type(self.given).__name__} would run one token after the other through all stages of the "
            "pipeline, which is not supported. Call accelerator.save_model() on all ranks, and load what it writes "
            "without a pipeline."
        )

    # A call

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model; ranks of one pipeline pass the same batch.

        Returns:
            The loss where the last stage computes it in training, else the outputs of the whole batch.

        Raises:
            ArgumentTypeError: an argument cannot pass through stages, or the schedule needs a loss.
            DataError: the batch cannot be cut into micro-batches.
        """
        if not self._chain:
            inputs, named = self._named(inputs, named)
        if TARGET in named and self._config.loss_function is None:
            raise ArgumentTypeError(
                f"The model was called with {TARGET}=…, and nothing computes a loss from it. Give "
                "PipelineParallelConfig(loss_function=…), or compute the loss from what the model returns."
            )
        has_loss = TARGET in named or (not self._chain and named.get("labels") is not None)
        trains = torch.is_grad_enabled()
        if trains and any(value.requires_grad for value in _tensors((inputs, named))):
            raise ArgumentTypeError(
                f"{type(self.given).__name__} was called with a tensor that requires a gradient, and a pipeline gives "
                "its inputs none. Put the modules that compute it into the model, or detach it."
            )
        schedule = self._schedule(has_loss)
        fused = schedule.kind is not None and trains and self.training
        if fused and not has_loss:
            raise ArgumentTypeError(
                f"The schedule {schedule.name!r} runs backward in the call of the model, so the last stage must "
                "compute the loss, and the model was called without labels. Pass labels to a model of transformers, or "
                "PipelineParallelConfig(loss_function=…) and model(…, target=…); or choose schedule='gpipe', with "
                "which the script computes the loss."
            )
        micro_batches, key = self._cut(inputs, named, schedule if fused else None)
        begun = self._exchange.begin() if self.foresight is None else None
        if has_loss and self._compares_losses and self.foresight is None:
            self._compares_losses = False
            self._compare_losses(micro_batches)
        weights = self._weights(micro_batches)
        if fused:
            if not schedule.takes(len(micro_batches), self._layout):
                schedule = FORWARD_FIRST
            found: Any = self._run_fused(schedule, micro_batches, key, weights)
        else:
            trains = trains and schedule.kind is None
            found = self._run_forward(
                micro_batches, key, weights, trains=trains, only_loss=has_loss and trains
            )
        if begun is not None:
            begun.wait()
        return found

    def _named(
        self, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            given = dict(self._signature.bind_partial(*inputs).arguments)
        except TypeError as error:
            raise ArgumentTypeError(
                f"{type(self.given).__name__} was called with too many arguments: {error}."
            ) from error
        named = {name: value for name, value in {**given, **named}.items() if value is not None}
        for name in _REFUSED:
            if named.get(name):
                raise ArgumentTypeError(
                    f"The model was called with {name}=True, and stages of a pipeline pass on activations alone. Leave "
                    "it out."
                )
        return (), {name: value for name, value in named.items() if name not in _DROPPED}

    def _schedule(self, has_loss: bool) -> PipelineSchedule:
        name = self._config.schedule
        if name is None:
            several = self._layout.stages > self._layout.ranks
            name = "interleaved_1f1b" if several else "1f1b" if has_loss else "gpipe"
        return SCHEDULES[name]

    def _weights(self, micro_batches: Sequence[MicroBatch]) -> list[float]:
        """The share of each micro-batch in the loss of the batch: of its labels that count, else of its rows."""
        if "num_items_in_batch" in micro_batches[0][1]:
            return [1.0] * len(micro_batches)  # the script divides by the items of the whole batch
        function = self._config.loss_function
        found = [counted_labels(self._loss_kind, named, function) for _, named in micro_batches]
        known = [count for count in found if count is not None]
        if not known:
            return [1 / len(micro_batches)] * len(micro_batches)
        counts = torch.stack(known).tolist()
        return [count / max(sum(counts), 1) for count in counts]

    def _compare_losses(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Check, in the first call, that the loss of two micro-batches together is the mean of theirs. Collective.

        Raises:
            PrepareError: it is not, so the loss of the batch cannot be computed from those of micro-batches.
        """
        labels = [_tensors(each[1].get(TARGET, each[1].get("labels"))) for each in micro_batches]
        differ = [not all(map(torch.equal, found, labels[0])) for found in labels]
        apart = [micro_batches[0], micro_batches[differ.index(True) if True in differ else -1]]
        outputs: list[Any] = []
        with _evaluated(self.stages), torch.no_grad():
            for each in (apart, [tree_map(_joined, *apart)]):
                forms: dict[int, list[Form]] = {}
                outputs += run_forward(
                    self._stages, self._layout, self._rank, self._exchange, each, forms, trains=False
                ).outputs
        self.free()
        last = self._layout.stages - 1
        found = None
        if outputs:
            low = max(torch.finfo(form.dtype).eps for form in forms[last])
            first, second, both = (float(output["loss"]) for output in outputs)
            weights = self._weights(apart)
            mean = first * weights[0] + second * weights[1]
            found = [torch.tensor([mean, both, low], dtype=torch.float64, device=self._device)]
        mean, whole, low = self._exchange.share(found, self._layout.owner(last))[0].tolist()
        if not abs(mean - whole) <= max(low**0.5, 1e-6) * max(abs(mean), abs(whole), 1e-3):
            function = self._config.loss_function
            name = getattr(function, "__name__", type(function).__name__)
            who = (
                f"loss_function={name}"
                if TARGET in apart[0][1]
                else f"The loss of {type(self.given).__name__}"
            )
            raise PrepareError(
                f"{who} is {whole:.6g} for two micro-batches together, and the mean of theirs is {mean:.6g}. A "
                "pipeline averages the losses of micro-batches, by the labels that count (other than -100) or by rows. "
                "Give it such a mean, without weights of classes and without a sum; or choose num_micro_batches=1, or "
                "schedule='gpipe' and compute the loss in the script."
            )

    def _cut(
        self, inputs: tuple[Any, ...], named: dict[str, Any], schedule: PipelineSchedule | None
    ) -> tuple[list[MicroBatch], Any]:
        """Cut a batch into micro-batches; the key tells batches apart whose tensors differ in form."""
        tensors = [value for value in _tensors((inputs, named)) if value.dim()]
        if not tensors:
            raise DataError("The model was called without a tensor that has rows. Pass the batch.")
        rows = max(tensor.shape[0] for tensor in tensors)
        odd = [tuple(tensor.shape) for tensor in tensors if tensor.shape[0] not in (1, rows)]
        if odd:
            raise DataError(
                f"The tensors of a batch have different numbers of rows: {rows}, and one has the shape {odd[0]}. The "
                "first dimension of each is cut into micro-batches."
            )
        count = self._count(rows, schedule)

        def piece(value: Tensor, place: int) -> Tensor:
            if not value.dim() or value.shape[0] != rows:
                return value
            size = rows // count
            return value[place * size : (place + 1) * size]

        micro_batches = [
            tree_map_only(Tensor, partial(piece, place=n), (inputs, named)) for n in range(count)
        ]
        return micro_batches, (count, _key((inputs, named)))

    def _count(self, rows: int, schedule: PipelineSchedule | None) -> int:
        """Into how many micro-batches a batch is cut."""
        given = self._config.num_micro_batches
        wanted = given or 2 * self._layout.stages
        training = self.training and torch.is_grad_enabled()
        short = not training or rows < self.most_rows
        if training:
            self.most_rows = max(self.most_rows, rows)
        if given is not None and rows % given and not short:
            raise DataError(
                f"A batch has {rows} rows, which num_micro_batches={given} does not divide. Change one of them: each "
                "batch of a rank is cut into that many micro-batches of one size."
            )
        fewer = [count for count in range(min(wanted, rows), 0, -1) if rows % count == 0]
        more = [] if given else [count for count in range(wanted + 1, rows + 1) if rows % count == 0]
        taken = (n for n in (*fewer, *more) if schedule is None or schedule.takes(n, self._layout))
        count = next(taken, fewer[0] if short else None)
        if count is not None:
            return count
        raise DataError(
            f"A batch of {rows} rows cannot be cut into at least {self._layout.stages} micro-batches of one size, "
            f"which the schedule {schedule.name if schedule else None!r} needs for {self._layout.stages} stages. Give "
            "batches of a multiple of that many rows (drop_last=True), or choose schedule='gpipe'."
        )

    # One forward

    def _run_forward(
        self,
        micro_batches: list[MicroBatch],
        key: Any,
        weights: list[float],
        *,
        trains: bool,
        only_loss: bool,
    ) -> Any:
        def begin() -> tuple[dict[int, list[Form]], Foreseen | None]:
            foreseen = self._foresee(micro_batches)
            return ({} if foreseen is None else foreseen.forms), foreseen

        forms, foreseen = self._known((torch.is_grad_enabled(), self.training, key), self._forms, begin)
        with torch.set_grad_enabled(trains):
            found = run_forward(
                self._stages, self._layout, self._rank, self._exchange, micro_batches, forms, trains=trains
            )
        # States are saved from the script's model, which does not contain the stages' outermost units.
        self.free()
        outputs = [_Output.of(output, only_loss) for output in found.outputs]
        merged = _Output.merged(outputs, weights) if outputs else None
        if merged is None and foreseen is not None:
            output = _Output.of(foreseen.output, only_loss)
            output = _Output.merged([output] * len(micro_batches), weights)
            merged = _Output(output.codes, made_up(output.tensors))
        codes, *tensors = self._exchange.share(
            None if merged is None else [torch.tensor(merged.codes, device=self._device), *merged.tensors],
            self._layout.owner(self._layout.stages - 1),
        )
        if trains:
            tensors = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
            self._passes = [known for known in self._passes if known.waits]
            self._passes.append(_Pass(found, outputs, tensors, weights))
        return _structure(codes.tolist(), tensors)

    def run_backward(self) -> None:
        """Run the backward of all calls whose outputs have got gradients.

        Raises:
            AccumulationError: a call's outputs went through backward before.
        """
        for item in [known for known in self._passes if known.has_gradients]:
            self._passes.remove(item)
            self.accumulated = True
            _end_backward(self._stages[0], ends=False)
            run_backward(
                self._stages[0],
                self._layout,
                self._exchange,
                item.forwarded.saved,
                item.taken(),
                before_last=lambda: _end_backward(self._stages[0], ends=True, reduces=self.reduces),
            )

    def check_losses(self) -> None:
        """Check that gradients of all calls went through all stages.

        Raises:
            AccumulationError: a loss went to `loss.backward()`, or to no backward although its gradients are computed.
        """
        if any(item.has_gradients for item in self._passes):
            raise raw_backward()
        self.losses.check("choose PipelineParallelConfig(schedule='gpipe')")

    def drop_gradients(self) -> None:
        """Gradients of parameters are dropped; calls whose backward computes gradients still wait for it."""
        self.losses.drop()
        self._passes = [item for item in self._passes if not item.has_gradients]
        self.accumulated = False

    def forget_calls(self) -> None:
        """Forget calls whose backward has not run: a state is loaded."""
        self._passes.clear()
        self.losses.drop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients of this rank's parameters, as that of an optimizer."""
        self.drop_gradients()
        for stage in self._stages:
            stage.zero_grad(set_to_none)

    # Forward and backward

    def _run_fused(
        self, schedule: PipelineSchedule, micro_batches: list[MicroBatch], key: Any, weights: list[float]
    ) -> EngineOutput:
        def make() -> tuple[Fused, Foreseen | None]:
            foreseen = self._foresee(micro_batches)
            forms: dict[int, list[Form]] = {} if foreseen is None else foreseen.forms
            with _evaluated(self.stages), torch.no_grad():
                run_forward(
                    self._stages,
                    self._layout,
                    self._rank,
                    self._exchange,
                    micro_batches[:1],
                    forms,
                    trains=False,
                )
            fused = Fused(
                schedule,
                self._stages,
                self._layout,
                len(micro_batches),
                forms,
                self._device,
                self._group,
            )
            return fused, foreseen

        fused, foreseen = self._known(key, self._fused, make)
        factor = self.loss_factor * self.loss_scale()
        losses = fused.run(micro_batches, [factor * weight for weight in weights], reduces=self.reduces)
        weighted = [loss * weight for loss, weight in zip(losses, weights if losses else (), strict=True)]
        total = torch.stack(weighted).sum() if weighted else None
        if total is None and foreseen is not None:
            [total] = made_up([foreseen.output["loss"]])
        [value] = self._exchange.share(
            None if total is None else [total], self._layout.owner(self._layout.stages - 1)
        )
        first, self.accumulated = not self.accumulated, True
        return EngineOutput(loss=self.losses.of_call(value, factor, partial(self._rescale, first)))

    def _rescale(self, first: bool, ratio: float) -> None:
        """The loss was multiplied after its gradients were computed."""
        if not first or not self.reduces:
            raise AccumulationError(
                f"The loss was multiplied by {ratio:g} after the model returned it, but its gradients are "
                "already added to those of earlier calls: the schedule computes them while it calls the model. Put the "
                "factor into the loss function, or choose PipelineParallelConfig(schedule='gpipe')."
            )
        self.scale(ratio)

    def _foresee(self, micro_batches: Sequence[MicroBatch]) -> Foreseen | None:
        return None if self.foresight is None else self.foresight.of(micro_batches[0])

    def _known(self, key: Any, cache: dict[Any, Any], make: Callable[[], Any]) -> Any:
        """What was made for batches of this form; only the newest few are kept."""
        found = cache.pop(key, None)
        if found is None:
            found = make()
            while len(cache) >= _KEPT_SHAPES:
                cache.pop(next(iter(cache)))
        cache[key] = found
        return found


class _Output:
    """An output of the last stage as a list of tensors.

    Attributes:
        codes: what the tensors are: numbers of names, or one tensor, or several.
        tensors: the tensors.
    """

    def __init__(self, codes: list[int], tensors: list[Tensor]) -> None:
        self.codes, self.tensors = codes, tensors

    @classmethod
    def of(cls, output: Any, only_loss: bool) -> _Output:
        if isinstance(output, Tensor):
            return cls([_SINGLE], [output])
        if isinstance(output, Mapping):
            wanted = _NAMES[:1] if only_loss else _NAMES
            found = {name: output[name] for name in wanted if isinstance(output.get(name), Tensor)}
            if found:
                return cls([_NAMES.index(name) for name in found], list(found.values()))
        if isinstance(output, tuple | list) and output and all(isinstance(item, Tensor) for item in output):
            return cls([_SEVERAL], list(output))
        raise ArgumentTypeError(
            f"The model returned {type(output).__name__}, and what all ranks of a pipeline get is a tensor, a tuple of "
            f"tensors, or a mapping with {', '.join(_NAMES)}. Let its forward return one of these."
        )

    @classmethod
    def merged(cls, outputs: Sequence[_Output], weights: Sequence[float]) -> _Output:
        """The output of the whole batch: losses are averaged, or added up; rows follow each other."""
        columns = zip(*(output.tensors for output in outputs), strict=True)
        return cls(
            outputs[0].codes,
            [
                torch.stack([t.detach() * weight for t, weight in zip(column, weights, strict=True)]).sum(0)
                if column[0].dim() == 0
                else torch.cat([t.detach() for t in column])
                for column in columns
            ],
        )


def _structure(codes: list[int], tensors: list[Tensor]) -> Any:
    if codes[0] == _SINGLE:
        return tensors[0]
    if codes[0] == _SEVERAL:
        return tuple(tensors)
    return EngineOutput(**{_NAMES[code]: tensor for code, tensor in zip(codes, tensors, strict=True)})


class _Pass:
    """A call whose backward has not run.

    Args:
        forwarded: what this rank's stage keeps.
        outputs: of each micro-batch, on the rank of the last stage.
        leaves: what the call returned.
        weights: of the micro-batches' losses.
    """

    def __init__(
        self,
        forwarded: Forwarded,
        outputs: Sequence[_Output],
        leaves: Sequence[Tensor],
        weights: Sequence[float],
    ) -> None:
        self.forwarded = forwarded
        self._outputs, self._weights = outputs, weights
        self._leaves = [weakref.ref(leaf) for leaf in leaves]
        self._gradients: dict[int, Tensor] = {}
        self._done = False
        for place, leaf in enumerate(leaves):
            if leaf.requires_grad:
                leaf.register_hook(self._receive(place))  # type: ignore[no-untyped-call]

    def _receive(self, place: int) -> Callable[[Tensor], None]:
        def receive(gradient: Tensor) -> None:
            if self._done:
                raise AccumulationError(
                    "A second backward went through what the model returned in one call, and its stages have freed "
                    "their activations. Add the losses up and call accelerator.backward() once, or call the model "
                    "again."
                )
            known = self._gradients.get(place)
            self._gradients[place] = gradient.detach().clone() if known is None else known + gradient

        return receive

    @property
    def waits(self) -> bool:
        """Whether its outputs may still get gradients."""
        return bool(self._gradients) or any(leaf() is not None for leaf in self._leaves)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has reached its outputs."""
        return bool(self._gradients)

    def taken(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Outputs and their gradients, of each micro-batch; afterwards they are spent."""
        self._done = True
        gradients, self._gradients = self._gradients, {}
        for leaf in self._leaves:
            known = leaf()
            if known is not None:
                known.grad = None
        found = []
        starts = [0] * (max(gradients, default=0) + 1)
        for output, weight in zip(self._outputs, self._weights[: len(self._outputs)], strict=True):
            tensors, theirs = [], []
            for place, gradient in gradients.items():
                tensor = output.tensors[place]
                if tensor.dim() == 0:
                    theirs.append((gradient * weight).to(tensor.dtype))
                else:
                    start = starts[place]
                    theirs.append(gradient[start : start + tensor.shape[0]])
                    starts[place] = start + tensor.shape[0]
                tensors.append(tensor)
            found.append((tensors, theirs))
        return found


def _joined(one: Any, other: Any) -> Any:
    """The rows of two micro-batches."""
    rows = isinstance(one, Tensor) and one.dim() and one is not other
    return torch.cat([one, other]) if rows else one


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    return type(value)


def _end_backward(stage: nn.Module, *, ends: bool, reduces: bool = False) -> None:
    """Whether FSDP frees parameters in the next backward, and whether it reduces gradients."""
    if isinstance(stage, FSDPModule):
        stage.set_reshard_after_backward(ends)
        stage.set_requires_gradient_sync(reduces)


@contextmanager
def _evaluated(stages: nn.ModuleList) -> Iterator[None]:
    """Context in which modules draw nothing and count nothing."""
    training = [module for module in stages.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
