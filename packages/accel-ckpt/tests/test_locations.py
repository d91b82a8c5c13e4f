import copy
import os
import pathlib
import pickle

import pytest

from accel_ckpt import RemotePath, location
from accel_state.errors import NotAvailableError


@pytest.mark.parametrize(
    ("given", "uri"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://bucket/run/", "s3://bucket/run"),
        ("S3://Bucket/Run", "s3://Bucket/Run"),
        ("gs://b/a//c", "gs://b/a/c"),
        (
            "abfs://container@account.dfs.core.windows.net/run",
            "abfs://container@account.dfs.core.windows.net/run",
        ),
        ("memory://run", "memory://run"),
        (pathlib.Path("s3://bucket/run"), "s3://bucket/run"),  # which has lost a slash
        (pathlib.Path("s3://bucket") / "run", "s3://bucket/run"),
    ],
)
def test_uris(given, uri):
    place = location(given)
    assert isinstance(place, RemotePath)
    assert str(place) == os.fspath(place) == f"{place}" == place.as_posix() == uri
    assert location(place) is place
    assert location(pathlib.Path(place)) == place  # what other code makes of it
    assert location(str(place)) == place


@pytest.mark.parametrize(
    "given", ["run", "/run", "./s3", "C:/run", "C:\\run", "a:b", pathlib.Path("run/x"), "s3"]
)
def test_local_paths(given):
    place = location(given)
    assert not isinstance(place, RemotePath)
    assert place == pathlib.Path(given)


def test_home_and_file_uris(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert location("~/run") == pathlib.Path("/home/somebody/run")
    assert location("file:///data/run") == location("local:///data/run") == pathlib.Path("/data/run")
    assert not isinstance(location("file:///data/run"), RemotePath)


@pytest.mark.parametrize("given", ["s3://", "s3:///", "s3://bucket/../other", "gs://b/a/.."])
def test_uris_that_are_no_place(given):
    with pytest.raises(ValueError, match="not a location for checkpoints; give a bucket"):
        location(given)


def test_names_of_a_uri():
    place = location("s3://bucket/run") / "checkpoint_3"
    assert isinstance(place, RemotePath)
    assert str(place) == "s3://bucket/run/checkpoint_3"
    assert (place.name, place.scheme, str(place.parent)) == ("checkpoint_3", "s3", "s3://bucket/run")
    assert isinstance(place.parent, RemotePath)
    assert str(place.with_name("checkpoint_4")) == "s3://bucket/run/checkpoint_4"
    assert place == location("s3://bucket/run/checkpoint_3")
    assert len({place, location("s3://bucket/run/checkpoint_3")}) == 1
    assert pickle.loads(pickle.dumps(place)) == copy.deepcopy(place) == place
    assert repr(place) == "RemotePath('s3://bucket/run/checkpoint_3')"
    assert place.expanduser() is place


@pytest.mark.parametrize(
    "method", ["exists", "is_dir", "stat", "iterdir", "mkdir", "read_bytes", "resolve", "unlink"]
)
def test_methods_of_local_files_say_what_to_use(method):
    with pytest.raises(
        NotAvailableError, match=r"s3://bucket/run is in object storage.*fsspec\.core\.url_to_fs"
    ):
        getattr(location("s3://bucket/run"), method)()
