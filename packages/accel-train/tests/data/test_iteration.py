"""How far an iteration is, and what it knows of its end; positions are counted by hand."""

import itertools
import random
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accel_train import Accelerator, DataLoaderConfiguration, skip_first_batches
from accel_train.data.iteration import Iteration
from accel_train.data.reading_random_states import ReadingStates
from accel_train.data.rng_replay import Randomness
from accel_train.data.sampling.index_streams import ArithmeticStream, SamplerReader, SingleStream
from accel_train.data.sampling.layout import BatchLayout
from accel_train.data.sampling.permutations import order_source
from accel_train.data.sampling.shared_seed import Alone


def iteration(source=(), stream=None, *, everything=False):
    made = Iteration(Randomness([], everything), {})
    made.source, made.stream = iter(source), stream
    return made


def counted(samples=10, batch=2, start=0):
    layout = BatchLayout(samples, batch, 1, 0, start=start)
    return ArithmeticStream(layout, order_source(SequentialSampler(range(samples))), Alone())


def failing(*items):
    yield from items
    raise ValueError("item is broken")


def test_the_end_is_found_by_reading_ahead():
    one = iteration([10, 11])
    assert not one.at_end(), "nothing was returned yet"
    assert next(one.source) == 10
    one.yielded = 1
    assert not one.at_end()
    assert one.ahead == [11]
    assert not one.at_end()
    assert one.ahead == [11], "read once"
    one.ahead.clear()
    one.yielded = 2
    assert not one.known_to_end()
    assert one.at_end()
    assert one.at_end()
    assert one.known_to_end()
    with pytest.raises(StopIteration):
        one.raise_failure()


def test_the_end_of_a_stream_that_counts_needs_no_reading():
    one = iteration(failing(), counted())
    one.yielded = 4
    assert not one.at_end()
    one.yielded = 5
    assert one.at_end()
    assert one.known_to_end()
    assert one.ahead == []


def test_a_batch_that_was_kept_is_not_the_end():
    one = iteration((), counted())
    one.yielded = 5
    one.ahead.append("kept")
    assert not one.at_end()


def test_a_failure_is_raised_once_and_is_not_the_end():
    one = iteration(failing(1))
    next(one.source)
    one.yielded = 1
    assert one.look_ahead()
    assert not one.at_end()
    with pytest.raises(ValueError, match="item is broken"):
        one.raise_failure()
    assert one.failure is None


def test_the_failure_does_not_keep_what_it_was_raised_from():
    class Owner:
        def __iter__(self):
            raise ValueError("broken")
            yield

    owner = Owner()
    one = iteration(owner)
    gone = weakref.ref(owner)
    one.look_ahead()
    with pytest.raises(ValueError, match="broken"):
        one.raise_failure()
    one.close(exhausted=False)
    del owner
    assert gone() is None


def test_closing():
    left = iteration([1, 2], None)
    left.yielded = 1
    left.look_ahead()
    left.close(exhausted=False)
    assert (left.closed, left.ended, left.source, left.ahead) == (True, False, None, [])
    assert not left.at_end(), "left early: nothing is known, and nothing is read"
    over = iteration()
    over.close(exhausted=True)
    assert over.at_end()
    over.close(exhausted=False)
    assert over.ended, "it stays over"
    counted_out = iteration((), counted())
    counted_out.yielded = 5
    counted_out.close(exhausted=False)
    assert counted_out.at_end(), "arithmetic knows without reading"


def test_generators_are_noted_as_they_were_before_reading_ahead():
    def draws():
        for _ in itertools.count():
            yield random.random()

    one = iteration(draws(), everything=True)
    one.notes_rng = True
    random.seed(7)
    expected = [random.random(), random.random()]
    random.seed(7)
    assert next(one.source) == expected[0]
    one.yielded = 1
    one.look_ahead()
    assert one.ahead == expected[1:]
    noted = one.read_ahead()
    assert noted["batches"] == 1
    with one.randomness.as_of(noted["rng"]):
        assert random.random() == expected[1]
    one.ahead.clear()
    one.note_ahead(None, 0)
    assert one.read_ahead() == {}, "it was returned"


