"""Big models from disk: ours, Accelerate's, transformers', and what the machine can do at best.

A decoder (Llama) of 24 blocks in 6 shards, 5.3 GB of fp32 unless `--gigabytes` says otherwise. Every measurement is a
process of its own; contenders take turns, round after round. The first round is not counted; in every round all outputs
are compared, bit for bit. Numbers are medians with the range in brackets. Give it a disk with room for three copies of
the model, a quiet machine, and for the part `limited` the right to make control groups.

    hatch run bench:bigmodel
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import forget, parser_of, read_all, samples_table, seconds, turns
from torch import nn

from testkit import limits

BLOCKS = 24
SHARDS = 6
SMALL = 12_000
PAGE = 4096
Answer = dict[str, Any]


# What the processes do


def config_of(gigabytes: float) -> Any:
    """A decoder whose blocks take so many bytes; the vocabulary is small."""
    from transformers import LlamaConfig

    width = max(1, round((gigabytes * 1e9 / 4 / BLOCKS / 12) ** 0.5 / 64)) * 64
    return LlamaConfig(
        hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=BLOCKS, vocab_size=2048,
        num_attention_heads=width // 64, num_key_value_heads=width // 64,
    )  # fmt: skip


class Ours:
    def empty(self, build: Callable[[], nn.Module]) -> nn.Module:
        # What is imported lazily is no part of a load, either.
        from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch  # noqa: F401

        with init_empty_weights():
            return build()

    def load(self, model: nn.Module, folder: Path, device_map: dict[str, str], offload: Path) -> nn.Module:
        from accel_bigmodel import load_checkpoint_and_dispatch

        return load_checkpoint_and_dispatch(
            model, folder, device_map=device_map, offload_folder=offload, progress=False
        )


class Theirs:
    def empty(self, build: Callable[[], nn.Module]) -> nn.Module:
        from accelerate import init_empty_weights

        with init_empty_weights():
            return build()

    def load(self, model: nn.Module, folder: Path, device_map: dict[str, str], offload: Path) -> nn.Module:
        from accelerate import load_checkpoint_and_dispatch

        return load_checkpoint_and_dispatch(
            model, str(folder), device_map=device_map, offload_folder=str(offload)
        )


class Transformers:
    """Its own loading; nothing else of it is measured. It makes the model, too."""

    def empty(self, build: Callable[[], nn.Module]) -> nn.Module | None:
        from transformers import LlamaForCausalLM  # noqa: F401

        return None

    def load(self, model: Any, folder: Path, device_map: dict[str, str], offload: Path) -> nn.Module:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(folder)


class Resident:
    """All weights in memory of their own."""

    empty = Ours.empty

    def load(self, model: nn.Module, folder: Path, device_map: dict[str, str], offload: Path) -> nn.Module:
        from safetensors.torch import load_file

        state = {
            k: v.clone() for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()
        }
        model.load_state_dict(state, assign=True)
        return model


CONTENDERS: dict[str, Any] = {
    "ours": Ours(), "accelerate": Theirs(), "transformers": Transformers(), "resident": Resident()
}  # fmt: skip


def small_model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(SMALL // 2)])


def decoder(folder: Path) -> Callable[[], nn.Module]:
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(folder)
    return lambda: LlamaForCausalLM(config).eval()


def touch(tensors: Any) -> None:
    """Read one byte of every page."""
    for tensor in tensors:
        tensor.detach().reshape(-1).view(torch.uint8)[::PAGE].sum()


def output(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(16).view(1, 16)
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def be_load(name: str, folder: Path, check: bool) -> Answer:
    """Load to the CPU and touch every page, with one thread: torch would take two for a whole file at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if name == "bare map":
        began = time.perf_counter()
        maps = []
        for path in sorted(folder.glob("*.safetensors")):
            with open(path, "rb") as file:
                maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        touch(torch.frombuffer(each, dtype=torch.uint8) for each in maps)
        return {"load and touch, s": time.perf_counter() - began}
    if name == "safetensors":
        from safetensors.torch import load_file

        began = time.perf_counter()
        tensors = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        touch(tensor for each in tensors for tensor in each.values())
        return {"load and touch, s": time.perf_counter() - began}
    contender = CONTENDERS[name]
    model = contender.empty(decoder(folder))
    began = time.perf_counter()
    model = contender.load(model, folder, {"": "cpu"}, folder / "unused")
    touch(model.parameters())
    spent = time.perf_counter() - began
    torch.set_num_threads(threads)
    return {"load and touch, s": spent} | ({"digest": digest(output(model.eval()))} if check else {})


