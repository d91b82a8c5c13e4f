"""What a machine is refused for; devices are the CPU, which computes rightly, and one that does not exist."""

from collections import namedtuple

import pytest
import torch

from accel_state.launching.machines import health

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def room(monkeypatch):
    """The free bytes of every disk."""
    free = [1 << 40]
    monkeypatch.setattr(health.shutil, "disk_usage", lambda folder: Usage(1 << 41, 0, free[0]))
    return free


def test_a_cpu_that_computes_has_no_faults(room):
    assert list(health.find_faults(8, cpu=True)) == []
    assert list(health.find_device_faults("cpu")) == []


def test_an_index_names_a_device_of_the_kind_that_is_there():
    assert list(health.find_device_faults(0)) == []


def test_a_device_that_is_not_there_cannot_compute():
    (fault,) = health.find_device_faults("cuda:99")
    assert fault.startswith("cuda:99 cannot compute: ")


def test_a_product_that_is_wrong(monkeypatch):
    plain = torch.full
    monkeypatch.setattr(torch, "full", lambda *args, **kwargs: plain(*args, **kwargs) + 1e-3)
    (fault,) = health.find_device_faults("cpu")
    assert fault == "cpu computes wrongly: a product of two matrices is not the expected one"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_accelerators_that_are_missing(room):
    (fault,) = health.find_faults(2, cpu=False)
    assert fault == "2 processes need 2 accelerators, but 0 can be used; look at the driver"


@pytest.mark.parametrize(("free", "told"), [((64 << 20) - 1, True), (64 << 20, False)])
def test_folders_without_room(room, free, told, tmp_path, monkeypatch):
    monkeypatch.setattr(health.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(health, "_SHARED", tmp_path / "gone")  # a system without it
    room[0] = free
    faults = list(health.find_faults(1, cpu=True))
    assert faults == ([f"{tmp_path} has less than 64 MB left; remove files there"] if told else [])


def test_the_exit_code_and_what_is_printed(room, capsys):
    assert health.main(["--processes", "1", "--cpu"]) == 0
    assert capsys.readouterr().err == ""
    room[0] = 0
    assert health.main(["--processes", "1", "--cpu"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("accel: /") and "has less than 64 MB left" in line for line in lines)
    with pytest.raises(SystemExit):
        health.main(["--cpu"])
