"""An iterator of torch sees replaced attributes, and the loader keeps its own."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_train.data.torch_iterator import torch_iterator

ROWS = TensorDataset(torch.arange(6))


def doubled(samples):
    return [2 * int(value) for (value,) in samples]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_replaced_holds_for_the_iterator_alone(workers):
    loader = DataLoader(ROWS, batch_size=3, num_workers=workers)
    collate, generator = loader.collate_fn, loader.generator
    replaced = {
        "collate_fn": doubled,
        "generator": torch.Generator(),
        "dataset": TensorDataset(torch.ones(6)),
    }
    batches = torch_iterator(loader, replaced)
    assert (loader.collate_fn, loader.generator, loader.dataset) == (collate, generator, ROWS)
    assert list(batches) == [[2, 2, 2], [2, 2, 2]]
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_workers_that_stay_are_the_loader_s_own():
    loader = DataLoader(ROWS, batch_size=3, num_workers=1, persistent_workers=True)
    first = torch_iterator(loader, {"collate_fn": doubled})
    assert list(first) == [[0, 2, 4], [6, 8, 10]]
    assert loader._iterator is first
    assert torch_iterator(loader, {}) is first
    assert list(first) == [[0, 2, 4], [6, 8, 10]], "they keep the function that they were started with"
