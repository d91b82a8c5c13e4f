"""T9: a state saved by some ranks is loaded by another number of them: the same samples, the same mathematics."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
SIZE, EPOCHS = 48, 3


class Numbers(Dataset):
    def __init__(self, size=SIZE):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(index)


class Stream(IterableDataset):
    def __init__(self, size=SIZE):
        self.size = size

    def __iter__(self):
        return iter(torch.arange(self.size))


class Halving(Sampler):
    """A sampler of one's own: another order in every epoch."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from ((index * 5 + self.epoch) % self.size for index in range(self.size))

    def __len__(self):
        return self.size


class OwnBatches(BatchSampler):
    def __iter__(self):
        yield from super().__iter__()


def loader_of(kind, batch, size):
    data = Numbers(size)
    if kind == "custom":
        return DataLoader(data, batch, sampler=Halving(size))
    if kind == "custom batches":
        return DataLoader(data, batch_sampler=OwnBatches(RandomSampler(range(size)), batch, False))
    if kind in ("stream", "dispatched stream"):
        return DataLoader(Stream(size), batch)
    return DataLoader(data, batch, shuffle=True)


def prepared(kind, batch, size, split, even=True):
    from accel_train import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(
            split_batches=split,
            even_batches=even,
            use_stateful_dataloader=True,
            use_seedable_sampler=kind == "seeded",
            dispatch_batches="dispatch" in kind,
        ),
    )
    torch.manual_seed(5)
    return accelerator, accelerator.prepare(loader_of(kind, batch, size))


def real_rows(accelerator, loader):
    """This rank's samples of each step, without padding."""
    for rows in loader:
        valid = loader.valid_rows()
        yield rows[: len(rows) if valid is None else valid[accelerator.process_index]].tolist()


def order_until(kind, batch, size, split, even, folder, epoch, steps):
    """This rank's samples by (epoch, step), until a state is saved after `steps` steps of `epoch`."""
    accelerator, loader = prepared(kind, batch, size, split, even)
    found = {}
    while True:
        for step, rows in enumerate(real_rows(accelerator, loader)):
            found[loader.iteration, step] = rows
            if (loader.iteration, step + 1) == (epoch, steps):
                accelerator.save_state(folder)
                return found


def order_after(kind, batch, size, split, even, folder):
    """The samples from a state to the end of the last epoch."""
    accelerator, loader = prepared(kind, batch, size, split, even)
    torch.manual_seed(77)
    accelerator.load_state(folder)
    found = {}
    while loader.iteration < EPOCHS:
        for step, rows in enumerate(real_rows(accelerator, loader)):
            found[loader.iteration, step] = rows
    return found


def joined(found):
    """The samples of all ranks, as they follow each other."""
    steps = sorted({place for rank in found for place in rank})
    return [index for place in steps for rank in found for index in rank.get(place, [])]


def whole_order(kind, batch, size):
    """The oracle: plain torch on one process."""
    torch.manual_seed(5)
    loader = loader_of(kind, batch, size)
    order = []
    for epoch in range(EPOCHS):
        if kind == "custom":
            loader.sampler.set_epoch(epoch)
        order += [index for rows in loader for index in rows.tolist()]
    return order


MOVES = [(2, 1), (2, 3), (2, 4), (1, 2), (3, 2), (4, 2)]


KINDS = ("shuffle", "custom", "custom batches", "dispatch", "dispatched stream")
ALWAYS = [("shuffle", *move) for move in MOVES[:4]] + [(kind, 2, 3) for kind in KINDS[1:]]
EVERY = [(kind, *move) for kind in KINDS for move in MOVES]
LONG = [pytest.param(*case, marks=pytest.mark.full) for case in EVERY if case not in ALWAYS]


@pytest.mark.wide(but=["shuffle-2-3", "shuffle-1-2", "dispatch-2-3"])
@pytest.mark.parametrize(("kind", "before", "after"), [*ALWAYS, *LONG])
def test_t9_the_same_samples_in_the_same_order(tmp_path, kind, before, after):
    """None lost and none twice, padded or not, split or not."""
    size = 50  # leaves an incomplete round for any number of ranks
    for number, (split, even) in enumerate([(False, True), (True, True), (False, False)]):
        if not even and "dispatch" in kind:
            continue  # dispatching has no such option
        batch, folder = (12 if split else 2), tmp_path / str(number)
        first = joined(worlds.run(order_until, before, kind, batch, size, split, even, folder, 1, 3))
        rest = joined(worlds.run(order_after, after, kind, batch, size, split, even, folder))
        [whole] = worlds.run(whole_order, 1, kind, batch, size)
        assert [*first, *rest] == whole, (split, even)


