"""``accel config`` in a real pseudo-terminal: every branch, going back, Ctrl-C, narrow and plain terminals."""

import os
import sys

import pytest
import yaml

from accel_cli.machine import detect
from accel_cli.wizard import outcome
from accel_cli.wizard.answers import Situation
from accel_cli.wizard.interview import Interview
from accel_cli.wizard.table import QUESTIONS
from accel_state.config.files import load
from testkit.terminals import DOWN, ENTER, Terminal
from testkit.wizard_branches import BRANCHES

CONFIG = (sys.executable, "-m", "accel_cli", "config")

# Runs the command once for each branch in one process, because each start of Python takes most of a second.
SEVERAL = """
import os, sys
from accel_cli.app import main
for line in sys.argv[1:]:
    devices, file = line.split("=")
    os.environ["ACCEL_DEVICE_COUNT"] = devices
    assert main(["config", "--config_file", file]) == 0
    input("next")
"""


@pytest.fixture
def start(tmp_path):
    opened = []

    def make(*words, argv=CONFIG, columns=100, **env):
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")
        }
        ours = {
            "XDG_CONFIG_HOME": str(tmp_path / "home"),
            "HF_HOME": str(tmp_path / "home"),
            "TERM": "xterm-256color",
            "ACCEL_DEVICE_COUNT": "0",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        opened.append(Terminal([*argv, *words], inherited | ours | env, str(tmp_path), columns))
        return opened[-1]

    yield make
    for terminal in opened:
        terminal.__exit__()


def keys_for(asked, answer):
    """What a user presses for an answer."""
    if asked.multiple:
        moves = [" " if choice.value in answer else "" for choice in asked.choices]
        return DOWN.join(moves) + ENTER
    if asked.choices:
        at = [choice.value for choice in asked.choices].index(answer)
        return (asked.choices[at].key or str((at + 1) % 10)) + ENTER
    if answer is None or answer == asked.default:
        return ENTER
    if isinstance(answer, tuple):
        separator = ";" if asked.name == "tpu.commands" else ","
        return separator.join(map(str, answer)) + ENTER
    return f"{answer}{ENTER}"


def reply(terminal, question, keys=ENTER):
    """Type the keys once the question is the last one on the screen."""
    terminal.wait_for(question, after="? ")
    terminal.send(keys)


def possible(branch):
    return all(outcome.offers(path, value) for path, value in branch.needs)


def walk(terminal, branch):
    """Answer the questions of a branch as they come up on the screen."""

    def ask(asked):
        answer = branch.answers.get(asked.name, asked.default)
        reply(terminal, asked.message, keys_for(asked, answer))
        return answer

    known = Situation(detect({"ACCEL_DEVICE_COUNT": str(branch.devices)}), {}, outcome.offers)
    return Interview(QUESTIONS, known, ask).run()


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.full)])
def test_every_branch_writes_its_file(start, tmp_path, part):
    branches = [branch for branch in BRANCHES if possible(branch)][part::2]
    files = [tmp_path / f"{at}.yaml" for at in range(len(branches))]
    words = [f"{branch.devices}={file}" for branch, file in zip(branches, files, strict=True)]
    terminal = start(*words, argv=(sys.executable, "-c", SEVERAL))
    for branch, file in zip(branches, files, strict=True):
        expected = outcome.configuration(walk(terminal, branch))
        terminal.wait_for(f"Write this to {file}?")
        assert not file.exists()
        terminal.send("y" + ENTER)
        terminal.wait_for(f"accel launch --config_file {file}")
        assert load(file) == expected, branch.name
        terminal.send(ENTER)
    assert terminal.code() == 0


