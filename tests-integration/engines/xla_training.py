"""What `test_xla.py` runs where torch_xla is installed: `python xla_training.py FUNCTION FOLDER [OPTIONS as JSON]`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

ROWS, WIDTH = 24, 8


class Rows(Dataset[Any]):
    """Features, a target, and a number of items, the same everywhere."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(ROWS, WIDTH, generator=generator)
        self.y = torch.randn(ROWS, generator=generator)
        self.items = torch.randint(1, 5, (ROWS,), generator=generator)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index], self.y[index], self.items[index]


class Tied(nn.Module):
    """Two layers with one weight, and a head; dropout on the device."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.tanh(self.first(x)))
        return self.head(torch.tanh(self.second(x))).squeeze(-1)


def make_model(seed: int = 0, dropout: float = 0.0) -> Tied:
    torch.manual_seed(seed)
    return Tied(dropout)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2)


def losses_of(outputs: Tensor, y: Tensor, items: Tensor, by_items: bool) -> Tensor:
    errors = (outputs.float() - y) ** 2
    return (errors * items).sum() if by_items else errors.mean()


def on_host(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def make_accelerator(options: dict[str, Any]) -> Any:
    from accel_train import Accelerator, XlaPlugin

    return Accelerator(
        strategy=XlaPlugin(spmd=True) if options.get("spmd") else None,
        mixed_precision=options.get("precision", "no"),
        gradient_accumulation_steps=options.get("accumulation", 1),
    )


def train(folder: Path, options: dict[str, Any]) -> None:
    """Two epochs; what is seen goes to `folder`, one file for each rank."""
    accelerator = make_accelerator(options)
    assert str(accelerator.distributed_type) == "DistributedType.XLA", accelerator.distributed_type
    assert accelerator.device == torch.device("xla", 0), accelerator.device
    model = make_model(seed=accelerator.process_index)  # rank 0's weights count
    model, optimizer, loader = accelerator.prepare(
        model, make_optimizer(model), DataLoader(Rows(), batch_size=options["batch"])
    )
    assert model.first.weight is model.second.weight, "tied weights stay tied"
    seen: dict[str, list[Any]] = {"losses": [], "norms": [], "weights": [], "rows": [], "specs": []}
    for _ in range(2):
        for index, x, y, items in loader:
            if options.get("spmd"):
                seen["specs"].append(sharding_of(x))
            with accelerator.accumulate(model):
                by_items = options.get("items", False)
                loss = losses_of(model(x), y, items, by_items)
                accelerator.backward(loss, **({"num_items": items.sum()} if by_items else {}))
                if accelerator.sync_gradients and "norm" in options:
                    seen["norms"].append(
                        accelerator.clip_grad_norm_(model.parameters(), options["norm"]).item()
                    )
                if accelerator.sync_gradients and "value" in options:
                    accelerator.clip_grad_value_(model.parameters(), options["value"])
                optimizer.step()
                optimizer.zero_grad()
            seen["losses"].append(loss.item())
            seen["rows"].append(accelerator.gather_for_metrics(index).tolist())
            if accelerator.sync_gradients:
                seen["weights"].append(on_host(accelerator.get_state_dict(model)))
    torch.save(seen, folder / f"seen_{accelerator.process_index}.pt")
    accelerator.end_training()


def sharding_of(tensor: Tensor) -> str:
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def programs(folder: Path, options: dict[str, Any]) -> None:
    """How many programs are compiled and run in each step, when the script reads no value."""
    from torch_xla.debug import metrics

    accelerator = make_accelerator(options)
    model = make_model()
    model, optimizer, loader = accelerator.prepare(
        model, make_optimizer(model), DataLoader(Rows(), batch_size=3)
    )

    counted = []
    for _, x, y, items in loader:
        accelerator.backward(losses_of(model(x), y, items, False))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        counted.append([metrics.counter_value(name) or 0 for name in ("UncachedCompile", "CachedCompile")])
    (folder / "counted.json").write_text(json.dumps(counted))


def control(folder: Path, options: dict[str, Any]) -> None:
    """Process control and collectives on two ranks."""
    from accel_state import PartialState, broadcast, gather_object, synchronize_rng_state
    from accel_train import Accelerator

    accelerator = Accelerator()
    rank, device = accelerator.process_index, accelerator.device
    assert (accelerator.num_processes, PartialState().backend) == (2, "gloo")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        accelerator.print("once")
    assert printed.getvalue() == ("once\n" if rank == 0 else "")
    assert accelerator.on_main_process(lambda: "here")() == ("here" if rank == 0 else None)
    with accelerator.main_process_first():
        mark = folder / "mark"
        mark.touch() if rank == 0 else None
        assert mark.exists()
    mine = {"rows": torch.full((2, 3), float(rank), device=device), "one": torch.tensor(rank, device=device)}
    everyone = accelerator.gather(mine)
    assert everyone["rows"].device == device
    assert everyone["rows"][:, 0].tolist() == [0, 0, 1, 1]
    assert everyone["one"].tolist() == [0, 1]
    assert accelerator.reduce(mine["rows"])[0].tolist() == [1, 1, 1]
    assert accelerator.reduce(mine["rows"], "mean")[0].tolist() == [0.5, 0.5, 0.5]
    assert accelerator.reduce(mine["rows"].bfloat16(), "max").dtype is torch.bfloat16
    large = torch.full((1 << 19,), rank, dtype=torch.float32, device=device)  # more than one small message
    assert accelerator.reduce(large)[-1].item() == 1
    assert accelerator.gather(large)[[0, -1]].tolist() == [0, 1]
    assert broadcast(torch.full((3,), rank, device=device), from_process=1).tolist() == [1, 1, 1]
    assert accelerator.pad_across_processes(torch.ones(rank + 1, device=device)).tolist() == [1, rank]
    assert gather_object([rank]) == [0, 1]
    torch.rand(3, device=device) if rank else None
    synchronize_rng_state("xla")
    drawn = accelerator.gather(torch.rand(1, device=device))
    assert drawn[0] == drawn[1], "after rank 0's state was copied"
    accelerator.set_trigger() if rank else None
    assert accelerator.check_trigger()
    try:
        accelerator.gather(torch.ones(2 + rank, device=device)[:, None].expand(-1, 1 + rank))
    except Exception as error:
        (folder / f"refused_{rank}").write_text(f"{type(error).__name__}: {error}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def save(folder: Path, options: dict[str, Any]) -> None:
    """Train one epoch of two and save; then the second epoch, which a resumed run must equal."""
    accelerator, model, optimizer, loader = _resumable(options, seed=0)
    _epoch(accelerator, model, optimizer, loader)
    accelerator.save_state(folder / "state")
    accelerator.save_state(folder / "asynchronous", asynchronous=True).result()
    accelerator.save_state(folder / "pickled", safe_serialization=False)
    accelerator.save_model(model, folder / "model")
    accelerator.save({"weights": model.state_dict(), "step": 3}, folder / "saved.bin")
    torch.save(on_host(accelerator.get_state_dict(model)), folder / "first.pt")
    _epoch(accelerator, model, optimizer, loader)
    torch.save(on_host(accelerator.get_state_dict(model)), folder / "second.pt")


def resume(folder: Path, options: dict[str, Any]) -> None:
    """The second epoch, from a state."""
    accelerator, model, optimizer, loader = _resumable(options, seed=5)
    accelerator.load_state(folder / options["state"])
    assert model.first.weight is model.second.weight
    assert model.first.weight.device.type == "xla"
    _epoch(accelerator, model, optimizer, loader)
    torch.save(on_host(accelerator.get_state_dict(model)), folder / "resumed.pt")


def average(folder: Path, options: dict[str, Any]) -> None:
    """An epoch with an average of the weights, applied in its middle, with the weights after each step."""
    from accel_train import AveragedWeights

    accelerator, model, optimizer, loader = _resumable(options, seed=0)
    averaged = AveragedWeights(accelerator, model, decay=0.5)
    seen: dict[str, list[Any]] = {"weights": [], "averages": []}
    for _, x, y, items in loader:
        accelerator.backward(losses_of(model(x), y, items, False))
        optimizer.step()
        optimizer.zero_grad()
        averaged.update()
        seen["weights"].append(on_host(accelerator.get_state_dict(model)))
        with averaged.applied():
            model(x).sum().item()
            seen["averages"].append(on_host(accelerator.get_state_dict(model)))
    torch.save(seen, folder / f"averaged_{accelerator.process_index}.pt")


def _resumable(options: dict[str, Any], seed: int) -> tuple[Any, Any, Any, Any]:
    from accel_state import set_seed

    set_seed(11 + seed)
    accelerator = make_accelerator(options)
    model = make_model(seed, dropout=options.get("dropout", 0.0))
    loader = DataLoader(Rows(), batch_size=4, shuffle=True)
    return accelerator, *accelerator.prepare(model, make_optimizer(model), loader)


def _epoch(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for _, x, y, items in loader:
        accelerator.backward(losses_of(model(x), y, items, False))
        optimizer.step()
        optimizer.zero_grad()


def refuse(folder: Path, options: dict[str, Any]) -> None:
    """What `Accelerator` says to arguments."""
    from accel_train import Accelerator, XlaPlugin

    if options.get("threads"):
        import torch_xla.runtime as runtime

        runtime.world_size = lambda: 4  # as in a process of torch_xla.launch, which has ranks of its own
    arguments = dict(options["arguments"])
    if arguments.get("strategy") == "spmd":
        arguments["strategy"] = XlaPlugin(spmd=True)
    try:
        Accelerator(**arguments)
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        (folder / f"refused_{rank}").write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
