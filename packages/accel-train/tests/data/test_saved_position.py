"""Which epoch a loader is in, and what is saved of it; positions are counted by hand."""

import pickle

import pytest
import torch
from torch.utils.data import SequentialSampler

from accel_train.data.iteration import Iteration
from accel_train.data.rng_replay import Randomness
from accel_train.data.sampling.index_streams import ArithmeticStream
from accel_train.data.sampling.layout import BatchLayout
from accel_train.data.sampling.permutations import order_source
from accel_train.data.sampling.shared_seed import Alone
from accel_train.data.saved_position import Epoch, read
from accel_train.errors import DataError
from accel_train.ranks import Ranks

ALONE = Ranks()
PAIR = Ranks.of_world(2, 1)


def begun(yielded, batch=2, epoch=3):
    """An iteration over 10 samples in order, of which some batches were returned."""
    iteration = Iteration(Randomness([], False), {"torch": torch.tensor([1])})
    iteration.epoch = epoch
    stream = ArithmeticStream(
        BatchLayout(10, batch, 1, 0), order_source(SequentialSampler(range(10))), Alone()
    )
    iteration.stream, iteration.source, iteration.yielded = stream, stream, yielded
    return iteration


def saved(epoch=3, yielded=2, *, finished=False, ranks=ALONE):
    return Epoch(epoch, running=begun(yielded, epoch=epoch)).dump(ranks, {"batch_size": 2}, finished)


def test_inside_an_epoch():
    state = saved()
    assert {key: state[key] for key in ("version", "epoch", "finished", "batches_yielded", "position")} == {
        "version": 1,
        "epoch": 3,
        "finished": False,
        "batches_yielded": 2,
        "position": {"samples": 4},
    }
    assert (state["ranks"], state["index"], state["options"]) == (1, 0, {"batch_size": 2})
    assert state["rng_at_start"] == {"torch": torch.tensor([1])}
    epoch = Epoch()
    epoch.load(state)
    assert epoch.iteration == 3
    waiting = epoch.waiting()
    assert waiting is not None
    assert (waiting.epoch, waiting.batches_yielded, waiting.position) == (3, 2, {"samples": 4})


def test_an_epoch_whose_last_batch_was_returned_is_over():
    state = saved(yielded=5, finished=True)
    assert (state["epoch"], state["finished"], state["position"]) == (4, True, {"samples": 10})
    assert state["batches_yielded"] == 0, "of the next epoch no batch was returned"
    epoch = Epoch()
    epoch.load(state)
    assert epoch.iteration == 4
    assert epoch.waiting() is None, "the next epoch begins at its beginning"
    epoch.choose(3)  # the script returns to it, and skips all its batches
    waiting = epoch.begin(0, {})
    assert waiting is not None
    assert waiting.position == {"samples": 10}


def test_between_two_epochs_nothing_waits():
    for epoch in (Epoch(2), Epoch(2, running=ended())):
        state = epoch.dump(PAIR, {"num_workers": 0}, False)
        assert (state["epoch"], state["finished"], state["batches_yielded"]) == (2, True, 0)
        assert (state["ranks"], state["index"], state["options"]) == (2, 1, {"num_workers": 0})
        assert read(state) is None
    assert Epoch(2).between(PAIR) == Epoch(2).dump(PAIR, {}, True)


def ended():
    iteration = begun(5)
    iteration.close(exhausted=True)
    return iteration


@pytest.mark.parametrize("finished", [False, True])
def test_a_loaded_state_that_was_not_used_is_saved_again(finished):
    state = saved(yielded=5 if finished else 2, finished=finished)
    epoch = Epoch()
    epoch.load(state)
    # What counts are the facts of the run that was interrupted, not those of this one.
    assert epoch.dump(PAIR, {"batch_size": 7}, False) == state


def test_a_loaded_state_of_an_earlier_epoch_is_not_saved_again():
    epoch = Epoch()
    epoch.load(saved(epoch=3))
    epoch.iteration = 5
    state = epoch.dump(ALONE, {}, False)
    assert (state["epoch"], state["batches_yielded"]) == (5, 0)


