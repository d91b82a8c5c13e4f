"""Google Cloud Storage and Azure: their file systems do not tell a bucket that is missing from an empty one."""

from __future__ import annotations

import logging

from accel_ckpt.errors import ObjectStorageError
from accel_ckpt.remote.store import Store

__all__ = ["BucketStore"]

logger = logging.getLogger(__name__)


class BucketStore(Store):
    """Objects in a bucket (a container, as Azure says) of its own name."""

    def children(self) -> list[str]:
        """As of any store; but a bucket that is not there is an error, and no place without checkpoints."""
        found = super().children()
        bucket = self.base.partition("/")[0]
        if not found and self._is_missing(bucket):
            raise ObjectStorageError(
                f"there is no {self.root}, its bucket is gone: {bucket!r} does not exist; check the name, and that the "
                "bucket exists"
            )
        return found

    def _is_missing(self, bucket: str) -> bool:
        try:
            self.ask(self.fs.ls, bucket, detail=False)
        except FileNotFoundError:
            return True
        except Exception:  # it was listed below a folder, so nobody says that it is not there
            logger.debug("the bucket %s cannot be listed as a whole", bucket, exc_info=True)
        return False
