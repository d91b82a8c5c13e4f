from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import weakref
from pathlib import Path

import pytest
import torch

from accel_state.communication.watchdog import RankStatus, Watchdog, call_site, diagnose
from accel_state.errors import CollectiveMismatchError
from accel_state.operations import collectives
from accel_state.world.process import PartialState
from testkit import worlds

ROOT = Path(__file__).parents[4]
QUICK = {"ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": "0.5"}


def launch(script: str, world: int, environ: dict[str, str] | None = None, timeout: float = 60.0) -> list:
    """Run a script on real processes that end as scripts end; return codes, outputs and seconds per rank.

    The limit is for ranks that hang: the imports of torch alone may take 20 s on a machine with other work. Scripts
    measure what must be quick themselves.
    """
    port = str(worlds.free_port())
    path = os.pathsep.join([str(ROOT / "packages/accel-state/src"), str(ROOT / "tools")])
    begin = time.monotonic()
    processes = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path,
        } | (environ or {})  # fmt: skip
        code = "import time, torch\nfrom accel_state.world.process import PartialState\n" + textwrap.dedent(
            script
        )
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            text = worlds.without_gloo_notes(out.decode())
            results.append((process.returncode, text, err.decode(), time.monotonic() - begin))
    finally:
        for process in processes:
            process.kill()
    return results


def test_t21_a_late_rank_is_reported_with_its_stack_and_then_all_goes_on():
    def body():
        def dawdle():
            time.sleep(1.6)

        rank = PartialState().process_index
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            if rank == 1:
                dawdle()
            got = collectives.gather(torch.tensor([rank]))
            time.sleep(0.1)
        return got.tolist(), errors.getvalue()

    results = worlds.run(body, 3, environ=QUICK)
    assert [values for values, _ in results] == [[0, 1, 2]] * 3
    text = "".join(report for _, report in results)
    assert results[1][1] == ""
    reports = re.findall(r"has been waiting for (\d\.\d) s", text)
    assert 1 <= len(reports) <= 2  # at 0.5 s, then at twice as long, by one rank for all
    assert 0.5 <= float(reports[0]) <= 1.6
    assert "collective #1, gather at " in text
    assert "arrived: rank 0: in gather (#1) at " in text
    assert "arrived: rank 2: in gather (#1) at " in text
    assert "test_watchdog.py:" in text
    assert "not arrived: rank 1: in no collective so far" in text
    assert "stack of rank 1:" in text
    assert "in dawdle" in text
    assert "time.sleep(1.6)" in text


@pytest.mark.wide
def test_t21_reports_back_off():
    def body():
        rank = PartialState().process_index
        collectives.set_collective_checks(report_after=0.2)
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            if rank == 1:
                time.sleep(2.5)
            PartialState().wait_for_everyone()
        return errors.getvalue()

    waiting, late = worlds.run(body, 2)
    assert late == ""
    ages = [
        float(age)
        for age in re.findall(r"has been waiting for (\d\.\d) s in collective #1, wait_for_everyone", waiting)
    ]
    assert 2 <= len(ages) <= 4
    # Ages are printed to a tenth of a second.
    assert all(later + 0.05 >= 2 * (sooner - 0.05) for sooner, later in itertools.pairwise(ages))


def test_t21_a_rank_in_the_middle_of_other_work_is_no_proof():
    def body():
        rank = PartialState().process_index
        if rank == 0:
            time.sleep(1.5)
        return collectives.gather_object([rank])

    assert worlds.run(body, 2, environ={"ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": "0.2"}) == [[0, 1]] * 2


@pytest.mark.full
def test_t21_a_rank_that_exits_is_proof():
    script = """
        state = PartialState()
        if state.process_index == 1:
            raise ValueError("no such file")
        from accel_state.operations import collectives
        begin = time.monotonic()
        try:
            collectives.gather(torch.zeros(2))
        finally:
            print(time.monotonic() - begin, flush=True)
    """
    results = launch(script, 3)
    assert [code for code, *_ in results] == [1, 1, 1]
    for rank in (0, 2):
        assert float(results[rank][1]) < 10  # at once, and not at the report after 30 s
        assert "CollectiveMismatchError: collective #1, gather at <string>:" in results[rank][2]
    assert any(
        "rank 1 is gone (exited after ValueError: no such file at <string>:6)" in results[rank][2]
        for rank in (0, 2)
    )


