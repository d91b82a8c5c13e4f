"""Placeholders for the optimizer and the scheduler of a DeepSpeed configuration, and DeepSpeed's CPU optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler

from accel_train.errors import OptionError, PrepareError

__all__ = ["DummyOptim", "DummyScheduler", "map_pytorch_optim_to_deepspeed"]


class DummyOptim(torch.optim.Optimizer):
    """Placeholder for the optimizer that the section "optimizer" of a DeepSpeed configuration describes.

    `prepare()` returns the real one in its place.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, if it is "auto" in the configuration.
        weight_decay: weight decay, if it is "auto" in the configuration.
        kwargs: further "auto" values of the configuration, such as betas and eps.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.kwargs = kwargs
        self._own_options: list[dict[str, Any]] = []
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, and record the options that it sets itself; the configuration has the others."""
        own = {key: value for key, value in param_group.items() if key not in ("params", "param_names")}
        super().add_param_group(param_group)
        self._own_options.append(own)

    def groups_for_engine(self) -> list[dict[str, Any]]:
        """The groups with the options that the script gave them; empty ones are left out."""
        return [
            {"params": list(group["params"]), **own}
            for group, own in zip(self.param_groups, self._own_options, strict=True)
            if group["params"]
        ]

    @property
    def params(self) -> list[dict[str, Any]]:
        """The groups of parameters."""
        return self.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:
        """Raise: a placeholder cannot step.

        Raises:
            PrepareError: always.
        """
        raise PrepareError(
            "DummyOptim is a placeholder for the optimizer of a DeepSpeed configuration and cannot step. Use the "
            "optimizer that prepare() returned in its place."
        )


class DummyScheduler(LRScheduler):
    """Placeholder for the scheduler that the section "scheduler" of a DeepSpeed configuration describes.

    Args:
        optimizer: the `DummyOptim`, or the real optimizer.
        total_num_steps: steps of the whole training, if "auto" in the configuration; planned for one process, as with
            Accelerate: N ranks that read different samples take N of them per optimizer step.
        warmup_num_steps: optimizer steps in the warm-up, if "auto" in the configuration.
        lr_scheduler_callable: creates the scheduler from the real optimizer, if the configuration has none; it takes
            one step per optimizer step.
        kwargs: kept in `kwargs`, for code that reads them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[torch.optim.Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # LRScheduler's own constructor would change the placeholder's learning rate.
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self, epoch: int | None = None) -> NoReturn:
        """Raise: a placeholder cannot step.

        Raises:
            PrepareError: always.
        """
        raise PrepareError(
            "DummyScheduler is a placeholder for the scheduler of a DeepSpeed configuration and cannot step. Use the "
            "scheduler that prepare() returned in its place."
        )


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Replace torch's optimizer by DeepSpeed's CPU optimizer, for optimizer states in host memory.

    Args:
        optimizer: Adam, AdamW, Adagrad or Lion, without state.

    Returns:
        A DeepSpeed optimizer with the same groups and options; optimizers of other classes come back as they are.

    Raises:
        OptionError: DeepSpeed's class does not have an option.
    """
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    defaults = optimizer.defaults
    kept = {"lr": defaults["lr"], "weight_decay": defaults.get("weight_decay", 0)}
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        if defaults.get("amsgrad") or defaults.get("maximize"):
            raise OptionError(
                "amsgrad and maximize of Adam do not exist in DeepSpeedCPUAdam, which steps in host memory. Leave them "
                "out, or set zero_force_ds_cpu_optimizer=false in the DeepSpeed configuration."
            )
        decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(defaults.get("decoupled_weight_decay"))
        cls: Any = DeepSpeedCPUAdam
        kept |= {"betas": defaults["betas"], "eps": defaults["eps"], "adamw_mode": decoupled}
    elif isinstance(optimizer, torch.optim.Adagrad):
        cls, kept = DeepSpeedCPUAdagrad, {**kept, "eps": defaults["eps"]}
    elif type(optimizer).__name__ == "Lion":
        cls, kept = DeepSpeedCPULion, {**kept, "betas": defaults["betas"]}
    else:
        return optimizer
    names = {"params", *kept} - {"adamw_mode"}
    groups = [
        {key: value for key, value in group.items() if key in names} for group in optimizer.param_groups
    ]
    made: torch.optim.Optimizer = cls(groups, **kept)
    for mine, theirs in zip(made.param_groups, optimizer.param_groups, strict=True):
        mine.update({key: value for key, value in theirs.items() if key == "initial_lr"})
    return made
