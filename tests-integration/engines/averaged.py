"""Training whose result does not depend on the number of ranks or on interruptions: a few steps on shuffled data.

averaged.py FOLDER STEPS PACE: each step takes PACE seconds. The weights are in FOLDER/weights.pt at the end. A file
FOLDER/crash makes rank 1 fail once, at step 5.
"""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, DataLoaderConfiguration, ProjectConfiguration

folder, steps, pace = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
accelerator = Accelerator(
    cpu=True,
    preemption=True,
    dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=3),
)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1, dtype=torch.float64)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
rows = torch.arange(48, dtype=torch.float64).reshape(16, 3).sin()
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
accelerator.print(f"from step {progress.done} on {accelerator.num_processes} ranks", flush=True)
while progress.done < steps:
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        progress.done += 1
        time.sleep(pace)
        if (
            accelerator.process_index == accelerator.num_processes - 1
            and progress.done == 5
            and (folder / "crash").exists()
        ):
            (folder / "crash").unlink()
            raise RuntimeError("told to crash")
        if accelerator.should_stop:
            accelerator.save_state()
            accelerator.exit_preempted()
        if progress.done % 3 == 0:
            accelerator.save_state()
        if progress.done == steps:
            break
accelerator.print(f"done after step {progress.done}", flush=True)
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), folder / "weights.pt")
accelerator.end_training()
