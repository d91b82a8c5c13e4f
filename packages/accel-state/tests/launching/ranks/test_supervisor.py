"""The launcher as a process: output, failures, signals, restarts, and that nothing is left running.

Scripts do not import torch, so a launch takes a tenth of a second. Every process of a test carries a marker
in its environment, by which leftovers are found.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

DRIVER = Path(__file__).parents[1] / "launching_driver.py"
posix = pytest.mark.skipif(os.name != "posix", reason="signals and process groups of POSIX systems")


def wait_for(path: Path, count: int = 1, timeout: float = 20.0) -> None:
    until(lambda: len(list(path.parent.glob(path.name))) >= count, timeout)


def until(holds, timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


READY = "open(f'ready_{rank}', 'w').close()\n"
SLEEP = READY + "time.sleep(60)\n"


def test_ranks_get_their_numbers_and_arguments(launcher):
    script = launcher.script("print(rank, os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'], sys.argv[1:])")
    done = launcher.run("--num_processes", "3", script, "--num_processes", "9", "a b")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] {rank} 3 {rank} ['--num_processes', '9', 'a b']" for rank in range(3)
    ]


def test_one_process_takes_the_launchers_place(launcher):
    script = launcher.script("print(os.getpid(), os.environ.get('RANK'))\nsys.exit(7)")
    process = launcher.start(script)
    out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == (f"{process.pid} None\n", "", 7)


def test_one_process_prints_without_prefix_when_it_is_watched(launcher):
    script = launcher.script("print('plain')")
    done = launcher.run("--max_restarts", "1", script)
    assert (done.returncode, done.stdout) == (0, "plain\n")


def test_the_rank_whose_traceback_came_first_is_blamed_although_it_ends_last(launcher):
    # Rank 0 is slow to end after its traceback, as a process that tears down a process group is; rank 1 meets
    # the broken connection and is gone before.
    script = launcher.script("""
        import atexit
        def tear_down():
            open("link_lost", "w").close()
            time.sleep(0.3)
        if rank == 0:
            atexit.register(tear_down)
            raise RuntimeError("cause")
        while not os.path.exists("link_lost"):
            time.sleep(0.01)
        time.sleep(0.1)  # the launcher has a thread per stream, and which of two runs first is the kernel's choice
        raise RuntimeError("consequence")
    """)
    done = launcher.run("--num_processes", "2", script)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: cause")


@posix
def test_death_by_signal_becomes_128_plus_n(launcher):
    script = launcher.script("""
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)
    """)
    done = launcher.run("--num_processes", "2", script)
    assert done.returncode == 128 + signal.SIGSEGV
    assert "rank 1 failed first (ended by SIGSEGV)" in done.stderr


@posix
def test_a_crash_is_blamed_although_the_error_that_it_causes_is_heard_first(launcher):
    # A busy launcher may read the traceback of a rank whose connection broke before it learns what has broken it.
    script = launcher.script("""
        if rank == 1:
            import traceback
            try: raise ConnectionError("closed by peer")
            except ConnectionError: traceback.print_exc()
            open("heard", "w").close()
            time.sleep(0.6)
            sys.exit(1)
        while not os.path.exists("heard"):
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = launcher.run("--num_processes", "2", script)
    assert done.returncode == 137
    assert "rank 0 failed first (ended by SIGKILL" in done.stderr


@posix
def test_a_killed_rank_is_explained(launcher):
    script = launcher.script("if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)")
    done = launcher.run("--num_processes", "2", script)
    assert done.returncode == 137
    assert "running out of memory" in done.stderr
    assert "wrote nothing" not in done.stderr


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_once_and_ranks_may_finish(launcher, number):
    script = launcher.script("""
        got = []
        signal.signal(signal.SIGTERM, lambda n, f: got.append(n))
        signal.signal(signal.SIGUSR1, lambda n, f: got.append(n))
    """)
    body = READY + (
        "while not got: time.sleep(0.01)\ntime.sleep(0.3)\nprint(len(got), "
        "signal.Signals(got[0]).name)\nsys.exit(75)\n"
    )
    Path(script).write_text(Path(script).read_text() + body)
    process = launcher.start("--num_processes", "2", script)
    wait_for(launcher.folder / "ready_*", 2)
    for _ in range(3):
        process.send_signal(number)
        time.sleep(0.05)
    out, err = process.communicate(timeout=20)
    assert sorted(out.splitlines()) == [f"[rank {rank}] 1 {number.name}" for rank in (0, 1)]
    assert process.returncode == 75
    assert "failed" not in err


