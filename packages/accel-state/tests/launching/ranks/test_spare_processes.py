"""Spare processes that take the places of ranks at a restart."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from accel_state.launching.plan import ProcessSpec
from accel_state.launching.ranks.spare_processes import SparePool
from accel_state.launching.target import Target

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sockets that children inherit")


FAILS_ONCE = """
open(f"seen_{rank}_{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w").write(str("torch" in sys.modules))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import psutil  # until the spares wait for their orders
    idle, until = False, time.monotonic() + 40
    while not idle and time.monotonic() < until:
        spares = [p for p in psutil.Process().parent().children() if "--spare" in p.cmdline()]
        before = [sum(p.cpu_times()[:2]) for p in spares]
        time.sleep(2)
        idle = len(spares) == 2 and before == [sum(p.cpu_times()[:2]) for p in spares] and min(before) > 0.5
    sys.exit(3 if rank == 1 else 0)
print(__name__, sys.argv[1:], os.environ["WORLD_SIZE"], sys.stdin.readline())
"""


def test_warm_processes_become_the_ranks_of_a_restart(launcher):
    script = launcher.script(FAILS_ONCE)
    process = launcher.start(
        "--cpu", "--num_processes", "2", "--spares", "2", script, "a b", stdin=subprocess.PIPE
    )
    out, err = process.communicate("hello\n", timeout=60)
    assert process.returncode == 0, err
    assert "spare processes take the places of 2 of 2 ranks" in err
    assert sorted(out.split("\n")) == [
        "", "[rank 0] ", "[rank 0] __main__ ['a b'] 2 hello", "[rank 1] __main__ ['a b'] 2 "
    ]  # fmt: skip
    warm = {path.name: path.read_text() for path in launcher.folder.glob("seen_*")}
    assert warm == {"seen_0_0": "False", "seen_1_0": "False", "seen_0_1": "True", "seen_1_1": "True"}


def test_spares_end_with_a_killed_launcher(launcher):
    process = launcher.start("--num_processes", "2", "--spares", "1", launcher.script("time.sleep(60)"))
    end = time.monotonic() + 20
    while not any("--spare" in line for line in launcher.leftovers(0.0)):
        assert time.monotonic() < end
    process.kill()
    process.communicate(timeout=20)


@pytest.fixture
def pool(tmp_path):
    (tmp_path / "job.py").write_text("import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n")
    made = SparePool(1, sys.executable, Target(str(tmp_path / "job.py"), ("x",)), cpu=True)
    yield made
    made.close()


def environment(**more):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def take(pool, **more):
    spec = ProcessSpec(4, (), {})
    return pool.take([spec], [environment(RANK="4", **more)])


def spares():
    return [child for child in psutil.Process().children() if "--spare" in child.cmdline()]


def test_a_spare_that_is_not_warm_is_left_alone(pool):
    pool.fill(environment())
    assert take(pool) == {}
    assert len(spares()) == 1
    assert pool.faults == []


def test_a_spare_that_has_ended_is_not_used(pool):
    pool.fill(environment())
    spare = spares()[0]
    spare.kill()
    while spare.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert take(pool) == {}
    assert pool.faults == ["it has ended"]
    pool.fill(environment())
    assert len(spares()) == 1


def test_a_spare_that_fails_its_probe_is_not_used(pool, tmp_path):
    fake = tmp_path / "fake" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("def full(*args, **more):\n    raise RuntimeError('device is lost')\n")
    path = os.pathsep.join([str(tmp_path / "fake"), *sys.path])
    pool.fill({**environment(), "PYTHONPATH": path})
    end = time.monotonic() + 20
    while not pool.faults:
        assert time.monotonic() < end
        assert take(pool) == {}
        time.sleep(0.05)
    assert pool.faults == ["cpu cannot compute: device is lost"]
    assert spares() == []


def test_a_warm_spare_becomes_the_rank(pool):
    pool.fill(environment())
    end = time.monotonic() + 60
    while not (taken := take(pool)):
        assert time.monotonic() < end
        time.sleep(0.1)
    process = taken[4]
    assert process.rank == 4
    assert dict(process.pipes)["stdout"].read() == b"4 ['x']\n"
    while process.poll() is None:
        time.sleep(0.01)
    assert process.poll() == 0
    for _, pipe in process.pipes:
        pipe.close()


def test_closing_ends_all(pool):
    pool.fill(environment())
    assert len(spares()) == 1
    pool.close()
    assert spares() == []
