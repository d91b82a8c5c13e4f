"""gather_for_metrics in a world of two: exactly one row per sample, whatever is gathered."""

from collections import namedtuple

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from testkit import worlds

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
    metrics.gather_object = lambda objects: sent.append(len(pickle.dumps(objects))) or gather(objects)
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
        assert "wants the loader that prepare() returned, got DataLoader" in error


def refused_loader():
    from accel_train import Accelerator
    from accel_train.errors import ArgumentTypeError

    with pytest.raises(ArgumentTypeError) as error:
        Accelerator(cpu=True).gather_for_metrics(torch.ones(2), dataloader=DataLoader(range(2)))
    return str(error.value)
