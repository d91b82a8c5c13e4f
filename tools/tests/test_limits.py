"""The tool that runs things under a limit of memory."""

import subprocess
import sys

import pytest

from testkit import limits

MB = 1 << 20


@pytest.fixture(autouse=True)
def _where_there_are_control_groups():
    if (reason := limits.why_not()) is not None:
        pytest.skip(reason)


def fill(nbytes):
    return len(bytearray(nbytes))


def fail():
    raise ArithmeticError("as asked")


def test_a_call_within_the_limit_returns_its_answer_and_its_peak():
    result = limits.call(fill, 30 * MB, limit=80 * MB)
    assert (result.value, result.killed, result.returncode) == (30 * MB, False, 0)
    assert 30 * MB < result.peak < 70 * MB


def test_a_call_that_takes_more_is_killed_and_said_to_be():
    with pytest.raises(limits.LimitedCallError, match=r"reached the limit \(exit code -9, 41943040 bytes"):
        limits.call(fill, 100 * MB, limit=40 * MB)


def test_the_page_cache_counts_but_kills_nobody(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(60 * MB))
    code = "import sys; file = open(sys.argv[1], 'wb'); [file.write(bytes(1 << 20)) for _ in range(60)]"
    result = limits.run([sys.executable, "-c", code, path], limit=30 * MB)
    assert (result.returncode, result.killed) == (0, False)
    assert 25 * MB < result.peak <= 30 * MB


def test_an_exception_comes_with_its_traceback():
    with pytest.raises(limits.LimitedCallError, match=r"in fail\n(.|\n)*ArithmeticError: as asked"):
        limits.call(fail, limit=80 * MB)


def test_nothing_is_left_behind():
    with limits.group(50 * MB) as group:
        folder = group.folder
        sleeper = subprocess.Popen(["sleep", "60"])
        (folder / "cgroup.procs").write_text(str(sleeper.pid))
        assert group.usage >= 0
    assert sleeper.wait() == -9
    assert not folder.exists()
