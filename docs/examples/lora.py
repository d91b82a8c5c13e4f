"""Adapt a frozen model with low-rank matrices (LoRA), and save only these. With PEFT the loop is the same.

accel launch --num_processes 2 --cpu lora.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, set_seed


class LoRALinear(nn.Module):
    """A frozen linear layer plus a product of two narrow matrices, the second of which begins at zero."""

    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.down.T @ self.up.T)


def base_model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def adapt(model):
    """Put an adapter around every linear layer."""
    for name, layer in list(model.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(model, name, LoRALinear(layer))
    return model


def data(shift):
    """Digits whose classes are renamed by `shift`; the last quarter is held out."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = (torch.tensor(digits.target) + shift) % 10
    cut = len(x) * 3 // 4
    return TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])


def train(accelerator, model, shift, epochs):
    """Train what requires a gradient; returns the prepared model and its accuracy on held-out data."""
    training, held_out = data(shift)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    model, optimizer, loader, eval_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(training, batch_size=32, shuffle=True),
        DataLoader(held_out, batch_size=64),
    )
    for _ in range(epochs):
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        hits = [accelerator.gather_for_metrics(model(x).argmax(dim=1) == y) for x, y in eval_loader]
    return model, torch.cat(hits).float().mean().item()


def main(args):
    accelerator = Accelerator()
    set_seed(0)
    model, accuracy = train(accelerator, base_model(), shift=0, epochs=args.epochs)
    accelerator.print(f"base model: accuracy {accuracy:.3f}")

    plain = accelerator.unwrap_model(model)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    model, accuracy = train(accelerator, adapt(plain), shift=1, epochs=args.epochs)
    state = accelerator.get_state_dict(model)
    adapter = {name: value for name, value in state.items() if name.endswith((".down", ".up"))}
    kept = all(torch.equal(value.cpu(), before[name.replace(".base", "")].cpu())
               for name, value in state.items() if ".base" in name)  # fmt: skip
    accelerator.print(f"adapter: accuracy {accuracy:.3f}, base unchanged: {kept}")
    accelerator.save(adapter, args.output, safe_serialization=True)
    numbers = [sum(value.numel() for value in values.values()) for values in (adapter, before)]
    accelerator.print("adapter of {} numbers, base of {}".format(*numbers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--output", default="adapter.safetensors")
    main(parser.parse_args())
