"""Random small language models of transformers under random strategies, against one document at a time.

A case is drawn from one number: a kind of model, how its rows are labelled or packed, windows, and one or two legs,
each under a strategy of its own. The oracle computes every document alone, on one process in float64. To repeat one:

    PYTHONPATH=tools python -m testkit.random_runs language 17
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from testkit import worlds
from testkit.float64 import Float64
from testkit.language_models import config_of
from testkit.random_runs import Kind, difference, ranks_of

ROWS, LENGTH, VOCABULARY = 4, 16, 96

LAYOUTS: dict[str, dict[str, int] | None] = {
    "single": None,
    "ddp": {"dp_replicate_size": 2},
    "fsdp2": {"dp_shard_size": 2},
    "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "cp": {"cp_size": 2},
    "cp of 4": {"cp_size": 4},
    "cp x fsdp2": {"cp_size": 2, "dp_shard_size": 2},
    "cp x ddp": {"cp_size": 2, "dp_replicate_size": 2},
    "cp x sp": {"cp_size": 2, "sp_size": 2},
    "sp": {"sp_size": 2},
    "sp x fsdp2": {"sp_size": 2, "dp_shard_size": 2},
    "tp": {"tp_size": 2},
    "tp x fsdp2": {"tp_size": 2, "dp_shard_size": 2},
    "tp x cp": {"tp_size": 2, "cp_size": 2},
    "tp x sp": {"tp_size": 2, "sp_size": 2},
    "pp": {"pp_size": 2},
    "pp x fsdp2": {"pp_size": 2, "dp_shard_size": 2},
    "pp x tp": {"pp_size": 2, "tp_size": 2},
    "ep": {"dp_shard_size": 2, "ep_size": 2},
    "ep of 4": {"dp_shard_size": 4, "ep_size": 4},
    "ep x tp": {"dp_shard_size": 2, "tp_size": 2, "ep_size": 2},
    "ep x cp": {"dp_shard_size": 2, "cp_size": 2, "ep_size": 2},
}
"""Strategies by their degrees; `ep_size` counts ranks of the others."""


@dataclass(frozen=True)
class Case:
    """A run, drawn from its number.

    Attributes:
        number: draws everything, also weights and rows.
        kind: of the model, see `config_of`.
        rows: "plain", "masked" (labels that do not count), or "packed" (two documents in a row).
        attention: the implementation.
        windows: micro-batches of a step.
        batches: of the run.
        chunked: the loss is computed in chunks.
        clips: gradients are clipped.
        optimizer: its kind.
        layouts: of the legs.
        stop: the first leg ends with this batch; None: there is one leg.
        by_block: FSDP gathers block by block.
        means: batches count alike, whatever number of tokens they have; else tokens do.
    """

    number: int
    kind: str
    rows: str
    attention: str
    windows: int
    batches: int
    chunked: bool
    clips: bool
    optimizer: str
    layouts: tuple[str, ...]
    stop: int | None
    by_block: bool
    means: bool

    @classmethod
    def draw(cls, number: int) -> Case:
        """The case of a number."""
        chance = random.Random(number)
        kind = chance.choice(["llama", "llama", "qwen3_moe", "mixtral", "gpt_oss"])
        # The masks of gpt-oss know no documents, and its attention cannot be divided.
        rows = chance.choice(["plain", "masked"] if kind == "gpt_oss" else ["plain", "masked", "packed"])
        windows, batches = chance.choice([1, 2]), chance.choice([4, 5])
        names = [name for name in LAYOUTS if _suits(name, kind, rows)]
        stop = chance.choice([None, None, windows * chance.randint(1, (batches - 1) // windows)])
        layouts = tuple(chance.choice(names) for _ in range(1 if stop is None else 2))
        parts = {part for name in layouts for part in name.replace(" of 4", "").split(" x ")}
        eager = kind == "gpt_oss" or (not parts & {"cp", "sp"} and chance.random() < 0.3)
        return cls(
            number=number,
            kind=kind,
            rows=rows,
            attention="eager" if eager else "sdpa",
            windows=windows,
            batches=batches,
            chunked=chance.random() < 0.4,
            clips=chance.random() < 0.6,
            optimizer=chance.choice(["sgd", "adamw", "muon"]),
            layouts=layouts,
            stop=stop,
            by_block=chance.random() < 0.7,
            means=bool(parts & {"cp", "sp", "pp"}),
        )


def _suits(layout: str, kind: str, rows: str) -> bool:
    parts = set(layout.replace(" of 4", "").split(" x "))
    if "ep" in parts and kind == "llama":
        return False
    if kind == "gpt_oss" and parts & {"cp", "sp", "tp"}:
        return False
    if "pp" in parts:
        return rows == "plain"  # the last stage averages over the tokens of a rank's batch
    # Groups of ranks with other numbers of tokens count alike where they divide sequences.
    return not (rows == "masked" and parts & {"cp", "sp"} and parts & {"ddp", "fsdp2", "ep"})


def _model(case: Case) -> nn.Module:
    import transformers

    torch.manual_seed(case.number)
    config = config_of(case.kind)
    # Grouped matrix products take no float64.
    experts = {} if case.kind == "llama" else {"experts_implementation": "eager"}
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=case.attention, **experts
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model


def _rows(case: Case) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(case.number + 1)
    found = []
    for _ in range(ROWS * case.batches):
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        row = {"input_ids": ids, "labels": ids.clone()}
        if case.rows == "masked":
            row["labels"][torch.rand(LENGTH, generator=generator) < 0.3] = -100
        elif case.rows == "packed":
            cut = int(torch.randint(3, LENGTH - 2, (1,), generator=generator))
            row["position_ids"] = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])
            row["labels"][[0, cut]] = -100
        found.append(row)
    return found


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if case.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    from accel_train import muon_with_adamw

    return muon_with_adamw(model, lr=0.02, adamw_lr=3e-3, adjust_lr_fn="original")


@dataclass
class Seen:
    """What a script sees: losses of batches, norms of steps, and the weights at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def one_process(case: Case) -> Seen:
    """The oracle: plain PyTorch, which computes each document by itself."""
    model, rows = _model(case), _rows(case)
    optimizer = _optimizer(case, model)
    seen = Seen([], [], {})
    window: list[list[dict[str, Tensor]]] = []
    with Float64():
        for number in range(case.batches):
            batch = rows[number * ROWS :][:ROWS]
            window.append(batch)
            with torch.no_grad():
                total, count = _sum_of_losses(model, batch)
                seen.losses.append(float(total) / count)
            if len(window) < case.windows and number < case.batches - 1:
                continue
            sums = [_sum_of_losses(model, each) for each in window]
            tokens = sum(count for _, count in sums)
            for total, count in sums:
                (total / (count * len(sums) if case.means else tokens)).backward()
            window.clear()
            if case.clips:
                seen.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    seen.weights = dict(model.state_dict())
    return seen


