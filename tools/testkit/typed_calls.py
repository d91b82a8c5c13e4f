"""Calls of scripts whose types a type checker has to know; `hatch run types:check` reads this file, nothing runs it."""

from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator

accelerator = Accelerator()


def a_misspelt_argument() -> None:
    """Without the error that is expected here, `mypy --strict` calls the comment unused."""
    Accelerator(mixed_precison="bf16")  # type: ignore[arg-type]


def prepared_objects_keep_their_types(
    model: nn.Linear, optimizer: torch.optim.SGD, loader: DataLoader[Any], scheduler: StepLR
) -> None:
    """One object, and several in any order."""
    assert_type(accelerator.prepare(model), nn.Linear)
    assert_type(
        accelerator.prepare(loader, optimizer, model, scheduler),
        tuple[DataLoader[Any], torch.optim.SGD, nn.Linear, StepLR],
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert_type(accelerator.prepare(*[model, optimizer]), Any)
    many = accelerator.prepare(model, optimizer, loader, scheduler, model, optimizer, loader, scheduler)
    assert_type(many, Any)


def a_loop_of_a_script(data: TensorDataset) -> None:
    """What the documentation's loops assign to themselves."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(data)
    scheduler: LRScheduler = StepLR(optimizer, 1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert_type(model.in_features, int)


def gathered_values_keep_their_types(values: Tensor, named: dict[str, Tensor]) -> None:
    """Tensors and structures of them; objects of ranks may change their form."""
    assert_type(accelerator.gather(values), Tensor)
    assert_type(accelerator.gather(named), dict[str, Tensor])
    assert_type(accelerator.reduce(named), dict[str, Tensor])
    assert_type(accelerator.pad_across_processes(values), Tensor)
    assert_type(accelerator.gather_for_metrics(values), Tensor)
    assert_type(accelerator.gather_for_metrics((values, values)), tuple[Tensor, Tensor])
    assert_type(accelerator.gather_for_metrics(values, use_gather_object=True), Any)
