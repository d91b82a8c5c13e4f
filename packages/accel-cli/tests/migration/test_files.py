"""Files by their kind."""

import os

import pytest

from accel_cli.migration.files import find_files, migrate_file
from accel_state.errors import ConfigError


def test_folders_are_searched_for_known_kinds(tmp_path):
    for name in ("a.py", "b.txt", "sub/c.sh", ".hidden/d.py", "__pycache__/e.py", "f.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    assert [str(path.relative_to(tmp_path)) for path in find_files([tmp_path])] == [
        "a.py",
        "f.yaml",
        "sub/c.sh",
    ]


@pytest.mark.parametrize(
    ("name", "message"), [("gone.py", "gone.py does not exist"), ("x.txt", "none of the kinds")]
)
def test_other_paths_are_refused(name, message, tmp_path):
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ConfigError, match=message):
        list(find_files([tmp_path / name]))


def migrated(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return migrate_file(tmp_path / name)


def test_shell_scripts_call_our_command(tmp_path):
    text = (
        "#!/bin/sh\naccelerate launch --num_processes 2 x.py # accelerate launch\npip install accelerate\n"
        "accelerate-launch x.py\n"
    )
    after = migrated(tmp_path, "x.sh", text).after
    assert after == (
        "#!/bin/sh\naccel launch --num_processes 2 x.py # accel launch\npip install accelerate\naccel launch x.py\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "accel launch --config_file run.accelerate-config.yml x.py",
        "cp accelerate-config.yaml accelerate-launch.sh my-accelerate launch",
        "accelerate launcher",
        "python -m accelerate.commands.launcher",
    ],
)
def test_names_of_files_are_not_commands(text, tmp_path):
    assert migrated(tmp_path, "x.sh", text).after == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$HOME/bin/accelerate launch x.py", "$HOME/bin/accel launch x.py"),
        ("`accelerate-launch x.py`", "`accel launch x.py`"),
        ("python -m accelerate.commands.launch x.py", "python -m accel_cli launch x.py"),
        ("python3 -u -m accelerate.commands.estimate gpt2", "python3 -u -m accel_cli estimate-memory gpt2"),
        ("python -m accelerate.commands.accelerate_cli test", "python -m accel_cli test"),
    ],
)
def test_other_ways_to_call_the_command(text, expected, tmp_path):
    assert migrated(tmp_path, "x.sh", text).after == expected


def test_line_ends_and_missing_ones_stay(tmp_path):
    after = migrated(tmp_path, "x.py", "from accelerate import Accelerator\r\nx = 1").after
    assert after == "from accel_train import Accelerator\r\nx = 1"


def test_sources_that_are_not_python_are_refused_with_the_line(tmp_path):
    assert [remark.line for remark in migrated(tmp_path, "x.py", "x = 1\ny = = 2\n").refusals] == [2]
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        migrated(tmp_path, "y.py", b"\xff\xfe")


def test_methods_that_do_not_exist_refuse_the_whole_file(tmp_path):
    found = migrated(tmp_path, "x.py", "from accelerate import Accelerator\na = Accelerator()\na.fly()\n")
    assert [remark.line for remark in found.refusals] == [3]
    assert found.after == found.before


def test_configuration_files_are_read_as_they_are(tmp_path):
    good = migrated(
        tmp_path, "c.yaml", "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nipex_config: {}\n"
    )
    assert (good.changed, good.refusals, len(good.notes)) == (False, (), 1)
    bad = migrated(tmp_path, "d.yaml", "distributed_type: 'NO'\nnum_proceses: 2\n")
    assert "did you mean num_processes" in bad.refusals[0].text
    assert not migrated(tmp_path, "e.json", '{"model": 1}').refusals, "some other file"


HOSTILE = {
    "parentheses": "x=" + "(" * 5000 + "1" + ")" * 5000,
    "elif": "if a: pass\n" + "elif a: pass\n" * 20000,
    "calls": "x=" + "f(" * 1000 + ")" * 1000,
    "subscripts": "x=a" + "[0]" * 20000,
    "attributes": "x=a" + ".b" * 5000,
    "sum": "x=" + "+".join(["1"] * 20000),
    "signs": "x=" + "-" * 3000 + "1",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_source_that_is_nested_too_deeply_is_refused(kind, tmp_path):
    (tmp_path / "a.py").write_text(f"from accelerate import Accelerator\n{HOSTILE[kind]}\n")
    found = migrate_file(tmp_path / "a.py")
    assert [each.text for each in found.refusals] == ["this is nested too deeply"]
    assert not found.changed


def test_a_source_that_python_reads_is_rewritten_however_deep_it_is(tmp_path):
    deep = "x=" + "1 if a else " * 900 + "1\n"
    after = migrated(tmp_path, "a.py", f"from accelerate import Accelerator\n{deep}").after
    assert after == f"from accel_train import Accelerator\n{deep}"


def test_links_pipes_and_folders_in_a_folder_are_left_out(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside / "folder.py", outside):
        folder.mkdir(parents=True)
    (inside / "ok.py").write_text("import accelerate\n")
    (outside / "v.py").write_text("import accelerate\n")
    os.mkfifo(inside / "pipe.py")
    for name, target in {"l": "../outside/v.py", "m": "ok.py", "n": "nothing.py", "o": "/dev/zero"}.items():
        (inside / f"{name}.py").symlink_to(target)
    (inside / "deep").symlink_to(outside)
    assert list(find_files([inside])) == [inside / "ok.py"]
    (tmp_path / "link").symlink_to(inside)
    assert list(find_files([tmp_path / "link"])) == [tmp_path / "link" / "ok.py"]
    assert list(find_files([inside / "l.py"])) == [inside / "l.py"], "a link that the user names"


def test_a_pipe_that_the_user_names_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("accel_state.whole_files._PATIENCE", 0.2)
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(ConfigError, match=r"pipe.py cannot be read: it is no regular file"):
        migrate_file(tmp_path / "pipe.py")


def test_an_import_that_stays_is_noted_where_nothing_else_changes(tmp_path):
    text = "from accelerate.utils import PrepareForLaunch\n"
    migration = migrated(tmp_path, "a.py", text)
    assert (migration.after, migration.refusals) == (text, ())
    assert ["has no counterpart here" in note.text for note in migration.notes] == [True]
    assert migrated(tmp_path, "b.py", 'name = "accelerate"\n').notes == ()
