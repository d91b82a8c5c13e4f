"""Google Cloud Storage and Azure: their file systems do not tell a bucket that is missing from an empty one."""

from __future__ import annotations

import logging

from accel_ckpt.errors import CheckpointNotFoundError
from accel_ckpt.folders.objects.store import Store

__all__ = ["BucketStore"]

logger = logging.getLogger(__name__)


class BucketStore(Store):
    """Objects in a bucket (a container, as Azure says) of its own name."""

    def missing_bucket(self, error: CheckpointNotFoundError) -> str | None:
        """See `Store.missing_bucket`: a bucket that exists can be listed, or refuses the request."""
        bucket = self.base.partition("/")[0]
        try:
            self.ask(self.fs.ls, bucket, detail=False)
        except FileNotFoundError:
            return (
                f"there is no {self.root}, its bucket is gone: {bucket!r} does not exist; check the name, and that the "
                "bucket exists"
            )
        except Exception:  # listing below a folder worked, so it exists
            logger.debug("the bucket %s cannot be listed as a whole", bucket, exc_info=True)
        return None
