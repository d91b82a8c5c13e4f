"""The dispatcher in worlds of real ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_state.world.process import PartialState
from accel_train.data import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from accel_train.errors import DataError
from testkit import worlds
from testkit.samples import Numbers

pytestmark = pytest.mark.usefixtures("kept_ranks")


class Map(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        assert PartialState().process_index == 0, "only rank 0 reads"
        return index


class Words(Map):
    def __getitem__(self, index):
        return {"x": torch.full((2,), index), "text": f"word {index}"}


class Ragged(Map):
    """Samples of different lengths."""

    def __getitem__(self, index):
        return torch.full((1 + index % 5,), float(index))


def pad_to_longest(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def prepare(loader, **options):
    state = PartialState(cpu=True)
    options = {"dispatch_batches": True, "put_on_device": True, "device": state.device, **options}
    return prepare_data_loader(loader, **options)


def steps(loader):
    """Everything that a loader says during two epochs."""
    assert isinstance(loader, DataLoaderDispatcher)
    seen = []
    for _ in range(2):
        for batch in loader:
            ends = loader.end_of_dataloader
            rows = batch.tolist() if isinstance(batch, torch.Tensor) else batch
            seen.append((rows, ends, loader.remainder, loader.valid_rows(), loader.batch_rows))
    return seen


def run_steps(build, options):
    return steps(prepare(build(), **options))


def _numbers(n, **loader):
    return lambda: DataLoader(Numbers(n), batch_size=3, **loader)


def test_ten_samples_over_two_ranks():
    first, second = worlds.run(run_steps, 2, _numbers(10), {})
    assert first == [
        ([0, 1, 2], False, -1, None, 3),
        ([6, 7], True, 4, None, 2),
    ] * 2  # fmt: skip
    assert second == [
        ([3, 4, 5], False, -1, None, 3),
        ([8, 9], True, 4, None, 2),
    ] * 2  # fmt: skip


def test_eleven_samples_over_two_ranks():
    first, second = worlds.run(run_steps, 2, _numbers(11), {})
    assert first[1] == ([6, 7, 8], True, 5, (3, 2), 3)
    assert second[1] == ([9, 10, 0], True, 5, (3, 2), 3)


def test_drop_last():
    def both():
        dropped = steps(prepare(DataLoader(Numbers(11), batch_size=3, drop_last=True)))
        exact = steps(prepare(DataLoader(Numbers(12), batch_size=3, drop_last=True)))
        return [[(rows, ends, left) for rows, ends, left, _, _ in seen[:2]] for seen in (dropped, exact)]

    for rank, (dropped, exact) in enumerate(worlds.run(both, 2)):
        assert dropped[0] == (list(range(rank * 3, rank * 3 + 3)), True, 6)
        assert [ends for _, ends, _ in exact] == [False, True]


def test_split_batches():
    def both():
        return steps(prepare(DataLoader(Numbers(10), batch_size=4), split_batches=True))

    first, second = worlds.run(both, 2)
    assert [rows for rows, *_ in first[:3]] == [[0, 1], [4, 5], [8]]
    assert [rows for rows, *_ in second[:3]] == [[2, 3], [6, 7], [9]]
    assert [facts[1:3] for facts in first[:3]] == [(False, -1), (False, -1), (True, 2)]


def lengths():
    def length(n, drop_last=False, **options):
        return len(prepare(DataLoader(Map(n), batch_size=3, drop_last=drop_last), **options))

    with pytest.raises(TypeError):
        len(prepare(DataLoader(Numbers(3), batch_size=3)))
    return length(10), length(10, drop_last=True), length(13), length(7, split_batches=False)


def test_length():
    assert worlds.run(lengths, 2) == [(2, 1, 3, 2)] * 2


def t3_multiset():
    state = PartialState(cpu=True)
    found = []
    for n in (0, 1, 2, 5, 8, 12, 13):
        for options in ({}, {"split_batches": True}):
            for dataset in (Numbers(n), Map(n)):
                loader = prepare(DataLoader(dataset, batch_size=4), **options)
                mine = []
                for batch in loader:
                    valid = loader.valid_rows()
                    mine += batch[: len(batch) if valid is None else valid[state.process_index]].tolist()
                found.append((n, mine, loader.end_of_dataloader))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_t3_every_sample_arrives_once(ranks):
    for cases in zip(*worlds.run(t3_multiset, ranks), strict=True):
        n = cases[0][0]
        assert sorted(index for _, mine, _ in cases for index in mine) == list(range(n))
        assert all(ended for _, _, ended in cases)


def t22_shares():
    """Bytes that arrive at this rank, and what it gets; batches are padded to different lengths."""
    received = [0]
    irecv = dist.irecv

    def counting(message, *args, **kwargs):
        received[0] += message.numel() * message.itemsize
        return irecv(message, *args, **kwargs)

    dist.irecv = counting
    prepare(DataLoader(Map(1)))  # joins the world
    wide = [torch.randn(64, 128) for _ in range(8)]
    loader = prepare(DataLoader(wide, batch_size=None))
    got = [(batch.shape, received[0]) for batch in loader]
    ragged = prepare(DataLoader(Ragged(11), batch_size=2, collate_fn=pad_to_longest))
    rows, shapes = [], []
    for batch in ragged:
        valid = ragged.valid_rows()
        mine = len(batch) if valid is None else valid[PartialState().process_index]
        rows += batch[:mine, 0].tolist()
        shapes.append(tuple(batch.shape))
    return got, received[0], rows, shapes


def test_t22_each_rank_receives_its_slice_and_ragged_batches_work():
    results = worlds.run(t22_shares, 2)
    local = 64 * 128 * 4
    got, _, _, _ = results[1]
    assert len(got) == 4
    assert got[-1][1] <= 1.1 * local * len(got)
    assert results[0][1] == 0  # rank 0 receives nothing
    rows = sorted(row for result in results for row in result[2])
    assert rows == [float(index) for index in range(11)]
    assert len(set(results[0][3] + results[1][3])) > 2


def texts():
    loader = prepare(DataLoader(Words(5), batch_size=2))
    return [(batch["x"][:, 0].tolist(), batch["text"]) for batch in loader]


def test_leaves_that_are_no_tensors():
    first, second = worlds.run(texts, 2)
    assert first == [([0, 1], ["word 0", "word 1"]), ([4], ["word 4"])]
    assert second == [([2, 3], ["word 2", "word 3"]), ([0], ["word 0"])]


def custom_slices():
    def take(data, part, process_index=None, num_processes=None):
        return data[process_index::num_processes]

    return [b.tolist() for b in prepare(DataLoader(Map(8), batch_size=2), slice_fn_for_dispatch=take)]


def test_slice_fn_for_dispatch():
    assert worlds.run(custom_slices, 2) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def failing(kind):
    seen = []
    if kind == "dataset":
        loader = prepare(DataLoader(Numbers(20, fail_at=13), batch_size=2))
    elif kind == "collate":
        loader = prepare(DataLoader(Numbers(20), batch_size=2, collate_fn=refuse))
    elif kind == "workers":
        loader = prepare(
            DataLoader(Numbers(20, fail_at=9), batch_size=2, num_workers=1, multiprocessing_context="fork")
        )
    else:
        loader = prepare(DataLoader(Map(8), batch_size=4), slice_fn_for_dispatch=unequal)
    try:
        seen.extend(batch.tolist() for batch in loader)
    except (LookupError, ArithmeticError) as error:
        told = str(error)
        # The world is still usable, and the loader too.
        dist.barrier()
        world = PartialState().num_processes
        good = [batch.tolist() for batch in prepare(DataLoader(Numbers(2 * world), batch_size=2))]
        return type(error).__name__, told, seen, good, loader.ledger.live
    raise AssertionError("nothing was raised")


def refuse(samples):
    if 8 in samples:
        raise ZeroDivisionError("cannot collate 8")
    return torch.tensor(samples)


def unequal(data, part, process_index=None, num_processes=None):
    raise OverflowError("cannot cut")


@pytest.mark.parametrize(
    ("kind", "error", "message", "batches"),
    [
        ("dataset", "LookupError", "sample 13 cannot be read", 2),
        ("collate", "ZeroDivisionError", "cannot collate 8", 2),
        ("workers", "LookupError", "sample 9 cannot be read", 2),
        ("slice_fn", "OverflowError", "cannot cut", 0),
    ],
)
def test_an_error_on_rank_zero_reaches_all_ranks(kind, error, message, batches):
    results = worlds.run(failing, 3 if kind == "dataset" else 2, kind)
    for rank, (name, told, seen, good, live) in enumerate(results):
        assert name == error
        assert message in told
        assert len(seen) == batches
        assert good == [[2 * rank, 2 * rank + 1]]
        assert live == []


def left_early():
    loader = prepare(DataLoader(Numbers(20), batch_size=2))
    for count, _ in enumerate(loader):
        if count == 1:
            break
    assert loader.ledger.live == []
    return [batch.tolist() for batch in loader]


def test_t4_an_epoch_left_early_leaves_nothing_on_the_wire():
    first, second = worlds.run(left_early, 2)
    assert first == [[i, i + 1] for i in range(0, 20, 4)]
    assert second == [[i + 2, i + 3] for i in range(0, 20, 4)]


def skipping():
    found = []
    for build in (Map, Numbers):
        for options in ({}, {"split_batches": True}):
            loader = prepare(DataLoader(build(26), batch_size=4), use_stateful_dataloader=True, **options)
            whole = [batch.tolist() for batch in loader]
            skipped = skip_first_batches(loader, 2)
            rest = []
            for count, batch in enumerate(skipped):
                rest.append(batch.tolist())
                if count == 0:
                    state = loader.state_dict()
            again = prepare(DataLoader(build(26), batch_size=4), use_stateful_dataloader=True, **options)
            again.load_state_dict(state)
            resumed = [batch.tolist() for batch in again]
            length = len(skipped) if build is Map else len(rest)
            found.append((whole, rest, resumed, state["batches_yielded"], length))
    return found


def test_skipping_and_resuming_count_steps():
    for answers in worlds.run(skipping, 2):
        for whole, rest, resumed, yielded, length in answers:
            assert rest == whole[2:]
            assert resumed == whole[3:]
            assert yielded == 3
            assert length == len(rest)


def two_at_once():
    one = prepare(DataLoader(Numbers(8), batch_size=2))
    two = prepare(DataLoader(Numbers(8), batch_size=1))
    return [(a.tolist(), b.tolist()) for a, b in zip(one, two, strict=False)]


def test_two_dispatchers_in_turn():
    first, second = worlds.run(two_at_once, 2)
    assert first == [([0, 1], [0]), ([4, 5], [2])]
    assert second == [([2, 3], [1]), ([6, 7], [3])]


def shuffled():
    state = PartialState(cpu=True)
    torch.manual_seed(5 if state.process_index == 0 else 77)
    loader = prepare(DataLoader(range(8), batch_size=2, shuffle=True))
    seen = [batch.tolist() for _ in range(2) for batch in loader]
    return seen, torch.rand(1).item()


def test_shuffling_is_rank_zeros():
    (first, draw), (second, _) = worlds.run(shuffled, 2)
    torch.manual_seed(5)
    plain = DataLoader(range(8), batch_size=2, shuffle=True)
    expected = [batch.tolist() for _ in range(2) for batch in plain]
    assert [batch for both in zip(first, second, strict=True) for batch in both] == expected
    assert draw == torch.rand(1).item()


def workers_read():
    loader = prepare(
        DataLoader(
            Map(13), batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
        )
    )
    return [batch.tolist() for _ in range(2) for batch in loader]


def test_workers_read_on_rank_zero_only():
    first, second = worlds.run(workers_read, 2)
    assert [batch for both in zip(first, second, strict=True) for batch in both] == [
        [0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12], [0],
    ] * 2  # fmt: skip


class Unreadable(IterableDataset):
    def __iter__(self):
        raise FileNotFoundError("no files")


class Stopping(Map):
    def __getitem__(self, index):
        if index == 5:
            raise StopIteration
        return index


def caught(build):
    loader = prepare(build())
    seen = []
    try:
        seen.extend(batch.tolist() for batch in loader)
    except (FileNotFoundError, DataError) as error:
        return seen, type(error).__name__, str(error), loader.ledger.live
    return seen


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_cannot_be_opened_is_an_error_on_all_ranks(workers):
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    for seen, name, text, live in worlds.run(caught, 2, lambda: DataLoader(Unreadable(), **options)):
        assert (seen, name, live) == ([], "FileNotFoundError", [])
        assert "no files" in text


def test_a_dataset_that_raises_stop_iteration_does_not_end_the_epoch_silently():
    for rank, (seen, name, text, live) in enumerate(
        worlds.run(caught, 2, lambda: DataLoader(Stopping(12), batch_size=2))
    ):
        assert (seen, name, live) == ([[2 * rank, 2 * rank + 1]], "DataError", [])
        assert "Reading batch 2 " in text
