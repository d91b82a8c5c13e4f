"""The prepared model under Megatron: a stage that runs micro-batches through Megatron-core's schedules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.errors import AccumulationError, ArgumentTypeError, DataError, OptionError
from accel_train.strategies.computed_loss import ComputedLosses
from accel_train.strategies.megatron.batches import Batch, micro_batches, supplied, weighted_mean
from accel_train.strategies.megatron.build import Built
from accel_train.strategies.megatron.context import ContextPart
from accel_train.strategies.megatron.plugin import MegatronLMPlugin
from accel_train.strategies.megatron.runtime import Groups, draws
from accel_train.strategies.outputs import EngineOutput

__all__ = ["MegatronEngine"]

_HARMLESS = frozenset(
    {"use_cache", "return_dict", "token_type_ids", "output_attentions", "output_hidden_states"}
)


class MegatronEngine(nn.Module):
    """This rank's stage of a model. A call with labels returns the loss of the whole batch on every rank.

    With one stage and one micro-batch a call is an ordinary forward. Otherwise a call in training runs Megatron-core's
    schedule over all micro-batches, forward *and* backward, so the gradients of the returned loss are computed already:
    `accelerator.backward(loss)` accounts for them. Such a loss can be multiplied only in the first call of a window.

    Args:
        chunk: the stage, inside Megatron's data-parallel wrapper if it is trained.
        built: the description that the stage was built from.
        groups: this rank's index in Megatron's process groups.
        plugin: has the number of micro-batches and the functions of the script.
        given: the script's model, whose values are in the stage now.
        trained: whether the model has an optimizer.
    """

    def __init__(
        self,
        chunk: Any,
        built: Built,
        groups: Groups,
        plugin: MegatronLMPlugin,
        given: nn.Module,
        trained: bool,
    ) -> None:
        super().__init__()
        self.module = chunk
        self._given = [given]  # no child: its values are elsewhere
        self._built = built
        self._groups = groups
        self._context = ContextPart.of(groups.cp_group) if groups.cp_size > 1 else None
        self._plugin = plugin
        self._trained = trained
        self.loss_factor = 1.0
        #: Of calls that have computed gradients.
        self.losses = ComputedLosses()
        self.before_backward: Callable[[], bool] = lambda: True
        self.scale: Callable[[float], None] = lambda factor: None

    @property
    def given(self) -> nn.Module:
        """The script's model."""
        return self._given[0]

    @property
    def config(self) -> Any:
        """The configuration of the script's model."""
        return getattr(self.given, "config", self._built.config)

    def forward(self, input_ids: Tensor | None = None, **others: Any) -> EngineOutput:
        """Call the model like one of transformers; ranks of a tensor, pipeline or context group pass the same batch.

        Args:
            input_ids: tokens.
            others: `labels`, `attention_mask` and `position_ids`; or the arguments that `custom_get_batch_function`
                reads.

        Raises:
            ArgumentTypeError: Megatron-core's models do not take an argument.
            DataError: the length of the batch differs from `seq_length`, or cannot be divided among ranks.
        """
        given = {"input_ids": input_ids, **others}
        given = {name: value for name, value in given.items() if value is not None}
        if self._plugin.custom_get_batch_function is None:
            given = self._checked(given)
        count = self._plugin.num_micro_batches or 1
        pieces = micro_batches(given, count)
        whole = len(pieces) == 1 and self._groups.pp_size == 1
        return self._whole(pieces[0]) if whole else self._scheduled(pieces)

    def _checked(self, given: dict[str, Any]) -> dict[str, Any]:
        known = {"input_ids", "labels", "attention_mask", "position_ids"}
        unknown = sorted(given.keys() - known - _HARMLESS)
        if unknown:
            raise ArgumentTypeError(
                f"The model was called with {unknown[0]}=…, which Megatron-core's models do not take; they take "
                f"{', '.join(sorted(known))}. Leave it out of the batch, or give custom_get_batch_function."
            )
        if "input_ids" not in given:
            raise ArgumentTypeError(
                "The model was called without input_ids. Pass the batch: `model(**batch)`."
            )
        length, wanted = given["input_ids"].shape[1], self._plugin.seq_length
        if wanted is not None and length != wanted:
            raise DataError(f"A batch has sequences of {length} tokens, but seq_length is {wanted}.")
        self._check_length(length)
        return {name: value for name, value in given.items() if name in known}

    def _check_length(self, length: int) -> None:
        """See that ranks can divide sequences."""
        if self._context is not None:
            self._context.check(length, self._groups.tp_size if self._plugin.sequence_parallelism else 1)

    def _batch(self, given: dict[str, Any]) -> Batch:
        custom = self._plugin.custom_get_batch_function
        if custom is not None:
            return supplied(custom, given, self._context, self._check_length)
        architecture = self._built.architecture
        masks = self._plugin.eod_mask_loss and architecture is not None
        eod_token = architecture.eod_token if masks and architecture is not None else None
        return Batch.of(given, eod_token, self._context)

    # One forward

    def _whole(self, given: dict[str, Any]) -> EngineOutput:
        if self.training and torch.is_grad_enabled() and self._trained:
            self.before_backward()
        batch = self._batch(given)
        output = self._call(self.module, batch)
        loss, logits = self._loss(batch, output, self._tokens([batch]))
        return EngineOutput(loss, logits)

    def _call(self, model: Any, batch: Batch) -> Any:
        """The logits of this rank's part of the vocabulary; of a script's own model what it returns."""
        arguments = (batch.tokens, batch.positions, batch.attention_mask)
        with draws(self._groups):
            if self._built.architecture is not None:
                return model(*arguments)
            return model(*arguments, labels=batch.labels)

    def _tokens(self, batches: list[Batch]) -> Tensor | None:
        """Tokens that count, as the mean over ranks, where the loss is the mean over tokens."""
        if not self._plugin.calculate_per_token_loss or batches[0].loss_mask is None:
            return None
        count = torch.stack([batch.loss_mask.sum() for batch in batches if batch.loss_mask is not None]).sum()
        dist.all_reduce(count, group=self._groups.dp_group)
        count.masked_fill_(count == 0, 1)  # where none counts the loss is 0, not NaN
        return count / self._groups.dp_size

    def _loss(self, batch: Batch, output: Any, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The loss of a micro-batch and its logits; None: not there, or not asked for.

        Args:
            batch: has labels and their mask.
            output: what the model returned.
            tokens: what the sum over tokens is divided by; None: by those of this micro-batch.
        """
        own = self._built.architecture is None
        custom = self._plugin.custom_loss_function
        if batch.labels is None:
            return None, self._joined(batch, output if own else self._gathered(output))
        losses = self._joined(batch, output if own else self._losses(output, batch.labels))
        logits = None
        if self._plugin.return_logits and not own:
            logits = self._joined(batch, self._gathered(output))
        if custom is not None:
            found = custom(batch.loss_mask, losses if logits is None else (losses, logits))
            return (found[0] if isinstance(found, tuple) else found), logits
        if batch.loss_mask is None:
            return losses.float().mean(), logits
        return weighted_mean(losses, batch.loss_mask, tokens), logits

    def _joined(self, batch: Batch, output: Any) -> Any:
        """What was computed for all positions, from that for this rank's."""
        if self._context is None:
            return output
        shape = tuple(getattr(output, "shape", ()))
        if shape[:2] != tuple(batch.tokens.shape):
            raise OptionError(
                f"The model of custom_model_provider_function returned {type(output).__name__} of shape {list(shape)}; "
                f"with context_parallel_size={self._context.parts} it must return a tensor of (samples, positions, …), "
                f"here {list(batch.tokens.shape)}, from which all ranks get the whole sequences."
            )
        return self._context.whole(output)

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of every position, from the parts of the vocabulary that ranks have."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        # It changes its argument, and the logits may be returned.
        values = self._without_padding(logits).float().clone(memory_format=torch.contiguous_format)
        losses: Tensor = vocab_parallel_cross_entropy(values, labels)
        return losses

    def _without_padding(self, logits: Tensor) -> Tensor:
        """Logits in which entries that pad the vocabulary have no share."""
        dims, size = self._built.dims, logits.shape[-1]
        count = max(0, min(size, dims.vocabulary - dims.tp_rank * size))
        if count == size:
            return logits
        padding = torch.arange(size, device=logits.device) >= count
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min)

    def _gathered(self, logits: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        whole: Tensor = gather_from_tensor_model_parallel_region(logits)
        return whole[..., : self._built.dims.vocabulary]

    # Schedules

    def _scheduled(self, pieces: list[dict[str, Any]]) -> EngineOutput:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        trains = self.training and torch.is_grad_enabled() and self._trained
        batches = [self._batch(piece) for piece in pieces]
        if trains and batches[0].labels is None:
            raise ArgumentTypeError(
                f"The model was called without labels, and with pp_degree={self._groups.pp_size} and num_micro_batches="
                f"{len(pieces)} a call computes gradients. Pass labels, or call it in torch.no_grad()."
            )
        first = not trains or self.before_backward()
        tokens = self._tokens(batches)
        count, factor = len(batches), self.loss_factor if trains else 1.0

        def loss_of(batch: Batch, output: Any) -> tuple[Tensor, dict[str, Any]]:
            loss, logits = self._loss(batch, output, tokens)
            found = {"loss": None if loss is None else loss.detach(), "logits": logits}
            if loss is None:
                return output.sum() * 0.0, found
            # The schedule divides by the number of micro-batches, which a mean over tokens must not be. It multiplies
            # by the ranks that divide sequences, for losses that are sums over this rank's positions; this is of all.
            return loss * ((factor if tokens is None else factor * count) / self._groups.cp_size), found

        def forward_step(data: Iterator[Batch], model: Any) -> tuple[Any, Any]:
            batch = next(data)
            return self._call(model, batch), functools.partial(loss_of, batch)

        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[self.module],
            num_microbatches=count,
            seq_length=batches[0].tokens.shape[1] * self._groups.cp_size,
            micro_batch_size=batches[0].tokens.shape[0],
            forward_only=not trains,
        )
        return self._collected(batches, results, trains, first, factor, tokens is not None)

    def _collected(
        self, batches: list[Batch], results: list[Any], trains: bool, first: bool, factor: float, summed: bool
    ) -> EngineOutput:
        """What the last stage has computed, on every stage."""
        batch = batches[0]
        logits = None
        if batch.labels is None or self._plugin.return_logits:
            logits = self._from_last(
                torch.cat([result["logits"].detach() for result in results]) if results else None,
                (
                    sum(item.tokens.shape[0] for item in batches),
                    batch.tokens.shape[1] * self._groups.cp_size,
                    self._built.dims.vocabulary,
                ),
            )
        if batch.labels is None:
            return EngineOutput(None, logits)
        losses = torch.stack([result["loss"].float() for result in results]) if results else None
        value = self._from_last(None if losses is None else losses.sum() if summed else losses.mean(), ())
        if not trains:
            return EngineOutput(value, logits)
        return EngineOutput(
            self.losses.of_call(value, factor, functools.partial(self._rescale, first, factor)), logits
        )

    def _from_last(self, value: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the last stage, on every stage."""
        groups = self._groups
        if groups.pp_size == 1:
            assert value is not None, "the only stage is the last"
            return value
        if value is None:
            device = next(self.module.parameters()).device
            value = torch.empty(shape, dtype=torch.float32, device=device)
        value = value.float().contiguous()
        dist.broadcast(value, groups.last_stage, group=groups.pp_group)
        return value

    def _rescale(self, first: bool, factor: float, ratio: float) -> None:
        """The loss was multiplied after its gradients were computed for `factor` times the loss."""
        if not first:
            raise AccumulationError(
                f"The loss was multiplied by {ratio:g} after the model returned it, but its gradients are "
                "already added to those of earlier calls: with pp_degree or num_micro_batches above 1, calling the "
                "model computes gradients. Put the factor into custom_loss_function, or step after every call."
            )
        self.scale(ratio)
        self.loss_factor = factor * ratio
