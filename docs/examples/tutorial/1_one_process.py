"""Train a small language model that writes dates in their ISO form."""

import torch
from dates import Model, answer, loss_of, make_dates
from torch.utils.data import DataLoader

training, _ = make_dates()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
order = torch.Generator().manual_seed(0)
loader = DataLoader(training, batch_size=64, shuffle=True, generator=order)

step = 0
for _ in range(4):
    for lines in loader:
        loss = loss_of(model, lines)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}")

for question in ("14 Mar 2026", "Feb 29 2000", "01.12.1999"):
    print(question, "=", answer(model, question))
