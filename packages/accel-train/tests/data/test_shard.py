"""A loader whose ranks read for themselves."""

from torch.utils.data import BatchSampler, DataLoader

from accel_train.data import prepare_data_loader


class RankAware(BatchSampler):
    """Takes this rank's part itself."""

    def __init__(self, rank):
        self.rank = rank
        self.batch_size = 2
        self.drop_last = False

    def __iter__(self):
        return iter([[self.rank, self.rank + 2], [self.rank + 4, self.rank + 6], [self.rank + 8]])

    def __len__(self):
        return 3


def prepare(rank, sampler=None):
    loader = DataLoader(range(10), batch_sampler=sampler) if sampler else DataLoader(range(10), 2)
    return prepare_data_loader(loader, num_processes=2, process_index=rank)


def test_a_script_makes_the_sampler_its_own_after_prepare():
    """As transformers does for a sampler that knows the ranks; from the next epoch on."""
    for rank in range(2):
        sampler = RankAware(rank)
        loader = prepare(rank, sampler)
        assert loader.batch_sampler.batch_sampler is sampler
        before = [batch.tolist() for batch in loader]
        assert len(before) == 2
        loader.batch_sampler.num_processes = 1
        loader.batch_sampler.process_index = 0
        assert len(loader) == 3
        seen = []
        for batch in loader:
            real = loader.real_rows
            seen.append((batch.tolist()[:real], loader.batches_left, loader.end_of_dataloader))
        assert seen == [
            ([rank, rank + 2], 2, False),
            ([rank + 4, rank + 6], 1, False),
            ([rank + 8], 0, True),
        ]
        assert loader.may_be_uneven  # nobody knows what the other ranks' samplers yield
        assert loader.full_rows == 2


def test_it_takes_effect_at_the_next_epoch():
    loader = prepare(1)
    iterator = iter(loader)
    assert next(iterator).tolist() == [2, 3]
    loader.batch_sampler.num_processes = 1
    loader.batch_sampler.process_index = 0
    assert [batch.tolist() for batch in iterator] == [[6, 7], [0, 1]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_rows_of_a_full_batch():
    assert prepare(0).full_rows == 2
    split = prepare_data_loader(
        DataLoader(range(10), 4), num_processes=2, process_index=0, split_batches=True
    )
    assert split.full_rows == 2
    varying = prepare_data_loader(
        DataLoader(range(10), batch_sampler=[[0, 1], [2]]), num_processes=2, process_index=0
    )
    assert varying.full_rows is None