@posix
def test_ranks_that_ignore_sigterm_are_killed_after_the_grace_period(launcher):
    script = launcher.script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP)
    process = launcher.start("--num_processes", "2", "--grace_period", "0.5", script)
    wait_for(launcher.folder / "ready_*", 2)
    started = time.monotonic()
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert 0.4 < time.monotonic() - started < 5
    assert process.returncode == 137
    assert "ranks 0 and 1 did not exit in time; killing" in err


@posix
def test_ranks_without_handler_end_at_once_on_sigterm(launcher):
    process = launcher.start("--num_processes", "2", launcher.script(SLEEP))
    wait_for(launcher.folder / "ready_*", 2)
    process.terminate()
    _, err = process.communicate(timeout=10)
    assert process.returncode == 143
    assert "failed" not in err


@posix
def test_a_closed_terminal_ends_the_ranks(launcher):
    process = launcher.start("--num_processes", "2", launcher.script(SLEEP))
    wait_for(launcher.folder / "ready_*", 2)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=10)
    assert process.returncode == 143


@posix
def test_ctrl_c_interrupts_the_ranks(launcher):
    script = launcher.script("""
        try:
            open(f'ready_{rank}', 'w').close()
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted")
            raise
    """)
    process = launcher.start("--num_processes", "2", script)
    wait_for(launcher.folder / "ready_*", 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert sorted(out.splitlines()) == ["[rank 0] interrupted", "[rank 1] interrupted"]
    assert "Traceback" not in err
    assert "KeyboardInterrupt" not in err
    assert f"accel: ended by Ctrl-C; rank 0 was in {script}, line " in err
    assert process.returncode == 130
    assert "failed" not in err


def interrupted(launcher, script, ranks):
    """A launch of a script, which then sleeps on all ranks, after Ctrl-C."""
    Path(script).write_text(Path(script).read_text() + SLEEP)
    process = launcher.start("--num_processes", str(ranks), script)
    wait_for(launcher.folder / "ready_*", ranks)
    process.send_signal(signal.SIGINT)
    return process


@posix
def test_what_ctrl_c_causes_is_not_a_failure(launcher):
    # The interpreter of rank 0 aborts at its end; rank 1 finds that its peer is gone; rank 2 ends without a traceback.
    script = launcher.script("""
        def interrupted(number, frame):
            if rank == 2:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
            if rank == 1:
                raise RuntimeError("CollectiveMismatchError: the store of this world is gone")
            import traceback
            try: raise KeyboardInterrupt
            except KeyboardInterrupt: traceback.print_exc()
            os.write(2, b"terminate called without an active exception\\n")
            os.abort()
        signal.signal(signal.SIGINT, interrupted)
    """)
    process = interrupted(launcher, script, 3)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert re.sub("accel: 3 processes share .*\n", "", err).count("\n") == 2, err
    assert "accel: ended by Ctrl-C; rank 0 was in " in err


@posix
def test_ctrl_c_while_interpreters_start_shows_nothing_of_them(launcher):
    script = launcher.script("""
        def interrupted(number, frame):
            print("Fatal Python error: init_import_site: Failed to import the site module", file=sys.stderr)
            print("Python runtime state: initialized", file=sys.stderr)
            print("Traceback (most recent call last):", file=sys.stderr)
            print('  File "<frozen site>", line 626, in main', file=sys.stderr)
            print("KeyboardInterrupt", file=sys.stderr)
            os._exit(1)
        signal.signal(signal.SIGINT, interrupted)
    """)
    process = interrupted(launcher, script, 2)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert err.splitlines()[-2:] == [
        "accel: interrupted; ranks have 5 s to exit, Ctrl-C again kills them", "accel: ended by Ctrl-C"
    ]  # fmt: skip
    assert "Python" not in err


@posix
def test_an_error_while_a_rank_ends_after_ctrl_c_is_shown(launcher):
    script = launcher.script("""
        def interrupted(number, frame):
            raise ValueError("the last save failed")
        signal.signal(signal.SIGINT, interrupted)
    """)
    process = interrupted(launcher, script, 2)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "ValueError: the last save failed" in err


def interrupted_while_ranks_ignore_it(launcher):
    return interrupted(launcher, launcher.script("signal.signal(signal.SIGINT, signal.SIG_IGN)\n"), 2)


@posix
def test_second_ctrl_c_kills(launcher):
    process = interrupted_while_ranks_ignore_it(launcher)
    time.sleep(0.3)
    assert process.poll() is None
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert time.monotonic() - started < 3
    assert process.returncode == 130
    assert "interrupted again; killing" in err


@pytest.mark.wide
@posix
def test_ranks_that_are_slow_to_end_after_ctrl_c_change_no_exit_code(launcher):
    process = interrupted_while_ranks_ignore_it(launcher)
    _, err = process.communicate(timeout=30)
    assert "ranks 0 and 1 did not exit in time; killing" in err
    assert process.returncode == 130


@posix
def test_what_ranks_started_ends_with_them(launcher):
    # The grandchild holds the output pipe open: the launcher must not wait for its end.
    script = launcher.script("""
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        sys.exit(3 if rank == 1 else 0)
    """)
    started = time.monotonic()
    done = launcher.run("--num_processes", "2", script)
    assert time.monotonic() - started < 10
    assert done.returncode == 3


@posix
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_launcher_leaves_nothing(launcher, number):
    script = launcher.script("""
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    """)
    Path(script).write_text(Path(script).read_text() + SLEEP)
    process = launcher.start(
        "--num_processes", "2", script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(launcher.folder / "ready_*", 2)
    assert len(launcher.leftovers(0)) >= 5
    process.send_signal(number)
    process.wait(timeout=10)
    assert launcher.leftovers() == []


@posix
def test_a_stopped_launcher_stops_its_ranks(launcher):
    process = launcher.start("--num_processes", "2", launcher.script(SLEEP), start_new_session=True)
    wait_for(launcher.folder / "ready_*", 2)
    ranks = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTSTP)
    until(lambda: psutil.Process(process.pid).status() == "stopped")
    until(lambda: [rank.status() for rank in ranks].count("stopped") == 2)
    process.send_signal(signal.SIGCONT)
    until(lambda: "stopped" not in [rank.status() for rank in ranks])
    process.terminate()
    process.communicate(timeout=10)


def test_crashes_restart_the_group_on_a_fresh_port(launcher):
    script = launcher.script("""
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"])
        if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
            sys.exit(1)
        time.sleep(0.3)
    """)
    done = launcher.run("--num_processes", "2", "--max_restarts", "2", script)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"\[rank 1\] attempt (\d) (\d+)", done.stdout)
    assert [attempt for attempt, _ in found] == ["0", "1", "2"]
    assert len({port for _, port in found}) == 3
    assert "restarting all ranks (2 of 2)" in done.stderr
    assert "Traceback" not in done.stderr