def test_choosing_an_epoch_drops_a_state_of_another_one():
    epoch = Epoch()
    epoch.load(saved(epoch=3))
    epoch.choose(3)
    assert epoch.waiting() is not None
    epoch.choose(4)
    epoch.choose(3)
    assert epoch.waiting() is None


def test_a_state_is_taken_once():
    epoch = Epoch()
    epoch.load(saved(epoch=3))
    assert epoch.begin(0, {}) is not None
    assert epoch.begin(0, {}) is None
    epoch.load(saved(epoch=3))
    epoch.iteration = 4
    assert epoch.begin(0, {}) is None
    assert epoch.restored is None, "a state of another epoch is dropped"


def test_what_an_iteration_took_and_did_not_use_goes_to_the_next_one():
    """tqdm, for one, makes an iterator that it never asks for a batch."""
    epoch = Epoch()
    epoch.load(saved(epoch=3))
    unused = begun(0)
    unused.restored = epoch.begin(0, {})
    epoch.running = unused
    assert epoch.begin(0, {}) is unused.restored
    unused.yielded = 1
    assert epoch.begin(0, {}) is None
    unused.yielded, unused.ended = 0, True
    assert epoch.begin(0, {}) is None, "it found that nothing is left"


def test_a_running_iteration_does_not_travel():
    epoch = Epoch(3, running=begun(2))
    epoch.restored = read(saved(epoch=3))
    copy = pickle.loads(pickle.dumps(epoch))
    assert (copy.iteration, copy.running) == (4, None), "the loop there is another one"
    assert copy.restored == epoch.restored


@pytest.mark.parametrize(
    ("here", "same"),
    [(PAIR, True), (Ranks.of_world(2, 0), False), (Ranks.of_world(3, 1), False), (ALONE, False)],
)
def test_whose_state_it_is(here, same):
    state = read(saved(ranks=PAIR))
    assert state is not None
    assert state.is_of(here) is same


def test_a_state_without_an_index_is_any_ranks():
    old = saved(ranks=PAIR)
    del old["index"]  # of the first releases
    state = read(old)
    assert state is not None
    assert state.is_of(Ranks.of_world(2, 0))
    assert not state.is_of(ALONE)


def test_what_is_no_state_is_refused():
    with pytest.raises(
        DataError, match=r"batches_yielded, draw, .*version missing in a mapping with the keys \['a'\]"
    ):
        read({"a": 1})
    with pytest.raises(DataError, match=r"has version 2, this release reads up to 1\. Upgrade accel-train"):
        read({**saved(), "version": 2})


def test_a_state_of_the_first_format_counts_the_batches_of_a_finished_epoch():
    state = saved(yielded=5, finished=True)
    state["batches_yielded"] = state.pop("batches_of_finished")
    restored = read(state)
    assert restored is not None
    assert (restored.epoch, restored.batches_yielded) == (3, 5)


def test_an_epoch_counts_once_a_batch_of_it_was_returned():
    epoch = Epoch(3, running=begun(0))
    epoch.begin(0, {})
    assert epoch.iteration == 3
    epoch.running = begun(1)
    assert epoch.following() == 4
    epoch.begin(0, {})
    assert epoch.iteration == 4


def test_the_rest_of_an_epoch_that_was_left_belongs_to_it():
    epoch = Epoch(3, running=begun(2))
    epoch.begin(2, {})
    assert epoch.iteration == 3
    epoch.begin(1, {})
    assert epoch.iteration == 4


def test_a_number_that_was_chosen_holds():
    epoch = Epoch(3, running=begun(2))
    epoch.choose(3)
    epoch.begin(0, {})
    assert epoch.iteration == 3, "the script repeats an epoch"
    epoch.choose(0)
    epoch.end(begun(5))
    assert epoch.iteration == 0, "chosen during the last batch of epoch 3"


def test_a_state_between_choosing_and_beginning_is_of_the_chosen_epoch():
    epoch = Epoch(3, running=begun(2))
    epoch.choose(4)
    state = epoch.dump(ALONE, {}, False)
    assert (state["epoch"], state["batches_yielded"], state["position"]) == (4, 0, {})


def test_a_loop_within_a_loop_ends_no_epoch_twice():
    epoch = Epoch(4)
    epoch.end(begun(5, epoch=4))
    epoch.end(begun(5, epoch=3))
    assert epoch.iteration == 5
