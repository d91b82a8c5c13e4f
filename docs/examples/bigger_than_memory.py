"""A language model of 0.54 GB that answers in a process that may use 0.35 GB.

    python bigger_than_memory.py              # train it, then query it in a new process under a memory limit
    python bigger_than_memory.py --plain      # the same with torch's own loading: the kernel kills that process

The model predicts the next character of Python's documentation. Beside a small causal network it has a memory: large
tables of vectors that are looked up by the last few characters. It is trained here, in a minute or two.

The limit is for PyTorch built for the CPU: of a build for CUDA or ROCm the libraries alone take more.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch
from accel_ckpt import save_model

LIMIT = 350_000_000  # bytes
SYMBOLS = 128
ROWS, WIDTH = 1 << 17, 256
ORDERS = (2, 3, 4, 6)  # a block for each: how many characters it looks back


class Block(nn.Module):
    """Looks up what usually comes after the last few characters, and mixes it in."""

    def __init__(self, order: int) -> None:
        super().__init__()
        self.order = order
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.mix = nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        key = torch.zeros_like(text)
        for back in range(self.order):
            key = (key * 1_000_003 + functional.pad(text, (back, 0))[:, : text.shape[1]] + 1) % 2_147_483_647
        found = self.table(key % ROWS)
        return x + found + self.mix(self.norm(torch.cat([x, found], -1)))


class Model(nn.Module):
    """From the characters of a text, (batch, length) integers, to scores for the next, (batch, length, 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.ModuleList(Block(order) for order in ORDERS)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x, text)
        return self.head(x)


def encode(text: str) -> torch.Tensor:
    return torch.tensor([min(ord(c), SYMBOLS - 1) for c in text])


def train(folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)  # fail before training if the folder cannot be written
    data = encode("\n".join(topics.values()))
    model = Model()
    for block in model.blocks:
        nn.init.zeros_(block.table.weight)
    tables = [block.table.weight for block in model.blocks]
    rest = [p for p in model.parameters() if all(p is not table for table in tables)]
    optimizers = [torch.optim.SparseAdam(tables, lr=0.02), torch.optim.AdamW(rest, lr=2e-3)]
    start = time.perf_counter()
    size = sum(p.nbytes for p in model.parameters())
    print(f"training a model of {size / 1e9:.2f} GB: {steps} steps", flush=True)
    for step in range(steps):
        at = torch.randint(len(data) - 129, (32,))
        batch = torch.stack([data[i : i + 129] for i in at.tolist()])
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 25 == 24:
            print(f"step {step + 1}: loss {loss.item():.2f}, {time.perf_counter() - start:.0f} s", flush=True)
    save_model(model, folder, max_shard_size="100MB")
    print(f"saved to {folder}", flush=True)


def answer(folder: Path, prompt: str, length: int, plain: bool) -> None:
    with init_empty_weights():
        model = Model()
    if plain:
        from safetensors.torch import load_file

        weights = {n: t.clone() for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
        model.load_state_dict(weights, assign=True)
    else:
        model = load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"})
    torch.manual_seed(0)
    text = encode(prompt)[None]
    with torch.no_grad():
        for _ in range(length):
            scores = model(text[:, -32:])[0, -1]
            text = torch.cat([text, (2 * scores).softmax(-1).multinomial(1).view(1, 1)], 1)
    print("".join(map(chr, text[0].tolist())))


def under_limit(command: list[str], limit: int) -> int:
    """Run a command in a control group that may use so many bytes, page cache included; its exit status."""
    for base, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(base, f"bigger-than-memory-{os.getpid()}")
        try:
            group.mkdir()
            (group / name).write_text(str(limit))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        try:
            join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
            return subprocess.run(["sh", "-c", join, "sh", *command], check=False).returncode
        finally:
            while (group / "cgroup.procs").read_text():  # after Ctrl-C it takes a moment to end
                time.sleep(0.01)
            group.rmdir()
    sys.exit(
        "no control group can be made here (that takes root); another way is\n"
        f"systemd-run --user --scope -p MemoryMax={limit} {shlex.join(command)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("bigger-than-memory"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt", default="The import statement ")
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--plain", action="store_true", help="load the weights to memory, as torch does")
    parser.add_argument("--answer", action="store_true", help="only answer, in this process")
    args = parser.parse_args()
    if args.answer:
        answer(args.folder, args.prompt, args.length, args.plain)
        return
    if not any(args.folder.glob("*.safetensors")):
        train(args.folder, args.steps)
    print(f"--- a new process that may use {LIMIT / 1e6:.0f} MB", flush=True)
    status = under_limit([sys.executable, os.path.abspath(__file__), "--answer", *sys.argv[1:]], LIMIT)
    if status:
        print(f"the process ended with status {status}" + (": killed" if status in (-9, 137) else ""))
        if torch.version.cuda or torch.version.hip:
            print("the libraries of this build of PyTorch take more than the limit; use one for the CPU")
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
