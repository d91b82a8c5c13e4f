"""Cross-validation: one model per fold, and the average of their predictions on a test set.

accel launch --num_processes 2 --cpu cross_validation.py
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from accel_train import Accelerator, set_seed


def fit(accelerator, training, held_out, test):
    """Train on one fold; its accuracy on the held-out part and its logits on the test set."""
    model = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loaders = [DataLoader(training, 32, shuffle=True), DataLoader(held_out, 64), DataLoader(test, 64)]
    model, optimizer, train_loader, eval_loader, test_loader = accelerator.prepare(model, optimizer, *loaders)
    for _ in range(2):
        for x, y in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        hits = [accelerator.gather_for_metrics(model(x).argmax(dim=1) == y) for x, y in eval_loader]
        logits = [accelerator.gather_for_metrics(model(x)) for x, y in test_loader]
    accelerator.free_memory(model, optimizer, train_loader, eval_loader, test_loader)
    return torch.cat(hits).float().mean().item(), torch.cat(logits)


def main():
    accelerator = Accelerator()
    set_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    data, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])
    logits = 0
    for fold, (train, held_out) in enumerate(StratifiedKFold(n_splits=3).split(x[:1500], y[:1500])):
        accuracy, fold_logits = fit(
            accelerator, Subset(data, train.tolist()), Subset(data, held_out.tolist()), test
        )
        accelerator.print(f"fold {fold}: accuracy {accuracy:.3f}")
        logits = logits + fold_logits.cpu()
    accelerator.print(f"ensemble: accuracy {(logits.argmax(dim=1) == y[1500:]).float().mean().item():.3f}")


if __name__ == "__main__":
    main()
