"""Identity of a process: whether a recorded one still runs."""

import os
import subprocess
import sys
import time

import pytest

from accel_state.host import process_identity
from accel_state.host.process_identity import has_ended, machine_id, ranks_here, start_time_of

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@linux
def test_this_process_has_not_ended():
    identity = process_identity.process_identity()
    assert identity["pid"] == os.getpid()
    assert not has_ended(identity)


@linux
def test_a_process_has_ended_also_before_it_is_reaped():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        identity = {"machine": machine_id(), "pid": child.pid, "born": start_time_of(child.pid)}
        assert not has_ended(identity)
        child.stdin.close()
        until = time.monotonic() + 10
        while not has_ended(identity) and time.monotonic() < until:  # a zombie until wait()
            time.sleep(0.01)
        assert has_ended(identity)
    assert has_ended(identity)


@linux
def test_a_reused_process_id_is_another_process():
    identity = process_identity.process_identity()
    assert has_ended(identity | {"born": "1"})


@pytest.mark.parametrize("machine", ["another/1", None])
def test_nothing_is_known_of_processes_on_other_machines(machine):
    assert not has_ended({"machine": machine, "pid": 2**22 + 1, "born": "1"})


@linux
def test_the_ranks_of_this_machine_are_found_without_asking_for_all():
    asked = []

    def process_of(rank):
        asked.append(rank)
        machine = machine_id() if 8 <= rank < 16 else "another"
        return None if rank == 14 else {"machine": machine, "pid": rank}

    found = dict(ranks_here(10, 4096, process_of))
    assert sorted(found) == [8, 9, 11, 12, 13], "14 has not begun"
    assert found[9]["pid"] == 9
    assert sorted(asked) == [7, 8, 9, 11, 12, 13, 14]
