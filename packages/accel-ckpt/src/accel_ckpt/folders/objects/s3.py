"""S3 and what speaks its protocol: uploads of which several parts are on their way at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from accel_ckpt.errors import CheckpointNotFoundError, ObjectStorageError
from accel_ckpt.folders.objects.store import Store, Upload

__all__ = ["LIMIT", "S3Store"]

logger = logging.getLogger(__name__)

LIMIT = 300.0
"""Seconds that a request may take: a part of 16 MiB arrives in time at 56 kB/s.

The read timeout of botocore begins when a body is sent, so a server that stops taking one would be waited for without
an end."""

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_MAX_PARTS = 10_000


class S3Store(Store):
    """Objects in S3."""

    def ask(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system for at most :data:`LIMIT` seconds; fsspec takes that argument everywhere."""
        return call(*arguments, **options, timeout=LIMIT)

    def below(self, path: str) -> Iterator[tuple[str, int]]:
        """Paths and sizes of all objects below one, in one request for a thousand; here it raises what goes wrong."""
        for name, about in self.ask(self.fs.find, path, detail=True).items():
            yield name, int(about["size"] or 0)

    def upload(self, name: str) -> Upload:
        """Begin a multipart upload."""
        return _Multipart(self, name)

    def request(self, operation: str, name: str, **arguments: Any) -> Any:
        """Make a request about an object, and repeat it where that may help."""
        bucket, key, _ = self.fs.split_path(self.path(name))
        return self.attempt(
            lambda: self.ask(self.fs.call_s3, operation, Bucket=bucket, Key=key, **arguments),
            f"{operation} of",
            name,
        )

    def missing_bucket(self, error: CheckpointNotFoundError) -> str | None:
        """See `Store.missing_bucket`: s3fs reports an empty listing, caused by the server's error about the bucket."""
        said = error.__cause__
        return str(error) if said is not None and said.__cause__ is not None else None

    def abandon_uploads(self, prefix: str, chosen: Callable[[str], bool] = lambda name: True) -> list[str]:
        """Abort multipart uploads, whose parts cost money until then."""
        bucket, start, _ = self.fs.split_path(self.path(prefix))
        base = start.removesuffix(prefix)
        found: list[tuple[str, str]] = []
        more: dict[str, str] = {}
        while True:
            listing = partial(
                self.ask, self.fs.call_s3, "list_multipart_uploads", Bucket=bucket, Prefix=start, **more
            )
            answer = self.attempt(listing, "listing the unfinished uploads of", prefix)
            found += [(one["Key"].removeprefix(base), one["UploadId"]) for one in answer.get("Uploads", ())]
            if not answer.get("IsTruncated"):
                break
            more = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}
        doomed = [(name, number) for name, number in found if chosen(name)]
        for name, number in doomed:
            try:
                self.request("abort_multipart_upload", name, UploadId=number)
            except CheckpointNotFoundError:  # it has just ended
                logger.info("the upload of %s has ended", self.uri(name))
        return [name for name, _ in doomed]


class _Multipart:
    ordered = False

    def __init__(self, store: S3Store, name: str) -> None:
        self._store, self._name = store, name
        self._tags: dict[int, str] = {}
        self._id: str = store.request("create_multipart_upload", name)["UploadId"]

    def send(self, number: int, data: bytes) -> None:
        """Send a part."""
        if number > _MAX_PARTS:
            raise ObjectStorageError(
                f"{self._store.uri(self._name)} would have more than {_MAX_PARTS} parts of {len(data)} bytes, which S3 "
                "does not allow; make files smaller with max_shard_size, or divide the state among more ranks"
            )
        answer = self._store.request(
            "upload_part", self._name, UploadId=self._id, PartNumber=number, Body=data
        )
        self._tags[number] = answer["ETag"]

    def complete(self, size: int) -> None:
        """Put the parts together."""
        parts = [{"PartNumber": number, "ETag": self._tags[number]} for number in sorted(self._tags)]
        try:
            self._store.request(
                "complete_multipart_upload", self._name, UploadId=self._id, MultipartUpload={"Parts": parts}
            )
        except (CheckpointNotFoundError, ObjectStorageError):
            # A request whose answer was lost may have done it, and the next one finds no such upload.
            if self._store.sizes(self._name).get(self._name) != size:
                raise

    def abort(self) -> None:
        """Drop the parts."""
        try:
            self._store.request("abort_multipart_upload", self._name, UploadId=self._id)
        except CheckpointNotFoundError:
            logger.info("the upload of %s has ended", self._store.uri(self._name))
