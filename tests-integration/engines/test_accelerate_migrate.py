"""``accel migrate`` on Accelerate's own scripts, where they are installed; nothing of them is kept here."""

import ast
import importlib
from pathlib import Path

import pytest

from accel_cli.migration.files import migrate_file

accelerate = pytest.importorskip(
    "accelerate", reason="accelerate is not installed: hatch run engines:accelerate"
)
SCRIPTS = sorted((Path(accelerate.__file__).parent / "test_utils" / "scripts").rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_refused_with_its_lines_or_its_imports_exist_here(path):
    migration = migrate_file(path)
    source = path.read_text()
    lines = source.splitlines()
    if migration.refusals:
        assert not migration.changed
        assert all(0 < remark.line <= len(lines) for remark in migration.refusals)
        return
    tree = ast.parse(migration.after)
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    noted = "\n".join(remark.text for remark in migration.notes)
    for node in imported:
        assert node.module is not None
        if node.module.split(".")[0] == "accelerate":
            assert all(f"{node.module}.{alias.name} is left as it is" in noted for alias in node.names)
        if node.module.startswith("accel_"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)
    # Nothing but imports, and attributes of imported modules, differs.
    kept = [
        ast.dump(node) for node in ast.parse(source).body if not isinstance(node, ast.ImportFrom | ast.Import)
    ]
    assert (
        "accelerate." in source
        or [ast.dump(n) for n in tree.body if not isinstance(n, ast.ImportFrom | ast.Import)] == kept
    )


def test_some_are_understood():
    done = [path.stem for path in SCRIPTS if migrate_file(path).changed]
    assert len(done) >= 5, done
