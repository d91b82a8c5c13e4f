"""Train a small language model that writes dates in their ISO form."""

import argparse
import os
import signal

import torch
from dates import Model, answer, loss_of, make_dates, predict
from torch.utils.data import DataLoader

from accel_train import Accelerator, DataLoaderConfiguration, ProjectConfiguration


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = []
    for lines in loader:
        scores, answers = predict(model, lines)
        all_ten = (scores.argmax(dim=2) == answers).all(dim=1)
        right.append(accelerator.gather_for_metrics(all_ten))
    model.train()
    return torch.cat(right)


parser = argparse.ArgumentParser()
parser.add_argument("--kill_at", type=int, help="rank 1 kills itself after this step")
arguments = parser.parse_args()

accelerator = Accelerator(
    gradient_accumulation_steps=2,
    project_config=ProjectConfiguration("dates", automatic_checkpoint_naming=True, total_limit=2),
    dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
)
training, validation = make_dates()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
order = torch.Generator().manual_seed(0)
micro_batch = 64 // accelerator.num_processes // accelerator.gradient_accumulation_steps
loader = DataLoader(training, batch_size=micro_batch, shuffle=True, generator=order)
validation_loader = DataLoader(validation, batch_size=64)
model, optimizer, loader, validation_loader = accelerator.prepare(model, optimizer, loader, validation_loader)
accelerator.resume()  # loads the newest state if accel launch has --resume

losses = []
for epoch in range(loader.iteration, 4):
    for lines in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, lines)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            accelerator.step += 1
            if accelerator.step % 10 == 0:
                mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
                accelerator.print(f"step {accelerator.step:3}  loss {mean.item():.3f}")
            losses.clear()
            if accelerator.step % 20 == 0:
                accelerator.save_state()
            if accelerator.step == arguments.kill_at and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    right = evaluate(model, validation_loader)
    accelerator.print(f"epoch {epoch + 1}: {right.sum().item()} of {len(right)} right")

for question in ("14 Mar 2026", "Feb 29 2000", "01.12.1999"):
    accelerator.print(question, "=", answer(model, question))
