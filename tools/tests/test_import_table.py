"""The import table agrees with what can really be imported."""

from __future__ import annotations

import copy
import importlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import import_table

ROOT = Path(__file__).parents[2]
ROWS = import_table.load_rows()
EXPORTED = import_table.exports(ROOT)


def test_the_data_has_accelerates_top_level_and_no_name_twice():
    assert len({(row.module, row.name) for row in ROWS}) == len(ROWS)
    # 29 unconditional names, counted in the __init__.py of Accelerate 1.15
    assert sum(row.module == "accelerate" for row in ROWS) == 29
    assert {row.home for row in ROWS} <= set(import_table.PACKAGES)


@pytest.mark.parametrize("package", import_table.PACKAGES)
def test_the_table_read_from_source_is_all(package):
    module = importlib.import_module(package.replace("-", "_"))
    assert sorted(EXPORTED[package]) == sorted(module.__all__)


def test_every_import_on_the_page_works_and_nothing_available_is_marked_missing():
    tops = [importlib.import_module(package.replace("-", "_")) for package in import_table.PACKAGES]
    for row in ROWS:
        line = import_table.import_line(row, EXPORTED)
        if line == import_table.NOT_YET:
            assert not [top.__name__ for top in tops if hasattr(top, row.name)], row.name
        else:
            exec(line, {})


def test_names_of_which_two_packages_have_a_version_are_the_listed_ones():
    versions: dict[str, list[object]] = {}
    for package in import_table.PACKAGES:
        for name in EXPORTED[package]:
            versions.setdefault(name, []).append(
                getattr(importlib.import_module(package.replace("-", "_")), name)
            )
    several = {name for name, found in versions.items() if any(one != found[0] for one in found)}
    assert several == set(import_table.TWO_VERSIONS)


def test_the_version_that_is_shown_takes_what_accelerates_takes():
    """A map of several devices and the disk, and a state dict that is offloaded."""
    (line,) = {
        import_table.import_line(row, EXPORTED) for row in ROWS if row.name == "load_checkpoint_in_model"
    }
    names: dict[str, Any] = {}
    exec(line, names)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "pytorch_model.bin")
        again = copy.deepcopy(model)
        torch.nn.init.zeros_(again[0].weight)
        names["load_checkpoint_in_model"](
            again,
            folder,
            device_map={"0": "cpu", "1": "disk"},
            offload_folder=folder,
            offload_state_dict=True,
        )
        assert torch.equal(again[0].weight, model[0].weight)


def test_names_are_at_home():
    assert import_table.problems(ROWS, EXPORTED) == []


def _exported(**names: set[str]) -> dict[str, frozenset[str]]:
    given = {package.replace("_", "-"): frozenset(found) for package, found in names.items()}
    return {package: given.get(package, frozenset()) for package in import_table.PACKAGES}


def test_problems_name_what_is_away_from_home_and_what_is_not_re_exported():
    rows = [import_table.Row("accelerate.utils", "gather", "accel-state")]
    assert import_table.problems(rows, _exported()) == []
    assert import_table.problems(rows, _exported(accel_state={"gather"}, accel_train={"gather"})) == []
    assert import_table.problems(rows, _exported(accel_state={"gather"})) == [
        "gather: accelerate.utils has it, accel_train does not re-export it"
    ]
    assert import_table.problems(rows, _exported(accel_train={"gather"})) == [
        "gather: its home is accel-state, but only accel-train exports it"
    ]


def test_imports_prefer_accel_train_and_what_is_missing_is_marked():
    exported = _exported(accel_state={"PartialState"}, accel_train={"PartialState"})
    row = import_table.Row("accelerate", "PartialState", "accel-state")
    assert import_table.import_line(row, exported) == "from accel_train import PartialState"
    missing = import_table.Row("accelerate", "Accelerator", "accel-train")
    assert import_table.import_line(missing, exported) == import_table.NOT_YET


def test_main_prints_what_disagrees(capsys):
    assert import_table.main(["--root", str(ROOT)]) == 0
    assert capsys.readouterr().out.startswith("imports: 0 problems in ")