def test_restarts_end_with_the_last_failure(launcher):
    script = launcher.script("raise ValueError(os.environ['TORCHELASTIC_RESTART_COUNT'])")
    done = launcher.run("--num_processes", "2", "--max_restarts", "1", script)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: 1")


def test_preemption_does_not_count_against_restarts(launcher):
    script = launcher.script("""
        count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        print("attempt", count)
        if count < 3:
            sys.exit(75)
    """)
    done = launcher.run("--num_processes", "2", "--max_restarts", "1", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 3") == 2


def test_preemption_without_restarts_is_left_to_the_scheduler(launcher):
    done = launcher.run("--num_processes", "2", launcher.script("sys.exit(75)"))
    assert done.returncode == 75
    assert "=====" not in done.stderr


@posix
def test_preempted_ranks_may_finish_saving(launcher):
    script = launcher.script("if rank == 1: time.sleep(1); print('saved')\nsys.exit(75)")
    done = launcher.run("--num_processes", "2", script)
    assert (done.returncode, done.stdout) == (75, "[rank 1] saved\n")


@posix
def test_a_stopped_launch_does_not_restart(launcher):
    script = launcher.script("signal.signal(signal.SIGTERM, lambda n, f: sys.exit(75))\n" + SLEEP)
    process = launcher.start("--num_processes", "2", "--max_restarts", "5", script)
    wait_for(launcher.folder / "ready_*", 2)
    process.terminate()
    _, err = process.communicate(timeout=10)
    assert process.returncode == 75
    assert "restarting" not in err


ATTEMPTS = """
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    print("attempt", count, "resume", os.environ.get("ACCELERATE_RESUME"))
    if count < 2:
        sys.exit(75)
"""


@pytest.mark.parametrize("size", [1, 2])
def test_resume_starts_preempted_ranks_again(launcher, size):
    done = launcher.run("--num_processes", str(size), "--resume", launcher.script(ATTEMPTS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 2 resume true") == size
    assert done.stderr.count("accel: training was preempted (exit code 75); restarting all ranks") == 2


def test_resume_alone_does_not_restart_after_a_crash(launcher):
    done = launcher.run("--num_processes", "2", "--resume", launcher.script("sys.exit(3)"))
    assert done.returncode == 3
    assert "restarting" not in done.stderr


def test_crashes_and_preemptions_are_counted_apart(launcher):
    script = launcher.script("""
        count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        sys.exit({0: 75, 1: 1, 2: 75, 3: 1}[count])
    """)
    done = launcher.run("--num_processes", "2", "--max_restarts", "1", "--resume", script)
    assert done.returncode == 1
    assert done.stderr.count("preempted (exit code 75); restarting") == 2
    assert done.stderr.count("restarting all ranks (1 of 1)") == 1


@posix
@pytest.mark.parametrize(
    ("number", "codes"),
    [(signal.SIGTERM, (143, 75)), (signal.SIGUSR1, (138, 75)), (signal.SIGINT, (130, 130))],
)
def test_a_stopped_launch_that_can_be_resumed_says_so_by_its_code(launcher, number, codes):
    """Also if ranks could not save any more: what is complete on the disk is what the next start finds."""
    for flags, code in zip(([], ["--resume"]), codes, strict=True):
        process = launcher.start("--num_processes", "2", *flags, launcher.script(SLEEP))
        wait_for(launcher.folder / "ready_*", 2)
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
        assert process.returncode == code, err
        assert "restarting" not in err
        for path in launcher.folder.glob("ready_*"):
            path.unlink()


@posix
def test_a_stopped_launch_that_can_be_resumed_tells_of_ranks_that_finished_or_failed(launcher):
    for code in (0, 5):
        script = launcher.script(f"signal.signal(signal.SIGTERM, lambda n, f: sys.exit({code}))\n" + SLEEP)
        process = launcher.start("--num_processes", "2", "--resume", script)
        wait_for(launcher.folder / "ready_*", 2)
        process.terminate()
        process.communicate(timeout=20)
        assert process.returncode == code
        for path in launcher.folder.glob("ready_*"):
            path.unlink()


@posix
def test_ranks_that_are_killed_after_the_grace_period_can_be_resumed(launcher):
    script = launcher.script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP)
    process = launcher.start("--num_processes", "2", "--resume", "--grace_period", "0.3", script)
    wait_for(launcher.folder / "ready_*", 2)
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 75
    assert "did not exit in time; killing" in err


def test_lines_never_mix(launcher):
    script = launcher.script("""
        for number in range(300):
            sys.stdout.write(f"line {number} ")
            sys.stdout.write("x" * 200)
            print()
    """)
    done = launcher.run("--num_processes", "3", script)
    lines = done.stdout.splitlines()
    assert len(lines) == 900
    assert all(re.fullmatch(r"\[rank \d\] line \d+ x{200}", line) for line in lines)


def test_much_output_does_not_block(launcher):
    script = launcher.script("""
        block = "y" * 1023 + "\\n"
        for _ in range(4000):
            sys.stdout.write(block)
            sys.stderr.write(block)
    """)
    done = launcher.run("--num_processes", "2", script, timeout=60)
    assert done.returncode == 0
    assert done.stdout.count("y" * 1023 + "\n") == 8000
    assert done.stderr.count("y" * 1023 + "\n") == 8000


def test_an_unfinished_last_line_is_shown(launcher):
    done = launcher.run("--num_processes", "2", launcher.script("if rank: sys.stdout.write('no newline')"))
    assert done.stdout == "[rank 1] no newline"


def test_a_script_that_closes_its_output_goes_on(launcher):
    script = launcher.script("""
        sys.stdout.close(); sys.stderr.close(); os.close(1); os.close(2)
        time.sleep(0.5)
        open(f"done_{rank}", "w").close()
        os._exit(0)
    """)
    done = launcher.run("--num_processes", "2", script)
    assert done.returncode == 0
    assert len(list(launcher.folder.glob("done_*"))) == 2


@posix
def test_a_reader_that_goes_away_ends_the_ranks_as_in_a_pipeline(launcher):
    script = launcher.script("""
        while True:
            print("more")
            time.sleep(0.01)
    """)
    process = launcher.start("--num_processes", "2", script)
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=15)
    assert "BrokenPipeError" in process.stderr.read()
    assert process.returncode != 0


@pytest.mark.wide
@posix
def test_a_slow_reader_gets_everything(launcher):
    script = launcher.script("sys.stdout.write(('z' * 99 + '\\n') * 600)")
    process = launcher.start("--num_processes", "2", script)
    time.sleep(3)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert out.count("z" * 99 + "\n") == 1200


@pytest.mark.wide
@posix
def test_a_reader_that_has_paused_does_not_hold_up_signals(launcher):
    # accel launch ... 2>&1 | less
    script = launcher.script(f"{READY}while True: print('w' * 1000)")
    process = launcher.start("--num_processes", "2", script, stderr=subprocess.STDOUT)
    wait_for(launcher.folder / "ready_*", 2)
    time.sleep(0.5)
    process.terminate()
    assert process.wait(timeout=15) == 143
    assert "Fatal Python error" not in process.stdout.read()


def test_rank_0_reads_standard_input_and_the_others_read_nothing(launcher):
    script = launcher.script("print(sys.stdin.read())")
    process = launcher.start("--num_processes", "2", script, stdin=subprocess.PIPE)
    out, _ = process.communicate("typed", timeout=10)
    assert sorted(out.splitlines()) == ["[rank 0] typed", "[rank 1] "]


def test_log_dir_gets_one_file_per_rank(launcher):
    script = launcher.script("print('out', rank)\nprint('err', rank, file=sys.stderr)")
    for _ in range(2):
        done = launcher.run("--num_processes", "2", "--log_dir", "logs", script)
        assert "[rank 1] out 1" in done.stdout
    names = ["rank_0.log", "rank_1.log", "run_0.json"]
    assert sorted(path.name for path in (launcher.folder / "logs").iterdir()) == names
    text = (launcher.folder / "logs/rank_1.log").read_text()
    assert text.count("out 1\n") == text.count("err 1\n") == 2, "a second run adds to the file"
    assert "rank 0" not in text
    assert text.count("==== ") == 2


@pytest.mark.parametrize(
    ("tee", "expected"), [("1", ["out"]), ("2", ["err"]), ("3", ["err", "out"]), ("1:2", ["err"])]
)
def test_tee_chooses_what_is_logged(launcher, tee, expected):
    script = launcher.script("print('out')\nprint('err', file=sys.stderr)")
    done = launcher.run("--num_processes", "2", "--tee", tee, script)
    folder = Path(re.search(r"logs go to (.*)", done.stderr)[1])
    lines = [line for line in (folder / "rank_1.log").read_text().splitlines() if not line.startswith("====")]
    assert sorted(lines) == expected
    assert "[rank 0] out" in done.stdout


def test_quiet_says_nothing_but_the_traceback(launcher):
    script = launcher.script("if rank: raise ValueError('loud')\ntime.sleep(60)")
    done = launcher.run("--num_processes", "2", "--quiet", script)
    assert done.returncode == 1
    assert "accel:" not in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: loud")


@posix
def test_programs_that_are_not_python_can_be_launched(launcher):
    done = launcher.run("--num_processes", "2", "--no_python", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]


def test_modules_can_be_launched(launcher):
    (launcher.folder / "project").mkdir()
    (launcher.folder / "project/train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = launcher.run("--num_processes", "2", "--module", "project.train", "--lr", "1")
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] __main__ ['--lr', '1']" for rank in (0, 1)]


def test_t30_two_launches_on_one_host_pass(launcher):
    script = launcher.script("""
        import socket
        address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        if rank == 0:
            server = socket.create_server(address)
            server.accept()[0].sendall(b"hello")
        else:
            until = time.monotonic() + 10
            while True:
                try:
                    link = socket.create_connection(address)
                    break
                except OSError:
                    assert time.monotonic() < until
                    time.sleep(0.01)
            assert link.recv(5) == b"hello"
        time.sleep(0.5)
    """)
    both = [launcher.start("--num_processes", "2", script) for _ in range(4)]
    ends = [(*process.communicate(timeout=30), process.returncode) for process in both]
    assert [code for _, _, code in ends] == [0, 0, 0, 0], ends


def test_a_taken_port_is_named_before_anything_starts(launcher):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = launcher.run(
            "--num_processes", "2", "--main_process_port", str(port), launcher.script("print('ran')")
        )
    assert done.returncode == 2
    assert "ran" not in done.stdout
    assert f"PortError: port {port} cannot be used" in done.stderr
    assert "Pass --main_process_port 0" in done.stderr


def test_dry_run_prints_commands_that_can_be_pasted(launcher):
    script = launcher.script("print('ran', rank, os.environ['WORLD_SIZE'], sys.argv[1:])")
    done = launcher.run(
        "--num_processes", "2", "--dry-run", "--mixed_precision", "bf16", script, "a b", "$HOME"
    )
    assert done.returncode == 0
    assert "ran 0 2" not in done.stdout
    blocks = done.stdout.split("\n\n")
    assert len(blocks) == 2
    assert "ACCELERATE_MIXED_PRECISION=bf16" in blocks[1]
    if os.name == "posix":
        out = subprocess.run(blocks[1], shell=True, capture_output=True, text=True, check=True).stdout
        assert out == "ran 1 2 ['a b', '$HOME']\n"


@posix
def test_signals_that_were_ignored_stay_ignored(launcher):
    # nohup
    command = f"{sys.executable} {DRIVER} --cpu --num_processes 2 {launcher.script(SLEEP)}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        ["sh", "-c", f"trap '' HUP; exec {command}"], env=launcher.environ, cwd=launcher.folder, **pipes
    )
    wait_for(launcher.folder / "ready_*", 2)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=10)


@posix
def test_a_prompt_without_newline_is_shown_while_the_rank_waits(launcher):
    script = launcher.script("if rank == 0: print('hello', input('name? '))")
    process = launcher.start("--num_processes", "2", script, stdin=subprocess.PIPE)
    assert process.stdout.read(len("[rank 0] name? ")) == "[rank 0] name? "
    out, _ = process.communicate("ada\n", timeout=10)
    assert out == "hello ada\n"


def test_a_mistake_at_the_start_is_not_made_four_times(launcher):
    done = launcher.run(
        "--num_processes", "2", "--max_restarts", "3", launcher.script("raise ValueError('at once')")
    )
    assert done.returncode == 1
    assert done.stderr.count("restarting all ranks") == 1
    assert "failed as before, at its start; it is not restarted again" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: at once")


def test_what_a_restart_may_mend_is_restarted(launcher):
    done = launcher.run(
        "--num_processes", "2", "--max_restarts", "2", launcher.script("raise ConnectionError('gone')")
    )
    assert done.stderr.count("restarting all ranks") == 2
