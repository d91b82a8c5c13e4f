"""Options and markers that the tests of every package share."""

from __future__ import annotations

import fnmatch
import functools
import gc
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import pytest

_LEFT_OUT = pytest.StashKey[int]()
# Marks of tests that a run leaves out unless one of these options is given.
_OPTIONS = {"wide": ("--wide", "--full"), "full": ("--full",)}

pytest_plugins = ["testkit.pytest_device", "testkit.pytest_conformance"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--wide`` and ``--full``."""
    parser.addoption("--wide", action="store_true", help="also run the tests marked `wide`, as CI does")
    parser.addoption("--full", action="store_true", help="also run the tests marked `wide` or `full`")


def pytest_configure(config: pytest.Config) -> None:
    """Make runs of the suite alike, wherever they are started."""
    # torch's store asks the name server for the name of each rank that connects to it. Where an answer gets lost, a
    # rank would wait 5 seconds for the next try.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
    # Models of tests are so small that several threads wait for each other four times as long as one computes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # No configuration file of a developer's own counts, or is changed.
    home = tempfile.TemporaryDirectory(prefix="accel-tests-")
    config.add_cleanup(home.cleanup)
    os.environ |= {"XDG_CONFIG_HOME": home.name, "HF_HOME": home.name}
    _keep_bytecode()
    # Heed the signals that tests send; a run that was started by nohup or in the background ignores them.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _give_examples_time()


def _keep_bytecode() -> None:
    """Let modules be compiled once, not by each of the thousands of processes that tests start."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def _give_examples_time() -> None:
    """Let an example of Hypothesis take more than its 200 ms, which a busy machine does not give it."""
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import settings

    settings.register_profile("suite", parent=settings(), deadline=None)
    settings.load_profile("suite")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what the test modules have imported, half a million objects, out of all later garbage collections."""
    gc.collect()
    gc.freeze()


@functools.cache
def _accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def _is_marked(item: pytest.Item, name: str) -> bool:
    """Whether a test has a mark, which may be for all cases but some, or for some only, by patterns of their ids."""
    case = item.callspec.id if hasattr(item, "callspec") else ""

    def is_any(patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(case, pattern) for pattern in patterns)

    marks = [mark.kwargs for mark in item.iter_markers(name)]
    return any(is_any(mark.get("only", ["*"])) and not is_any(mark.get("but", [])) for mark in marks)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason printed, what this machine cannot run, and leave out what this run did not ask for."""
    for item in items:
        needs = item.get_closest_marker("gpu")
        if needs and not needs.kwargs.get("small_on_cpu") and not _accelerator():
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; none found by torch.accelerator"))
    left_out = [mark for mark, options in _OPTIONS.items() if not any(map(config.getoption, options))]
    long = [item for item in items if any(_is_marked(item, mark) for mark in left_out)]
    if long:
        kept = set(items).difference(long)
        items[:] = [item for item in items if item in kept]
        config.hook.pytest_deselected(items=long)
        config.stash[_LEFT_OUT] = len(long)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that shows results how many long tests this one has left out; all processes collect all."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep that number."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Count the long tests that were left out; list figures where a run is of tests for an accelerator."""
    left_out = config.stash.get(_LEFT_OUT, 0)
    if left_out:
        wide = "" if config.getoption("--wide") else " (those that CI runs also with --wide)"
        terminalreporter.write_line(f"{left_out:,} long tests were left out; they run with --full{wide}")
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    rows = [value for report in reports for name, value in report.user_properties if name == "figure"]
    if rows and config.getoption("markexpr") == "gpu":
        from testkit.figures import table

        terminalreporter.section("figures")
        terminalreporter.write_line(table(rows))
