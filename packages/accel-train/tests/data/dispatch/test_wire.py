import pytest

from accel_train.data.dispatch.wire import (
    Envelope,
    Kind,
    pack_error,
    receive,
    send,
    send_error,
    send_stop,
    unpack_error,
)
from accel_train.errors import DispatchError


class Tape:
    """A scatterer whose parts are received one rank after the other."""

    def __init__(self):
        self.parts = []

    def __call__(self, parts):
        if parts is None:
            return self.parts.pop(0)
        self.parts += parts
        return parts[0]


def test_envelopes_arrive_as_they_were():
    tape = Tape()
    envelopes = [Envelope(Kind.BATCH, "a", rows=3), Envelope(Kind.BATCH, {"b": 1}, True, 5, (3, 2), 2)]
    send(tape, envelopes)
    assert [receive(tape), receive(tape)] == envelopes
    send_stop(tape, 2)
    assert [receive(tape).kind, receive(tape).kind] == [Kind.STOP, Kind.STOP]


def test_errors_arrive_as_they_were():
    tape = Tape()
    try:
        {}["missing"]
    except KeyError as error:
        send_error(tape, 1, error)
    got = receive(tape)
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


def test_errors_of_classes_that_only_rank_zero_has_are_told(monkeypatch):
    packed = pack_error(DispatchError("gone"))
    monkeypatch.delattr("accel_train.errors.DispatchError")
    error = unpack_error(packed)
    assert "DispatchError: gone" in str(error)
    with pytest.raises(RuntimeError, match="rank 0 could not read a batch"):
        raise error