def _sum_of_losses(model: nn.Module, rows: Sequence[dict[str, Tensor]]) -> tuple[Tensor, int]:
    """The sum over the tokens of documents, and their number."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        positions = row.get("position_ids", torch.arange(LENGTH))
        starts = [*(positions == 0).nonzero().flatten().tolist(), LENGTH]
        for begin, end in itertools.pairwise(starts):
            logits = model(input_ids=row["input_ids"][None, begin:end]).logits[0, :-1]
            labels = row["labels"][begin + 1 : end]
            total = total + nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            count += int((labels != -100).sum())
    return total, count


def train_leg(case: Case, index: int, folder: str) -> Seen:
    """One leg, on one of its ranks.

    Args:
        case: the case.
        index: of the leg.
        folder: the first leg saves there, and the second one loads.
    """
    from accel_train import use_chunked_loss

    layout = case.layouts[index]
    accelerator = _accelerator(case, layout)
    model = _model(case)
    if "tp" in layout:
        _divide(model, case.kind, accelerator.torch_device_mesh["tp"])
    if case.chunked:
        use_chunked_loss(model, chunk_size=5)
    optimizer = _optimizer(case, model)
    loader = torch.utils.data.DataLoader(_rows(case), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if index:
        accelerator.load_state(folder)
    number, until = (case.stop or 0) if index else 0, case.stop if index == 0 else None
    seen = Seen([], [], {})
    for batch in loader:
        with accelerator.accumulate(model), Float64():
            if case.means:
                loss = model(**batch, **_counted(accelerator, layout, batch)).loss
                accelerator.backward(loss)
                seen.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            else:
                count = (batch["labels"][..., 1:] != -100).sum()
                loss = model(**batch, num_items_in_batch=1).loss
                accelerator.backward(loss, num_items=count)
                both = accelerator.reduce(torch.stack([loss.detach(), count.double()]), "sum")
                seen.losses.append(float(both[0] / both[1]))
            if accelerator.sync_gradients and case.clips:
                seen.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        number += 1
        if number == until:
            accelerator.save_state(folder)
            return seen
    seen.weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return seen


def _counted(accelerator: Any, layout: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What makes the mean of the ranks' losses that over all tokens, where no loader and no stage does."""
    if any(part in layout for part in ("cp", "sp", "pp")):
        return {}
    count = (batch["labels"][..., 1:] != -100).sum().double()
    return {"num_items_in_batch": accelerator.reduce(count, "mean")}


