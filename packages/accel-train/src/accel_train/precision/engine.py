"""A precision that the strategy's engine computes in by itself."""

from __future__ import annotations

from accel_train.precision.base import DTypePolicy, Precision

__all__ = ["EnginePrecision"]


class EnginePrecision(Precision):
    """Nothing is cast or scaled here; the engine gets the dtypes.

    Args:
        wanted: the precision that the script chose.
    """

    def __init__(self, wanted: Precision) -> None:
        super().__init__(wanted.options)
        self.name = wanted.name  # type: ignore[misc]
        self._dtypes = wanted.dtypes

    @property
    def dtypes(self) -> DTypePolicy:
        """The dtypes that the engine computes in."""
        return self._dtypes
