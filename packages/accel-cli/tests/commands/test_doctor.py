"""``accel doctor``: its lines, its JSON and its exit codes."""

import json

import pytest

from accel_cli import machine as machines
from accel_cli.app import main


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return tmp_path


def test_every_check_has_a_line(home, capsys):
    code = main(["doctor", "--checkpoint_dir", str(home)])
    out = capsys.readouterr().out
    for topic in (
        "packages",
        "torch",
        "accelerators",
        "CPUs",
        "memory",
        "host name",
        "disk",
        "variables",
        "configuration",
    ):
        assert f"  {topic} " in out
    assert "problems: " in out.splitlines()[-1]
    assert code == int("PROBLEM" in out)


def test_a_warning_is_exit_code_0(home, monkeypatch, capsys):
    monkeypatch.setattr(machines, "_addresses", lambda name: ())
    assert main(["doctor", "--json", "--checkpoint_dir", str(home)]) == 0
    found = {finding["topic"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["host name"]["status"] == "warning"
    assert "/etc/hosts" in found["host name"]["advice"]


def test_a_wrong_configuration_is_a_problem(home, capsys):
    (home / "c.yaml").write_text("num_proceses: 2\n")
    assert main(["doctor", "--config_file", str(home / "c.yaml"), "--checkpoint_dir", str(home)]) == 1
    assert "did you mean num_processes" in " ".join(capsys.readouterr().out.split())


def test_a_folder_that_does_not_exist(home, capsys):
    assert main(["doctor", "--checkpoint_dir", str(home / "gone")]) == 2
    assert "gone is not a folder; make it, or name another" in capsys.readouterr().err


def test_a_configuration_file_that_does_not_exist(home, capsys):
    assert main(["doctor", "--config_file", str(home / "gone.yaml"), "--checkpoint_dir", str(home)]) == 2
    assert "gone.yaml does not exist; `accel config` creates one" in capsys.readouterr().err


def test_an_advice_in_a_pipe_is_one_line(home, monkeypatch, capsys):
    monkeypatch.setattr(machines, "_addresses", lambda name: ())
    monkeypatch.setenv("COLUMNS", "60")
    main(["doctor", "--json", "--checkpoint_dir", str(home)])
    [advice] = [one["advice"] for one in json.loads(capsys.readouterr().out) if one["topic"] == "host name"]
    assert len(advice) > 60
    main(["doctor", "--checkpoint_dir", str(home)])
    assert advice in [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_findings_are_printed_one_after_the_other(home, monkeypatch, capsys):
    """What is known is printed before what takes longer is measured."""
    seen = []

    def measures(folder):
        seen.append(capsys.readouterr().out)
        return 1e9, 1e9

    monkeypatch.setattr(machines, "measure_disk", measures)
    main(["doctor", "--checkpoint_dir", str(home)])
    assert "  host name " in seen[0]
    assert "  disk " not in seen[0]
    assert "  disk " in capsys.readouterr().out
