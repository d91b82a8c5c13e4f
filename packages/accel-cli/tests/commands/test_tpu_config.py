"""``accel tpu-config``, with a ``gcloud`` that records its arguments and hands the command to a real shell."""

import shlex

import pytest

from accel_cli.app import main
from testkit import gcloud


@pytest.fixture
def pod(tmp_path, monkeypatch):
    """A folder with a gcloud that is first on PATH."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", gcloud.install(folder)["PATH"])
    return folder


def called(pod):
    (words,) = gcloud.recorded(pod)
    return words


def test_the_command_line_of_gcloud(pod):
    assert main(["tpu-config", "--tpu_name", "my pod", "--tpu-zone", "us-central1-a", "--command", "ls"]) == 0
    assert called(pod) == [
        "compute", "tpus", "tpu-vm", "ssh", "my pod", "--zone", "us-central1-a",
        "--command", "set -e; cd /usr/share; ls", "--worker", "all",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--command", "a", "--command", "b c"], "a; b c"),
        (["--command", "a", "b c", "--use_alpha"], "a; b c"),
        (["--command=a"], "a"),
        (["--command", "echo 'it''s' \"$HOME\" | cat # all"], "\necho 'it''s' \"$HOME\" | cat # all"),
    ],
)
def test_the_commands(pod, flags, expected):
    assert main(["tpu-config", "--tpu_name", "pod", *flags]) == 0
    words = called(pod)
    joint = "" if expected.startswith("\n") else "; "
    assert words[words.index("--command") + 1] == f"set -e; cd /usr/share{joint}{expected}"
    assert ("alpha" in words) is ("--use_alpha" in flags)
    assert "--zone" not in words  # gcloud has a zone of its own


def test_the_file_gives_what_flags_do_not(pod, tmp_path):
    script = tmp_path / "set_up.sh"
    script.write_text("# packages\nfor name in a b; do\n  echo $name\ndone\n")
    file = tmp_path / "c.yaml"
    file.write_text(f"tpu_name: one\ntpu_zone: here\ncommand_file: {script}\ncommands: [last]\n")
    assert main(["tpu-config", "--config_file", str(file)]) == 0
    assert main(["tpu-config", "--config_file", str(file), "--tpu_name", "two", "--command", "mine"]) == 0
    first, second = gcloud.recorded(pod)
    assert first[4:7] == ["one", "--zone", "here"]
    assert first[8] == f"set -e; cd /usr/share\n{script.read_text()}last"
    assert second[4:7] == ["two", "--zone", "here"]
    assert second[8] == "set -e; cd /usr/share; mine"


def test_quotes_arrive_as_they_were_typed(tmp_path, monkeypatch, capfd):
    folder = tmp_path / "bin"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", gcloud.install(folder, machines=2)["PATH"])
    script = tmp_path / "set_up.sh"
    script.write_text("# one\nfor name in a b; do\n  echo \"$name in $(pwd)\"  # 'twice'\ndone\n")
    # One write for a line: the machines share an output, and parts of lines would mix.
    command = "printf '%s|%s|%s|\\n' \"it's\" '$HOME' \"a  b\""
    words = ["tpu-config", "--tpu_name", "p", "--command_file", str(script), "--command", command]
    assert main(words) == 0
    out = capfd.readouterr().out
    lines = sorted(out.splitlines())  # the machines write at the same time
    one = ["a in /usr/share", "b in /usr/share", "it's|$HOME|a  b|"]
    assert lines == sorted([*one, *one, "p is set up"])


def test_the_first_failure_ends_it_and_its_code_is_returned(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", gcloud.install(tmp_path / "bin", machines=1)["PATH"])
    words = [
        "tpu-config",
        "--tpu_name",
        "p",
        "--command",
        "echo one",
        "--command",
        "(exit 7)",
        "--command",
        "echo two",
    ]
    assert main(words) == 7
    out = capfd.readouterr().out
    assert "one" in out
    assert "two" not in out
    assert "set up" not in out


def test_debug_prints_a_command_that_a_shell_reads_back(pod, capsys):
    words = ["tpu-config", "--tpu_name", "p", "--command", "echo 'a b'", "--debug"]
    assert main(words) == 0
    shown = shlex.split(capsys.readouterr().out)
    assert shown[0] == "Running"
    assert shown[1:] == [
        "gcloud", "compute", "tpus", "tpu-vm", "ssh", "p", "--command", "set -e; cd /usr/share; echo 'a b'",
        "--worker", "all",
    ]  # fmt: skip
    assert gcloud.recorded(pod) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--command", "a"], "the TPU has no name; pass --tpu_name"),
        (["--tpu_name", "p"], "nothing to run; pass --command or --command_file"),
        (["--tpu_name", "p", "--command_file", "no.sh"], "--command_file no.sh cannot be read"),
        (["--tpu_name", "p", "--install_accelerate", "--command", "a"], "are on no package index yet"),
        (["--tpu_name", "p", "stray"], "stray"),
    ],
)
def test_what_is_missing_is_named_before_anything_runs(pod, capsys, words, said):
    assert main(["tpu-config", *words]) == 2
    assert said in capsys.readouterr().err
    assert gcloud.recorded(pod) == []


def test_without_gcloud(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["tpu-config", "--tpu_name", "p", "--command", "a"]) == 1
    assert "install the Google Cloud CLI" in capsys.readouterr().err
