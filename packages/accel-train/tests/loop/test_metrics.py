"""gather_for_metrics: exactly one row per sample, whatever is gathered."""

from collections import namedtuple

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds
from testkit.samples import Numbers

pytestmark = pytest.mark.usefixtures("kept_ranks")
Pair = namedtuple("Pair", "words x")


def words(x):
    return [f"w{i}" for i in x.tolist()]


VALUES = {
    "mapping": (lambda x: {"x": x, "words": words(x), "none": None}, False),
    "tuple with a list": (lambda x: (words(x), x), False),
    "named tuple": (lambda x: Pair(words(x), x), False),
    "nested": (lambda x: {"outer": ({"words": words(x)}, [x, x + 1])}, False),
    "tuple of objects": (lambda x: tuple(words(x)), False),
    "list of mappings": (lambda x: [{"i": int(i)} for i in x], False),
    "array": (lambda x: x.numpy(), False),
    "tensor as objects": (lambda x: x.view(-1, 1), True),
    "ragged tensors": (lambda x: [torch.ones(int(i)) for i in x], True),
    "tensor in a mapping as objects": (lambda x: {"x": x.view(-1, 1)}, True),
    "one per rank": (lambda x: {"loss": x.float().mean(), "first": int(x[0])}, False),
}

EXPECTED = {
    "mapping": {"x": [0, 1, 2], "words": ["w0", "w1", "w2"], "none": None},
    "tuple with a list": (["w0", "w1", "w2"], [0, 1, 2]),
    "named tuple": Pair(["w0", "w1", "w2"], [0, 1, 2]),
    "nested": {"outer": ({"words": ["w0", "w1", "w2"]}, [[0, 1, 2], [1, 2, 3]])},
    "tuple of objects": ("w0", "w1", "w2"),
    "list of mappings": [{"i": 0}, {"i": 1}, {"i": 2}],
    "array": [0, 1, 2],
    "tensor as objects": [[0], [1], [2]],
    "ragged tensors": [[], [1.0], [1.0, 1.0]],
    "tensor in a mapping as objects": {"x": [[0], [1], [2]]},
    "one per rank": {"loss": [0.5, 1.0], "first": [0, 2]},
}


def plain(value):
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def gather_all():
    from accel_train import Accelerator
    from accel_train.errors import MetricsShapeError

    accelerator = Accelerator(cpu=True)
    found = {}
    for name, (value, as_objects) in VALUES.items():
        # Three samples on two ranks of two rows: the last row is padding.
        for x in accelerator.prepare(DataLoader(range(3), batch_size=2)):
            found[name] = plain(accelerator.gather_for_metrics(value(x), use_gather_object=as_objects))
    refused = []
    for value in (["one"], ("a", "b", "c"), {"words": ["one"]}, torch.ones(3)):
        for _ in accelerator.prepare(DataLoader(range(3), batch_size=2)):
            with pytest.raises(MetricsShapeError, match="batch has 2 rows") as error:
                accelerator.gather_for_metrics(value, use_gather_object=True)
            refused.append(str(error.value))
    return found, refused


def test_t3_everything_that_is_gathered_is_exact():
    for found, refused in worlds.run(gather_all, 2):
        assert found == EXPECTED
        assert len(refused) == 4


def sent_for_rows():
    """Bytes that this rank pickles to gather the rows of a matrix as objects."""
    import pickle

    from accel_train.loop import metrics

    sent = []
    gather = metrics.gather_object
    metrics.gather_object = lambda objects, group: (
        sent.append(len(pickle.dumps(objects))) or gather(objects, group=group)
    )
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True)
    matrix = torch.zeros(50, 100)
    for _ in accelerator.prepare(DataLoader(range(100), batch_size=50)):
        accelerator.gather_for_metrics(matrix, use_gather_object=True)
    return sent[0], matrix.nbytes


def test_rows_gathered_as_objects_do_not_take_the_batch_along():
    for sent, size in worlds.run(sent_for_rows, 2):
        assert sent < 3 * size


def test_a_loader_that_was_not_prepared_is_refused():
    for error in worlds.run(refused_loader, 2):
        assert "takes a loader that prepare() returned, got DataLoader" in error


def refused_loader():
    from accel_train import Accelerator
    from accel_train.errors import ArgumentTypeError

    with pytest.raises(ArgumentTypeError) as error:
        Accelerator(cpu=True).gather_for_metrics(torch.ones(2), dataloader=DataLoader(range(2)))
    return str(error.value)


