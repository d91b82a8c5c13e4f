"""Divided training against the same written by hand: steps, the start of a large model from its files, and saving.

A toy transformer trains on CPU ranks of one thread each, ours, plain `fully_shard` and Lightning Fabric in turn, round
after round; final weights are checked to be equal. The same with feed-forward nets divided by `parallelize_module`,
with both together on four ranks, with Muon over FSDP2's shards, and with DeepSpeed's engine by hand, by ours and by
Accelerate. The start builds a Llama on the meta device and reads it in parts: time over that of reading as many bytes
into memory, memory per rank beyond its share. Saving compares `save_state` with torch's Distributed Checkpoint of the
same state, both on a file system in memory, and how long each keeps the loop waiting when it saves in the background.

    hatch run bench:parallel
    hatch run engines-deepspeed:bench
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import installed, parser_of, quartiles, ratios, seconds, table, turns
from torch import Tensor, nn

from testkit import worlds

STEPS = 8
WIDTH, LAYERS, TOKENS, BATCH = 128, 4, 32, 4
Step = Callable[[], None]


class Block(nn.Module):
    """Attention and a feed-forward net."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        out: Tensor = x + self.feed(x)
        return out


class Transformer(nn.Module):
    """Blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    inputs = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    return model, optimizer, inputs


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Shard each block, then the model around them."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def raw() -> tuple[nn.Module, Step]:
    from torch.distributed.device_mesh import init_device_mesh

    model, _, inputs = parts()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        model(inputs).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def ours() -> tuple[nn.Module, Step]:
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    return _by_accelerator(accelerator, *parts(), clip=True)


def _by_accelerator(
    accelerator: Any,
    plain: nn.Module,
    plain_optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    clip: bool = False,
) -> tuple[nn.Module, Step]:
    """A loop with an `Accelerator`, which clips unless the engine does."""
    model, optimizer = accelerator.prepare(plain, plain_optimizer)

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return model, step


def _divide_feed_forward(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block.feed, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})


def _inputs_of(group: int) -> Tensor:
    """The samples of the ranks that share a copy of the model."""
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(group))


def tensor_parallel_by_hand(sharded: bool) -> tuple[nn.Module, Step]:
    """Feed-forward nets over two ranks; with `sharded`, each of the parts over two more."""
    from torch.distributed.device_mesh import init_device_mesh

    model, _, _ = parts()
    degrees = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("dp", "tp"))
    _divide_feed_forward(model, mesh["tp"])
    if sharded:
        _shard(model, mesh["dp"])
    inputs = _inputs_of(mesh["dp"].get_local_rank())
    groups = _by_mesh(model)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3, foreach=True)

    def step() -> None:
        model(inputs).square().mean().backward()
        # torch's own clipping takes neither whole and divided gradients, nor those of two meshes, together.
        norms = [nn.utils.get_total_norm([p.grad for p in group]) for group in groups]
        total = torch.stack([_whole(norm) for norm in norms]).norm()
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, 1.0, total)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """Parameters that one foreach call takes together."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def _whole(tensor: Any) -> Tensor:
    value: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return value


def tensor_parallel_ours(sharded: bool) -> tuple[nn.Module, Step]:
    """The same by `Accelerator`."""
    from accel_train import Accelerator, ParallelismConfig

    degrees = {"dp_shard_size": 2} if sharded else {}
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, **degrees))
    model, _, _ = parts()
    _divide_feed_forward(model, accelerator.torch_device_mesh["tp"])
    optimizer = torch.optim.AdamW([{"params": group} for group in _by_mesh(model)], lr=1e-3, foreach=True)
    return _by_accelerator(accelerator, model, optimizer, _inputs_of(dist.get_rank() // 2), clip=True)


def muon_by_hand() -> tuple[nn.Module, Step]:
    """torch.optim.Muon over FSDP2's shards, whose products of matrices gather them; AdamW steps the rest."""
    from torch.distributed.device_mesh import init_device_mesh

    model, inputs = _parts_for_muon()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _shard(model, mesh)
    matrices = [p for p in model.parameters() if _is_muons(p)]
    rest = [p for p in model.parameters() if not _is_muons(p)]
    muon = torch.optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.0, foreach=True)

    def step() -> None:
        model(inputs).square().mean().backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()

    return model, step


def _parts_for_muon() -> tuple[nn.Module, Tensor]:
    """Without the narrow head, which leaves gradients of low rank; Muon makes what is rounded of the rest large."""
    model, _, inputs = parts()
    model.head = nn.Identity()
    return model, inputs


def _is_muons(parameter: Tensor) -> bool:
    return parameter.dim() == 2


def muon_ours() -> tuple[nn.Module, Step]:
    """The same by `Accelerator`."""
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, MuonWithAdamW

    model, inputs = _parts_for_muon()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    matrices = [p for p in model.parameters() if _is_muons(p)]
    rest = [p for p in model.parameters() if not _is_muons(p)]
    optimizer = MuonWithAdamW(
        [
            {"params": matrices, "use_muon": True},
            {"params": rest, "use_muon": False, "weight_decay": 0.0},
        ],
        lr=1e-3,
    )
    return _by_accelerator(accelerator, model, optimizer, inputs)


def fabric() -> tuple[nn.Module, Step]:
    """Lightning Fabric divides by a function of the script."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    def divide(model: nn.Module, mesh: Any) -> nn.Module:
        return _shard(model, mesh["data_parallel"])

    ranks = dist.get_world_size()
    strategy = ModelParallelStrategy(divide, data_parallel_size=ranks, tensor_parallel_size=1)
    runner = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    runner.launch()
    plain, _, inputs = parts()
    model = runner.setup_module(plain)
    optimizer = runner.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))

    def step() -> None:
        runner.backward(model(inputs).square().mean())
        runner.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return plain, step


def engine_by_hand(stage: int) -> tuple[nn.Module, Step]:
    """DeepSpeed's own loop."""
    import deepspeed

    model, optimizer, inputs = parts()
    config = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**62,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )

    def step() -> None:
        engine.backward(engine(inputs).square().mean())
        engine.step()

    return model, step


