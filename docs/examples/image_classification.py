"""Classify images with data augmentation and a one-cycle schedule, using only the Accelerator.

accel launch --num_processes 2 --cpu image_classification.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_train import Accelerator, set_seed


class Digits(Dataset):
    """Handwritten digits; when training, shifted by up to one pixel."""

    def __init__(self, rows, augment):
        digits = load_digits()
        self.images = torch.tensor(digits.images[rows], dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target[rows])
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            image = image.roll(torch.randint(-1, 2, (2,)).tolist(), dims=(0, 1))
        return image.unsqueeze(0), self.labels[index]


def main(args):
    accelerator = Accelerator()
    set_seed(
        0, device_specific=True
    )  # each process shifts images differently; prepare makes the models equal
    train_loader = DataLoader(Digits(slice(0, 1200), augment=True), batch_size=32, shuffle=True)
    eval_loader = DataLoader(Digits(slice(1200, None), augment=False), batch_size=64)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=args.epochs * len(train_loader)
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            hits = [accelerator.gather_for_metrics(model(x).argmax(dim=1) == y) for x, y in eval_loader]
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(hits).float().mean().item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    main(parser.parse_args())
