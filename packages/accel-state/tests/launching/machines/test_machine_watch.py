"""The exchange of machines: each is a watch in this process, and all share a store of torch."""

import json
import time

import pytest

dist = pytest.importorskip("torch.distributed")

from accel_state.launching.machines import machine_watch  # noqa: E402
from accel_state.launching.machines.failures import Failure, FailureCause  # noqa: E402
from accel_state.launching.machines.machine_watch import End, MachineWatch  # noqa: E402
from accel_state.launching.watching.hang_report import LastCollective, RankStack  # noqa: E402
from accel_state.launching.watching.monitor import Activity, Limits  # noqa: E402
from accel_state.monitoring.heartbeat import PHASES, Pulse  # noqa: E402

OWN, UNKNOWN, PEER = FailureCause


class Ranks:
    """In place of the monitor of a machine: what its two ranks do."""

    def __init__(self, machine, limits, steps=0, joined=True):
        self.ranks = range(2 * machine, 2 * machine + 2)
        self.limits = limits
        self.steps = steps
        self.since = 1
        self.joined = joined
        self.saving = False
        self.late_now = None
        self.waits = "all_reduce (#7 of gloo; Float 5)"

    def activity(self, ranks):
        return Activity(self.joined, self.since, self.saving, self.late_now)

    def stalled(self, ranks):
        return "no rank has made progress"

    def stacks(self, ranks):
        frames = (("/nowhere/train.py", 3, "train\x1b[31m"),)
        collectives = (self.waits,) if self.waits else ()
        recorded = (LastCollective("0 gloo", 7 if self.waits else 6, "all_reduce (Float 5)"),)
        return [RankStack(rank, frames, collectives, "", recorded) for rank in self.ranks]

    def pulses(self):
        spent = dict.fromkeys(PHASES, 10**6)
        return {
            rank: Pulse(1, 1, 1, 0, 0, self.steps, spent | {18: (rank + 1) * 10**8}) for rank in self.ranks
        }


class Lost(RuntimeError):
    pass


