"""Random states for reading that several ranks have in common."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from accel_train.data.reading_random_states import (
    ReadingSource,
    ReadingStates,
    begin_shared_reading,
    may_draw,
)
from accel_train.data.rng_replay import Randomness
from accel_train.data.sampling.shared_seed import Alone
from accel_train.ranks import Ranks


def draws():
    return torch.rand(()).item(), random.random(), np.random.rand()


def seed(value):
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def test_reading_draws_alike_and_the_model_for_itself():
    found = []
    for model_seed in (1, 2):
        seed(model_seed)
        expected = [draws() for _ in range(3)]
        seed(model_seed)
        reading = ReadingStates(5)
        source = ReadingSource((draws() for _ in range(2)), reading)
        mine = [draws()]
        read = [next(source)]
        mine.append(draws())
        read += list(source)
        mine.append(draws())
        assert mine == expected
        found.append(read)
    assert found[0] == found[1]
    assert len(set(found[0])) == 2


def test_states_are_saved_and_loaded():
    reading = ReadingStates(5)
    with reading:
        draws()
    tree = reading.tree()
    with reading:
        expected = draws()
    other = ReadingStates(6)
    other.load(tree)
    with other:
        assert draws() == expected


def test_a_failure_while_reading_leaves_the_model_its_states():
    seed(3)
    expected = draws()
    seed(3)

    def fail():
        draws()
        raise LookupError("broken")
        yield

    with pytest.raises(LookupError, match="broken"):
        next(ReadingSource(fail(), ReadingStates(5)))
    assert draws() == expected


def test_the_seed_is_the_draw_that_torch_makes_there():
    seeds = {}
    for index in (0, 1):
        torch.manual_seed(4)
        ranks = Ranks(2, index, None, (0, 1, 0, 1), 2 + index)
        reading = begin_shared_reading(Randomness([], False), None, Alone(), ranks)
        seeds[index] = reading.seed
        after = torch.rand(()).item()
    assert seeds[0] != seeds[1]
    torch.manual_seed(4)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.rand(()).item() == after
    generator = torch.Generator().manual_seed(9)
    begin_shared_reading(Randomness([generator], False), generator, Alone(), ranks)
    expected = torch.Generator().manual_seed(9)
    torch.empty((), dtype=torch.int64).random_(generator=expected)
    assert torch.equal(generator.get_state(), expected.get_state())


def test_reading_that_runs_torchs_code_alone_draws_nothing():
    tensors = TensorDataset(torch.arange(4))
    for dataset in (tensors, Subset(tensors, [1]), [1, 2], range(3)):
        assert not may_draw(dataset, default_collate)
        assert may_draw(dataset, list)
    assert may_draw(Subset(Own(), [0]), default_collate)


class Own(Dataset):
    def __getitem__(self, index):
        return index


def test_numpys_generator_of_the_script_is_put_back():
    np.random.seed(3)
    expected = np.random.rand(4).tolist()
    np.random.seed(3)
    with ReadingStates(5):
        np.random.rand()
    found = [np.random.rand()]
    reading = ReadingStates(6)
    for _ in range(3):
        with reading:
            np.random.rand(2)
        found.append(np.random.rand())
    assert found == expected
