"""Training that a job's signal stops, and that goes on when the job runs again: one step every 0.1 s."""

import sys
import time

import torch

from accel_train import Accelerator, ProjectConfiguration

folder, steps = sys.argv[1], int(sys.argv[2])
accelerator = Accelerator(
    cpu=True,
    preemption=True,
    project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True),
)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


class Progress:
    done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


progress = Progress()
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.register_for_checkpointing(progress)
accelerator.resume()
accelerator.print(f"from step {progress.done}", flush=True)
while progress.done < steps:
    accelerator.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
    progress.done += 1
    time.sleep(0.1)
    if accelerator.should_stop:
        accelerator.save_state()
        accelerator.exit_preempted()
accelerator.print(f"done after step {progress.done}", flush=True)
accelerator.end_training()
