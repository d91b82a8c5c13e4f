"""Ranks that wait for a writer, here as threads. With processes: tests-integration/test_ckpt_worlds.py."""

import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from accel_ckpt import CheckpointSaveError, completed_by_writer
from accel_ckpt.coordination import write_notices
from accel_ckpt.coordination.write_notices import WriteCall, WriteNotices, calling_lines
from accel_state.host.process_identity import machine_id, start_time_of


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(write_notices, "_LOOK", 0.01)
    monkeypatch.setattr(write_notices, "_GRACE", 0.3)
    monkeypatch.setattr(write_notices, "_PATIENCE", 1.0)


@pytest.fixture
def store():
    return dist.HashStore()


def call(position=0, lines="train.py:7", directory="/model"):
    return WriteCall(directory, position, lines)


def write(store, made, name="a"):
    return WriteNotices(store, 0, 0).write(made, lambda: [name])


def wait(store, made, rank=1):
    return WriteNotices(store, 0, rank).wait(made)


class Waiting:
    """A rank that waits in a thread."""

    def __init__(self, store, made, rank=1):
        self.result = []
        self.thread = threading.Thread(
            target=lambda: self.result.append(wait(store, made, rank)), daemon=True
        )
        self.thread.start()

    def waits(self):
        self.thread.join(0.1)
        return self.thread.is_alive()

    def found(self):
        self.thread.join(5)
        return self.result[0]


def test_alone_the_writer_is_the_only_one(tmp_path):
    assert completed_by_writer(tmp_path, lambda: ["a"]) == ("a",)


def test_the_writer_waits_for_nobody_and_the_others_for_its_end(store):
    early = Waiting(store, call())
    assert early.waits()
    gate, writing = threading.Event(), threading.Event()

    def slowly():
        writing.set()
        gate.wait(5)
        return ["a", "b"]

    writer = threading.Thread(target=lambda: WriteNotices(store, 0, 0).write(call(), slowly))
    writer.start()
    writing.wait(5)
    during = Waiting(store, call(), rank=2)
    assert early.waits()
    assert during.waits()
    gate.set()
    assert early.found() == during.found() == ("a", "b")
    assert wait(store, call(), rank=3) == ("a", "b")  # comes late
    writer.join()


def test_two_calls_in_a_row_find_two_writes(store):
    for name in "ab":
        write(store, call(), name)
    assert [wait(store, call())[0] for _ in range(2)] == ["a", "b"]
    third = Waiting(store, call())
    assert third.waits()
    write(store, call(), "c")
    assert third.found() == ("c",)


def test_a_write_of_the_writer_alone_is_not_taken_for_the_next_of_all(store):
    write(store, call(3), "before a collective")
    write(store, call(4, "train.py:5"), "on another line")
    write(store, call(4, directory="/best"), "to another folder")
    waiting = Waiting(store, call(4))
    assert waiting.waits()
    write(store, call(4), "of all")
    assert waiting.found() == ("of all",)


def test_another_line_is_accepted_after_a_while(store):
    write(store, call(4, "train.py:5"), "if")
    else_branch = Waiting(store, call(4, "train.py:7"))
    assert else_branch.waits()
    assert else_branch.found() == ("if",)


def test_the_failure_of_the_writer_is_raised_on_all(store):
    def fail():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        WriteNotices(store, 0, 0).write(call(), fail)
    with pytest.raises(CheckpointSaveError, match=r"rank 0, which writes /model, failed: OSError: disk full"):
        wait(store, call())
    write(store, call(), "again")
    assert wait(store, call()) == ("again",)


def test_a_writer_that_has_ended_is_named(store, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = {"machine": machine_id(), "pid": process.pid, "born": start_time_of(process.pid)}
    process.communicate(b"\n")
    monkeypatch.setattr(write_notices, "process_identity", lambda: who)
    gate = threading.Event()
    notices = WriteNotices(store, 0, 0)
    threading.Thread(target=notices.write, args=(call(), lambda: gate.wait(5) and []), daemon=True).start()
    with pytest.raises(
        CheckpointSaveError, match=rf"rank 0 \(process {who['pid']}\) has ended while it wrote /model"
    ):
        wait(store, call())
    gate.set()


def test_a_writer_that_does_not_come_is_named(store):
    with pytest.raises(
        CheckpointSaveError, match=r"rank 0 has not begun to write /model within 1 s, .* at train.py:7"
    ):
        wait(store, call())


def test_another_folder_on_the_same_line_is_named(store):
    write(store, call(directory="/model_0"))
    with pytest.raises(CheckpointSaveError, match=r"writes to /model_0 here, and rank 1 waits for /model_1"):
        wait(store, call(directory="/model_1"))


def test_the_lines_are_those_of_the_script():
    def helper():
        return calling_lines()

    one = helper()
    other = helper()
    assert one.startswith("test_write_notices.py:")
    assert one != other
    assert "save_model.py" not in one


def test_lines_of_exec_without_a_module():
    space = {"__name__": None, "calling_lines": calling_lines}
    exec(compile("lines = calling_lines()", "cell", "exec"), space)
    assert space["lines"].startswith("cell:1 < ")
