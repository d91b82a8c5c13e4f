"""How far an iteration is where rank 0 reads for all; positions are counted by hand."""

import pytest
import torch
from torch.utils.data import SequentialSampler

from accel_train.data.dispatch.dispatcher import DispatchIteration, is_plain
from accel_train.data.rng_replay import Randomness
from accel_train.data.sampling.index_streams import ArithmeticStream, SamplerReader, SingleStream
from accel_train.data.sampling.layout import BatchLayout
from accel_train.data.sampling.permutations import order_source
from accel_train.data.sampling.shared_seed import Alone


def iteration(stream=None):
    made = DispatchIteration(Randomness([], False), {})
    made.source, made.stream = iter(()), stream
    return made


def counted(samples, batch):
    layout = BatchLayout(samples, batch, 1, 0)
    return ArithmeticStream(layout, order_source(SequentialSampler(range(samples))), Alone())


def test_positions_in_batches_of_the_users_loader():
    """For 3 ranks a step takes 3 of the loader's batches; 6 were skipped."""
    reader = SamplerReader(iter([[n] for n in range(20)]), ahead=[], pulled=None, keep=8)
    stream = SingleStream(reader, skip=6)
    for _ in range(7):
        next(stream)
    one = iteration(stream)
    one.per_batch, one.first_base, one.skipped, one.yielded = 3, 6, 2, 2
    assert one.place() == (4, {"base_batches": 12, "pulled": 13, "ended": False, "ahead": [[12]]})
    by_samples = iteration(counted(40, 2))
    by_samples.per_batch, by_samples.yielded = 3, 2
    assert by_samples.place() == (2, {"base_batches": 6}), "rank 0 counts batches"
    without = iteration()
    without.per_batch, without.first_base, without.yielded, without.skipped = 2, 4, 3, 2
    assert without.place() == (5, {"base_batches": 10})


def test_draws_that_rank_0_makes():
    one = iteration(counted(4, 2))
    assert one.draw(True) == counted(4, 2).drawn()
    one.drew_along = True
    assert one.draw(True) == {"along": True}


def test_the_position_of_a_dataset_is_saved_with_the_first_batch_or_not_at_all():
    one = iteration()
    one.source_state = lambda: {"at": 5}
    assert one.position_of_source() == {"at": 5}
    one.first_batch = object()
    assert one.position_of_source() is None, "padding needs the first batch, which cannot be saved"


def test_what_padding_needs_is_saved_where_it_can_be():
    one = iteration()
    one.first_rng = {"torch": 1}
    assert one.read_ahead() == {"first_rng": {"torch": 1}}
    one.first_rng, one.first_batch = None, {"x": torch.ones(2), "y": [1, None, ("a", b"b", 0.5)]}
    assert one.read_ahead() == {"first": one.first_batch}
    one.first_batch = {"x": {1, 2}}
    assert one.read_ahead() == {}


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("batch", "plain"),
    [
        (None, True),
        (torch.ones(1), True),
        ({"a": (1, [True, "x"])}, True),
        ({1: 2}, False),
        ([{"a": object()}], False),
        (torch.nn.Parameter(torch.ones(1)), False),
        (Text("a"), False),
        (range(3), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_batches(batch, plain):
    assert is_plain(batch) is plain
