"""What users write, run as they write it, on one and on two CPU ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
RANKS = pytest.mark.parametrize("ranks", [1, 2])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(x)))


def data(size: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)
    )


def build(lr: float = 0.1, size: int = 24, batch_size: int = 4, shuffle: bool = True) -> Any:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loader = DataLoader(data(size), batch_size=batch_size, shuffle=shuffle)
    return model, optimizer, loader


def weights(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().double().flatten().tolist() for parameter in model.parameters()]


# accelerator = Accelerator(); prepare; backward


def five_lines(order: list[int]) -> Any:
    from accel_train import Accelerator

    accelerator = Accelerator()
    device = accelerator.device
    model, optimizer, loader = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    objects = [model, optimizer, loader, scheduler, "not torch's"]
    prepared = accelerator.prepare(*(objects[i] for i in order))
    model, optimizer, loader, scheduler, text = (prepared[order.index(i)] for i in range(5))
    assert text == "not torch's"
    for _ in range(2):
        for x, y in loader:
            assert x.device == device
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
    return weights(accelerator.unwrap_model(model)), scheduler.scheduler.last_epoch


@RANKS
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [3, 4, 2, 1, 0]])
def test_five_lines(ranks: int, order: list[int]) -> None:
    results = worlds.run(five_lines, ranks, order)
    assert all(result == results[0] for result in results)
    assert results[0][1] == 12  # N ranks take N steps at a time, and have 1/N of the batches
    if ranks == 1:
        model, optimizer, loader = build()
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        assert results[0][0] == weights(model)


# the scheduler left as it is, with the prepared loader's length


def four_lines(epochs: int) -> Any:
    from transformers import get_scheduler

    from accel_train import Accelerator

    accelerator = Accelerator()
    model, optimizer, loader = build()
    loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
    num_training_steps = epochs * len(loader)
    scheduler = get_scheduler(
        "linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=num_training_steps
    )
    steps = 0
    for _ in range(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
    return steps, num_training_steps, scheduler.get_last_lr()


@RANKS
def test_four_lines_with_a_scheduler_left_alone(ranks: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for steps, planned, rates in worlds.run(four_lines, ranks, 3):
        assert steps == planned == 18 // ranks
        assert rates == [0.0]


# accumulate around everything


def accumulated(zero_first: bool) -> Any:
    from accel_train import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = build(shuffle=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    updates, last = 0, weights(model)
    for x, y in loader:
        with accelerator.accumulate(model):
            if zero_first:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.5)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if not zero_first:
                optimizer.zero_grad()
        updates += weights(model) != last
        last = weights(model)
    return updates, scheduler.scheduler.last_epoch, last


@RANKS
def test_accumulate_makes_one_update_per_window(ranks: int) -> None:
    batches = 6 // ranks
    windows = math.ceil(batches / 2)
    zero_last = worlds.run(accumulated, ranks, False)
    for updates, steps, _ in zero_last:
        assert updates == windows
        assert steps == windows * ranks
    assert worlds.run(accumulated, ranks, True) == zero_last


# mixed precision, with the loss outside the model


def low_precision(name: str) -> Any:
    from accel_train import Accelerator

    accelerator = Accelerator(mixed_precision=name)
    model, optimizer, loader = build()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(10):
        for x, y in loader:
            outputs = model(x)
            with accelerator.autocast():
                product = outputs @ outputs.T
                loss = nn.functional.cross_entropy(outputs, y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    epoch = len(losses) // 10
    return str(product.dtype), sum(losses[:epoch]), sum(losses[-epoch:]), all(map(math.isfinite, losses))


@RANKS
@pytest.mark.parametrize(("name", "dtype"), [("fp16", "torch.float16"), ("bf16", "torch.bfloat16")])
def test_mixed_precision_with_autocast_outside_the_model(ranks: int, name: str, dtype: str) -> None:
    for computed, first, last, finite in worlds.run(low_precision, ranks, name):
        assert computed == dtype
        assert finite
        assert last < first


# saving models


def saved(folder: str) -> Any:
    from accel_train import Accelerator, load_checkpoint_in_model

    accelerator = Accelerator()
    model, optimizer, loader = build()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    accelerator.wait_for_everyone()
    accelerator.save_model(model, f"{folder}/safe")
    accelerator.save_model(model, f"{folder}/shards", max_shard_size="200B")
    accelerator.save_model(model, f"{folder}/pickled", safe_serialization=False)
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    expected = weights(unwrapped)
    for kind in ("safe", "shards", "pickled"):
        for parameter in unwrapped.parameters():
            parameter.data.zero_()
        load_checkpoint_in_model(unwrapped, f"{folder}/{kind}", device_map={"": accelerator.device})
        assert weights(unwrapped) == expected, kind
    unwrapped.load_state_dict(torch.load(f"{folder}/pickled/pytorch_model.bin"))
    return expected


@RANKS
def test_saved_models_load(ranks: int, tmp_path: Path) -> None:
    results = worlds.run(saved, ranks, str(tmp_path))
    assert results[0] == results[-1]
    assert (tmp_path / "safe" / "model.safetensors").exists()
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()


def pretrained(folder: str) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    from accel_train import Accelerator

    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = BertForSequenceClassification(config)
    model = accelerator.prepare(model)
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.wait_for_everyone()
    again = BertForSequenceClassification.from_pretrained(folder)
    assert weights(again) == weights(unwrapped)


@RANKS
def test_save_pretrained_through_the_accelerator(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    worlds.run(pretrained, ranks, str(tmp_path))
    assert (tmp_path / "model.safetensors").exists()


# saving and resuming the state


class Counter:
    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def training(project: str, epochs: int, resume: bool, save: bool) -> Any:
    from accel_train import Accelerator, ProjectConfiguration, set_seed

    set_seed(0)
    accelerator = Accelerator(
        project_config=ProjectConfiguration(project, automatic_checkpoint_naming=True, total_limit=2)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if resume:
        accelerator.load_state()
    first = counter.seen
    for _ in range(first, epochs):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
        counter.seen += 1
        if save:
            accelerator.save_state()
    return first, weights(accelerator.unwrap_model(model))


@RANKS
def test_a_resumed_training_ends_where_the_uninterrupted_one_does(ranks: int, tmp_path: Path) -> None:
    expected = worlds.run(training, ranks, str(tmp_path / "whole"), 4, False, False)
    worlds.run(training, ranks, str(tmp_path / "parts"), 2, False, True)
    resumed = worlds.run(training, ranks, str(tmp_path / "parts"), 4, True, True)
    assert [first for first, _ in resumed] == [2] * ranks
    assert [state for _, state in resumed] == [state for _, state in expected]
    names = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir())
    assert names == ["checkpoint_2", "checkpoint_3"]


def inside_an_epoch(folder: str, stop_after: int | None) -> Any:
    from accel_train import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    model, optimizer, loader = build()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(accelerator.process_index if stop_after is not None else 99)
    seen = []
    if stop_after is None:
        accelerator.load_state(folder)
    for number, (x, _) in enumerate(loader, start=1):
        seen.append(x.sum().item())
        if number == stop_after:
            accelerator.save_state(folder)
    return seen


@RANKS
def test_a_stateful_loader_continues_inside_an_epoch(ranks: int, tmp_path: Path) -> None:
    whole = worlds.run(inside_an_epoch, ranks, str(tmp_path / "state"), 2)
    rest = worlds.run(inside_an_epoch, ranks, str(tmp_path / "state"), None)
    assert rest == [seen[2:] for seen in whole]


# an optimizer whose state is already filled


def filled_optimizer() -> Any:
    from accel_train import Accelerator

    model, optimizer, loader = build()
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        break
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    return all(
        optimizer.state[parameter]["momentum_buffer"].device == accelerator.device
        for parameter in accelerator.unwrap_model(model).parameters()
    )


@RANKS
def test_a_filled_optimizer_keeps_its_state_on_the_device(ranks: int) -> None:
    assert worlds.run(filled_optimizer, ranks) == [True] * ranks


# evaluation


def evaluated(size: int) -> Any:
    from accel_train import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(size)), batch_size=4))
    by_hand, exact = [], []
    for (x,) in loader:
        by_hand.append(accelerator.gather(x).cpu().numpy())
        exact.append(accelerator.gather_for_metrics(x))
    import numpy

    return numpy.concatenate(by_hand)[:size].tolist(), torch.cat(exact).tolist()


@RANKS
@pytest.mark.parametrize("size", [3, 4, 8, 13, 21, 22])
def test_evaluation_by_hand_and_for_metrics_is_exact(ranks: int, size: int) -> None:
    for by_hand, exact in worlds.run(evaluated, ranks, size):
        assert by_hand == list(range(size))
        assert exact == list(range(size))


# where code runs


def who_runs() -> Any:
    from tqdm.auto import tqdm

    from accel_train import Accelerator

    accelerator = Accelerator()
    ran = []

    @accelerator.on_main_process
    def main() -> None:
        ran.append("main")

    @accelerator.on_local_main_process
    def local_main() -> None:
        ran.append("local main")

    @accelerator.on_process(process_index=1)
    def second() -> None:
        ran.append("second")

    @accelerator.on_local_process(local_process_index=1)
    def local_second() -> None:
        ran.append("local second")

    @accelerator.on_last_process
    def last() -> None:
        ran.append("last")

    for function in (main, local_main, second, local_second, last):
        function()
    if accelerator.is_main_process:
        ran.append("is main")
    with accelerator.main_process_first():
        pass
    bar = tqdm(range(3), disable=not accelerator.is_local_main_process)
    ran.append(f"bar {not bar.disable}")
    bar.close()
    return ran


def test_code_runs_exactly_where_it_says() -> None:
    assert worlds.run(who_runs, 2) == [
        ["main", "local main", "is main", "bar True"],
        ["second", "local second", "last", "bar False"],
    ]
    [alone] = worlds.run(who_runs, 1)
    assert alone == ["main", "local main", "second", "local second", "last", "is main", "bar True"]


# random states


def augmentation(rng_types: list[str] | None) -> Any:
    from accel_train import Accelerator

    accelerator = Accelerator(rng_types=rng_types)
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True))
    seen, drawn = [], None
    for (x,) in loader:
        drawn = torch.rand(1).item() if drawn is None else drawn
        seen += accelerator.gather(x).tolist()
    return seen, drawn


def test_shuffling_agrees_between_ranks_and_augmentation_differs() -> None:
    (first, one), (second, other) = worlds.run(augmentation, 2, None)
    assert first == second
    assert sorted(first) == list(range(8))
    assert one != other


def test_rng_types_torch_shares_more() -> None:
    (first, one), (second, other) = worlds.run(augmentation, 2, ["torch"])
    assert first == second
    assert sorted(first) == list(range(8))
    assert one == other


# models larger than memory


def big_model(folder: str) -> list[Any]:
    from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch

    x = torch.linspace(-1, 1, 12).view(3, 4)
    answers = []
    for options in (
        {},
        {"no_split_module_classes": ["Linear"]},
        {"offload_folder": f"{folder}/offload", "max_memory": {"cpu": "150B"}},
    ):
        with init_empty_weights():
            model = Net()
        model = load_checkpoint_and_dispatch(model, folder, device_map="auto", **options)
        with torch.no_grad():
            answers.append((set(model.hf_device_map.values()), model(x).tolist()))
    return answers


@RANKS
def test_a_model_larger_than_memory_answers(ranks: int, tmp_path: Path) -> None:
    from accel_ckpt import save_model

    torch.manual_seed(0)
    model = Net()
    save_model(model, tmp_path, max_shard_size="200B")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        expected = model(torch.linspace(-1, 1, 12).view(3, 4)).tolist()
    for answers in worlds.run(big_model, ranks, str(tmp_path)):
        assert [answer for _, answer in answers] == [expected] * 3
        assert answers[0][0] == {"cpu"}
        assert "disk" in answers[2][0]