@pytest.mark.full
def test_t21_a_rank_that_is_done_is_proof():
    script = """
        state = PartialState()
        if state.process_index == 0:
            from accel_state.operations import collectives
            collectives.gather_object(["saving on the main process only"])
        print("through", flush=True)
    """
    saving, done = launch(script, 2)
    assert done[0] == 0
    assert saving[0] == 1
    assert "through" not in saving[1]
    assert "collective #1, gather_object at <string>:" in saving[2]
    assert "rank 1 is gone (" in saving[2]


@pytest.mark.wide
def test_t21_a_killed_rank_is_proof():
    script = """
        import os, signal
        state = PartialState()
        if state.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.wait_for_everyone()
    """
    left, killed = launch(script, 2)
    assert killed[0] == -signal.SIGKILL
    assert left[0] == 1
    assert "wait_for_everyone" in left[2]
    assert re.search(r"rank 1 is gone \(process \d+ has ended\)", left[2])


@pytest.mark.wide
def test_t21_another_collective_is_proof_without_fingerprints():
    """A point-to-point collective has no fingerprint; the watch finds the ranks in different ones."""
    script = """
        from accel_state.operations import collectives
        from accel_state.operations.scatter import Scatterer
        state = PartialState()
        begin = time.monotonic()
        try:
            if state.process_index == 1:
                Scatterer()(None)
            else:
                collectives.gather(torch.zeros(1))
        finally:
            print(time.monotonic() - begin, flush=True)
    """
    for code, out, err, _ in launch(script, 3, QUICK):
        assert code == 1
        assert "CollectiveMismatchError" in err
        assert "rank 1 entered scatter (stream 1) instead" in err or "entered gather instead" in err
        assert "rank 1: in scatter (stream 1) (#1) at <string>:" in err
        assert re.search(r"rank [02]: in gather \(#1\) at <string>:", err)
        assert float(out) < 3


@pytest.mark.wide
def test_t21_nothing_hangs_at_exit_and_the_group_stays_given_up():
    script = """
        from accel_state.operations import collectives
        from accel_state.errors import CollectiveMismatchError
        from accel_state.operations.scatter import Scatterer
        state = PartialState()
        errors = 0
        for _ in range(2):
            try:
                Scatterer()(None) if state.process_index else collectives.gather(torch.zeros(1))
            except CollectiveMismatchError:
                errors += 1
        print(errors, flush=True)
        if state.process_index:
            time.sleep(1)
    """
    for code, out, err, _ in launch(script, 2, QUICK, timeout=15):
        assert (code, out.strip()) == (0, "2"), err


def test_saving_under_is_main_process_is_named_at_once():
    def body():
        state = PartialState()
        begin = time.monotonic()
        try:
            if state.is_main_process:
                collectives.gather(torch.zeros(3))
            state.wait_for_everyone()
        except CollectiveMismatchError as error:
            return str(error), time.monotonic() - begin
        return "no error", 0.0

    for text, seconds in worlds.run(body, 2):
        assert "rank 0: gather at" in text
        assert "rank 1: wait_for_everyone at" in text
        assert seconds < 2


def test_the_watch_ends_with_the_state():
    def watching() -> bool:
        return any(thread.name == "accel-watch" for thread in threading.enumerate())

    def body():
        import torch.distributed as dist

        state = PartialState()
        seen = [watching()]
        collectives.gather_object([0])
        PartialState._reset_state()
        seen.append(watching())
        state = PartialState()  # adopts the group
        seen.append(watching())
        assert collectives.gather_object([state.process_index]) == [0, 1]
        state.wait_for_everyone()
        state.destroy_process_group()
        seen.append(watching())
        assert not dist.is_initialized()
        return seen

    assert worlds.run(body, 2) == [[True, False, True, False]] * 2


def test_without_reports_there_is_no_watch():
    def body():
        got = collectives.gather_object([1])
        return got, [thread.name for thread in threading.enumerate() if thread.name == "accel-watch"]

    assert worlds.run(body, 2, environ={"ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": "0"}) == [([1, 1], [])] * 2


def test_reports_can_be_switched_on_later():
    def body():
        state = PartialState()
        collectives.set_collective_checks(report_after=0.2)
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            if state.process_index == 1:
                time.sleep(1.2)
            state.wait_for_everyone()
        return errors.getvalue()

    waiting, _ = worlds.run(body, 2, environ={"ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": "0"})
    assert "not arrived: rank 1" in waiting


