"""Mixtures of data in an `Accelerator`: windows, metrics, checkpoints, and errors on all ranks."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
FIRST = {"code": 1000, "web": 0}
SIZE = {"code": 22, "web": 50}


class Rows(Dataset):
    """A number, and features that depend on it."""

    def __init__(self, first, size):
        self.first, self.size = first, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        number = self.first + index
        return number, torch.tensor([number % 7, number % 11, 1.0], dtype=torch.float64).sin()


class Stream(IterableDataset):
    def __init__(self, first, size):
        self.rows = Rows(first, size)

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


def prepared(kind="map", batch=4, accumulate=1, split=True, **options):
    from accel_train import Accelerator, DataLoaderConfiguration, MixedDataLoader

    torch.manual_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulate, dataloader_config=DataLoaderConfiguration(split_batches=split)
    )
    torch.manual_seed(0)
    loaders = {name: DataLoader(Rows(FIRST[name], SIZE[name]), batch, shuffle=True) for name in SIZE}
    if kind == "dispatched stream":
        loaders["code"] = DataLoader(Stream(FIRST["code"], SIZE["code"]), batch)
    options = {"stop": "all_exhausted", "weights": {"web": 2, "code": 1}} | options
    return accelerator, accelerator.prepare(MixedDataLoader(loaders, **options))


def numbers(accelerator, mixed):
    """The samples of all ranks in one step, without padding."""
    return lambda batch: accelerator.gather_for_metrics(batch[0]).tolist()


# Training: an interrupted run and an uninterrupted one


def trained(kind, folder, save_at, load, total=40, accumulate=3):
    """Train over epochs of a mixture; what came, and the weights."""
    accelerator, mixed = prepared(kind, accumulate=accumulate)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1)).double()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.05))
    if load:
        torch.manual_seed(99)
        accelerator.load_state(folder)
    found = []
    while mixed.epoch_state.step < total:
        for ids, features in mixed:
            with accelerator.accumulate(model):
                accelerator.backward(model(features).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            found.append((mixed.epoch_state.step, mixed.source, accelerator.gather_for_metrics(ids).tolist()))
            step = mixed.epoch_state.step
            if step == 9:
                mixed.set_weights({"web": 1, "code": 3})
            if step == save_at:
                accelerator.save_state(folder)
                return found, None, None
            if step >= total:
                break
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return found, weights, mixed.counts


@pytest.mark.parametrize("save_at", [5, 16, 22])
@pytest.mark.parametrize(("kind", "world"), [("map", 1), ("map", 2), ("dispatched stream", 2)])
def test_an_interrupted_training_equals_an_uninterrupted_one(tmp_path, kind, world, save_at):
    """In a window, after `set_weights`, in the second epoch of a source: the same samples and bit-equal weights."""
    whole = worlds.run(trained, world, kind, str(tmp_path), None, False)
    first = worlds.run(trained, world, kind, str(tmp_path), save_at, False)
    rest = worlds.run(trained, world, kind, str(tmp_path), None, True)
    for (found, weights, counts), (before, _, _), (after, again, counted) in zip(
        whole, first, rest, strict=True
    ):
        assert [*before, *after] == found
        assert counts == counted
        for expected, parameter in zip(weights, again, strict=True):
            assert torch.equal(expected, parameter)
    assert {source for _, source, _ in whole[0][0]} == set(SIZE)


def windows(kind):
    """Sizes of the windows of two epochs, and how long the epochs are."""
    accelerator, mixed = prepared(kind, accumulate=4)
    model = nn.Linear(3, 1).double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    sizes, lengths, open_ones = [], [], 0
    for _ in range(2):
        length = 0
        for _, features in mixed:
            length += 1
            with accelerator.accumulate(model):
                accelerator.backward(model(features).square().mean())
                open_ones += 1
                if accelerator.sync_gradients:
                    sizes.append(open_ones)
                    open_ones = 0
                optimizer.step()
                optimizer.zero_grad()
        lengths.append(length)
    return sizes, lengths


@pytest.mark.parametrize("kind", ["map", "dispatched stream"])
def test_windows_end_with_the_mixture_and_not_with_a_source(kind):
    for sizes, lengths in worlds.run(windows, 2, kind):
        expected = []
        for length in lengths:
            full, rest = divmod(length, 4)
            expected += [4] * full + ([rest] if rest else [])
        assert sizes == expected


# Other numbers of ranks


def order(folder, save_at, load, total=40):
    accelerator, mixed = prepared("map", stop="never")
    if load:
        accelerator.load_state(folder)
    found = []
    for ids, _ in mixed:
        found.append((mixed.source, accelerator.gather_for_metrics(ids).tolist()))
        if mixed.epoch_state.step == save_at:
            accelerator.save_state(folder)
            break
        if mixed.epoch_state.step == total:
            break
    return found, mixed.counts


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_continues_the_same_order(tmp_path, before, after):
    [(whole, counts)] = worlds.run(order, 1, str(tmp_path), None, False)
    first = worlds.run(order, before, str(tmp_path), 23, False)
    rest = worlds.run(order, after, str(tmp_path), None, True)
    for found, _ in first:
        assert found == whole[:23]
    for found, counted in rest:
        assert found == whole[23:]
        assert counted == counts


# Strategies


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def trained_under(strategy, folder=None, begin=0, end=20):
    """The weights after steps of a mixture; between `begin` and `end` if a folder is given."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from accel_train import (
        Accelerator,
        DataLoaderConfiguration,
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        MixedDataLoader,
        ParallelismConfig,
    )

    options = {
        "single": dict,
        "ddp": dict,
        "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
        "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
        "deepspeed": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)},
    }[strategy]()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=3,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        **options,
    )
    torch.manual_seed(0)
    model = Net() if strategy == "deepspeed" else Net().double()
    if strategy == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    sources = {name: Rows(FIRST[name], SIZE[name]) for name in SIZE}
    loaders = {name: DataLoader(rows, 4, shuffle=True, drop_last=True) for name, rows in sources.items()}
    mixed = MixedDataLoader(loaders, {"web": 2, "code": 1}, stop="never")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, mixed = accelerator.prepare(model, optimizer, mixed)
    if begin:
        accelerator.load_state(folder)
    for _, features in mixed:
        with accelerator.accumulate(model):
            features = features.to(next(model.parameters()).dtype)
            accelerator.backward(model(features).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if mixed.epoch_state.step == end:
            break
    if folder is not None:
        accelerator.save_state(folder)
    return {name: value.double() for name, value in accelerator.get_state_dict(model).items()}, mixed.counts


NO_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="hatch run engines:deepspeed installs it"
)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp", pytest.param("deepspeed", marks=NO_DEEPSPEED)])
def test_a_mixture_trains_as_on_one_process_and_continues_there(tmp_path, strategy):
    """Ranks of tensor parallelism read the same batches, the others their parts of them."""
    bound = 1e-5 if strategy == "deepspeed" else 1e-12  # DeepSpeed trains in float32
    [(right, counts)] = worlds.run(trained_under, 1, "single")
    run = partial(worlds.run, timeout=120, fresh_ranks=strategy == "deepspeed")
    for found, counted in run(trained_under, 2, strategy):
        assert counted == counts
        for name, value in right.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=bound)
    run(trained_under, 2, strategy, str(tmp_path), 0, 12)
    [(found, counted)] = worlds.run(trained_under, 1, "single", str(tmp_path), 12)
    assert counted == counts
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=bound)