def engine_ours(stage: int) -> tuple[nn.Module, Step]:
    """The same by `Accelerator`; the configuration clips, as in the loop above."""
    from accel_train import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0)
    return _by_accelerator(Accelerator(cpu=True, deepspeed_plugin=plugin), *parts())


def engine_accelerate(stage: int) -> tuple[nn.Module, Step]:
    """The same by Hugging Face Accelerate."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = BATCH
    plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
    os.environ["ACCELERATE_USE_CPU"] = "false"  # asked for the CPU, it would not use the engine
    accelerator = Accelerator(deepspeed_plugin=plugin)
    for state in (PartialState(), accelerator.state):  # without a GPU it counts one process
        state.num_processes, state.process_index = dist.get_world_size(), dist.get_rank()
    return _by_accelerator(accelerator, *parts())


def _engines(stage: int) -> dict[str, Callable[[], tuple[nn.Module, Step]]]:
    makers = {"ours": engine_ours, "raw": engine_by_hand, "accelerate": engine_accelerate}
    return {name: partial(make, stage) for name, make in makers.items()}


CONTENDERS: dict[str, dict[str, Callable[[], tuple[nn.Module, Step]]]] = {
    "FSDP2": {"ours": ours, "raw": raw, "fabric": fabric},
    "TP": {"ours": partial(tensor_parallel_ours, False), "raw": partial(tensor_parallel_by_hand, False)},
    "FSDP2 x TP": {
        "ours": partial(tensor_parallel_ours, True),
        "raw": partial(tensor_parallel_by_hand, True),
    },
    "Muon, FSDP2": {"ours": muon_ours, "raw": muon_by_hand},
    "ZeRO-1": _engines(1),
    "ZeRO-3": _engines(3),
}
ROUNDING = {
    "Muon, FSDP2": 1e-3
}  # it orthogonalises in bfloat16, and torch's sums over shards in another order
PACKAGES = {"fabric": "lightning_fabric", "accelerate": "accelerate"}


def local_values(parameter: Any) -> Tensor:
    """What this rank holds of a parameter of any of them."""
    if hasattr(parameter, "ds_tensor"):
        values: Tensor = parameter.ds_tensor
        return values
    own: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return own.detach()


def measure_steps(kind: str, peers: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds per step of every round, on each rank."""
    from accel_state import PartialState

    warnings.filterwarnings("ignore")
    PartialState(cpu=True)
    runs = {name: CONTENDERS[kind][name]() for name in ["ours", *peers]}

    def turn(name: str) -> float:
        dist.barrier()
        return seconds(runs[name][1], STEPS)

    times = turns({name: lambda name=name: turn(name) for name in runs}, rounds)
    for peer in peers:
        for mine, theirs in zip(runs["ours"][0].parameters(), runs[peer][0].parameters(), strict=True):
            torch.testing.assert_close(
                local_values(mine), local_values(theirs), rtol=1e-3, atol=ROUNDING.get(kind, 1e-5)
            )
    return times


def llama_config(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
    )


def _peak() -> int:
    """Largest resident memory so far, without pages of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_start(folder: str, layers: int) -> tuple[float, int, int]:
    """Seconds of `prepare`, bytes of private memory that it added, and bytes of this rank's share."""
    from transformers import LlamaForCausalLM

    from accel_bigmodel import init_empty_weights
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    warnings.filterwarnings("ignore")
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(checkpoint=folder))
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(llama_config(layers))
    before = _peak()
    dist.barrier()
    began = time.perf_counter()
    model = accelerator.prepare(model)
    spent = time.perf_counter() - began
    held = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    return spent, _peak() - before, held


def read_share(folder: str) -> float:
    """Seconds to read half of each file into new memory, as one of two ranks would, by the fastest plain way."""
    from accel_state import PartialState

    PartialState(cpu=True)
    dist.barrier()
    began = time.perf_counter()
    for path in sorted(Path(folder).glob("*.safetensors")):
        half = path.stat().st_size // 2
        with open(path, "rb", buffering=0) as file:
            file.seek(half * dist.get_rank())
            into = memoryview(torch.empty(half, dtype=torch.uint8).numpy())
            done = 0
            while done < half:
                done += file.readinto(into[done : done + (1 << 23)]) or half
    return time.perf_counter() - began


