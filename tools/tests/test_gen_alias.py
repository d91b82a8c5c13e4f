"""The written package ``accelerate`` agrees with its tables, and with what can be imported."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

import gen_alias
import import_table

ROOT = Path(__file__).parents[2]


def test_the_files_are_up_to_date():
    assert gen_alias.problems(ROOT) == []


@pytest.fixture
def copied(tmp_path):
    for part in (gen_alias.HERE, Path("tools/data")):
        shutil.copytree(ROOT / part, tmp_path / part)
    for package in import_table.PACKAGES:
        top = Path("packages") / package / "src" / package.replace("-", "_") / "__init__.py"
        (tmp_path / top).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / top, tmp_path / top)
    return tmp_path


def test_what_is_changed_missing_or_left_over_is_named(copied):
    assert gen_alias.problems(copied) == []
    folder = copied / gen_alias.HERE / "path/accelerate"
    (folder / "hooks.py").write_text("")
    (folder / "scheduler.py").unlink()
    (folder / "other.py").write_text("")
    assert gen_alias.problems(copied) == [
        "accelerate/hooks.py: out of date",
        "accelerate/scheduler.py: out of date",
        "accelerate/other.py: left over",
    ]


def test_every_name_of_the_table_is_one_of_accelerates_modules_and_listed_once():
    rows = (ROOT / gen_alias.TABLE).read_text().splitlines()
    assert len(rows) == len(set(rows))
    assert all(row.startswith("accelerate") for row in rows[1:])


def test_names_come_from_where_they_are_public():
    where = gen_alias.homes(ROOT) | gen_alias.extras(ROOT)
    for module, names in gen_alias.read_modules(ROOT).items():
        for name in names:
            if name in where:
                assert hasattr(importlib.import_module(where[name]), name), (module, name)


def test_a_function_named_like_a_module_wins():
    text = gen_alias.render("accelerate.utils", ["tqdm"], {"tqdm": "accel_train"}, ["tqdm"])
    lines = [line for line in text.splitlines() if " import tqdm" in line]
    assert lines == ["from accelerate.utils import tqdm as tqdm", "from accel_train import tqdm as tqdm"]


def test_missing_names_are_listed(capsys):
    assert gen_alias.main(["--missing"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "accelerate.utils.launch.prepare_tpu" in listed
    assert "accelerate.Accelerator" not in listed
