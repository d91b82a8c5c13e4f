"""A training in which one rank fails; started by `accel launch`. Arguments: the strategy, and the rank that fails."""

from __future__ import annotations

import sys

import torch

from testkit.conformance import (
    Case,
    Record,
    Samples,
    make_accelerator,
    make_model,
    make_optimizer,
    micro_batch,
)

strategy, victim = sys.argv[1], int(sys.argv[2])
case = Case(strategy)
accelerator = make_accelerator(case)
model = make_model(case)
model, optimizer = accelerator.prepare(model, make_optimizer(case, model))
row = next(iter(torch.utils.data.DataLoader(Samples(4, case.dtype), batch_size=4)))
row = [part.to(accelerator.device) for part in row]
for step in range(100):
    if step == 3 and accelerator.process_index == victim:
        raise ValueError(f"rank {victim} fails on purpose")
    micro_batch(case, accelerator, model, row, Record())
    optimizer.step()
    optimizer.zero_grad()
