"""Train a small language model that writes dates in their ISO form."""

import torch
from dates import Model, answer, loss_of, make_dates, predict
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accel_train import Accelerator


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


def kilobytes(tensors):
    """What this rank holds: of a divided tensor its own part."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.nbytes for part in parts) / 1000


def print_memory(model, optimizer):
    gradients = [parameter.grad for parameter in model.parameters()]
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [kilobytes(model.parameters()), kilobytes(gradients), kilobytes(states)]
    for rank, row in enumerate(accelerator.gather(torch.tensor([held])).tolist()):
        parameters, gradients, states = row
        accelerator.print(
            f"rank {rank}: parameters {parameters:.0f} kB, gradients {gradients:.0f} kB, AdamW {states:.0f} kB"
        )


accelerator = Accelerator(gradient_accumulation_steps=2)
training, validation = make_dates()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
order = torch.Generator().manual_seed(0)
micro_batch = 64 // accelerator.num_processes // accelerator.gradient_accumulation_steps
loader = DataLoader(training, batch_size=micro_batch, shuffle=True, generator=order)
validation_loader = DataLoader(validation, batch_size=64)
model, optimizer, loader, validation_loader = accelerator.prepare(model, optimizer, loader, validation_loader)

step, losses = 0, []
for epoch in range(4):
    for lines in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, lines)
            accelerator.backward(loss)
            optimizer.step()
            if step == 0 and accelerator.sync_gradients:
                print_memory(model, optimizer)
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            step += 1
            if step % 10 == 0:
                mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
                accelerator.print(f"step {step:3}  loss {mean.item():.3f}")
            losses.clear()
    right = evaluate(model, validation_loader)
    accelerator.print(f"epoch {epoch + 1}: {right.sum().item()} of {len(right)} right")

for question in ("14 Mar 2026", "Feb 29 2000", "01.12.1999"):
    accelerator.print(question, "=", answer(model, question))
