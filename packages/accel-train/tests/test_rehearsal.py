"""What a rehearsal observes; batches, rows and bytes are counted by hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_state.world.rehearsal import Rehearsal
from accel_train.data import prepare_data_loader
from accel_train.rehearsal import NotSaved, RehearsalEnd, TrainingRehearsal, leaves_out, local


class Model(nn.Module):
    """56 bytes that are trained, 8 that are frozen, 16 of a buffer; one parameter is there twice."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)  # 36 + 12
        self.tied = self.body
        self.narrow = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))  # 8
        self.frozen = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)  # 8
        self.register_buffer("mean", torch.zeros(4))  # 16


def here(*optimizers, models=(), loaders=(), accumulation=1, degrees=None):
    strategy = SimpleNamespace(name="ddp", batch=SimpleNamespace(size=4))
    mesh = SimpleNamespace(degrees=degrees or {"dp_replicate": 4, "tp": 1}, device_mesh=None)
    plan = SimpleNamespace(strategy=strategy, precision=SimpleNamespace(name="bf16"), mesh=mesh)
    return SimpleNamespace(
        plan=plan,
        accumulator=SimpleNamespace(num_steps=accumulation),
        models=list(models),
        prepared_models=list(models),
        optimizers=list(optimizers),
        loaders=list(loaders),
    )


def following(found, steps=2):
    rehearsal = Rehearsal(steps)
    training = TrainingRehearsal(rehearsal)
    training.follow(found)
    return rehearsal, training


def step(training, optimizer):
    training.before_step(optimizer)
    optimizer.step()
    training.after_step(optimizer)


def test_memory_of_a_script_that_fails_in_a_forward_is_that_before_it():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    rehearsal, training = following(here(optimizer, models=[model]))
    training.ledger.yielded(object())
    model.body.weight = nn.Parameter(torch.zeros(300, 300))  # as FSDP2 gathers
    assert rehearsal.report()["accelerator"]["memory"]["parameters"] == 64
    training.ledger.yielded(object())
    assert rehearsal.report()["accelerator"]["memory"]["parameters"] == 64


def test_training_ends_after_the_wanted_steps():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    _, training = following(here(optimizer), steps=3)
    for _ in range(3):
        step(training, optimizer)
    with pytest.raises(RehearsalEnd) as end:
        step(training, optimizer)
    assert end.value.code == 0, "the script ends as by sys.exit()"
    assert isinstance(end.value, SystemExit)


def test_every_optimizer_takes_its_steps():
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(2))
    _, training = following(here(first, second), steps=2)
    for _ in range(4):
        step(training, first)
    step(training, second)
    training.end_if_done()
    step(training, second)
    with pytest.raises(RehearsalEnd):
        training.before_step(first)


def test_an_optimizer_that_never_steps_is_not_waited_for_without_end():
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(2))
    _, training = following(here(first, second), steps=2)
    for _ in range(2 + 16):
        step(training, first)
    with pytest.raises(RehearsalEnd):
        training.before_step(first)


def test_a_batch_after_the_last_step_ends_the_script():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    found = here(optimizer)
    _, training = following(found, steps=1)
    loader = prepare_data_loader(
        DataLoader(range(8), 2), num_processes=1, process_index=0, ledger=training.ledger
    )
    seen = []

    def script():
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == 2:
                step(training, optimizer)

    with pytest.raises(RehearsalEnd):
        script()
    assert seen == [[0, 1], [2, 3]]
    evaluation = following(here(), steps=1)[1]
    loader = prepare_data_loader(
        DataLoader(range(4), 2), num_processes=1, process_index=0, ledger=evaluation.ledger
    )
    assert len(list(loader)) == 2, "without optimizers nothing is waited for"


def test_memory_is_what_this_rank_holds():
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    rehearsal, training = following(here(optimizer, models=[model]))
    assert rehearsal.report()["accelerator"]["memory"] == {
        "parameters": 64,
        "gradients": 0,
        "optimizer": 0,
        "buffers": 16,
    }
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    step(training, optimizer)
    optimizer.zero_grad()
    # Two states of each element, in its dtype, and a count of steps for each of three tensors.
    assert rehearsal.report()["accelerator"]["memory"] == {
        "parameters": 64,
        "gradients": 56,
        "optimizer": 2 * 56 + 3 * 4,
        "buffers": 16,
    }


def test_a_divided_tensor_counts_with_its_part():
    part = torch.ones(2)
    divided = SimpleNamespace(to_local=lambda: part)
    assert local(divided) is part
    assert local(part) is part


