"""Lazy package namespaces."""

import gc
import signal
import subprocess
import sys
import textwrap
import zipfile

import pytest

from accel_state._lazy import names_of_stub

TOP = """
from accel_state._lazy import attach
__getattr__, __dir__, __all__ = attach(__name__)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A lazy package whose modules are not imported yet."""
    folder = tmp_path / "lazy_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(TOP)
    (folder / "__init__.pyi").write_text(
        "from lazy_package.about import __version__ as __version__\n"
        "from lazy_package.bad import third as third\n"
        "from lazy_package.good import first as first\n"
        "from lazy_package.good import second as second\n"
    )
    (folder / "good.py").write_text("import gc\nfirst, second = gc.isenabled(), object()\n")
    (folder / "bad.py").write_text("raise RuntimeError('no luck')\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lazy_package

    yield lazy_package
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy_package"]:
        del sys.modules[name]


def test_a_name_is_imported_when_it_is_asked_for(package):
    assert package.__all__ == ["first", "second", "third"]
    assert "lazy_package.good" not in sys.modules
    assert package.second is sys.modules["lazy_package.good"].second
    assert vars(package)["second"] is package.second, "later lookups are direct"
    assert {"first", "second", "third", "__all__"} <= set(dir(package))


def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=r"module 'lazy_package' has no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_a_package_in_an_archive_reads_its_stub(package, tmp_path, monkeypatch):
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in (tmp_path / "lazy_package").glob("*.py"):
            file.write(path, f"zipped/{path.name}")
        file.writestr("zipped/__init__.pyi", "from zipped.good import second as second\n")
    monkeypatch.syspath_prepend(str(archive))
    import zipped

    assert zipped.__all__ == ["second"]
    assert zipped.second is sys.modules["zipped.good"].second


@pytest.mark.parametrize(
    "line", ["from a import b", "from a import b as c", "from a import b as b, c as c", "from a import ("]
)
def test_a_line_that_names_something_else_is_refused(line):
    with pytest.raises(ValueError, match="is to read 'from home import name as name'"):
        names_of_stub(f"from a import x as x\n{line}\n")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_pauses_and_is_as_before(package, enabled):
    try:
        if not enabled:
            gc.disable()
        assert package.first is False, "while the module was imported"
        assert gc.isenabled() is enabled
        with pytest.raises(RuntimeError, match="no luck"):
            package.third  # noqa: B018 - the attribute imports
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


@pytest.mark.wide(only=["from accel_bigmodel*"])
@pytest.mark.parametrize(
    "statement", ["from accel_train import Accelerator", "from accel_bigmodel import dispatch_model"]
)
def test_an_import_after_torch_sets_off_no_search_for_garbage(statement):
    script = f"""
        import gc, torch
        found = []
        gc.collect(0)  # how many objects torch has made since the last time decides nothing here
        gc.callbacks.append(lambda phase, info: found.append(info["generation"]) if phase == "start" else None)
        {statement}
        # Counted before anything is printed: one young generation may be due by now.
        assert 2 not in found and len(found) <= 1, found
        assert gc.isenabled()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_a_name_that_another_package_has_says_where(tmp_path, monkeypatch):
    folder = tmp_path / "lazy_pointing"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from accel_state._lazy import attach\n"
        "__getattr__, __dir__, __all__ = attach(__name__, elsewhere={'other': ('wanted',)})\n"
    )
    (folder / "__init__.pyi").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ImportError, match="lazy_pointing has no wanted, other does: from other import wanted"
    ):
        from lazy_pointing import wanted  # noqa: F401
    import lazy_pointing

    with pytest.raises(AttributeError, match="from other import wanted"):
        lazy_pointing.wanted  # noqa: B018
    assert not hasattr(lazy_pointing, "wanted")
    assert lazy_pointing.__all__ == []
    with pytest.raises(ImportError, match="cannot import name 'unknown'"):
        from lazy_pointing import unknown  # noqa: F401


@pytest.mark.parametrize(("version", "told"), [("2.8.1+cu126", True), ("2.9.0a0+git", False), ("3.0", False)])
@pytest.mark.parametrize("broken", ["from torch import newer_name", "import torch\ntorch.newer_name"])
def test_an_import_that_fails_with_an_old_torch_says_so(tmp_path, version, told, broken):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(f"__version__ = {version!r}\n")
    (tmp_path / "needs.py").write_text(broken)
    (tmp_path / "script.py").write_text("from accel_state._lazy import load\nload('needs', 'x')\n")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    *_, error, last = done.stderr.splitlines()
    advice = f"torch {version} is installed, and 2.9 or newer is needed: pip install --upgrade torch"
    assert "newer_name" in (error if told else last)
    assert (last == advice) is told


def test_ctrl_c_during_an_import_is_told_in_one_line(tmp_path):
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt\n")
    (tmp_path / "script.py").write_text("from accel_state._lazy import load\n\nload('slow', 'x')\n")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.startswith("accel: ended by Ctrl-C while modules were imported in ")
    assert done.stderr.endswith("script.py, line 3\n")
    assert done.returncode in (-signal.SIGINT, 0xC000013A), "as Ctrl-C ends a Python script"
