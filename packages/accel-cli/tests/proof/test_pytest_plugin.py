"""The fixture ``prove`` in a test of another project."""

import subprocess
import sys

import pytest

from accel_cli.proof import prove as proof
from accel_cli.proof import pytest_plugin
from accel_cli.proof.findings import Cause, Verdict
from accel_cli.proof.show import in_words, merged
from accel_state.errors import LaunchError

prove = pytest_plugin.prove  # an installed package has it without


def test_a_loop_that_is_right_passes_and_returns_the_verdicts(prove, monkeypatch, tmp_path):
    asked = {}

    def compare(target, environ, folder, options):
        asked.update(vars(options), target=target, folder=folder)
        return [Verdict("ddp"), Verdict("tp", reason="no plan")], {}

    monkeypatch.setattr(proof, "prove", compare)
    assert [verdict.name for verdict in prove("train.py", "--lr", "1", strategies=["ddp", "tp"])] == [
        "ddp",
        "tp",
    ]
    assert asked["target"].name == "train.py"
    assert asked["target"].args == ("--lr", "1")
    assert (asked["strategies"], asked["steps"], asked["double"]) == (["ddp", "tp"], 3, True)
    assert asked["folder"] == tmp_path / "proof"


def test_a_fault_fails_the_test_with_its_words(prove, monkeypatch):
    wrong = Verdict("ddp", ["losses"], [Cause("summed", "it is twice", "leave out the sum")])
    monkeypatch.setattr(proof, "prove", lambda *given, **options: ([wrong], {}))
    with pytest.raises(pytest.fail.Exception, match="ddp: wrong, summed: it is twice\n  leave out the sum"):
        prove("train.py")


def test_nothing_compared_and_a_script_that_ends_fail_the_test(prove, monkeypatch):
    monkeypatch.setattr(proof, "prove", lambda *given, **options: ([Verdict("tp", reason="no plan")], {}))
    with pytest.raises(pytest.fail.Exception, match="tp: not compared"):
        prove("train.py")

    def ends(*given, **options):
        raise LaunchError("train.py has nothing to compare")

    monkeypatch.setattr(proof, "prove", ends)
    with pytest.raises(pytest.fail.Exception, match=r"^train.py has nothing to compare$"):
        prove("train.py")


def test_strategies_that_say_the_same_are_told_once():
    cause = Cause("summed", "it is twice", "leave out the sum")
    one, other = merged([Verdict(name, ["losses"], [cause]) for name in ("ddp", "fsdp2")] + [Verdict("tp")])
    assert in_words(one) == ["ddp; fsdp2: wrong, summed: it is twice", "  leave out the sum"]
    assert in_words(other) == []


def test_what_a_verdict_says():
    assert in_words(Verdict("ddp")) == []
    assert in_words(Verdict("tp", reason="no plan")) == ["tp: not compared. no plan"]
    assert in_words(Verdict("ddp", [], [Cause("a", "b", "c", fault=False)])) == ["ddp: note, a: b", "  c"]


def test_the_plugin_imports_nothing_slow():
    code = "import sys, accel_cli.proof.pytest_plugin; assert not {'torch', 'typer', 'rich'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