def be_small(name: str, folder: Path) -> Answer:
    """Load many small tensors."""
    if name == "safetensors":
        from safetensors.torch import load_file

        load_file(folder.parent / "one" / "model.safetensors")
        began, processor = time.perf_counter(), time.process_time()
        load_file(folder / "model.safetensors")
        return {"processor s": time.process_time() - processor, "s": time.perf_counter() - began}
    contender = CONTENDERS[name]
    contender.load(
        contender.empty(lambda: nn.Linear(8, 8)), folder.parent / "one", {"": "cpu"}, folder / "unused"
    )
    model = contender.empty(small_model)
    began, processor = time.perf_counter(), time.process_time()
    contender.load(model, folder, {"": "cpu"}, folder / "unused")
    spent = {"processor s": time.process_time() - processor, "s": time.perf_counter() - began}
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    return spent | {"digest": repr(total)}


def placement() -> dict[str, str]:
    """All blocks wait on disk. (Accelerate takes no map with nothing but disk.)"""
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    return rest | {f"model.layers.{number}": "disk" for number in range(BLOCKS)}


def be_offload(name: str, folder: Path, offload: Path, forwards: int, cold: bool) -> Answer:
    """Prepare, and run forwards; the first is cold if asked for."""
    contender = CONTENDERS[name]
    model = contender.empty(decoder(folder))
    began = time.perf_counter()
    model = contender.load(model, folder, placement(), offload).eval()
    answer: Answer = {"prepare, s": time.perf_counter() - began}
    files = [path for path in offload.rglob("*") if path.is_file()] if offload.exists() else []
    answer["written, MB"] = sum(path.stat().st_size for path in files) / 1e6
    if cold:
        forget(folder)
        forget(offload)
    times = []
    for _ in range(forwards):
        began = time.perf_counter()
        result = output(model)
        times.append(time.perf_counter() - began)
    first, *later = times
    answer |= {"first forward, s": first, "forward, s": statistics.median(later), "digest": digest(result)}
    if name == "ours":
        from accel_bigmodel import offload_stats

        if (stats := offload_stats(model)) is not None:
            answer["read, GB per s"] = stats.rate / 1e9
            answer["kept in memory, MB"] = stats.resident_bytes / 1e6
    return answer


def be_read(folder: Path) -> Answer:
    """Read the files once."""
    return {"read once, s": seconds(lambda: read_all(folder.glob("*.safetensors")))}


def be_hooks() -> Answer:
    """What a call of a tiny layer costs with hooks, over one without."""
    import accelerate.hooks as theirs

    from accel_bigmodel import AlignDevicesHook, add_hook_to_module

    batch = torch.ones(1, 4)

    def layer() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 4)

    offloaded, placed, ours = layer(), layer(), layer()
    weights = {name: value.detach() for name, value in offloaded.state_dict().items()}
    theirs.add_hook_to_module(offloaded, theirs.AlignDevicesHook("cpu", offload=True, weights_map=weights))
    theirs.add_hook_to_module(placed, theirs.AlignDevicesHook("cpu"))
    add_hook_to_module(ours, AlignDevicesHook("cpu"))
    layers = {
        "none": layer(),
        "accelerate, offload": offloaded,
        "accelerate, placement": placed,
        "ours, placement": ours,
    }
    expected = layers["none"](batch)
    assert all(torch.equal(each(batch), expected) for each in layers.values())
    calls = {
        name: lambda each=each: timeit.timeit(lambda: each(batch), number=500) / 500 * 1e6
        for name, each in layers.items()
    }
    with torch.no_grad():
        times = turns(calls, 31, warm=0)
    plain = statistics.median(times.pop("none"))
    return {f"{name}, µs": statistics.median(found) - plain for name, found in times.items()} | {
        "a call, µs": plain
    }


def be_make(folder: Path, gigabytes: float) -> Answer:
    """Write the checkpoints."""
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(gigabytes))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder / "decoder", max_shard_size=f"{nbytes * 11 // SHARDS // 10_000}KB")
    for name, each in (("small", small_model()), ("one", nn.Linear(8, 8))):
        (folder / name).mkdir()
        save_file(each.state_dict(), folder / name / "model.safetensors", {"format": "pt"})
    os.sync()
    return {"gigabytes": nbytes / 1e9}


# What the program does


