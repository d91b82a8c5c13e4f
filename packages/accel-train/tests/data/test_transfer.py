import gc
import weakref

import pytest
import torch
from torch.utils.data import DataLoader

from accel_train.data import ActiveLoaders, prepare_data_loader
from accel_train.data.iterators import AheadIterator
from accel_train.data.transfer import DirectTransfer, StreamTransfer, choose_transfer
from testkit.accelerators import keep_busy, this_accelerator
from testkit.samples import Numbers

CPU = torch.device("cpu")


class Recording(StreamTransfer):
    """Plays an accelerator: notes when a copy begins and when its batch is handed out."""

    def __init__(self):
        self.events = []

    def start(self, batch):
        self.events.append(("start", batch.tolist()))
        return batch, "ticket"

    def finish(self, ticket):
        batch, kind = ticket
        assert kind == "ticket"
        self.events.append(("finish", batch.tolist()))
        return batch * 10


def recorded(loader, ranks=1, **options):
    prepared = prepare_data_loader(loader, num_processes=ranks, process_index=0, **options)
    prepared.transfer = Recording()
    return prepared


@pytest.mark.parametrize("dataset", [range(6), Numbers(6)])
def test_the_next_batch_is_on_its_way_before_the_current_one_is_used(dataset):
    loader = recorded(DataLoader(dataset, batch_size=2))
    events = loader.transfer.events
    for count, batch in enumerate(loader):
        events.append(("use", batch.tolist()))
        assert loader.end_of_dataloader is (count == 2)
        assert loader.current.yielded == count + 1
    assert events == [
        ("start", [0, 1]), ("finish", [0, 1]), ("start", [2, 3]), ("use", [0, 10]),
        ("finish", [2, 3]), ("start", [4, 5]), ("use", [20, 30]),
        ("finish", [4, 5]), ("use", [40, 50]),
    ]  # fmt: skip


def test_padding_of_a_stream_stays_with_its_batch():
    loader = recorded(DataLoader(Numbers(10), batch_size=4), 2)
    seen = [(batch.tolist(), loader.valid_rows()) for batch in loader]
    assert seen == [([0, 10, 20, 30], None), ([80, 90, 0, 10], (2, 0))]


def test_a_failure_ahead_is_raised_in_its_turn():
    ledger = ActiveLoaders()
    loader = recorded(DataLoader(Numbers(9, fail_at=5), batch_size=2), ledger=ledger)
    seen = []
    with pytest.raises(LookupError, match="sample 5 cannot be read"):
        seen.extend(batch.tolist() for batch in loader)
    assert seen == [[0, 10], [20, 30]]
    assert ledger.live == []


def test_t4_leaving_early_with_a_batch_ahead():
    ledger = ActiveLoaders()
    loader = recorded(DataLoader(range(8), batch_size=2), ledger=ledger)
    for _ in loader:
        break
    assert ledger.live == []
    assert loader.state_dict()["batches_yielded"] == 1
    assert len(list(loader)) == 4
    alive = weakref.ref(loader)
    del loader
    gc.collect()
    assert alive() is None


def test_a_sampler_that_draws_late_is_not_asked_ahead():
    class Late:
        batch_size = 2

        def __iter__(self):
            return iter([[0, 1], [2, 3]])

        def __len__(self):
            return 2

    loader = recorded(DataLoader(range(4), batch_sampler=Late()))
    assert not isinstance(iter(loader), AheadIterator)
    assert [batch.tolist() for batch in loader] == [[0, 10], [20, 30]]
    assert [kind for kind, _ in loader.transfer.events] == ["start", "finish"] * 2
    assert isinstance(iter(recorded(DataLoader(range(4), batch_size=2))), AheadIterator)


def test_samples_without_batches_are_on_their_way_too():
    loader = recorded(DataLoader(torch.arange(3), batch_size=None))
    assert isinstance(iter(loader), AheadIterator)
    assert [sample.tolist() for sample in loader] == [0, 10, 20]


def test_the_way_is_chosen_by_device_and_workers(monkeypatch):
    assert choose_transfer(None, non_blocking=False, background_workers=True) is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert choose_transfer(CPU, non_blocking=False, background_workers=True) is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    on_cpu = choose_transfer(CPU, non_blocking=False, background_workers=True)
    assert isinstance(on_cpu, DirectTransfer)


def test_batches_go_to_the_device_when_they_are_handed_out():
    batch = {"x": torch.ones(2), "y": [torch.zeros(1), "text"]}
    meta = torch.device("meta")
    moved = DirectTransfer(meta).move(batch)
    assert moved["x"].device == moved["y"][0].device == meta
    assert moved["y"][1] == "text"
    loader = prepare_data_loader(
        DataLoader(torch.arange(4), batch_size=2), device=meta, put_on_device=True,
        num_processes=1, process_index=0,
    )  # fmt: skip
    assert [b.device for b in loader] == [meta, meta]
    stay = prepare_data_loader(
        DataLoader(torch.arange(4), batch_size=2), device=meta, num_processes=1, process_index=0
    )
    assert [b.device for b in stay] == [CPU, CPU]


@pytest.mark.gpu
def test_batches_arrive_whole_on_the_device():
    device = this_accelerator()
    data = torch.randn(64, 1024, 64)
    loader = prepare_data_loader(
        DataLoader(data, batch_size=8, num_workers=1, pin_memory=True), device=device, put_on_device=True,
        num_processes=1, process_index=0, dispatch_batches=False,
    )  # fmt: skip
    assert isinstance(loader.transfer, StreamTransfer)
    for _ in range(2):
        arrived = []
        for batch in loader:
            keep_busy(4)  # the computing stream is behind; the copy must not overtake it
            arrived.append((batch * 2).sum(dim=(1, 2)))
        assert torch.allclose(torch.cat(arrived).cpu(), (data * 2).sum(dim=(1, 2)), atol=1e-2)


@pytest.mark.gpu
def test_the_copy_does_not_wait_for_the_computing_stream():
    device = this_accelerator()
    transfer = StreamTransfer(device)
    ticket = transfer.start(torch.randn(256, 1024))
    torch.accelerator.synchronize()
    keep_busy(100)
    computing = torch.Event()
    computing.record()
    ticket = transfer.start(torch.randn(256, 1024))
    ticket[2].synchronize()
    assert not computing.query()
    assert transfer.finish(ticket).device == device
