"""The memory through which ranks tell their launcher what they do."""

import copy
import os
import pickle
import time
import timeit

import pytest

from accel_state.monitoring.heartbeat import DATA, FORWARD, OTHER, SAVE, START, STEP, HeartbeatFile


@pytest.fixture
def files(tmp_path):
    """The file as the launcher and as a rank map it."""
    return HeartbeatFile.create(tmp_path / "heart", 3, timed=True), HeartbeatFile(tmp_path / "heart")


def test_the_launcher_reads_what_a_rank_writes(files):
    launcher, rank = files
    assert launcher.read(1).pid == launcher.read(1).joined == 0
    pulse = rank.claim(1)
    pulse.joined()
    pulse.enter(DATA)
    time.sleep(0.02)
    pulse.enter(FORWARD)
    pulse.stepped(pulse.enter(STEP))
    seen = launcher.read(1)
    assert (seen.pid, seen.steps, seen.phase) == (os.getpid(), 1, FORWARD)
    assert 15e6 < seen.spent[DATA] < 1e9
    assert seen.joined <= seen.since <= time.monotonic_ns()
    assert launcher.read(0).pid == launcher.read(2).pid == 0


def test_time_before_the_first_batch_is_no_part_of_a_step(files):
    launcher, rank = files
    pulse = rank.claim(0)
    pulse.joined()
    assert launcher.read(0).phase == START
    time.sleep(0.01)
    pulse.enter(DATA)
    assert sum(launcher.read(0).spent.values()) < 5e6


def test_the_phase_in_progress_counts(files):
    launcher, rank = files
    pulse = rank.claim(0)
    pulse.enter(FORWARD)
    time.sleep(0.01)
    assert launcher.read(0).spent[FORWARD] > 8e6


def test_what_follows_the_last_step_counts_only_if_training_goes_on(files):
    launcher, rank = files
    pulse = rank.claim(0)
    pulse.enter(OTHER)
    time.sleep(0.01)
    assert launcher.read(0).spent[OTHER] == 0
    pulse.enter(DATA)
    assert launcher.read(0).spent[OTHER] > 8e6


def test_a_save_is_in_progress_until_it_ends_or_fails(files):
    launcher, rank = files
    pulse = rank.claim(0)
    pulse.enter(OTHER)

    def save():
        with pulse.saving():
            assert (launcher.read(0).phase, launcher.read(0).saving > 0) == (SAVE, True)
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        save()
    assert (launcher.read(0).phase, launcher.read(0).saving) == (OTHER, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_record_belongs_to_one_process(files):
    launcher, rank = files
    child = os.fork()
    if child == 0:
        os._exit(0 if rank.claim(0) is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert launcher.read(0).pid == child
    assert rank.claim(0) is None
    assert rank.claim(7) is None, "there are three ranks"


def test_copies_report_for_the_same_rank_and_pickles_for_none(files):
    pulse = files[1].claim(0)
    assert copy.deepcopy(pulse) is pulse
    assert pickle.loads(pickle.dumps(pulse)) is None


def test_a_change_of_phase_costs_little(files):
    pulse = files[1].claim(0)
    best = min(timeit.repeat(lambda: pulse.enter(DATA), number=10_000, repeat=7)) / 10_000
    assert best < 10e-6, f"{best * 1e9:.0f} ns; expected about 500"
