"""A small Llama that learns to write the documentation, character by character.

A configuration file alone says how it is trained:

    accel launch --config_file single.yaml char_llama.py
    accel launch --config_file ddp.yaml char_llama.py
    accel launch --config_file fsdp2.yaml char_llama.py
    accel launch --config_file pp.yaml char_llama.py            # each rank has one of the two layers
    accel launch --config_file deepspeed.yaml char_llama.py     # needs DeepSpeed
    accel launch --config_file ep.yaml char_llama.py --experts 4    # a mixture, as single.yaml with --experts 4
    python plot_losses.py                                       # needs matplotlib
"""

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from accel_train import Accelerator, DataLoaderConfiguration

LENGTH = 64  # characters of a sample
BATCH = 16  # samples of a step, over all processes


class Text(Dataset):
    """Pieces of a text as numbers of characters."""

    def __init__(self, folder: Path) -> None:
        text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.md")))
        self.characters = sorted(set(text))
        number = {character: index for index, character in enumerate(self.characters)}
        self.numbers = torch.tensor([number[character] for character in text])

    def __len__(self) -> int:
        return len(self.numbers) // LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.numbers[index * LENGTH : (index + 1) * LENGTH]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[2], help="folder with .md files")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--experts", type=int, default=0, help="of each layer; each character uses two")
    arguments = parser.parse_args()

    # split_batches: a step sees the same samples however many processes share them.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    text = Text(arguments.text)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(text.characters),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
    }
    if arguments.experts:  # Mixtral is a Llama with experts in the place of its feed-forward networks
        model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=arguments.experts))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    loader = DataLoader(text, batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    while len(losses) < arguments.steps:
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            if len(losses) % 50 == 0:
                accelerator.print(f"step {len(losses)}: loss {losses[-1]:.4f}")
            if len(losses) == arguments.steps:
                break

    name = accelerator.strategy.name + ("_experts" if arguments.experts else "")
    accelerator.save_model(model, f"char_llama_{name}")  # the same file for every strategy
    if accelerator.is_main_process:
        Path(f"losses_{name}.json").write_text(json.dumps(losses))
    accelerator.print(f"loss {losses[-1]:.4f}; wrote char_llama_{name}/ and losses_{name}.json")
    accelerator.end_training()


if __name__ == "__main__":
    main()