# Metrics


def evaluated(kind):
    accelerator, mixed = prepared(kind, split=False, batch=3, stop="all_exhausted")
    found = {name: [] for name in SIZE}
    for ids, _ in mixed:
        found[mixed.source] += accelerator.gather_for_metrics(ids, dataloader=mixed).tolist()
    return found, mixed.counts, mixed.log_values()


@pytest.mark.parametrize("kind", ["map", "dispatched stream"])
def test_metrics_drop_the_padding_of_each_source_and_counts_agree(kind):
    for found, counts, values in worlds.run(evaluated, 2, kind):
        for name, size in SIZE.items():
            numbers = list(range(FIRST[name], FIRST[name] + size))
            epochs, more = divmod(len(found[name]), size)
            assert epochs >= 1
            for epoch in range(epochs):
                assert sorted(found[name][epoch * size : (epoch + 1) * size]) == numbers
            assert len(set(found[name][epochs * size :])) == more
            assert counts[name].samples == len(found[name]) == values[f"samples/{name}"]


# Preparation


def preparing():
    from accel_train import Accelerator, DataLoaderConfiguration, MixedDataLoader

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    plain = DataLoader(Rows(0, 8), 2)
    web, code = accelerator.prepare(DataLoader(Rows(0, 8), 2), DataLoader(Rows(8, 8), 2))
    mixed = MixedDataLoader({"web": web, "code": code}, {"web": 1, "code": 1})
    result = accelerator.prepare(mixed)
    again = accelerator.prepare(result)
    alone = accelerator.prepare_data_loader(MixedDataLoader({"web": plain}, {"web": 1}))
    known = accelerator._dataloaders
    shares = [rows.tolist() for rows, _ in alone]
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        even = [source.share().even_batches for source in alone.sources.values()]
    found = [loader is expected for loader, expected in zip(known, (result, alone), strict=True)]
    return again is result, found, shares, even