def test_the_report_says_what_runs():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    found = here(optimizer, models=[model], accumulation=3, degrees={"dp_replicate": 4, "tp": 2, "cp": 1})
    rehearsal, training = following(found, steps=5)
    step(training, optimizer)
    step(training, optimizer)
    report = rehearsal.report()["accelerator"]
    assert report["strategy"] == "ddp"
    assert report["precision"] == "bf16"
    assert report["mesh"] == {"dp_replicate": 4, "tp": 2}
    assert report["ranks that read different samples"] == 4
    assert report["gradient accumulation steps"] == 3
    assert report["optimizer steps taken"] == 2
    assert report["models"] == [{"class": "Model", "parameters": 17, "trained": 16}]
    assert report["loaders"] == []


def test_each_accelerator_has_a_section():
    rehearsal = Rehearsal(1)
    for _ in range(3):
        TrainingRehearsal(rehearsal).follow(here())
    assert list(rehearsal.sections) == ["accelerator", "accelerator 1", "accelerator 2"]


class Samples:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def described(loader, ranks, rank=0, accumulation=1, **options):
    prepared = prepare_data_loader(loader, num_processes=ranks, process_index=rank, **options)
    rehearsal, _ = following(here(loaders=[prepared], accumulation=accumulation))
    [found] = rehearsal.report()["accelerator"]["loaders"]
    return found


def test_what_a_rank_reads_in_an_epoch():
    """22 samples, 3 ranks, 2 samples each: 3 full rounds of 6, and 4 more that are completed with 2."""
    found = described(DataLoader(Samples(22), 2), 3, rank=2, accumulation=3)
    assert found == {
        "class": "DataLoaderShard",
        "dataset": "Samples",
        "samples": 22,
        "batch size of this rank": 2,
        "global batch size": 6,
        "batches of this rank": 4,
        "optimizer steps per epoch": 2,
        "batches in the last window": 1,
        "rows of this rank": 8,
        "rows of all ranks": 24,
        "problems": [],
    }


@pytest.mark.parametrize(
    ("accumulation", "steps", "last"), [(1, 4, 1), (2, 2, 2), (3, 2, 1), (4, 1, 4), (8, 1, 4)]
)
def test_windows_of_four_batches(accumulation, steps, last):
    found = described(DataLoader(Samples(22), 2), 3, accumulation=accumulation)
    assert (found["optimizer steps per epoch"], found["batches in the last window"]) == (steps, last)


def test_uneven_ranks():
    """18 samples in full rounds; of 3 more rank 0 has 2, rank 1 has 1 and rank 2 has none."""
    rows = []
    for rank in range(3):
        found = described(DataLoader(Samples(21), 2), 3, rank=rank, even_batches=False)
        rows.append((found["batches of this rank"], found["rows of this rank"]))
        assert found["rows of all ranks"] == 21
        [problem] = found["problems"]
        assert problem["kind"] == "warning"
        assert "different numbers of batches, 4 and 3 (even_batches is off)" in problem["text"]
        assert "join_uneven_inputs" in problem["text"]
    assert rows == [(4, 8), (4, 7), (3, 6)]


@pytest.mark.parametrize(
    ("size", "options", "drop_last", "kind", "text"),
    [
        (5, {}, True, "error", "has 5 samples, and one step of all ranks takes 8: drop_last drops the only"),
        (3, {"even_batches": False}, False, "error", "2 of 4 ranks get no batch"),
        (3, {}, False, "warning", "5 of its rows are repeated samples"),
    ],
)
def test_data_that_is_too_small_for_the_world(size, options, drop_last, kind, text):
    found = described(DataLoader(Samples(size), 2, drop_last=drop_last), 4, rank=1, **options)
    [problem] = found["problems"]
    assert problem["kind"] == kind
    assert text in problem["text"]


def test_a_stream_has_no_counted_share():
    found = described(DataLoader(Endless(), 2), 2)
    assert found["samples"] is None
    assert found["batches of this rank"] is None
    assert found["optimizer steps per epoch"] is None
    assert found["batches in the last window"] is None
    assert found["dataset"] == "Endless"
    assert found["problems"] == []
    assert "rows of this rank" not in found


@pytest.mark.parametrize("together", [False, True])
def test_nothing_is_saved_in_a_rehearsal(together):
    rehearsal, waited = Rehearsal(1), []
    process = SimpleNamespace(rehearsal=rehearsal, wait_for_everyone=lambda: waited.append(1))
    for _ in range(2):
        assert leaves_out(SimpleNamespace(process=process), "save_state", Path("out"), together=together)
    assert len(waited) == (2 if together else 0)
    [note] = rehearsal.notes
    assert note.startswith("save_state('out') wrote nothing")
    process.rehearsal = None
    assert not leaves_out(SimpleNamespace(process=process), "save_state", Path("out"), together=together)
    assert len(waited) == (2 if together else 0), "an ordinary save waits by itself"


def test_the_handle_of_a_save_that_is_left_out():
    handle = NotSaved(Path("out"))
    assert handle.done() is True
    assert handle.wait() is None
    assert handle.result(timeout=0.1) == Path("out")
