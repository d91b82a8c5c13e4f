"""What the hosts of a test run: steps with a collective each, so that every rank notices at once when a host dies."""

import socket
import sys
import time

import torch

from accel_train import Accelerator

accelerator = Accelerator(cpu=True)
for step in range(int(sys.argv[1])):
    ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    if step in (0, int(sys.argv[1]) - 1):
        place = "first" if step == 0 else "last"
        sys.stdout.write(
            f"{place} step: rank {accelerator.process_index} of {ranks} on {socket.gethostname()}\n"
        )
        sys.stdout.flush()
    time.sleep(0.1)
accelerator.end_training()
