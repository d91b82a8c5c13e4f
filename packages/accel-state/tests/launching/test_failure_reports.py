"""What the launcher shows of ranks that fail."""

import os
import re
import time

import pytest

posix = pytest.mark.skipif(os.name != "posix", reason="signals and process groups of POSIX systems")


def test_torchs_prefix_of_tracebacks_is_not_repeated(launcher):
    script = launcher.script("""
        if rank == 1:
            sys.stderr.write("[rank1]: Traceback (most recent call last):\\n[rank1]: ValueError: x\\n")
            open("link_lost", "w").close()
            time.sleep(0.3)
            sys.exit(1)
        while not os.path.exists("link_lost"):
            time.sleep(0.01)
        time.sleep(0.1)
        sys.stderr.write("[rank0]: Traceback (most recent call last):\\n[rank0]: OSError: link lost\\n")
        sys.exit(1)
    """)
    done = launcher.run("--num_processes", "2", script)
    assert done.stderr.count("ValueError: x") == 1, "the report at the end shows it, and nothing before"
    assert "rank 0 failed too: OSError: link lost\n" in done.stderr
    assert done.stderr.endswith("\nTraceback (most recent call last):\nValueError: x\n")
    debugged = launcher.run("--debug", "--num_processes", "2", script)
    assert "[rank 1] ValueError: x\n" in debugged.stderr


@pytest.mark.parametrize("pause", [0, 0.3])
def test_a_traceback_after_an_unfinished_bar_is_found(launcher, pause):
    script = launcher.script(f"""
        sys.stderr.write("\\r 10%\\r 50%")
        time.sleep({pause})
        raise ValueError("x")
    """)
    done = launcher.run("--num_processes", "2", script)
    assert re.search(r"^\[rank [01]\]  50%$", done.stderr, re.MULTILINE), done.stderr
    assert "10%" not in done.stderr
    report = done.stderr.partition("failed first (exit code 1) =")[2]
    assert re.search(
        r"=\n(rank [01] raised the same error\n)?Traceback .*\nValueError: x\n$", report, re.DOTALL
    )
    assert done.stderr.count("Traceback") == 1


def test_a_traceback_of_a_rank_that_goes_on_is_shown_in_its_place(launcher):
    script = launcher.script("""
        import traceback
        if rank == 0:
            try: raise ValueError("handled")
            except ValueError: traceback.print_exc()
            time.sleep(3)
            sys.stderr.write("later\\n")
    """)
    done = launcher.run("--num_processes", "2", script)
    assert done.returncode == 0
    assert "[rank 0] ValueError: handled\n[rank 0] later\n" in done.stderr


def test_tracebacks_of_an_attempt_are_shown_before_the_restart(launcher):
    script = launcher.script("raise ValueError(os.environ['TORCHELASTIC_RESTART_COUNT'])")
    done = launcher.run("--num_processes", "2", "--max_restarts", "1", script)
    first, _, second = done.stderr.partition("restarting all ranks")
    assert re.search(r"^\[rank [01]\] ValueError: 0$", first, re.MULTILINE)
    assert "ValueError: 0" not in second
    assert second.rstrip().endswith("ValueError: 1")
    assert second.count("Traceback") == 1


def test_library_frames_are_folded_and_the_log_file_has_them(launcher):
    script = launcher.script("""
        import json
        def read():
            return json.loads("{")
        if rank == 1:
            read()
        time.sleep(60)
    """)
    done = launcher.run("--num_processes", "2", "--log_dir", "logs", script)
    assert "frames of Python" in done.stderr
    assert "in read" in done.stderr
    assert "decoder.py" in (launcher.folder / "logs/rank_1.log").read_text()
    assert "frames of Python" not in launcher.run("--debug", "--num_processes", "2", script).stderr


@posix
@pytest.mark.parametrize(("environ", "coloured"), [({}, False), ({"FORCE_COLOR": "1"}, True)])
def test_ranks_have_colours_of_their_own(launcher, environ, coloured):
    launcher.environ |= environ
    script = launcher.script("print('hello')")
    done = launcher.run("--num_processes", "2", script)
    prefixes = {"\x1b[36m[rank 0]\x1b[0m hello", "\x1b[35m[rank 1]\x1b[0m hello"}
    assert set(done.stdout.splitlines()) == (prefixes if coloured else {"[rank 0] hello", "[rank 1] hello"})


def test_a_rank_that_waited_for_another_is_not_blamed_although_its_traceback_came_first(launcher):
    script = launcher.script("""
        if rank == 0:
            while not os.path.exists("up"):
                time.sleep(0.01)
            open("waiting", "w").close()
            raise RuntimeError("[../gloo/pair.cc:525] Connection closed by peer [127.0.0.1]:4242. GLHF!")
        open("up", "w").close()
        while not os.path.exists("waiting"):
            time.sleep(0.01)
        time.sleep(0.3)
        raise ValueError("cause")
    """)
    done = launcher.run("--num_processes", "2", script)
    assert "rank 1 failed first (exit code 1)" in done.stderr
    assert "rank 0 waited for it, and ended because it was gone\n" in done.stderr
    assert "GLHF" not in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: cause")


def test_chained_exceptions_are_told_whole(launcher):
    script = launcher.script("""
        if rank == 0:
            try:
                {}["key"]
            except KeyError as error:
                raise RuntimeError("outer") from error
        time.sleep(60)
    """)
    done = launcher.run("--num_processes", "2", script)
    told = done.stderr.rpartition("=\n")[2]
    assert "KeyError: 'key'" in told
    assert "RuntimeError: outer" in told


def test_a_syntax_error_is_told_once(launcher):
    path = launcher.folder / "bad.py"
    path.write_text("x = = 1\n")
    done = launcher.run("--num_processes", "2", str(path))
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr.rpartition("=\n")[2]
    assert done.stderr.count("SyntaxError") == 1


def test_first_failing_rank_is_told_last_and_gives_the_code(launcher):
    script = launcher.script("""
        def broken():
            raise ValueError("the numbers do not add up")
        if rank == 1:
            time.sleep(0.2)
            try:
                broken()
            except ValueError:
                import traceback
                traceback.print_exc()
                sys.exit(5)
        time.sleep(60)
    """)
    started = time.monotonic()
    done = launcher.run("--num_processes", "3", script)
    assert time.monotonic() - started < 10
    assert done.returncode == 5
    heading, _, error = done.stderr.rpartition("=\n")
    assert "rank 1 failed first (exit code 5)" in heading.splitlines()[-1]
    assert error.startswith("Traceback (most recent call last):\n")
    assert error.endswith("ValueError: the numbers do not add up\n")
    assert "accel: rank 1 failed; ending ranks 0 and 2\n" in done.stderr
