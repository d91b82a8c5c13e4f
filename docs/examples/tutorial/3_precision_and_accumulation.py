"""Train a small language model that writes dates in their ISO form."""

import torch
from dates import Model, answer, loss_of, make_dates
from torch.utils.data import DataLoader

from accel_train import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2)
training, _ = make_dates()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
order = torch.Generator().manual_seed(0)
micro_batch = 64 // accelerator.num_processes // accelerator.gradient_accumulation_steps
loader = DataLoader(training, batch_size=micro_batch, shuffle=True, generator=order)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step, losses = 0, []
for _ in range(4):
    for lines in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, lines)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            step += 1
            if step % 10 == 0:
                mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
                accelerator.print(f"step {step:3}  loss {mean.item():.3f}")
            losses.clear()

for question in ("14 Mar 2026", "Feb 29 2000", "01.12.1999"):
    accelerator.print(question, "=", answer(model, question))
