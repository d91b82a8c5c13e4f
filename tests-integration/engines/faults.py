"""What the hosts of a test run: training with a fault, such as ``raise:0,3``, of rank 3 if no rank is named."""

import os
import signal
import socket
import sys
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator

fault, _, named = sys.argv[1].partition(":")
ranks = {int(rank) for rank in (named or "3").split(",")}
if fault == "absent" and int(os.environ["RANK"]) in ranks:
    time.sleep(600)
accelerator = Accelerator(cpu=True, preemption=fault == "preempted")
guilty = accelerator.process_index in ranks


class Saved:
    def state_dict(self) -> dict[str, int]:
        if guilty and fault == "save":
            time.sleep(600)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


model = nn.Linear(4, 1)
loader = DataLoader(TensorDataset(torch.randn(16000, 4)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
accelerator.register_for_checkpointing(Saved())
for step, (x,) in enumerate(loader):
    if step == 20:
        sys.stdout.write(f"rank {accelerator.process_index} trains on {socket.gethostname()}\n")
        sys.stdout.flush()
        if fault == "save":
            accelerator.save_state(tempfile.mkdtemp())
    if step == 40 and guilty:
        if fault == "sleep":
            time.sleep(600)
        if fault == "raise":
            raise ValueError("a fault of this rank")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    if fault == "slow":
        time.sleep(0.02 if guilty else 0)
        if step == 60:
            break
    time.sleep(0.01)
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.should_stop:
        accelerator.exit_preempted()
accelerator.end_training()