def measure_saves(folder: str, layers: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of saving one state in turn, and of what the loop waits for when it is saved in the background."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from transformers import LlamaForCausalLM

    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    warnings.filterwarnings("ignore")
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(layers))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.mean())
    optimizer.step()
    optimizer.zero_grad()
    writers = dist.new_group(backend="gloo")

    def state() -> dict[str, Any]:
        weights, optimizers = get_state_dict(model, optimizer.optimizer)
        return {"model": weights, "optimizer": optimizers}

    def timed(save: Callable[[Path], Any]) -> tuple[float, Any]:
        target = Path(folder) / "state"
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
        dist.barrier()
        began = time.perf_counter()
        answer = save(target)
        return time.perf_counter() - began, answer

    def in_background(save: Callable[[Path], Any], then: Callable[[], object] = lambda: None) -> float:
        spent, handle = timed(save)
        spent += seconds(then)
        handle.result()
        return spent

    ways: dict[str, Callable[[], float]] = {
        "ours": lambda: timed(accelerator.save_state)[0],
        "dcp": lambda: timed(lambda path: dcp.save(state(), checkpoint_id=path))[0],
        # The next step waits until what it changes is copied.
        "ours stall": lambda: in_background(
            lambda path: accelerator.save_state(path, asynchronous=True), optimizer.step
        ),
        "dcp stall": lambda: in_background(
            lambda path: dcp.async_save(state(), checkpoint_id=path, process_group=writers)
        ),
    }
    return turns(ways, rounds)


def show_saves(layers: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        times = worlds.run(measure_saves, 2, folder, layers, rounds, timeout=900)[0]
    rows = []
    for what, mine, theirs, goal in (
        ("save_state over dcp.save", "ours", "dcp", "≤ 0.9"),
        (
            "stall of dcp.async_save over that of save_state in the background",
            "dcp stall",
            "ours stall",
            "≥ 3",
        ),
    ):
        medians = [f"{statistics.median(times[name]):.3f} s" for name in (mine, theirs)]
        rows.append([what, *medians, quartiles(ratios(times[mine], times[theirs])), goal])
    table(["2 ranks", "", "", "ratio", "goal"], rows)


def show_steps(kind: str, rounds: int, ranks: int = 2) -> None:
    there = installed(PACKAGES[name] for name in CONTENDERS[kind] if name in PACKAGES)
    peers = [name for name in CONTENDERS[kind] if name != "ours" and PACKAGES.get(name, "") in ("", *there)]
    times = worlds.run(measure_steps, ranks, kind, peers, rounds, timeout=900)[0]
    rows = [
        [peer, quartiles(ratios(times["ours"], times[peer]), ".3f"), "≤ 1.03" if peer == "raw" else "< 1"]
        for peer in peers
    ]
    raw = f"{statistics.median(times['raw']) * 1e6:.0f} µs"
    title = f"A step of {kind}, {ranks} ranks: ours over others; raw takes {raw}"
    table(["over", "ratio", "goal"], rows, title)


def show_start(layers: int, rounds: int) -> None:
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = LlamaForCausalLM(llama_config(layers))
        size = sum(p.numel() for p in model.parameters())
        model.save_pretrained(folder, max_shard_size="1GB")
        largest = max(p.numel() * p.element_size() for p in model.parameters())
        del model
        spans, starts, extra = [], [], []
        for _ in range(rounds):
            spans.append(max(worlds.run(read_share, 2, folder, timeout=300)))
            found = worlds.run(measure_start, 2, folder, layers, timeout=900)
            starts.append(max(spent for spent, _, _ in found))
            extra.append(max(added - held for _, added, held in found))
    ratio = statistics.median(ratios(starts, spans))
    memory = f"{max(extra) / 1e6:.0f} MB"
    row = [*(f"{statistics.median(values):.2f} s" for values in (starts, spans)), f"{ratio:.2f}", memory]
    title = f"Start of {size / 1e9:.2f} B parameters, 2 ranks, warm; goals 1.2, and {largest / 1e6:.0f} MB (one tensor)"
    table(["start", "reading the share", "ratio", "memory beyond the share"], [row], title)


def main() -> None:
    parser = parser_of(__doc__, rounds=31, layers=20, parts=["steps", "deepspeed", "saves", "start"])
    parser.set_defaults(parts=["steps", "saves", "start"])  # DeepSpeed has an environment of its own
    given = parser.parse_args()
    if "steps" in given.parts:
        for kind, ranks in (("FSDP2", 2), ("TP", 2), ("FSDP2 x TP", 4), ("Muon, FSDP2", 2)):
            show_steps(kind, given.rounds, ranks)
    if "deepspeed" in given.parts:
        for kind in ("ZeRO-1", "ZeRO-3"):
            show_steps(kind, given.rounds)
    if "saves" in given.parts:
        show_saves(2, 7)
    if "start" in given.parts:
        show_start(given.layers, 3)  # 20 layers are 1 B parameters


if __name__ == "__main__":
    main()