def test_sources_become_part_of_the_mixture():
    same, known, shares, even = zip(*worlds.run(preparing, 2), strict=True)
    assert all(same)
    assert known == ([True, True], [True, True])  # the sources alone are no longer loaders of the accelerator
    assert shares == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    assert even == ([False], [False])


# What ranks must agree on


def disagreeing(case):
    from accel_train import Accelerator, MixedDataLoader
    from accel_train.errors import DataError

    accelerator = Accelerator()
    rank = accelerator.process_index
    weights = {"web": 1, "code": 1 + (rank if case == "weights" else 0)}
    seed = rank if case == "seed" else 0
    loaders = {name: DataLoader(Rows(FIRST[name], 8), 2) for name in SIZE}
    mixed = accelerator.prepare(MixedDataLoader(loaders, weights, seed=seed, stop="never"))
    drawn = 0
    try:
        for _ in mixed:
            drawn += 1
            if case == "set_weights":
                mixed.set_weights({"web": 1, "code": 3 + rank})
            elif case == "a wrong weight":
                mixed.set_weights({"web": 1, "code": -1 if rank else 1})
            elif drawn > 3:
                break
    except DataError as error:
        return drawn, str(error)
    return drawn, ""


@pytest.mark.parametrize(
    ("case", "drawn", "texts"),
    [
        ("weights", 0, ["weights of the mixture differ between ranks"] * 2),
        ("seed", 0, ["seed of the mixture differ between ranks: 0 on rank 0, 1 on rank 1"] * 2),
        ("set_weights", 1, ["weights of the mixture differ between ranks"] * 2),
        (
            "a wrong weight",
            1,
            ["Rank 1 refused its mixture: weights: the weight of 'code'", "weights: the weight of"],
        ),
    ],
)
def test_what_differs_between_ranks_is_an_error_on_all(case, drawn, texts):
    for found, text in zip(worlds.run(disagreeing, 2, case), texts, strict=True):
        assert found[0] == drawn
        assert text in found[1]


def saved_with_other_names(folder):
    from accel_train import Accelerator, MixedDataLoader
    from accel_train.errors import DataError

    def build(names):
        accelerator = Accelerator()
        loaders = {name: DataLoader(Rows(0, 8), 2) for name in names}
        return accelerator, accelerator.prepare(MixedDataLoader(loaders, dict.fromkeys(names, 1)))

    accelerator, mixed = build(["web.en/2024", "code"])
    next(iter(mixed))
    accelerator.save_state(folder)
    accelerator, mixed = build(["web.en/2024", "code"])
    accelerator.load_state(folder)
    steps = copy.copy(mixed.epoch_state.step)
    accelerator, mixed = build(["web.en/2024", "books"])
    try:
        accelerator.load_state(folder)
    except DataError as error:
        return steps, str(error)
    return steps, ""


def test_a_checkpoint_of_other_sources_is_refused(tmp_path):
    [(steps, text)] = worlds.run(saved_with_other_names, 1, str(tmp_path))
    assert steps == 1
    assert "it has no 'books', and this mixture has no 'code'" in text
