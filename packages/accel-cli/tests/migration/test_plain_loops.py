"""Notes on plain training loops: every line that changes, and what to write there."""

import inspect
import re

import pytest

from accel_cli.migration import plain_loops
from accel_cli.migration.files import migrate_source
from accel_cli.migration.plain_loops import notes_on_loops
from accel_cli.migration.source import PythonSource
from accel_train import Accelerator

PLAIN = """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
sampler = DistributedSampler(dataset)
model = DDP(torch.nn.Linear(8, 1).cuda(), device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = ((model(x) - y) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        optimizer.zero_grad()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "m.pt")
"""


def test_every_line_that_changes_has_a_note_and_no_other():
    migration = migrate_source(PLAIN)
    assert (migration.changed, migration.refusals) == (False, ())
    assert sorted({note.line for note in migration.notes}) == [4, 5, 6, 8, 10, 12, 14, 15, 16, 19, 20]
    told = {note.line: note.text for note in migration.notes}
    assert "write accelerator.backward(loss)" in told[14]
    assert "accelerator.prepare(model, optimizer, loader)" in told[14]
    assert 'mixed_precision="bf16"' in told[12]


@pytest.mark.parametrize(
    "text",
    ["", "x = 1\n", "torch.nn.utils.clip_grad_norm_(p, 1.0)\n", "a = Accelerator()\nloss.backward()\n"],
)
def test_other_sources_have_none(text):
    assert notes_on_loops(PythonSource(text)) == []


def test_what_the_notes_advise_exists():
    advised = set(re.findall(r"accelerator\.(\w+)", inspect.getsource(plain_loops)))
    assert "backward" in advised
    assert all(hasattr(Accelerator, name) for name in advised)
