"""Choosing the class of store for a URI."""

from __future__ import annotations

from pathlib import Path

from accel_ckpt.folders.objects.store import Store
from accel_ckpt.locations import RemotePath

__all__ = ["open_store"]

_IN_BUCKETS = ("gs", "gcs", "az", "abfs", "abfss")


def open_store(root: Path) -> Store:
    """The objects below a URI.

    Raises:
        MissingDependencyError: the file system of the URI is not installed.
    """
    assert isinstance(root, RemotePath), "local paths have no store"
    if root.scheme in ("s3", "s3a"):
        from accel_ckpt.folders.objects.s3 import S3Store

        return S3Store(root)
    if root.scheme in _IN_BUCKETS:
        from accel_ckpt.folders.objects.buckets import BucketStore

        return BucketStore(root)
    return Store(root)