@pytest.mark.full
def test_an_interrupted_rank_exits():
    script = """
        import signal, threading
        from accel_state.operations import collectives
        state = PartialState()
        state.wait_for_everyone()
        if state.process_index == 0:
            threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT)).start()
            collectives.gather_object([1])
        time.sleep(3)
    """
    interrupted, sleeping = launch(script, 2)
    assert interrupted[0] in (1, -signal.SIGINT, 130)
    assert "KeyboardInterrupt" in interrupted[2]
    assert interrupted[3] < sleeping[3]
    assert sleeping[0] == 0


def test_an_exit_is_announced_even_if_the_thread_ends_first(monkeypatch):
    """The thread may hold the lock when the script leaves, and end before the script gets it."""
    from torch._C._distributed_c10d import HashStore

    class Group:
        name, ranks = "group", [0, 1]

        def position(self):
            return 0, None, 0

        def mark_failed(self, error):
            raise AssertionError(error)

    class LockOfTheSlower:
        def __init__(self, lock):
            self.lock = lock

        def __enter__(self):
            if threading.current_thread() is threading.main_thread():
                thread.join(timeout=10)
            self.lock.acquire()

        def __exit__(self, *failure):
            self.lock.release()

    store, group = HashStore(), Group()
    watchdog = Watchdog(store, 1, 2, 0.2)
    watchdog.add(group)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "accel-watch"]
    monkeypatch.setattr(watchdog, "_lock", LockOfTheSlower(watchdog._lock))
    watchdog.leave("exited")
    assert not thread.is_alive()
    assert json.loads(store.get("1/rank/1"))["gone"] == "exited"


def test_a_forked_child_does_not_say_goodbye():
    def body():
        state = PartialState()
        state.wait_for_everyone()
        if os.fork() == 0:
            state.channels.close("a child's end")
            os._exit(0)
        os.wait()
        time.sleep(0.3)
        return collectives.gather_object([state.process_index])

    assert worlds.run(body, 2, environ=QUICK) == [[0, 1]] * 2


@pytest.mark.full
def test_without_a_watch_a_lost_rank_is_still_an_error():
    script = """
        import os, signal
        state = PartialState()
        state.wait_for_everyone()
        if state.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.wait_for_everyone()
    """
    left, _ = launch(script, 2, {"ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": "0"})
    assert left[0] == 1
    assert "DistributedOperationException: collective #2, wait_for_everyone at <string>:" in left[2]


def test_t21_a_rank_that_destroyed_its_group_is_proof():
    def body():
        import torch.distributed as dist

        state = PartialState()
        if state.process_index == 1:
            dist.destroy_process_group()  # behind the back of PartialState
            time.sleep(1.5)
            return ""
        try:
            state.wait_for_everyone()
        except CollectiveMismatchError as error:
            return str(error)

    text, _ = worlds.run(body, 2, environ=QUICK)
    assert "rank 1 is gone (destroyed its process group)" in text


class TestJudge:
    def test_arrived_and_absent(self):
        peers = [
            RankStatus(0, 3, "gather", "a.py:1"),
            RankStatus(1, 2),
            RankStatus(2, 4, "reduce"),
            RankStatus(3, 3),
            RankStatus(4),
        ]
        found = diagnose(3, "gather", peers)
        assert [p.rank for p in found.arrived] == [0, 2, 3]
        assert [p.rank for p in found.absent] == [1, 4]
        assert found.proof is None

    def test_another_operation(self):
        assert "rank 1 entered reduce" in (diagnose(3, "gather", [RankStatus(1, 3, "reduce")]).proof or "")
        assert diagnose(3, "gather", [RankStatus(1, 2, "reduce")]).proof is None

    def test_gone(self):
        assert "rank 1 is gone (exited)" in (
            diagnose(3, "gather", [RankStatus(1, 2, gone="exited")]).proof or ""
        )
        assert diagnose(3, "gather", [RankStatus(1, 3, "gather", gone="killed")]).proof is not None
        assert diagnose(3, "gather", [RankStatus(1, 3, gone="exited")]).proof is None
        assert diagnose(3, "gather", [RankStatus(1, 4, "reduce", gone="exited")]).proof is None

    def test_words(self):
        assert str(RankStatus(1)) == "rank 1: no answer"
        assert str(RankStatus(1, 2, "gather", "a.py:3")) == "rank 1: in gather (#2) at a.py:3"
        assert str(RankStatus(1, 0)) == "rank 1: in no collective so far"
        assert str(RankStatus(1, 2, gone="exited")) == "rank 1: in no collective, after #2; gone: exited"