def _accelerator(case: Case, layout: str) -> Any:
    from accel_train import (
        Accelerator,
        DataLoaderConfiguration,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        PipelineParallelConfig,
    )

    degrees = LAYOUTS[layout]
    stages = PipelineParallelConfig(num_micro_batches=2) if "pp" in layout else None
    plugin = None
    if "dp_shard_size" in (degrees or {}):
        blocks = {"auto_wrap_policy": "transformer_based_wrap"} if case.by_block else {}
        plugin = FullyShardedDataParallelPlugin(**blocks)
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.windows,
        parallelism_config=None if degrees is None else ParallelismConfig(**degrees, pp_handler=stages),
        fsdp_plugin=plugin,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_stateful_dataloader=True),
    )


def _divide(model: nn.Module, kind: str, mesh: Any) -> None:
    """Attention, its norms over heads, and the layers of llama's blocks."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    plan["self_attn.o_proj"] = RowwiseParallel()
    if kind == "qwen3_moe":
        for name in ("q_norm", "k_norm"):
            plan[f"self_attn.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    if kind == "llama":
        plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        plan["mlp.down_proj"] = RowwiseParallel()
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def problem_of(number: int) -> str | None:
    """What differs between a case and one process; None: nothing does."""
    case = Case.draw(number)
    with tempfile.TemporaryDirectory(prefix="accel-test-") as folder:
        legs = [
            worlds.run(train_leg, ranks_of(LAYOUTS[layout]), case, index, f"{folder}/state", timeout=300)
            for index, layout in enumerate(case.layouts)
        ]
    wanted = one_process(case)
    for kind in ("losses", "norms"):
        found = [value for ranks in legs for value in getattr(ranks[0], kind)]
        if problem := difference(found, getattr(wanted, kind), _bound(case)):
            return f"{kind}: {problem}"
    for rank, seen in enumerate(legs[-1]):
        if problem := difference(seen.weights, wanted.weights, _bound(case)):
            return f"weights of rank {rank}: {problem}"
    return None


def _bound(case: Case) -> float:
    return 1e-5 if case.optimizer == "muon" else 1e-7  # Muon sends its updates in bfloat16


KIND = Kind("language", Case.draw, problem_of)