class Bench:
    """One run."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.tables: dict[str, dict[str, dict[str, list[float]]]] = {}
        self.digests: dict[str, str] = {}

    def ask(self, what: str, *, limit: int | None = None, **arguments: Any) -> Answer:
        """Let a process of its own do something."""
        command = [sys.executable, __file__, "--be", what, json.dumps(arguments, default=str)]
        if limit is None:
            done: Any = subprocess.run(command, capture_output=True, text=True)
            answer: Answer = {}
        else:
            done = limits.run(command, limit=limit)
            answer = {"peak, MB": done.peak / 1e6}
            if done.killed:
                return {**answer, "killed": 1.0}
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        return answer | json.loads(done.stdout.splitlines()[-1])

    def note(self, table: str, name: str, answer: Answer, compare: str) -> None:
        """Keep the figures; all of the same kind must have computed the same."""
        found = answer.pop("digest", None)
        if found is not None:
            assert self.digests.setdefault(compare, found) == found, f"{name}: another output than others"
        samples = self.tables.setdefault(table, {}).setdefault(name, {})
        for figure, value in answer.items():
            samples.setdefault(figure, []).append(value)

    def load(self) -> None:
        decoder = self.folder / "decoder"
        for cache in ("warm", "cold"):
            for name in ("bare map", "safetensors", "ours", "accelerate", "transformers"):
                if cache == "cold":
                    forget(decoder)
                else:
                    be_read(decoder)
                has_model = name not in ("bare map", "safetensors")
                answer = self.ask("load", name=name, folder=decoder, check=cache == "warm" and has_model)
                self.note(f"Load and touch, page cache {cache}", name, answer, "decoder")

    def small(self) -> None:
        for name in ("safetensors", "ours", "accelerate"):
            answer = self.ask("small", name=name, folder=self.folder / "small")
            self.note(f"Load of {SMALL} small tensors", name, answer, "small")

    def offload(self) -> None:
        for name in ("ours", "accelerate", "resident"):
            be_read(self.folder / "decoder")
            answer = self._offload(name, None, cold=False)
            self.note("Blocks on disk, page cache warm", name, answer, "decoder")

    def limited(self) -> None:
        table = f"Blocks on disk, {self.limit / 1e6:.0f} MB of memory, page cache cold"
        for name in ("ours", "accelerate"):
            forget(self.folder / "decoder")
            self.note(table, name, self._offload(name, self.limit, cold=True), "decoder")
            forget(self.folder / "decoder")
            answer = self.ask("read", limit=self.limit, folder=self.folder / "decoder")
            self.note(table, "read", answer, "")

    def _offload(self, name: str, limit: int | None, cold: bool) -> Answer:
        folder = self.folder / "offload"
        answer = self.ask(
            "offload",
            limit=limit,
            name=name,
            folder=self.folder / "decoder",
            offload=folder,
            forwards=4,
            cold=cold,
        )
        shutil.rmtree(folder, ignore_errors=True)
        return answer

    def hooks(self) -> None:
        for figure, value in self.ask("hooks").items():
            name, _, unit = figure.rpartition(", ")
            self.note("A hook on a tiny layer", name, {unit: value}, "")


PARTS = ["load", "small", "offload", "limited", "hooks"]


def main() -> None:
    # The limit is MB of memory in the part `limited`.
    parser = parser_of(__doc__, gigabytes=5.3, limit=1500, rounds=5, parts=PARTS, folder=Path.cwd())
    parser.add_argument("--be", nargs=2, help=argparse.SUPPRESS)  # in the processes that this program starts
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.be is not None:
        what, given = arguments.be[0], json.loads(arguments.be[1])
        paths = {key: Path(given[key]) for key in ("folder", "offload") if key in given}
        with contextlib.redirect_stdout(io.StringIO()):
            answer = globals()[f"be_{what}"](**{**given, **paths})
        print(json.dumps(answer))
        return
    parts = list(arguments.parts)
    if "limited" in parts and (reason := limits.why_not()) is not None:
        print(f"limited: NOT RUN, {reason}")
        parts.remove("limited")
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=arguments.folder) as folder:
        bench = Bench(Path(folder), arguments.limit * 1_000_000)
        made = bench.ask("make", folder=folder, gigabytes=arguments.gigabytes)
        for turn in range(arguments.rounds + 1):
            for part in parts:
                getattr(bench, part)()
            if turn == 0:
                bench.tables.clear()
    print(f"{made['gigabytes']:.2f} GB, {os.cpu_count()} cores, {arguments.rounds} rounds")
    for title, samples in bench.tables.items():
        samples_table(title, samples, across=False)


if __name__ == "__main__":
    main()
