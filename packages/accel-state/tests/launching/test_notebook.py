"""Launching from a running process. Each case has an interpreter of its own, as a notebook's kernel is."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from accel_state.errors import ConfigError, LaunchError
from accel_state.launching import notebook
from accel_state.launching.notebook import debug_launcher, notebook_launcher
from testkit import worlds

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def run(body, folder, timeout=60, **environ):
    script = folder / "kernel.py"
    script.write_text(
        "import os, sys, time\nfrom accel_state import debug_launcher, notebook_launcher\n"
        + textwrap.dedent(body)
    )
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= {"PYTHONPATH": os.pathsep.join(sys.path), **environ}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    done.stdout = worlds.without_gloo_notes(done.stdout)
    return done


@forks
def test_ranks_form_a_world_and_print_with_prefix(tmp_path):
    done = run(
        """
        def train(word):
            import torch
            from accel_state import PartialState
            state = PartialState()
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            print(word, state.process_index, state.num_processes, total.item())

        notebook_launcher(train, ("hello",), num_processes=2)
        print("after", "RANK" in os.environ)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    *ranks, after = done.stdout.splitlines()
    assert sorted(ranks) == ["[rank 0] hello 0 2 2.0", "[rank 1] hello 1 2 2.0"]
    assert after == "after False"


@forks
@pytest.mark.full
def test_a_rank_of_torchrun_can_start_a_world_of_its_own(tmp_path):
    # Tests that call debug_launcher, themselves under torchrun: its agent's store must not be waited for.
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
             "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9",
             "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    done = run(
        """
        def train():
            import torch
            from accel_state import PartialState
            state = PartialState()
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            print(state.process_index, state.num_processes, os.environ["GROUP_RANK"], total.item())

        debug_launcher(train)
        """,
        tmp_path,
        **place,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 2 0 2.0", "[rank 1] 1 2 0 2.0"]


@forks
def test_t26_mixed_precision_reaches_the_function(tmp_path):
    done = run(
        """
        def show():
            from accel_state.config import decode
            print(decode(os.environ).mixed_precision)

        notebook_launcher(show, num_processes=2, mixed_precision="bf16")
        notebook_launcher(show, num_processes=1, mixed_precision="fp16")
        print(os.environ.get("ACCELERATE_MIXED_PRECISION"))
        """,
        tmp_path,
    )
    *ranks, single, after = done.stdout.splitlines()
    assert sorted(ranks) == ["[rank 0] bf16", "[rank 1] bf16"]
    assert (single, after) == ("fp16", "None")


@pytest.mark.wide
@forks
def test_torch_that_has_computed_before_does_not_hang_the_ranks(tmp_path):
    # OpenMP's threads do not survive a fork; without care this never ends.
    done = run(
        """
        import torch
        big = torch.randn(1500, 1500)
        (big @ big).exp().sum()
        def work():
            print(torch.isfinite((big @ big).sum()).item())
        notebook_launcher(work, num_processes=2)
        """,
        tmp_path,
        timeout=30,
    )
    assert sorted(done.stdout.splitlines()) == ["[rank 0] True", "[rank 1] True"], done.stderr


@forks
def test_a_failing_ranks_traceback_is_raised(tmp_path):
    done = run(
        """
        def broken():
            if os.environ["RANK"] == "1":
                raise ValueError("the data is bad")
            time.sleep(60)
        try:
            notebook_launcher(broken, num_processes=2)
        except RuntimeError as error:
            print(type(error).__name__, error)
        """,
        tmp_path,
        timeout=30,
    )
    told = done.stdout
    assert told.startswith(
        "LaunchError rank 1 of 2 failed (exit code 1):\n\nTraceback (most recent call last):\n"
    )
    assert told.endswith("ValueError: the data is bad\n")
    assert "in broken" in told
    assert "forks.py" not in told


