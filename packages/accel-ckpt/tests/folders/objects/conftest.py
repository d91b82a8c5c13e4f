import tempfile

import fsspec
import pytest

from testkit.object_storage import Objects, install, uri


@pytest.fixture(autouse=True)
def _storage(tmp_path, monkeypatch):
    """The file system of tests, nothing watched; folders of `tempfile` of this test alone."""
    install()
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]
    yield
    Objects.watch = None


@pytest.fixture
def bucket(tmp_path):
    """A URI that several processes see."""
    return uri(tmp_path)
