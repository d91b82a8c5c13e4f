"""Streams of Hugging Face's datasets and of Grain: prepared loaders continue inside an epoch, without torchdata.

The oracle is the uninterrupted epoch of the plain dataset: what was read before and after the interruption is compared
with what the package itself yields.
"""

import copy
import itertools
import sys

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from accel_train import Accelerator, ArgumentTypeError, DataLoaderConfiguration, GrainDataset
from testkit import worlds

datasets = pytest.importorskip("datasets", reason="runs with: hatch run engines:datasets")
grain = pytest.importorskip("grain", reason="runs with: hatch run engines:datasets")

SIZE, BATCH = 53, 2


def squared(row):
    return {"id": row["id"], "square": row["id"] ** 2}


def streams(shards=4, size=SIZE):
    return datasets.Dataset.from_dict({"id": list(range(size))}).to_iterable_dataset(num_shards=shards)


def plain():
    return streams()


def mapped():
    return streams().map(squared).filter(lambda row: row["id"] % 7 != 3)


def batched_map():
    return streams().map(
        lambda rows: {"id": [i for i in rows["id"] for _ in range(2)]}, batched=True, batch_size=5
    )


def interleaved():
    return datasets.interleave_datasets(
        [streams(2, 30), streams(2, 20).map(lambda row: {"id": row["id"] + 100})],
        probabilities=[0.6, 0.4],
        seed=3,
        stopping_strategy="all_exhausted",
    )


def buffered():
    return streams().shuffle(seed=5, buffer_size=9)


def taken():
    return streams().skip(3).take(40)


def torch_format():
    return streams().with_format("torch")


def grain_stream():
    return GrainDataset(
        grain.MapDataset.range(SIZE).shuffle(seed=2).map(lambda x: {"id": int(x)}).to_iter_dataset()
    )


def grain_filtered():
    return GrainDataset(
        grain.MapDataset.range(SIZE)
        .shuffle(seed=2)
        .to_iter_dataset()
        .filter(lambda x: x % 5 != 1)
        .map(lambda x: {"id": int(x)})
    )


def grain_by_epoch():
    return GrainDataset(
        lambda epoch: (
            grain.MapDataset.range(SIZE).shuffle(seed=epoch).map(lambda x: {"id": int(x)}).to_iter_dataset()
        )
    )


def grain_prefetching():
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return GrainDataset(grain.MapDataset.range(SIZE).map(lambda x: {"id": int(x)}).to_iter_dataset(options))


def one_shard():
    """Fewer files than ranks: every rank reads all of it."""
    return streams(1)


HUGGING_FACE = [plain, mapped, batched_map, interleaved, taken, torch_format]
GRAIN = [grain_stream, grain_filtered, grain_by_epoch, grain_prefetching]


def prepare(build, workers=0, persistent=False, dispatch=False, pinned=False):
    config = DataLoaderConfiguration(dispatch_batches=dispatch, use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = DataLoader(
        build(),
        batch_size=BATCH,
        num_workers=workers,
        persistent_workers=persistent,
        multiprocessing_context="fork" if workers else None,
    )
    return accelerator.prepare(loader)


def ids(batch):
    return batch["id"].tolist()


def left_after(build, cut, epoch, **options):
    """What came before `cut` batches of an epoch; what comes after, and the next epoch, uninterrupted and resumed."""
    loader = prepare(build, **options)
    for _ in range(epoch):
        list(loader)
    iterator = iter(loader)
    before = [ids(batch) for batch in itertools.islice(iterator, cut)]
    state = copy.deepcopy(loader.state_dict())
    rest = [ids(batch) for batch in iterator]
    following = [ids(batch) for batch in loader]
    fresh = prepare(build, **options)
    fresh.load_state_dict(state)
    again = [ids(batch) for batch in fresh]
    return before, rest, again, following, [ids(batch) for batch in fresh], state["source"] is not None


@pytest.fixture(autouse=True)
def without_torchdata(monkeypatch):
    """An import of it fails, wherever these tests run."""
    monkeypatch.setitem(sys.modules, "torchdata", None)


@pytest.mark.parametrize("build", HUGGING_FACE + GRAIN)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("cut", "epoch"), [(9, 0), (1, 1)])
def test_t5_one_process_continues(build, workers, cut, epoch):
    before, rest, again, following, after, asked = left_after(build, cut, epoch, workers=workers)
    assert asked
    assert again == rest
    assert after == following
    if not workers:  # the package itself
        dataset = build()
        dataset.set_epoch(epoch)
        assert [i for batch in before + rest for i in batch] == [int(row["id"]) for row in dataset]


