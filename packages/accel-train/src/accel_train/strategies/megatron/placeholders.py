"""Placeholders that a script passes to `prepare()` for objects that Megatron-core creates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from accel_state.errors import NotAvailableError
from accel_state.operations.collectives import reduce
from accel_train.errors import OptionError
from accel_train.strategies.megatron.plugin import MegatronLMPlugin

__all__ = [
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronScheduler",
    "avg_losses_across_data_parallel_group",
    "make_scheduler",
]


class MegatronLMDummyScheduler(LRScheduler):
    """Placeholder for Megatron's schedule of learning rate and weight decay, which `prepare()` creates.

    The plugin has the options of the schedule.

    Args:
        optimizer: the optimizer whose groups the schedule changes.
        total_num_steps: steps of training; None: the plugin's `lr_decay_iters`, or `train_iters`.
        warmup_num_steps: steps in which the learning rate grows; the plugin's `lr_warmup_iters` has precedence.
        kwargs: kept as attributes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs

    def step(self, epoch: int | None = None) -> None:
        """Raise: only `prepare()` under Megatron replaces it by a scheduler.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            "MegatronLMDummyScheduler is a placeholder, and was not replaced: it was not passed to prepare() with "
            "megatron_lm_plugin=…. Pass it to that call, with its optimizer, or use a scheduler of torch."
        )


class MegatronScheduler(LRScheduler):
    """Megatron-core's schedule, as a scheduler of torch.

    Args:
        optimizer: whose groups it changes.
        schedule: Megatron's `OptimizerParamScheduler`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        self.optimizer = optimizer
        self._schedule = schedule

    def step(self, epoch: int | None = None) -> None:
        """Advance by one optimizer step."""
        self._schedule.step(increment=1)

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The state from which the schedule continues."""
        state: dict[str, Any] = self._schedule.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state."""
        self._schedule.load_state_dict(state_dict)


def make_scheduler(given: MegatronLMDummyScheduler, plugin: MegatronLMPlugin) -> MegatronScheduler:
    """Create Megatron's schedule from a placeholder and the plugin, whose numbers have precedence.

    Raises:
        OptionError: neither sets the number of steps.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = given.optimizer
    steps = plugin.lr_decay_iters or plugin.train_iters or given.total_num_steps
    if steps is None:
        raise OptionError(
            "The length of Megatron's schedule is not set. Pass MegatronLMDummyScheduler(total_num_steps=…), or "
            "MegatronLMPlugin(lr_decay_iters=…)."
        )
    warmup = plugin.lr_warmup_iters
    if warmup is None and plugin.lr_warmup_fraction is not None:
        warmup = int(plugin.lr_warmup_fraction * steps)
    if warmup is None:
        warmup = given.warmup_num_steps
    first = optimizer.param_groups[0]
    decay = float(first.get("weight_decay", 0.0))
    lower = [float(plugin.min_lr)] * len(optimizer.param_groups)
    for group, low in zip(optimizer.param_groups, lower, strict=True):
        group["max_lr"], group["min_lr"] = float(group["lr"]), low
        group.setdefault("wd_mult", float(group.get("weight_decay", 0.0)) / decay if decay else 1.0)
        group.setdefault("lr_mult", 1.0)
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=float(first["lr"]),
        min_lr=float(plugin.min_lr),
        lr_warmup_steps=warmup,
        lr_decay_steps=steps,
        lr_decay_style=plugin.lr_decay_style,
        start_wd=decay if plugin.start_weight_decay is None else plugin.start_weight_decay,
        end_wd=decay if plugin.end_weight_decay is None else plugin.end_weight_decay,
        wd_incr_steps=plugin.train_iters or steps,
        wd_incr_style=plugin.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=True,
        override_opt_param_scheduler=False,
    )
    return MegatronScheduler(optimizer, schedule)


class MegatronLMDummyDataLoader:
    """Refused: stands for a dataset of Megatron-LM's own training loop, which Megatron-core does not have.

    Args:
        dataset_kwargs: not used.

    Raises:
        NotAvailableError: always; the message names the replacement.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        raise NotAvailableError(
            "MegatronLMDummyDataLoader stands for the datasets of Megatron-LM's own training loop (megatron.training), "
            "which megatron-core does not have. Build the dataset with megatron.core.datasets "
            "(BlendedMegatronDatasetBuilder), and pass torch.utils.data.DataLoader(dataset, …) to prepare()."
        )


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Average each loss over all ranks; ranks of one tensor or pipeline group have the same losses.

    Args:
        losses: 0-d tensors, the same number on each rank.

    Returns:
        A 1-d tensor.
    """
    stacked = torch.stack([loss.detach().float().reshape(()) for loss in losses])
    averaged: Tensor = reduce(stacked, reduction="mean")
    return averaged
