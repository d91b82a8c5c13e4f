"""Train a GAN: two models, two optimizers, each accumulating gradients of its own.

accel launch --num_processes 2 --cpu gan.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, set_seed

NOISE = 4


def ring(count):
    """Points on a circle of radius 2, which the generator has to learn."""
    angles = torch.rand(count) * 2 * torch.pi
    return 2 * torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    generator, discriminator = network(NOISE, 2), network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    loader = DataLoader(TensorDataset(ring(4096)), batch_size=64, shuffle=True, drop_last=True)
    generator, discriminator, generator_optimizer, discriminator_optimizer, loader = accelerator.prepare(
        generator, discriminator, generator_optimizer, discriminator_optimizer, loader
    )
    # Every process needs noise of its own; the initial weights are those of process 0 in any case.
    torch.manual_seed(accelerator.process_index)

    for epoch in range(args.epochs):
        for (real,) in loader:
            noise = torch.randn(len(real), NOISE, device=accelerator.device)
            with accelerator.accumulate(discriminator):
                answers = discriminator(torch.cat([real, generator(noise).detach()]))
                right, wrong = answers.chunk(2)
                loss = nn.functional.softplus(-right).mean() + nn.functional.softplus(wrong).mean()
                accelerator.backward(loss)
                discriminator_optimizer.step()
                discriminator_optimizer.zero_grad()

            discriminator.requires_grad_(False)
            with accelerator.accumulate(generator):
                accelerator.backward(nn.functional.softplus(-discriminator(generator(noise))).mean())
                generator_optimizer.step()
                generator_optimizer.zero_grad()
            discriminator.requires_grad_(True)

        with torch.no_grad():
            made = generator(torch.randn(256, NOISE, device=accelerator.device))
            radius = accelerator.gather(made.norm(dim=1))
        accelerator.print(f"epoch {epoch + 1}: radius {radius.mean():.3f}, spread {radius.std():.3f}")
    accelerator.save_model(generator, args.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--output", default="gan")
    main(parser.parse_args())
