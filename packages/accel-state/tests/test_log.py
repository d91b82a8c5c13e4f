"""Loggers that know their rank."""

from __future__ import annotations

import gc
import inspect
import logging
import weakref

import pytest

from accel_state.environment import patch_environment
from accel_state.errors import ConfigError, StateError
from accel_state.log import MultiProcessAdapter, get_logger
from accel_state.world.process import PartialState
from testkit import worlds


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    PartialState._reset_state()
    PartialState()
    yield
    PartialState._reset_state()


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def lines(self):
        return [record.getMessage() for record in self.records]


@pytest.fixture
def records():
    handler = Records()
    logger = logging.getLogger("accel_test_log")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def line() -> int:
    return inspect.currentframe().f_back.f_lineno


@pytest.mark.parametrize("level", ["DEBUG", "info", logging.ERROR])
def test_t24_the_root_logger_is_left_alone(level):
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    logger = get_logger("accel_test_log.t24", log_level=level)
    with patch_environment(accelerate_log_level="debug"):
        get_logger("accel_test_log.t24_too")
    assert (root.level, root.handlers) == before
    assert logging.getLogger("accel_test_log").level == logging.NOTSET
    expected = level if isinstance(level, int) else logging.getLevelNamesMapping()[level.upper()]
    assert logger.logger.level == expected
    assert logging.getLogger("accel_test_log.t24_too").level == logging.DEBUG


def test_an_unknown_level_is_named_with_where_it_came_from():
    with pytest.raises(ConfigError, match=r"^log_level is 'LOUD'.*DEBUG"):
        get_logger("accel_test_log.x", log_level="LOUD")
    with (
        patch_environment(accelerate_log_level="loud"),
        pytest.raises(ConfigError, match="ACCELERATE_LOG_LEVEL is 'loud'"),
    ):
        get_logger("accel_test_log.x")


def test_the_rank_is_said(records):
    get_logger("accel_test_log").warning("%d of %d", 1, 2)
    assert records.lines == ["[RANK 0] 1 of 2"]


def test_logging_before_there_is_a_state(records):
    logger = get_logger("accel_test_log")
    PartialState._reset_state()
    with pytest.raises(StateError, match=r"PartialState\(\) or an Accelerator\(\)") as caught:
        logger.warning("too early")
    assert isinstance(caught.value, RuntimeError)


def test_the_callers_line_is_shown(records):
    logger = get_logger("accel_test_log")
    logger.setLevel(logging.DEBUG)
    lines = []
    logger.info("a"), lines.append(line())
    logger.error("b", main_process_only=False), lines.append(line())
    logger.log(logging.INFO, "c"), lines.append(line())
    logger.warning("d", in_order=True), lines.append(line())
    logger.warning_once("e"), lines.append(line())
    try:
        raise KeyError("f")
    except KeyError:
        logger.exception("f"), lines.append(line())
    assert [record.lineno for record in records.records] == lines
    assert {record.filename for record in records.records} == {"test_log.py"}
    assert {record.funcName for record in records.records} == {"test_the_callers_line_is_shown"}


class Wrapper(logging.LoggerAdapter):
    """Somebody's own adapter around ours; it asks for its caller by stacklevel."""

    def log(self, level, msg, *args, **kwargs):
        kwargs["stacklevel"] = 3
        self.logger.log(level, msg, *args, **kwargs)


def test_the_stacklevel_that_is_given_is_kept(records):
    logger = get_logger("accel_test_log")
    Wrapper(logger, {}).warning("x"), (expected := line())
    assert records.records[0].lineno == expected


def test_extra_fields_reach_the_record(records):
    get_logger("accel_test_log").warning("x", extra={"color": "red"})
    MultiProcessAdapter(logging.getLogger("accel_test_log"), {"color": "blue"}).warning("y")
    assert records.records[0].color == "red"


def test_once_per_message_and_arguments(records):
    logger = get_logger("accel_test_log")
    for _ in range(3):
        logger.warning_once("%s", "a")
        logger.warning_once("%s", "b")
        logger.warning_once("%s", ["unhashable"])
    assert records.lines == ["[RANK 0] a", "[RANK 0] b", "[RANK 0] ['unhashable']"]


def test_warning_once_keeps_no_adapter_alive(records):
    logger = get_logger("accel_test_log")
    logger.warning_once("x")
    gone = weakref.ref(logger)
    del logger
    gc.collect()
    assert gone() is None


def what_ranks_log():
    state = PartialState()
    lines = []

    class Shared(logging.Handler):
        def emit(self, record):
            place = state.store.add("lines", 1)
            state.store.set(f"line {place}", record.getMessage())
            lines.append(record.getMessage())

    logger = get_logger("accel_test_world", log_level="INFO")
    logger.logger.addHandler(Shared())
    logger.info("main")
    logger.info("all", main_process_only=False)
    state.wait_for_everyone()
    begin = state.store.add("lines", 0)
    state.wait_for_everyone()  # all have counted before rank 0 logs on
    logger.info("ordered", in_order=True, main_process_only=True)
    ordered = [state.store.get(f"line {begin + 1 + rank}").decode() for rank in range(state.num_processes)]
    if state.is_last_process:
        logger.setLevel("ERROR")
    logger.info("levels may differ", in_order=True)
    state.wait_for_everyone()
    return lines, ordered


def test_in_a_world():
    results = worlds.run(what_ranks_log, 3)
    ordered = [f"[RANK {rank}] ordered" for rank in range(3)]
    for rank, (lines, order) in enumerate(results):
        assert order == ordered
        expected = ["main"] * (rank == 0) + ["all", "ordered"] + ["levels may differ"] * (rank < 2)
        assert lines == [f"[RANK {rank}] {text}" for text in expected]


def test_a_launcher_that_prefixes_lines_leaves_no_rank_to_the_logger(monkeypatch, caplog):
    monkeypatch.setenv("ACCEL_RANK_PREFIXED", "1")
    get_logger("prefixed").warning("hello")
    assert [record.getMessage() for record in caplog.records] == ["hello"]
