"""Files by their kind."""

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
