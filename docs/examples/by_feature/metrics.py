"""Evaluate on all processes with scikit-learn's metrics: every sample counts exactly once.

accel launch --num_processes 2 --cpu metrics.py
"""

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, f1_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, set_seed


def main():
    accelerator = Accelerator()
    set_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train_loader = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=32, shuffle=True)
    eval_loader = DataLoader(TensorDataset(x[1200:], y[1200:]), batch_size=64)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, train_loader, eval_loader
    )
    for epoch in range(2):
        model.train()
        for inputs, targets in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        predictions, labels = [], []
        for inputs, targets in eval_loader:
            with torch.no_grad():
                guesses = model(inputs).argmax(dim=1)
            guesses, targets = accelerator.gather_for_metrics((guesses, targets))
            predictions.append(guesses.cpu())
            labels.append(targets.cpu())
        predictions, labels = torch.cat(predictions), torch.cat(labels)
        assert len(labels) == len(x) - 1200
        f1 = f1_score(labels, predictions, average="macro")
        accelerator.print(f"epoch {epoch}: accuracy {accuracy_score(labels, predictions):.3f}, F1 {f1:.3f}")


if __name__ == "__main__":
    main()
