"""Train a small convolutional net on handwritten digits, on any number of processes.

accel launch --num_processes 2 --cpu digits.py
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, ProjectConfiguration, set_seed, tqdm


def load_data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 3 == 0
    training = TensorDataset(images[~held_out], labels[~held_out])
    evaluation = TensorDataset(images[held_out], labels[held_out])
    return DataLoader(training, batch_size=32, shuffle=True), DataLoader(evaluation, batch_size=64)


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    hits = torch.cat([accelerator.gather_for_metrics(model(x).argmax(dim=1) == y) for x, y in loader])
    return f"{hits.sum().item()} of {len(hits)} right ({hits.float().mean().item():.2%})"


def train(args):
    project = ProjectConfiguration(args.output, automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, project_config=project)
    set_seed(args.seed)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_loader, eval_loader = load_data()
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs * len(train_loader) // 2)

    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    if args.resume:
        accelerator.load_state()  # the newest complete checkpoint

    for epoch in range(train_loader.iteration, args.stop_after or args.epochs):
        model.train()
        for x, y in tqdm(train_loader, desc=f"epoch {epoch + 1}"):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: {evaluate(accelerator, model, eval_loader)}")
        accelerator.save_state()
    accelerator.save_model(model, args.output / "model")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--stop_after", type=int, help="stop after this epoch, to be resumed")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("--output", type=Path, default=Path("digits"))
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())