def repeated_losses(kind, n, batch, split=False):
    """Rows gathered at each step of a loss that is repeated to the configured batch size, as Trainer does."""
    from accel_train import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            dispatch_batches=True if kind == "dispatch" else None, split_batches=split
        ),
    )
    data = Numbers(n) if kind == "stream" else range(n)
    loader = accelerator.prepare(DataLoader(data, batch_size=batch))
    return [
        (
            len(accelerator.gather_for_metrics(x.float().mean().repeat(batch))),
            len(accelerator.gather_for_metrics({"loss": [x.float().mean().repeat(batch)]})["loss"][0]),
        )
        for x in loader
    ]


@pytest.mark.parametrize("kind", ["map", "stream", "dispatch"])
@pytest.mark.parametrize(
    ("world", "n", "batch", "expected"),
    [(1, 5, 4, [4, 1]), (1, 8, 4, [4, 4]), (2, 11, 4, [8, 3]), (2, 9, 4, [8, 1])],
)
def test_a_loss_repeated_to_the_batch_size_counts_once_per_sample(kind, world, n, batch, expected):
    for found in worlds.run(repeated_losses, world, kind, n, batch):
        assert found == [(rows, rows) for rows in expected]


@pytest.mark.parametrize("kind", ["map", "stream", "dispatch"])
@pytest.mark.parametrize(("n", "expected"), [(11, [4, 4, 3]), (9, [4, 4, 1])])
def test_a_loss_repeated_to_the_size_of_batches_that_ranks_divide_counts_once_per_sample(kind, n, expected):
    for found in worlds.run(repeated_losses, 2, kind, n, 4, True):
        assert found == [(rows, rows) for rows in expected]


def test_on_one_process_nothing_else_is_cut():
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(5.0)), batch_size=4))
    for (x,) in loader:
        for value in (x, torch.ones(7), torch.tensor(1.0), {"a": torch.ones(3)}, ["a", "b"], "text"):
            found = accelerator.gather_for_metrics(value)
            assert plain(found) == plain(value) if not isinstance(value, str) else found == value
    words = ["repeated"] * 4
    assert accelerator.gather_for_metrics(words) is words  # no loader is at a batch
    for (x,) in loader:
        assert len(accelerator.gather_for_metrics(words, use_gather_object=True)) == len(x)
    other = accelerator.prepare(DataLoader(range(8), batch_size=4))
    for (x,), _ in zip(loader, other, strict=True):
        assert len(accelerator.gather_for_metrics(torch.ones(4))) == 4  # of either loader
        assert len(accelerator.gather_for_metrics(torch.ones(4), dataloader=loader)) == len(x)


def one_value_per_rank():
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    return [plain(accelerator.gather_for_metrics(x.float().mean().reshape(1))) for x in loader]


def test_one_value_per_rank_is_gathered_as_a_scalar_is():
    # The second round is 4 and, as padding, 0, 1 and 2.
    assert worlds.run(one_value_per_rank, 2) == [[[0.5, 2.5], [2.0, 1.5]]] * 2


def on_a_mesh(degrees):
    from accel_state import PartialState
    from accel_train.data.active_loaders import ActiveLoaders
    from accel_train.data.prepare import prepare_for_ranks
    from accel_train.loop import metrics
    from accel_train.mesh import Mesh
    from accel_train.plugins import DataLoaderConfiguration

    state = PartialState(cpu=True)
    ranks = Mesh(degrees, "cpu", state.num_processes, state.process_index).batch
    ledger = ActiveLoaders()
    loader = prepare_for_ranks(
        DataLoader(range(8), batch_size=3), ranks, DataLoaderConfiguration(), ledger=ledger
    )
    found = []
    for x in loader:
        rows = metrics.gather_for_metrics(x, ledger, ranks=ranks)
        words_ = metrics.gather_for_metrics(words(x), ledger, ranks=ranks)
        assert words_ == words(rows)
        found += rows.tolist()
    return found


@pytest.mark.parametrize(
    ("world", "degrees"),
    [(2, {"tp": 2}), (2, {"pp": 2}), (4, {"dp_shard": 2, "tp": 2}), (4, {"dp_replicate": 2, "cp": 2})],
    ids=str,
)
def test_on_a_mesh_each_sample_is_gathered_once(world, degrees):
    assert worlds.run(on_a_mesh, world, degrees) == [list(range(8))] * world
