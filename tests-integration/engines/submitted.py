"""A training that jobs of every engine run: it saves and goes on, may crash, and leaves its weights.

They depend neither on the number of ranks nor on interruptions, which come inside an epoch of shuffled data.
Arguments: folder, steps, and optionally a rank, a step and a number of times: that rank crashes at that step so often.
"""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, DataLoaderConfiguration, ProjectConfiguration

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
crash_rank, crash_step, crash_times = (int(word) for word in (*sys.argv[3:], -1, -1, -1)[:3])
accelerator = Accelerator(
    cpu=True,
    preemption=True,
    dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    project_config=ProjectConfiguration(
        project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2
    ),
)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
rows = torch.arange(96, dtype=torch.float64).reshape(24, 4).sin()
loader = DataLoader(
    TensorDataset(rows),
    batch_size=4 // accelerator.num_processes,
    shuffle=True,
    generator=torch.Generator().manual_seed(1),
)


class Progress:
    done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


progress = Progress()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(progress)
accelerator.resume()
rank, world = accelerator.process_index, accelerator.num_processes
accelerator.print(f"{world} ranks from step {progress.done}", flush=True)
while progress.done < steps:
    for (inputs,) in loader:
        accelerator.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        progress.done += 1
        if progress.done % 5 == 0:
            accelerator.print(f"step {progress.done}", flush=True)
        if progress.done == crash_step and rank == crash_rank:
            crashes = folder / "crashes"
            if len(crashes.read_text() if crashes.exists() else "") < crash_times:
                with crashes.open("a") as stream:
                    stream.write("x")
                raise RuntimeError("a planted crash")
        time.sleep(0.1)
        if accelerator.should_stop:
            accelerator.save_state()
            accelerator.exit_preempted()
        if progress.done % 10 == 0:
            accelerator.save_state()
        if progress.done == steps:
            break
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), folder / "weights.pt")
accelerator.print(f"done after step {progress.done}", flush=True)
accelerator.end_training()