def test_call_site_is_the_users_line():
    site = call_site(sys._getframe())
    assert site is not None
    assert site.startswith(f"{__file__}:")
    assert call_site(None) is None


@pytest.mark.parametrize("names", [{}, {"__name__": None}, {"__name__": 3}])
def test_call_site_in_code_of_exec_whose_module_has_no_name(names):
    space = {**names, "call_site": call_site, "sys": sys}
    exec(compile("site = call_site(sys._getframe())", "cell", "exec"), space)
    assert space["site"] == "cell:1"


@pytest.mark.parametrize("size", [8, 100_000])
def test_a_backends_thread_is_never_the_last_to_hold_a_tensor(size):
    """It would need the interpreter's lock to let go of it, and abort a process that is just ending."""

    def body():
        import torch.distributed as dist

        from accel_state.communication import channel

        state = PartialState()
        seen = []
        plain = {"all_reduce": dist.all_reduce, "broadcast": dist.broadcast}

        def spy(function):
            def call(*tensors, **kwargs):
                work = function(*tensors, **kwargs)
                seen.extend(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
                return work

            return call

        channel.all_gather_single = spy(channel.all_gather_single)
        blocks = state.channel()._blocks
        blocks._all_to_all = spy(blocks._all_to_all)
        for name, function in plain.items():
            setattr(dist, name, spy(function))
        x = torch.ones(size)
        for call in (collectives.gather, collectives.reduce, collectives.broadcast):
            del seen[:]
            call(x)
            time.sleep(0.1)  # for the thread to let go
            owners = [tensor._use_count() for tensor in seen[-2:]]
            assert min(owners) >= 2, (call, owners)

    worlds.run(body, 2)


class Work:
    """What a collective on a device returns: the host does not wait in it."""

    def __init__(self):
        self.done = False

    def is_completed(self):
        return self.done

    def wait(self, timeout=None):
        assert timeout is None  # on a device it would make the host wait


def test_device_collectives_are_watched_after_the_host_has_gone_on():
    """The logic of collectives on a device, with stand-ins for the device and its works."""

    def body():
        state = PartialState()
        channel = state.channel()
        works = [Work(), Work()]

        on_device = types.SimpleNamespace(device=torch.device("cuda"))
        for work in works:
            with channel.operation("gather"):
                channel.wait(work, on_device)
        seen = [channel.position()[:2]]
        works[0].done = True
        seen.append(channel.position()[:2])
        works[1].done = True
        seen.append(channel.position()[:2])
        late = Work()
        with channel.operation("reduce"):
            channel.wait(late, on_device)
        if state.process_index == 0:
            while channel.failure is None:
                time.sleep(0.01)
            try:
                channel.barrier()
            except CollectiveMismatchError as error:
                return seen, str(error)
        state.channels.close("left early")
        late.done = True
        time.sleep(1)
        return seen, ""

    # Rank 1 leaves while it is itself still in the collective, as far as rank 0 can see.
    results = worlds.run(body, 2, environ=QUICK)
    for seen, _ in results:
        assert seen == [(1, "gather"), (2, "gather"), (2, None)]
    assert "collective #3, reduce" in results[0][1]
    assert "rank 1 is gone (left early)" in results[0][1]


def test_a_look_costs_nothing_when_nobody_waits():
    """The thread makes one request per look, and none of them while a collective runs."""

    class Store:
        calls: list[str] = []

        def add(self, key, amount):
            self.calls.append(key)
            return 0

    class Idle:
        name, ranks = "0", [0, 1]

        def position(self):
            return 5, None, 0

    store = Store()
    watchdog = Watchdog(store, 0, 2)
    watchdog._poll(store, [Idle()])
    assert store.calls == ["ask"]


def test_variables_of_a_script_are_freed_after_a_record_of_where_it_is():
    """A frame holds its variables, such as batches, for as long as something holds the frame."""
    from torch._C._distributed_c10d import HashStore

    class Group:
        name, ranks = "group", [0]

        def position(self):
            return 1, "gather", threading.get_ident()

    def script(watchdog):
        batch = torch.ones(2)
        watchdog._peers(store, group)
        return weakref.ref(batch)

    store, group = HashStore(), Group()
    watchdog = Watchdog(store, 0, 1)
    watchdog.add(group)
    gc.collect()
    gc.disable()
    try:
        assert script(watchdog)() is None
        assert json.loads(store.get("rank/0"))["at"]["group"][:2] == [1, "gather"]
    finally:
        gc.enable()
        watchdog.leave("exited")