def test_generators_for_reading_are_noted_from_inside():
    one = iteration((torch.rand(()).item() for _ in range(9)), everything=True)
    one.notes_rng, one.reading = True, ReadingStates(5)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(5)).item()
    torch.manual_seed(1)
    outside = torch.get_rng_state()
    one.yielded = 1
    one.look_ahead()
    assert torch.equal(one.drawn_ahead[0][0], torch.Generator().manual_seed(5).get_state())
    with one.randomness.as_of(one.read_ahead()["rng"]):
        assert torch.rand(1).item() == expected
    assert not torch.equal(torch.get_rng_state(), outside), "the source itself is wrapped elsewhere"


def test_asking_a_sampler_for_its_end_draws_as_reading_does():
    def sampler():
        while True:
            yield [random.random()]

    stream = SingleStream(SamplerReader(sampler(), ahead=[], pulled=None, keep=4))
    one = iteration((), stream)
    one.reading = ReadingStates(3)
    expected = random.Random(3).random()
    random.seed(1)
    before = random.getstate()
    one.yielded = 0
    assert not one.at_end()
    one.yielded = 1
    next(stream)
    random.setstate(before)
    assert not one.at_end()
    assert random.getstate() == before, "the script's own generator stays"
    assert next(stream) == [expected]


def test_positions_of_streams_that_are_iterated():
    one = iteration()
    one.skipped, one.yielded, one.stride = 3, 4, 16
    assert one.place() == (7, {"local_batches": 7, "samples_per_batch": 16})


def test_positions_of_counted_samples():
    one = iteration((), counted(10, 2, start=4))
    one.yielded = 2
    assert one.place() == (4, {"samples": 8})


def test_draws_for_the_order():
    assert iteration().draw(False) == {}
    generator = torch.Generator().manual_seed(2)
    layout = BatchLayout(4, 2, 1, 0)
    stream = ArithmeticStream(layout, order_source(RandomSampler(range(4), generator=generator)), Alone())
    one = iteration((), stream)
    state = generator.get_state()
    next(stream)
    record = one.draw(False)
    assert torch.equal(record["generator"], state)
    assert (record["drawn"], record["exhausted"]) == (4, False)
    assert one.draw(True)["exhausted"] is True
    assert one.draw(False)["exhausted"] is False, "the stream itself is not changed"


def test_the_position_of_a_dataset_that_keeps_its_own():
    place = itertools.count(5)
    one = iteration([1, 2, 3])
    assert one.position_of_source() is None
    one.source_state = lambda: {"at": next(place)}
    assert one.position_of_source() == {"at": 5}
    one.yielded = 1
    one.look_ahead()
    assert one.position_of_source() == {"at": 6}, "before what was read ahead"
    one.note_ahead(None, 0)
    assert one.position_of_source() == {"at": 7}


class Noisy(IterableDataset):
    """Seven samples, each of which draws; of known length."""

    def __len__(self):
        return 7

    def __iter__(self):
        return (random.random() for _ in range(7))


@pytest.mark.parametrize("by", ["skip", "stateful", "dispatch"])
@pytest.mark.parametrize("asks", [True, False], ids=["read ahead", "not asked"])
def test_samples_that_fill_no_batch_are_drawn_once(by, asks):
    """The oracle is the plain loader, which draws for the seventh sample when it is asked for a third batch."""

    def loader_of():
        options = DataLoaderConfiguration(
            use_stateful_dataloader=by != "skip", dispatch_batches=by == "dispatch"
        )
        accelerator = Accelerator(cpu=True, dataloader_config=options)
        return accelerator, accelerator.prepare(DataLoader(Noisy(), batch_size=3, drop_last=True))

    random.seed(3)
    drawn = [random.random() for _ in range(7)]
    next_draw = random.random()

    random.seed(3)
    _, loader = loader_of()
    iterator = iter(loader)
    batches = [next(iterator), next(iterator)]
    assert torch.equal(torch.cat(batches), torch.tensor(drawn[:6], dtype=torch.float64))
    if asks:
        assert loader.end_of_dataloader
    state, generator = loader.state_dict(), random.getstate()

    _, again = loader_of()
    again.load_state_dict(state)
    random.setstate(generator)
    again.set_epoch(0)
    rest = skip_first_batches(again, 2) if by == "skip" else again
    assert list(rest) == []
    assert random.random() == next_draw
