"""The part of `Accelerator` that answers how data loaders are prepared."""

from __future__ import annotations

from accel_train.plugins import DataLoaderConfiguration
from accel_train.setup.prepared import Options

__all__ = ["LoaderView"]


class LoaderView:
    """The options of prepared loaders, under the names that Accelerate's scripts read and change."""

    _options: Options

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are prepared."""
        return self._options.loaders

    @dataloader_config.setter
    def dataloader_config(self, config: DataLoaderConfiguration) -> None:
        self._options.loaders = config

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is divided among ranks."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether every rank gets the same number of batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling depends on seed and epoch alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches move without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders restore their position."""
        return self.dataloader_config.use_stateful_dataloader
