"""Train a small diffusion model on handwritten digits, keep an average of its weights, and sample on all processes.

accel launch --num_processes 2 --cpu diffusion.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, set_seed

STEPS = 50
BETAS = torch.linspace(1e-4, 0.15, STEPS)
ALPHAS = torch.cumprod(1 - BETAS, dim=0)


class Denoiser(nn.Module):
    """Predicts the noise in a digit of 8 x 8 pixels, given the time step and the class."""

    def __init__(self, width=192):
        super().__init__()
        self.time = nn.Embedding(STEPS, width)
        self.digit = nn.Embedding(10, width)
        self.inputs = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
            )
            for _ in range(3)
        )
        self.outputs = nn.Linear(width, 64)

    def forward(self, noisy, time, digit):
        hidden = self.inputs(noisy) + self.time(time) + self.digit(digit)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.outputs(hidden)


def noised(images, time, noise):
    level = ALPHAS.to(images.device)[time, None]
    return level.sqrt() * images + (1 - level).sqrt() * noise


@torch.no_grad()
def sample(model, digit):
    """Digits of these classes, from noise."""
    images = torch.randn(len(digit), 64, device=digit.device)
    for step in reversed(range(STEPS)):
        time = torch.full_like(digit, step)
        beta, level = BETAS[step].item(), ALPHAS[step].item()
        images = (images - beta / (1 - level) ** 0.5 * model(images, time, digit)) / (1 - beta) ** 0.5
        if step:
            images = images + beta**0.5 * torch.randn_like(images)
    return images


def main(args):
    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1
    labels = torch.tensor(digits.target)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    average = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.99))
    accelerator.register_for_checkpointing(average)
    set_seed(1, device_specific=True)  # noise differs between processes

    for epoch in range(args.epochs):
        for batch, digit in loader:
            time = torch.randint(0, STEPS, (len(batch),), device=batch.device)
            noise = torch.randn_like(batch)
            loss = nn.functional.mse_loss(model(noised(batch, time, noise), time, digit), noise)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(accelerator.unwrap_model(model))
        if (epoch + 1) % 10 == 0:
            accelerator.print(
                f"epoch {epoch + 1}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}"
            )
    accelerator.save_state(args.output)

    wanted = torch.arange(10).repeat(8)
    with accelerator.split_between_processes(wanted) as mine:
        made = sample(average.module.eval(), mine.to(accelerator.device))
    made = accelerator.gather(made.contiguous())
    # How near each sample is to the mean image of its class, against the means of the others.
    means = torch.stack([images[labels == digit].mean(dim=0) for digit in range(10)])
    nearest = torch.cdist(made.cpu(), means).argmin(dim=1)
    accelerator.print(f"samples: {(nearest == wanted).float().mean().item():.2f} are nearest to their class")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", default="diffusion")
    main(parser.parse_args())
