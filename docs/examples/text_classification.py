"""Classify sequences with a transformers model, using only the Accelerator.

accel launch --num_processes 2 --cpu text_classification.py
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from accel_train import Accelerator, set_seed


def samples(count):
    """Sequences of different length; the class is whether token 5 occurs."""
    rows = [torch.randint(6, 40, (int(length),)) for length in torch.randint(4, 12, (count,))]
    for row in rows[::2]:
        row[torch.randint(len(row), ())] = 5
    return [{"input_ids": row, "label": int(5 in row)} for row in rows]


def collate(batch):
    ids = torch.nn.utils.rnn.pad_sequence([one["input_ids"] for one in batch], batch_first=True)
    labels = torch.tensor([one["label"] for one in batch])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def main(args):
    accelerator = Accelerator()
    set_seed(0)
    # Built from a configuration; BertForSequenceClassification.from_pretrained goes here.
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=40
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train_loader = DataLoader(samples(400), batch_size=16, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(samples(100), batch_size=32, collate_fn=collate)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, train_loader, eval_loader
    )
    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        hits = []
        for batch in eval_loader:
            with torch.no_grad():
                guesses = model(**batch).logits.argmax(dim=-1)
            hits.append(accelerator.gather_for_metrics(guesses == batch["labels"]))
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(hits).float().mean().item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    main(parser.parse_args())