class Store(dist.Store):
    """A client of a store in this process, whose connection can break."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept
        self.broken = False
        self.asked = 0

    def _checked(self):
        self.asked += 1
        if self.broken:
            raise Lost("connection reset")
        return self.kept

    def add(self, key, amount):
        return self._checked().add(key, amount)

    def set(self, key, value):
        self._checked().set(key, value)

    def get(self, key):
        return self._checked().get(key)

    def check(self, keys):
        return self._checked().check(keys)


@pytest.fixture
def machines(monkeypatch):
    """Two machines with a step time-out of half a second."""
    monkeypatch.setattr(machine_watch, "_INTERVAL", 0.05)
    monkeypatch.setattr(machine_watch, "_STACKS", 1.0)
    monkeypatch.setattr(machine_watch, "_REPORT", 2.0)
    monkeypatch.setattr(machine_watch, "_WORD", 0.5)
    monkeypatch.setattr(machine_watch, "_OWN_WAY", 0.2)
    made = []

    def make(limits=Limits(step=0.5), count=2, alive=None, **about):  # noqa: B008 - it is frozen
        kept = dist.HashStore()
        for machine in range(count) if alive is None else alive:
            monkeypatch.setattr(machine_watch.socket, "gethostname", lambda name=f"host{machine}": name)
            ranks = Ranks(machine, limits, **about)
            store = Store(kept)
            watch = MachineWatch(store, 0, machine, count, lambda ranks=ranks: list(ranks.ranks), ranks)
            watch.ranks, watch.store = ranks, store
            made.append(watch)
        return made

    yield make
    for watch in made:
        watch.close()


@pytest.mark.parametrize(
    ("limits", "told"), [(Limits(step=9.0), False), (Limits(), True), (Limits(step=8.0), True)]
)
def test_time_outs_that_differ_between_machines_are_told(machines, capsys, limits, told):
    first = machines(Limits(step=9.0), alive=[0])[0]
    until(lambda: first.store.kept.check(["limits"]))
    other = MachineWatch(Store(first.store.kept), 0, 1, 2, list, Ranks(1, limits))
    until(lambda: other._compared)
    other.close()
    assert ("accel: the time-outs of host0 are not those of the first" in capsys.readouterr().err) == told


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def ends(watches):
    return [until(watch.end) for watch in watches]


def test_a_hang_is_one_of_all_machines_and_the_rank_at_fault_is_first(machines, capsys):
    first, second = machines()
    second.ranks.waits = ""
    for _ in range(20):  # one machine makes progress, for twice the time
        first.ranks.since += 1
        time.sleep(0.05)
    assert (first.end(), second.end()) == (None, None)
    why = "no rank of any machine has made progress for 0.5 s (--step_timeout)"
    assert ends([first, second]) == [End(124, why, restarts=True)] * 2
    text = capsys.readouterr().err
    assert text.count(f"accel: {why}; ending all ranks") == 1, "the first machine reports for all"
    rows = text.splitlines()[1:4]
    assert [row.split()[0] for row in rows] == ["machine", "host1", "host0"]
    assert "2 and 3" in rows[1]
    assert "in no collective" in rows[1]
    assert "ranks 2 and 3 have begun 6 collectives of group 0 gloo, others 7: all_reduce (Float 5)" in text
    assert "ranks 2 and 3 on host1 differ from the others" in text
    assert "\x1b" not in text, "nothing from the store reaches a terminal as it is"


def test_a_save_and_a_wait_for_others_are_no_hang(machines):
    first, second = machines(joined=False)
    first.ranks.joined = True
    time.sleep(1)
    assert first.end() is None
    second.ranks.joined = second.ranks.saving = True
    time.sleep(1)
    assert first.end() is None
    second.ranks.saving = False
    assert [end.code for end in ends([first, second])] == [124, 124]


def test_a_machine_that_is_late_ends_all(machines):
    first, second = machines(Limits(start=5))
    second.ranks.late_now = "rank 3 has not joined"
    assert ends([first, second]) == [End(124, "on host1 rank 3 has not joined", restarts=True)] * 2


def test_a_machine_that_does_not_answer_has_failed(machines, capsys):
    first, second = machines(count=3, alive=(0, 1))
    for watch in (first, second):
        watch.store.kept.add("0/joined", int(watch is first))  # the third had joined
    assert [end.code for end in ends([first, second])] == [76, 76]
    assert "; machine 2 does not answer; ending all ranks" in capsys.readouterr().err


def test_without_the_store_each_machine_reports_for_itself(machines, capsys):
    first, second = machines()
    for watch in (first, second):
        watch.store.broken = True
    assert [end.code for end in ends([first, second])] == [76, 76]
    assert (
        capsys.readouterr().err.count("the machine that hosts the store of this run does not answer; ending")
        == 2
    )


def failure(rank, code, cause, error="Connection closed by peer"):
    return Failure(rank, code, cause, error)


def test_the_machine_that_failed_by_itself_keeps_its_code(machines):
    first, second = machines()
    assert second.settle(failure(3, 9, OWN)) == End(9, "rank 3 failed first, with exit code 9")
    end = first.settle(failure(0, 1, PEER))
    assert end == End(
        76, "rank 3 on host1 failed first, with exit code 9; the ranks of host0 ended because of it"
    )


def test_ranks_that_notice_nothing_are_ended_when_another_machine_fails(machines):
    first, second = machines(None)
    second.settle(failure(3, 1, OWN))
    assert until(first.end).code == 76


def test_a_preempted_run_is_preempted_on_all_machines(machines):
    first, second = machines(None)
    second.settle(failure(3, 75, OWN, ""))
    time.sleep(0.5)
    assert first.end() is None, "its ranks may be saving"
    assert first.settle(failure(0, 1, PEER)).code == 75


def test_errors_of_their_own_on_two_machines(machines):
    first, second = machines()
    assert (first.settle(failure(0, 1, OWN)).code, second.settle(failure(2, 3, OWN)).code) == (1, 3)


def test_nobody_knows_the_cause(machines):
    first, second = machines()
    assert second.settle(failure(2, 1, UNKNOWN)).code == 1, "the first to say so has failed"
    assert first.settle(failure(0, 1, UNKNOWN)).code == 76
    third, fourth = machines()[2:]
    ends = third.settle(failure(0, 1, PEER)), fourth.settle(failure(2, 1, PEER))
    assert [end.code for end in ends] == [76, 76], "both lost a third machine"
    assert "without a word: rank 0 lost its connection (Connection closed by peer)" in ends[0].why


def test_a_lost_store_is_a_lost_machine(machines):
    first, _ = machines()
    first.store.broken = True
    until(lambda: first.is_lost)
    assert first.settle(failure(0, 1, UNKNOWN)).code == 76
    assert first.settle(failure(0, 1, OWN)).code == 1


def test_the_times_of_all_ranks_are_one_table(machines):
    first, second = machines(steps=10)
    first.finish()
    time.sleep(0.3)
    assert not first.run_is_over
    second.finish()
    until(lambda: first.run_is_over and second.run_is_over)
    rows = [line.split()[:3] for line in first.phases.splitlines()[2:6]]
    assert rows == [[f"host{rank // 2}", str(rank), "10"] for rank in range(4)]
    assert "slowest: rank 3 on host1" in first.phases
    assert second.phases == ""


@pytest.mark.parametrize(
    "value",
    [
        "no JSON",
        "[" * 100000,
        "{}",
        '["hang", 1]',
        '["failure", 1, "host1", [1, 2]]',
        '["failure",1,"h",[1,2,9,""]]',
    ],
)
def test_what_another_program_writes_is_no_event(machines, value, capsys):
    first, second = machines(None)
    first.store.kept.set("0/event/1", value)
    first.store.kept.add("0/events", 1)
    second.settle(failure(3, 1, OWN))
    assert until(first.end).code == 76, "the next event is read"
    assert "0/event/1 in the store of this run is no event of a machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    "stacks", ["[[[]], []]", '[[{"rank": "x"}], []]', "[[], [[1, 2]]]", json.dumps("x" * (5 << 20))]
)
def test_stacks_that_cannot_be_read_are_left_out(machines, stacks, capsys):
    (first,) = machines(alive=(0,))
    first.store.kept.add("0/joined", 1)
    first.store.kept.set("0/stacks/1", stacks)
    first.store.kept.set("host/1", '"host1"')
    assert until(first.end).code in (76, 124)
    text = capsys.readouterr().err
    assert "ranks 0 and 1 wait in all_reduce" in text
    assert "cannot be read" in text


def test_a_look_sends_the_same_for_any_number_of_ranks_and_machines(machines):
    for count in (2, 50):
        watch = machines(Limits(step=100), count, alive=(0,))[-1]
        watch.store.kept.add("0/joined", count - 1)
        until(lambda watch=watch: watch.store.asked > 10)
        before, began = watch.store.asked, time.monotonic()
        time.sleep(1)
        looks = (time.monotonic() - began) / 0.05
        assert 1 < watch.store.asked - before <= 2 * looks + 2
