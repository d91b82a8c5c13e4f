"""What file systems of Google and Azure say, on stand-ins; engines:clouds runs them on servers."""

from __future__ import annotations

import pytest

from accel_ckpt import CheckpointNotFoundError, ObjectStorageError
from accel_ckpt.folders.objects.buckets import BucketStore
from accel_ckpt.locations import location


class Listing:
    """A file system that answers listings of some paths, and raises an error for the others."""

    def __init__(self, known, otherwise=FileNotFoundError):
        self.known, self.otherwise = known, otherwise

    def ls(self, path, detail):
        if path in self.known:
            return self.known[path]
        raise (FileNotFoundError if path == "bucket/run" else self.otherwise)(path)


@pytest.fixture
def store():
    made = BucketStore(location("memory://bucket/run"))
    made.base = "bucket/run"  # as gcsfs and adlfs have it
    return made


def test_names_below_a_folder(store):
    store.fs = Listing({"bucket/run": ["bucket/run/checkpoint_1", "bucket/run/checkpoint_0/"]})
    assert store.children() == ["checkpoint_0", "checkpoint_1"]


def test_an_empty_bucket(store):
    store.fs = Listing({"bucket": []})
    assert store.children() == []


def test_no_bucket(store):
    store.fs = Listing({})
    with pytest.raises(
        ObjectStorageError, match=r"its bucket is gone: 'bucket' does not exist; check the name"
    ):
        store.children()


def test_a_bucket_that_may_not_be_listed_as_a_whole(store):
    store.fs = Listing({}, otherwise=PermissionError)
    assert store.children() == []


class HttpError(Exception):
    code = 401


class HttpResponseError(Exception):
    status_code = 403


class ResourceNotFoundError(Exception):
    status_code = 404


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            OSError("Forbidden: b/bucket\nno storage.objects.get"),
            ObjectStorageError,
            "was refused: OSError: Forbidden: b/b",
        ),
        (HttpError("Invalid Credentials"), ObjectStorageError, "was refused: HttpError: Invalid Credentials"),
        (
            HttpResponseError("no\nRequestId: 1"),
            ObjectStorageError,
            "was refused: HttpResponseError: no; check the cred",
        ),
        (
            ResourceNotFoundError("no container\nRequestId"),
            CheckpointNotFoundError,
            "bucket is gone: no container; check",
        ),
        (
            FileNotFoundError("b/bucket/o/x"),
            CheckpointNotFoundError,
            "bucket is gone: b/bucket/o/x; check the name",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_errors_that_stay_are_raised_at_once(store, error, kind, message, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it is tried again"))
    calls = []

    def fail():
        calls.append(1)
        raise error

    with pytest.raises(kind) as caught:
        store.attempt(fail, "reading", "x")
    assert message in str(caught.value)
    assert len(calls) == 1