def test_back_keeps_the_answers(start, tmp_path):
    terminal = start("--config_file", "c.yaml")
    terminal.wait_for("< goes back, ? explains, Ctrl-C ends")
    terminal.wait_for("Where will the script run?")
    terminal.send("<" + ENTER)  # at the first question nothing happens
    terminal.send("2" + ENTER)
    reply(terminal, "How many machines", "3" + ENTER)
    reply(terminal, "compute on", "<" + ENTER)
    reply(terminal, "How many machines will you use? [3]", "<" + ENTER)
    reply(terminal, "» 2) on several machines", "1" + ENTER)
    terminal.send(ENTER)  # CPU
    reply(terminal, "share the work", "1" + ENTER)
    reply(terminal, "mixed precision")
    reply(terminal, "more options", "<" + ENTER)
    reply(terminal, "» 1) no", "3" + ENTER)
    reply(terminal, "more options")
    reply(terminal, "Write this to c.yaml?", "<" + ENTER)
    reply(terminal, "(space selects, Enter accepts)")
    reply(terminal, "Write this to c.yaml?", "y" + ENTER)
    assert terminal.code() == 0
    config = load(tmp_path / "c.yaml")
    assert (config.num_machines, config.num_processes, config.mixed_precision) == (1, 1, "bf16")


def test_an_invalid_answer_is_explained_below_its_line(start):
    terminal = start(ACCEL_DEVICE_COUNT="4")
    terminal.send("1" + ENTER)
    reply(terminal, "compute on")
    reply(terminal, "share the work", "2" + ENTER)
    reply(terminal, "Which accelerators", "0,9" + ENTER)
    terminal.wait_for("names accelerator 9, but this machine has 4 (0 to 3)")
    reply(terminal, "Which accelerators", "0,1" + ENTER)
    reply(terminal, "How many processes", "x" + ENTER)
    terminal.wait_for("the answer is 'x'; expected an integer")
    reply(terminal, "How many processes", "3" + ENTER)
    terminal.wait_for("expected an integer from 2 to 2")
    terminal.send("?")
    terminal.wait_for("flag --num_processes")
    reply(terminal, "How many processes")
    terminal.wait_for("mixed precision")


@pytest.mark.parametrize("keys", ["\x03", "2\r\x03", "2\r\x04"])
def test_ending_writes_nothing(start, tmp_path, keys):
    terminal = start()
    terminal.wait_for("Where will the script run?")
    for key in keys:
        terminal.send(key)
        if key == ENTER:
            terminal.wait_for("How many machines")
    assert terminal.code() == 130
    assert "nothing is written" in terminal.shown()
    assert "Traceback" not in terminal.transcript()
    assert not (tmp_path / "home").exists()


@pytest.mark.wide
def test_a_file_that_exists_gives_the_defaults(start, tmp_path):
    theirs = tmp_path / "home/accelerate/default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_machines: 1\nnum_processes: 4\nuse_cpu: true\n"
        "mixed_precision: bf16\nmax_restarts: 3\nfsdp_config:\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n"
        "  fsdp_min_num_params: 77\n  fsdp_sharding_strategy: 1\n"
    )
    before = theirs.read_bytes()
    ours = tmp_path / "home/accel/default_config.yaml"
    terminal = start(columns=160)
    terminal.wait_for("Accelerate's file, which is not changed")
    for message in (
        "Where",
        "compute on",
        "share the work",
        "processes in total will you use? [4]",
        "wrap policy",
    ):
        reply(terminal, message)
    reply(terminal, "size-based wrapping? [77]", "78" + ENTER)
    for message in (
        "reshard",
        "offload",
        "state dict type",
        "first process only",
        "activation checkpointing",
        "several kinds of parallelism",
    ):
        reply(terminal, message)
    reply(terminal, "» 3) bf16")
    reply(terminal, "more options")
    terminal.wait_for("kept from the existing file, without a question: max_restarts")
    reply(terminal, "Write this", "y" + ENTER)
    assert terminal.code() == 0
    assert "  accel launch train.py" in terminal.shown().splitlines()
    assert theirs.read_bytes() == before
    config = load(ours)
    assert (config.distributed_type, config.num_processes, config.max_restarts) == ("FSDP", 4, 3)
    assert (config.fsdp.fsdp_version, config.fsdp.min_num_params, config.fsdp.sharding_strategy) == (
        2,
        78,
        None,
    )
    shown = terminal.shown()
    written = yaml.safe_load(ours.read_text())
    assert all(f"{key}:" in shown for key in written), "the file was shown before it was written"

    terminal = start()  # now ours exists, and is replaced only after a yes
    terminal.wait_for(str(ours))
    before = ours.read_bytes()
    for message in (
        "Where",
        "compute on",
        "share the work",
        "processes in total",
        "wrap policy",
        "[78]",
        "reshard",
    ):
        reply(terminal, message)
    for message in (
        "offload",
        "state dict type",
        "first process only",
        "activation checkpointing",
        "several kinds of parallelism",
        "precision",
    ):
        reply(terminal, message)
    reply(terminal, "more options")
    reply(terminal, "exists. Replace it?", "n" + ENTER)
    assert terminal.code() == 0
    assert "nothing is written" in terminal.shown()
    assert ours.read_bytes() == before


