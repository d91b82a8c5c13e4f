"""Evaluate a generating model: prompts are divided among processes, answers gathered in order, and scored once.

accel launch --num_processes 2 --cpu generation.py
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from accel_train import Accelerator, set_seed

VOCABULARY, LENGTH, PAD = 32, 12, 0


def counting(count):
    """Sequences that count upwards, as training data: 5 6 7 8 …; 0 is left out, it pads."""
    starts = torch.randint(0, VOCABULARY - 1, (count, 1))
    return (starts + torch.arange(LENGTH)) % (VOCABULARY - 1) + 1


def left_padded(prompts):
    """A batch of prompts of different length, whose last tokens are in one column."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def train(accelerator, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(counting(1024), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for rows in loader:
        accelerator.backward(model(input_ids=rows, labels=rows).loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def answers(accelerator, model, prompts, new_tokens):
    """What the model continues each prompt with, in the order of the prompts, on every process."""
    plain = accelerator.unwrap_model(model).eval()  # generate() is a method of the model itself
    loader = accelerator.prepare(DataLoader(prompts, batch_size=4, collate_fn=left_padded))
    texts = []
    for batch in loader:
        made = plain.generate(**batch, max_new_tokens=new_tokens, do_sample=False, pad_token_id=PAD)
        made = made[:, batch["input_ids"].shape[1] :]
        # Without an end-of-sequence token all answers have one length; otherwise pad_across_processes comes first.
        texts += accelerator.gather_for_metrics(made).tolist()
    return texts


def main(args):
    accelerator = Accelerator()
    set_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
    model = train(accelerator, GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=PAD, eos_token_id=None)))

    # 13 prompts do not divide by the batches of two processes; none is counted twice.
    prompts = [[(start + at) % (VOCABULARY - 1) + 1 for at in range(3 + start % 4)] for start in range(13)]
    made = answers(accelerator, model, prompts, args.new_tokens)
    assert len(made) == len(prompts)
    wanted = [
        [(prompt[-1] + at) % (VOCABULARY - 1) + 1 for at in range(args.new_tokens)] for prompt in prompts
    ]
    right = sum(
        a == b for one, other in zip(made, wanted, strict=True) for a, b in zip(one, other, strict=True)
    )
    accelerator.print(f"{len(made)} answers, {right / len(made) / args.new_tokens:.2f} of the tokens right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--new_tokens", type=int, default=4)
    main(parser.parse_args())
