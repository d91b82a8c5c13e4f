"""What every engine starts: a script that says where it is and gathers the ranks; an argument makes one rank fail."""

import sys

import torch

from accel_train import Accelerator

accelerator = Accelerator()
topology = accelerator._process.topology
if len(sys.argv) > 1 and accelerator.process_index == int(sys.argv[1]):
    raise ValueError("rank told to fail")
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
line = f"{topology.launcher} {topology.rank} {topology.world_size} {topology.local_rank} {topology.num_nodes} {ranks}"
sys.stdout.write(
    f"{line}\n"
)  # at once: without a buffer print() writes twice, and lines of other ranks come between
accelerator.end_training()
