"""Where names are found: the answer of the generated page of imports."""

import subprocess
import sys
from pathlib import Path

import pytest

import_table = pytest.importorskip("import_table", reason="tools/ is not beside the package")

from accel_cli.migration.names import SUBMODULES, home_of  # noqa: E402

ROOT = Path(__file__).parents[4]


def test_every_name_has_the_package_of_the_page():
    exported = import_table.exports(ROOT)
    for row in import_table.load_rows():
        line = import_table.import_line(row, exported)
        home = home_of(row.name)
        assert line == (import_table.NOT_YET if home is None else f"from {home} import {row.name}"), row


def test_every_module_of_the_page_is_known():
    modules = {row.module.split(".")[1] for row in import_table.load_rows() if "." in row.module}
    assert modules <= SUBMODULES


def test_torch_is_not_imported():
    code = "import sys; from accel_cli.migration.names import home_of; home_of('x'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