@forks
def test_restarts(tmp_path):
    done = run(
        """
        def flaky():
            print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                sys.exit(3)
        notebook_launcher(flaky, num_processes=2, max_restarts=1)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 1") == 2


@forks
def test_prefix_template(tmp_path):
    done = run(
        """
        prefix = "<${role_name} ${rank}> "
        notebook_launcher(lambda: print("x"), num_processes=2, log_line_prefix_template=prefix)
        """,
        tmp_path,
    )
    assert sorted(done.stdout.splitlines()) == ["<default 0> x", "<default 1> x"], done.stderr


@pytest.mark.wide
@forks
def test_debug_launcher_uses_the_cpu(tmp_path):
    done = run(
        """
        def show(factor):
            import torch
            from accel_state import PartialState
            state = PartialState()
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            print(state.device, state.backend, state.fork_launched, total.item() * factor)
        debug_launcher(show, (10,), num_processes=3)
        """,
        tmp_path,
    )
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"[rank {rank}] cpu gloo True 30.0" for rank in range(3)], done.stderr


@pytest.mark.wide
@forks
def test_debug_launcher_with_one_process_has_no_group(tmp_path):
    done = run(
        """
        def show():
            from accel_state import PartialState
            state = PartialState()
            print(state.distributed_type.value, state.num_processes, state.backend, state.device)
        debug_launcher(show, num_processes=1)
        """,
        tmp_path,
    )
    assert done.stdout == "[rank 0] NO 1 None cpu\n", done.stderr


@pytest.mark.wide
@forks
def test_ranks_do_not_inherit_the_state_that_a_launch_of_one_process_left(tmp_path):
    done = run(
        """
        def show():
            from accel_state import PartialState
            print(PartialState().num_processes)
        notebook_launcher(show, num_processes=1)
        notebook_launcher(show, num_processes=2)
        from accel_state import PartialState
        print(PartialState().num_processes)
        """,
        tmp_path,
    )
    single, *ranks, after = done.stdout.splitlines()
    assert (single, sorted(ranks), after) == ("1", ["[rank 0] 2", "[rank 1] 2"], "1"), done.stderr


def test_a_state_of_this_process_is_refused(tmp_path):
    done = run(
        """
        from accel_state import PartialState
        PartialState(cpu=True)
        for launcher in (notebook_launcher, debug_launcher):
            try:
                launcher(lambda: print("it ran"), num_processes=2)
            except RuntimeError as error:
                print(type(error).__name__, error)
        """,
        tmp_path,
    )
    for line, launcher in zip(done.stdout.splitlines(), ("notebook_launcher", "debug_launcher"), strict=True):
        assert line.startswith(f"StateError {launcher}")
        assert "an Accelerator or PartialState already exists" in line


NOT_FORKED = [
    pytest.param(
        "import torch; torch.distributed.init_process_group('gloo', rank=0, world_size=1, "
        "store=torch.distributed.HashStore())",
        "belongs to a process group",
        marks=pytest.mark.full,
    ),
    ("import torch; torch.cuda.is_initialized = lambda: True", "CUDA, which does not survive a fork"),
]


@forks
@pytest.mark.parametrize(("before", "reason"), NOT_FORKED)
@pytest.mark.full
def test_where_a_fork_is_not_safe_the_ranks_are_new_processes(tmp_path, before, reason):
    done = run(
        f"""
        {before}
        offset = 40
        def work(value):
            import torch
            from accel_state import PartialState, gather
            state = PartialState(cpu=True)
            found = gather(torch.tensor([state.process_index + value + offset])).tolist()
            print(found, torch.cuda.is_initialized(), os.environ["WORLD_SIZE"])
        notebook_launcher(work, (2,), num_processes=2)
        debug_launcher(work, (2,))
        try:
            notebook_launcher(work, (2,), num_processes=2, start_method="fork")
        except RuntimeError as error:
            print(error)
        """,
        tmp_path,
    )
    *ranks, refused = done.stdout.splitlines()
    assert sorted(ranks) == [f"[rank {rank}] [42, 43] False 2" for rank in (0, 0, 1, 1)], done.stderr
    assert reason in refused
    assert "leave start_method out" in refused


def test_spawned_ranks_leave_nothing_and_show_their_errors(tmp_path):
    done = run(
        """
        import tempfile, threading
        tempfile.tempdir = os.getcwd()
        def fail(rank):
            if os.environ["RANK"] == "1":
                raise ValueError(f"bad {rank}")
        try:
            notebook_launcher(fail, ("cell",), num_processes=2, start_method="spawn")
        except RuntimeError as error:
            print(error)
        lock = threading.Lock()
        try:
            notebook_launcher(lambda: lock, num_processes=2, start_method="spawn")
        except RuntimeError as error:
            print(error)
        print(os.listdir())
        """,
        tmp_path,
    )
    assert "rank 1 of 2 failed" in done.stdout
    assert "ValueError: bad cell" in done.stdout
    assert "cannot be sent to new processes" in done.stdout
    assert done.stdout.splitlines()[-1] == "['kernel.py']"


def test_a_start_method_that_does_not_exist():
    with pytest.raises(ConfigError, match="start_method is 'thread'; expected 'fork' or 'spawn'"):
        notebook_launcher(print, num_processes=2, start_method="thread")


@forks
def test_an_interrupt_ends_the_ranks_and_comes_through(tmp_path):
    done = run(
        """
        import signal, threading
        def sleep():
            time.sleep(60)
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            notebook_launcher(sleep, num_processes=2)
        except KeyboardInterrupt:
            print("interrupted")
        """,
        tmp_path,
        timeout=20,
    )
    assert done.stdout == "interrupted\n", done.stderr


@forks
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_ranks_end_with_the_process_that_forked_them(tmp_path, how):
    body = f"""
        import signal, subprocess, threading
        def sleep():
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # {tmp_path}"])
            open("ready_" + os.environ["RANK"], "w").close()
            time.sleep(60)
        def end():
            while len([name for name in os.listdir() if name.startswith("ready_")]) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.{how})
        threading.Thread(target=end, daemon=True).start()
        notebook_launcher(sleep, num_processes=2)
    """
    assert run(body, tmp_path, timeout=20).returncode == -getattr(signal, how)
    until = time.monotonic() + 5
    while found := [process for process in psutil.process_iter(["cmdline"]) if marked(process, tmp_path)]:
        assert time.monotonic() < until, found
        time.sleep(0.05)


def marked(process, folder):
    try:
        alive = process.status() != "zombie"
    except psutil.NoSuchProcess:
        return False
    return alive and any(str(folder) in word for word in process.info["cmdline"] or ())


def test_more_processes_than_accelerators(tmp_path):
    done = run(
        """
        try:
            notebook_launcher(print, num_processes=3)
        except RuntimeError as error:
            print(type(error).__name__, error)
        """,
        tmp_path,
        ACCEL_DEVICE_COUNT="2",
    )
    assert "DeviceError num_processes=3 needs 3 accelerators, but this machine has 2" in done.stdout


def test_one_process_runs_in_the_shell_of_a_job_with_several_machines(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_NNODES", "2")
    done = run(
        """
        import os
        def show():
            from accel_state import PartialState
            print(PartialState().num_processes)
        notebook_launcher(show, num_processes=1)
        debug_launcher(show, num_processes=1)
        print(os.environ.get("ACCEL_CLUSTER"))
        """,
        tmp_path,
    )
    assert done.stdout == "1\n[rank 0] 1\nNone\n", done.stderr


def test_one_process_runs_here():
    seen = []
    notebook_launcher(lambda value: seen.append((value, os.getpid())), (7,), num_processes=1)
    assert seen == [(7, os.getpid())]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_processes": 0}, "num_processes=0 starts nothing"),
        ({"num_processes": "2"}, "num_processes is '2'; expected an integer"),
        ({"args": 0.1}, r"args=0.1 is a float; expected a tuple or list .* pass args=\(0.1,\)"),
        ({"args": "ab", "num_processes": 2}, "args='ab' is a str; expected a tuple or list"),
        ({"args": {"lr": 1}, "num_processes": 1}, "is a dict; expected a tuple or list"),
        ({"num_processes": 2, "use_port": "abc"}, "use_port is 'abc'; expected an integer"),
        ({"num_processes": 2, "mixed_precision": "fp17"}, "mixed_precision is 'fp17'"),
        ({"num_processes": 2, "node_rank": 2, "num_nodes": 2}, "node_rank=2 is not one of num_nodes=2"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        notebook_launcher(print, **arguments)


def test_debug_launcher_needs_a_process():
    with pytest.raises(ConfigError, match="num_processes=0"):
        debug_launcher(print, num_processes=0)


def test_debug_launcher_refuses_a_single_value_as_arguments():
    with pytest.raises(ConfigError, match="args=3 is a int; expected a tuple or list"):
        debug_launcher(print, 3)


def test_platforms_without_fork_start_new_processes(tmp_path):
    done = run("del os.fork\ndebug_launcher(lambda: print(os.environ['RANK']))", tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0", "[rank 1] 1"], done.stderr


def test_without_cloudpickle_its_installation_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr(notebook, "_process_state", lambda: None)  # other tests may have left one
    with pytest.raises(LaunchError, match="pip install cloudpickle"):
        notebook_launcher(print, num_processes=2, start_method="spawn")