@pytest.mark.parametrize("build", [plain, mapped, grain_stream])
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_t5_it_continues_anywhere(build, workers):
    """Workers end at different times, since their parts are of different size."""
    total = len(list(prepare(build, workers)))
    for cut in range(1, total, 1 if not workers else 3):
        _, rest, again, *_ = left_after(build, cut, 0, workers=workers)
        assert again == rest, cut


@pytest.mark.parametrize("build", [plain, grain_by_epoch])
@pytest.mark.parametrize("cut", [3, 6])
def test_workers_that_are_kept_go_on(build, cut):
    _, rest, again, following, after, _ = left_after(build, cut, 1, workers=2, persistent=True)
    assert again == rest
    assert after == following


def test_a_shuffle_buffer_is_read_again():
    """Its content is no part of the state of `datasets`, so the position alone would lose samples."""
    before, rest, again, following, after, asked = left_after(buffered, 6, 1)
    assert not asked
    assert again == rest
    assert after == following
    assert sorted(i for batch in before + again for i in batch) == list(range(SIZE))


def reads(build, cut):
    """How many rows a resumed loader reads again."""
    seen = []

    def count(row):
        seen.append(row["id"])
        return row

    def counted():
        return build().map(count)

    loader = prepare(counted)
    for _ in itertools.islice(iter(loader), cut):
        pass
    state = loader.state_dict()
    fresh = prepare(counted)
    fresh.load_state_dict(state)
    seen.clear()
    first = ids(next(iter(fresh)))
    return first, len(seen)


def test_nothing_is_read_again():
    first, read = reads(plain, 15)
    assert first == [30, 31]
    assert read <= 4


def on_two_ranks(build, cut, workers, dispatch):
    sys.modules["torchdata"] = None
    before, rest, again, following, after, asked = left_after(
        build, cut, 1, workers=workers, dispatch=dispatch
    )
    return before, rest, again, following == after, asked


@pytest.mark.parametrize(
    "build", [plain, mapped, one_shard, interleaved, grain_stream, grain_by_epoch, buffered]
)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dispatch", [False, True])
def test_t5_two_ranks_continue(build, workers, dispatch):
    found = worlds.run(on_two_ranks, 2, build, 4, workers, dispatch, timeout=120)
    for _, rest, again, same, _ in found:
        assert again == rest
        assert same
    assert found[0][4] == (build is not buffered)
    seen = {i for before, rest, *_ in found for batch in before + rest for i in batch}
    dataset = build()
    dataset.set_epoch(1)
    assert seen == {int(row["id"]) for row in dataset}


def drawing():
    """Draws random numbers while it is read, in workers as well."""

    def draw(row):
        info = get_worker_info()
        return {
            "id": row["id"] * 1000 + int(torch.randint(0, 1000, ())),
            "worker": 0 if info is None else info.id,
        }

    return streams().map(draw)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_continue_too(tmp_path, workers):
    def build():
        config = DataLoaderConfiguration(dispatch_batches=False, use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        loader = DataLoader(
            drawing(), 2, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
        return accelerator, accelerator.prepare(loader)

    torch.manual_seed(7)
    accelerator, loader = build()
    iterator = iter(loader)
    for _ in itertools.islice(iterator, 5):
        pass
    accelerator.save_state(tmp_path / "state")
    rest = [ids(batch) for batch in iterator]
    torch.manual_seed(8)
    accelerator, fresh = build()
    accelerator.load_state(tmp_path / "state")
    assert [ids(batch) for batch in fresh] == rest


def test_a_map_dataset_of_grain_is_read_by_index():
    dataset = grain.MapDataset.range(20).map(lambda x: int(x) * 10)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )

    def build():
        return accelerator.prepare(DataLoader(dataset, 4, shuffle=True))

    torch.manual_seed(0)
    loader = build()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    fresh = build()
    fresh.load_state_dict(state)
    assert [batch.tolist() for batch in fresh] == rest
    with pytest.raises(ArgumentTypeError, match="Give it to DataLoader itself"):
        GrainDataset(dataset)
    with pytest.raises(ArgumentTypeError, match="got int"):
        GrainDataset(3)
