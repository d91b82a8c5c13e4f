import pytest
import torch

from accel_train.data.dispatch_wire import Envelope, Kind, Receiver, Sender, pack_error, unpack_error
from accel_train.errors import DispatchError


class Tape:
    """A link that keeps messages in order, as one rank would receive them."""

    device = torch.device("cpu")

    def __init__(self):
        self.messages = []
        self.bytes = 0

    def send(self, message, to):
        self.messages.append(message.clone())
        self.bytes += message.numel() * message.itemsize
        return self

    def wait(self):
        return None

    def receive(self, message):
        sent = self.messages.pop(0)
        assert sent.shape == message.shape
        message.copy_(sent)


@pytest.fixture
def tape():
    return Tape()


def transmit(tape, sender, receiver, envelope):
    sender.batches([Envelope(Kind.BATCH), envelope])
    return receiver()


def test_batches_arrive_as_they_were(tape):
    sender, receiver = Sender(tape, 2), Receiver(tape)
    batch = {
        "float": torch.randn(3, 5),
        "half": torch.randn(3).to(torch.bfloat16),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.randn(2, dtype=torch.complex128),
        "byte": torch.arange(7, dtype=torch.uint8),
        "strided": torch.arange(12).reshape(3, 4).t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "nested": [(torch.arange(2), "text", None), {"x": 1.5}],
    }
    envelope = Envelope(Kind.BATCH, batch, last=True, real=5, valid=(3, 2), rows=3)
    got = transmit(tape, sender, receiver, envelope)
    assert (got.kind, got.last, got.real, got.valid, got.rows) == (Kind.BATCH, True, 5, (3, 2), 3)
    for name in ("float", "half", "bool", "complex", "byte", "strided", "scalar", "empty"):
        assert got.batch[name].dtype == batch[name].dtype
        assert torch.equal(got.batch[name], batch[name]), name
    assert got.batch["nested"][0][1:] == ("text", None)
    assert got.batch["nested"][1] == {"x": 1.5}


def test_a_description_travels_only_when_it_changes(tape):
    sender, receiver = Sender(tape, 2), Receiver(tape)
    sizes = []
    for shape in ((4, 8), (4, 8), (4, 9), (4, 9)):
        before = tape.bytes
        batch = {"x": torch.randn(shape), "y": torch.zeros(4)}
        got = transmit(tape, sender, receiver, Envelope(Kind.BATCH, batch, rows=4))
        assert torch.equal(got.batch["x"], batch["x"])
        sizes.append(tape.bytes - before)
    payload = (4 * 8 + 4) * 4
    assert sizes[1] == payload + 5 * 8
    assert sizes[0] > sizes[2] > sizes[3] == (4 * 9 + 4) * 4 + 5 * 8


def test_the_end_and_unknown_counts(tape):
    sender, receiver = Sender(tape, 2), Receiver(tape)
    got = transmit(tape, sender, receiver, Envelope(Kind.BATCH, "text"))
    assert (got.batch, got.last, got.real, got.valid, got.rows) == ("text", False, None, None, None)
    sender.stop()
    assert receiver().kind is Kind.STOP


def test_errors_arrive_as_they_were(tape):
    sender, receiver = Sender(tape, 2), Receiver(tape)
    try:
        {}["missing"]
    except KeyError as error:
        sender.error(error)
    got = receiver()
    assert got.kind is Kind.ERROR
    assert type(got.batch) is KeyError
    assert got.batch.args == ("missing",)
    assert "KeyError: 'missing'" in got.batch.__notes__[0]


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_errors_that_cannot_travel_are_told():
    error = unpack_error(pack_error(Unpicklable("this", "that")))
    assert type(error) is DispatchError
    assert "Unpicklable: this and that" in str(error)


def test_nothing_leaves_when_a_part_cannot_be_sent(tape):
    sender = Sender(tape, 3)
    envelopes = [
        Envelope(Kind.BATCH),
        Envelope(Kind.BATCH, torch.ones(2)),
        Envelope(Kind.BATCH, torch.eye(2).to_sparse()),
    ]
    with pytest.raises(DispatchError, match=r"layout torch\.sparse_coo"):
        sender.batches(envelopes)
    assert tape.messages == []