# The same mathematics: float64, one global batch divided among ranks


def rows():
    return torch.arange(SIZE * 3.0, dtype=torch.float64).reshape(SIZE, 3).sin()


def trained(folder, stop, items):
    """Train to the end, or save and stop; returns losses by place, weights and the optimizer's state."""
    from accel_train import Accelerator, DataLoaderConfiguration

    torch.manual_seed(0)
    config = DataLoaderConfiguration(split_batches=True, use_stateful_dataloader=True)
    accelerator = Accelerator(gradient_accumulation_steps=3, dataloader_config=config)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = DataLoader(rows(), 12, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, data)
    losses = {}
    restored = None
    if stop is None and folder is not None:
        accelerator.load_state(folder)
        restored = _moments(optimizer)
    while loader.iteration < EPOCHS:
        for step, x in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(x).pow(2).sum()
                if items:
                    accelerator.backward(loss, num_items=len(x))
                else:
                    accelerator.backward(loss / len(x))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses[loader.iteration, step] = accelerator.reduce(loss.detach()).item()
            if stop == (loader.iteration, step):
                accelerator.save_state(folder)
                return losses, None, _moments(optimizer)
    return losses, [parameter.detach().clone() for parameter in model.parameters()], restored


def _moments(optimizer):
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


@pytest.mark.wide(but=["1-2-means", "2-1-items", "2-3-means", "3-2-items"])
@pytest.mark.parametrize("items", [False, True], ids=["means", "items"])
@pytest.mark.parametrize(("before", "after"), MOVES)
def test_t9_losses_and_weights_as_if_nothing_had_happened(tmp_path, before, after, items):
    """Saved inside a window: (1, 1) is the second of three micro-batches, and the epoch's last window is cut short."""
    [(whole, weights, _)] = worlds.run(trained, 1, None, None, items)
    stopped = worlds.run(trained, before, tmp_path / "state", (1, 1), items)
    gone_on = worlds.run(trained, after, tmp_path / "state", None, items)
    first, saved = stopped[0][0], stopped[0][2]
    places = sorted(whole)
    for rank, (losses, end, restored) in enumerate(gone_on):
        joined_losses = [*first.values(), *losses.values()]
        assert joined_losses == pytest.approx([whole[place] for place in places], rel=1e-12), rank
        for ours, theirs in zip(end, weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
        for ours, theirs in zip(restored, saved, strict=True):
            assert torch.equal(ours, theirs)


def undividable(folder, save):
    from accel_state.errors import NotAvailableError

    accelerator, loader = prepared("stream", 2, SIZE, False)
    if save:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        accelerator.save_state(folder)
        return None
    before = torch.get_rng_state()
    try:
        accelerator.load_state(folder)
    except NotAvailableError as error:
        assert torch.equal(before, torch.get_rng_state())
        return str(error)
    return "no error"


def test_t9_a_place_that_does_not_divide_is_an_error_before_anything_is_changed(tmp_path):
    worlds.run(undividable, 1, tmp_path / "state", True)
    for answer in worlds.run(undividable, 2, tmp_path / "state", False):
        assert "3 batches on each of 1 ranks; 2 ranks cannot continue there" in answer


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_t9_a_stream_goes_on_where_it_divides(tmp_path, before, after):
    first = joined(worlds.run(order_until, before, "stream", 2, SIZE, False, True, tmp_path / "s", 1, 6))
    rest = joined(worlds.run(order_after, after, "stream", 2, SIZE, False, True, tmp_path / "s"))
    [whole] = worlds.run(whole_order, 1, "stream", 2, SIZE)
    assert [*first, *rest] == whole


def drawn_after(folder, save):
    from accel_train import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    if save:
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    return torch.rand(1).item()


def test_t9_new_ranks_derive_their_random_states(tmp_path):
    saved = worlds.run(drawn_after, 2, tmp_path / "state", True)
    grown = worlds.run(drawn_after, 4, tmp_path / "state", False)
    assert grown == worlds.run(drawn_after, 4, tmp_path / "state", False)
    assert grown[:2] == saved
    assert len(set(grown)) == 4
    assert worlds.run(drawn_after, 1, tmp_path / "state", False) == saved[:1]