def colours(raw):
    import re

    found = re.findall(rb"\x1b\[([0-9;]*)m", raw)
    return {
        code
        for codes in found
        for code in codes.split(b";")
        if code not in (b"", b"0", b"1", b"7", b"39", b"49")
    }


def answer_all(terminal):
    for message in ("Where", "compute on", "share the work"):
        reply(terminal, message, "1" + ENTER)
    for message in ("mixed precision", "more options", "Write this"):
        reply(terminal, message)
    assert terminal.code() == 0


@pytest.mark.wide
def test_no_color(start):
    terminal = start("--config_file", "a.yaml")
    answer_all(terminal)
    assert colours(terminal.raw), "there is colour to turn off"
    terminal = start("--config_file", "b.yaml", NO_COLOR="1")
    answer_all(terminal)
    assert not colours(terminal.raw)


def test_sixty_columns(start, tmp_path):
    terminal = start("--config_file", "c.yaml", columns=60)
    answer_all(terminal)
    assert load(tmp_path / "c.yaml").num_processes == 1
    assert max(map(len, terminal.transcript().splitlines())) <= 60


def test_a_dumb_terminal(start, tmp_path):
    terminal = start("--config_file", "c.yaml", TERM="dumb")
    reply(terminal, "2) on several machines", "2" + ENTER)
    reply(terminal, "How many machines", "one" + ENTER)
    reply(terminal, "the answer is 'one'; expected an integer", "?" + ENTER)
    reply(terminal, "flag --num_machines", "<" + ENTER)
    reply(terminal, "[2]", "9" + ENTER)
    reply(terminal, "expected one of 1, 2, 3, 4", "1" + ENTER)
    answer = {
        "compute on": "",
        "share the work": "2",
        "processes in total": "2",
        "precision": "bf16",
        "more": "1,4",
    }
    for message, text in answer.items():
        reply(terminal, message, text + ENTER)
    reply(terminal, "micro-batches", "8" + ENTER)
    reply(terminal, "Write this")
    assert terminal.code() == 0
    assert b"\x1b" not in terminal.raw
    config = load(tmp_path / "c.yaml")
    assert (config.num_processes, config.mixed_precision, config.debug) == (2, "bf16", True)
    assert config.gradient_accumulation_steps == 8


def test_a_file_that_cannot_be_read_gives_no_defaults(start, tmp_path):
    (tmp_path / "c.yaml").write_text("num_proceses: 2\n")
    terminal = start("--config_file", "c.yaml")
    terminal.wait_for("cannot be read")
    terminal.wait_for("did you mean num_processes")
    for message in (
        "Where",
        "compute on",
        "share the work",
        "mixed precision",
        "more options",
        "Replace it?",
    ):
        reply(terminal, message)
    assert terminal.code() == 0
    assert load(tmp_path / "c.yaml").num_processes == 1
