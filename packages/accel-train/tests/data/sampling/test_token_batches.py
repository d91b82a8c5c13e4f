"""Batches by tokens through prepared loaders: all ranks together, resumed, dispatched, with exact gradients."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_train import Accelerator, ArgumentTypeError, DataError, DataLoaderConfiguration, TokenBatchSampler
from accel_train.data import prepare_data_loader, skip_first_batches
from testkit import worlds

LENGTHS = np.random.RandomState(0).randint(1, 40, 203)


class Texts(Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return torch.full((int(LENGTHS[index]),), index)


def pad(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


def prepare(ranks=1, rank=0, *, stateful=False, workers=0, **options):
    sampler = TokenBatchSampler(LENGTHS, 160, **options)
    loader = DataLoader(Texts(), batch_sampler=sampler, collate_fn=pad, num_workers=workers)
    return prepare_data_loader(
        loader, num_processes=ranks, process_index=rank, use_stateful_dataloader=stateful
    )


def samples_in(batch):
    return batch[:, 0].tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_all_samples_and_have_equally_many_batches(ranks):
    loaders = [prepare(ranks, rank) for rank in range(ranks)]
    orders = []
    for _ in range(2):
        epochs = [list(loader) for loader in loaders]
        assert {len(epoch) for epoch in epochs} == {len(epochs[0])}
        seen = [sample for epoch in epochs for batch in epoch for sample in samples_in(batch)]
        assert sorted(seen) == list(range(len(LENGTHS)))
        for parts in zip(*epochs, strict=True):
            cells = [batch.numel() for batch in parts]
            assert max(cells) <= 160
            assert max(cells) / np.mean(cells) < 1.35
        orders.append(seen)
    assert orders[0] != orders[1], "each epoch has an order of its own"


def test_the_number_of_batches_is_known():
    loader = prepare(2, 1)
    assert len(loader) == len(list(loader)) > 10


@pytest.mark.wide(only=["2-*-2"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("epoch", [0, 2])
def test_t5_an_epoch_continues_with_the_next_batch(workers, stateful, epoch):
    whole = prepare(2, 1, workers=workers)
    for _ in range(epoch):
        list(whole)
    iterator = iter(whole)
    for _ in range(5):
        next(iterator)
    state = whole.state_dict()
    rest = [samples_in(batch) for batch in iterator]
    following = [samples_in(batch) for batch in whole]
    fresh = prepare(2, 1, workers=workers, stateful=stateful)
    fresh.load_state_dict(state)
    assert [samples_in(batch) for batch in (fresh if stateful else skip_first_batches(fresh, 5))] == rest
    assert [samples_in(batch) for batch in fresh] == following


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 1), (1, 2)])
def test_t9_another_number_of_ranks_continues_with_the_next_sample(before, after):
    saved = [prepare(before, rank) for rank in range(before)]
    iterators = [iter(loader) for loader in saved]
    taken = [sample for _ in range(4) for iterator in iterators for sample in samples_in(next(iterator))]
    fresh = [prepare(after, rank, stateful=True) for rank in range(after)]
    for loader in fresh:
        loader.load_state_dict(saved[0].state_dict())
    epochs = [list(loader) for loader in fresh]
    rest = [sample for epoch in epochs for batch in epoch for sample in samples_in(batch)]
    if after <= before:
        assert sorted(taken + rest) == list(range(len(LENGTHS)))
    else:  # the last round may lack a batch, which then comes twice
        assert set(taken + rest) == set(range(len(LENGTHS)))
    following = [list(loader) for loader in fresh]
    fair = [prepare(after, rank) for rank in range(after)]
    for loader in fair:
        loader.set_epoch(1)
    assert [[samples_in(b) for b in epoch] for epoch in following] == [
        [samples_in(b) for b in loader] for loader in fair
    ]


def test_a_state_of_other_lengths_or_options_is_refused():
    sampler, state = TokenBatchSampler(LENGTHS, 160), TokenBatchSampler(LENGTHS, 160).state_dict()
    for other, what in (
        (TokenBatchSampler(LENGTHS[:-1], 160), "number of samples 203"),
        (TokenBatchSampler(np.minimum(LENGTHS + 1, 39), 160), "number of tokens"),
        (TokenBatchSampler(LENGTHS, 170), "max_tokens"),
        (TokenBatchSampler(LENGTHS, 160, seed=3), "has seed 0, and this sampler 3"),
    ):
        with pytest.raises(DataError, match=what):
            other.load_state_dict(state)
    sampler.load_state_dict(state)


def dispatched(stateful):
    config = DataLoaderConfiguration(dispatch_batches=True, use_stateful_dataloader=stateful)

    def loader():
        accelerator = Accelerator(dataloader_config=config)
        plain = DataLoader(Texts(), batch_sampler=TokenBatchSampler(LENGTHS, 160), collate_fn=pad)
        return accelerator.prepare(plain)

    first = loader()
    iterator = iter(first)
    began = [samples_in(next(iterator)) for _ in range(3)]
    state = first.state_dict()
    rest = [samples_in(batch) for batch in iterator]
    fresh = loader()
    fresh.load_state_dict(state)
    again = [samples_in(batch) for batch in (fresh if stateful else skip_first_batches(fresh, 3))]
    return began, rest, again


@pytest.mark.parametrize("stateful", [False, True])
def test_rank_0_can_read_for_all(stateful):
    found = worlds.run(dispatched, 2, stateful)
    for _, rest, again in found:
        assert again == rest
    seen = [sample for began, rest, _ in found for batch in began + rest for sample in batch]
    assert set(seen) == set(range(len(LENGTHS)))
    assert len(seen) - len(LENGTHS) <= 1, "the last round is cut by rows, and completed to equal parts"
    for (began, _, _), rank in zip(found, range(2), strict=True):
        assert began == [samples_in(batch) for batch in list(prepare(2, rank))[:3]]


def features(tokens):
    return torch.stack([torch.sin(tokens + 1.0), torch.cos(tokens * 0.7)], dim=-1).double()


def train(steps):
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    torch.manual_seed(0)
    model = nn.Linear(2, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Texts(), batch_sampler=TokenBatchSampler(LENGTHS, 160, quadratic=0.1), collate_fn=pad)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    windows, weights, window = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            mask = batch >= 0
            loss = (model(features(batch.double()))[..., 0] ** 2 * mask).sum()
            accelerator.backward(loss, num_items=mask.sum())
            window.append(samples_in(batch))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            windows.append(window)
            weights.append(accelerator.get_state_dict(model)["weight"].clone())
            window = []
    return windows, weights


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (2, 1), (2, 3)])
def test_weighted_by_tokens_an_update_is_that_of_one_big_batch(ranks, steps):
    found = worlds.run(train, ranks, steps)
    torch.manual_seed(0)
    model = nn.Linear(2, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update, weight in enumerate(found[0][1]):
        samples = [s for windows, _ in found for batch in windows[update] for s in batch]
        tokens = torch.cat([torch.full((int(LENGTHS[s]),), float(s), dtype=torch.float64) for s in samples])
        (model(features(tokens))[..., 0] ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(weight, model.weight.detach())


class Columns:
    """As datasets of Hugging Face give their columns."""

    column_names = ("ids", "size")

    def with_format(self, kind):
        assert kind is None
        return self

    def __getitem__(self, name):
        return {"ids": [[1], [1, 2], [3, 4, 5]], "size": [1, 2, 3]}[name]

    def __len__(self):
        return 3


def test_lengths_can_be_given_in_several_ways():
    for lengths, dataset in (
        ([1, 2, 3], None),
        (torch.tensor([1, 2, 3]), None),
        (np.array([1, 2, 3], dtype=np.int32), None),
        (lambda index: index + 1, Columns()),
        ("ids", Columns()),
        ("size", Columns()),
    ):
        assert TokenBatchSampler(lengths, 3, dataset=dataset).lengths.tolist() == [1, 2, 3]


def test_what_cannot_be_batched_is_refused():
    with pytest.raises(
        DataError, match="Sample 1 has 9 tokens, and 2 of 3 samples do not have 1 to max_tokens=8"
    ):
        TokenBatchSampler([1, 9, 0], 8)
    with pytest.raises(ArgumentTypeError, match="dtype float64"):
        TokenBatchSampler([1.5], 8)
    with pytest.raises(DataError, match="If lengths is a function, pass `dataset`"):
        TokenBatchSampler(len, 8)
    with pytest.raises(DataError, match="no dataset was given"):
        TokenBatchSampler("ids", 8)
    with pytest.raises(DataError, match="Columns has"):
        TokenBatchSampler("words", 8, dataset=Columns())
    with pytest.raises(DataError, match="max_tokens=0"):
        TokenBatchSampler([], 0)
    assert list(TokenBatchSampler([], 5)) == []


def test_too_few_samples_for_a_round_are_completed_or_dropped():
    for drop, counts in ((False, [1, 1, 1]), (True, [0, 0, 0])):
        sampler = TokenBatchSampler([5, 5], 5, drop_last=drop)
        loaders = [
            prepare_data_loader(
                DataLoader(range(2), batch_sampler=sampler), num_processes=3, process_index=rank
            )
            for rank in range(3)
        ]
        assert [len(list(loader)) for loader in loaders] == counts
