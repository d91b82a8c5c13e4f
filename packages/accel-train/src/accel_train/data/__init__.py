"""Data loaders for many processes: sharding by arithmetic, dispatch, device transfer, resume."""

from accel_train.data.active_loaders import ActiveLoaders
from accel_train.data.dispatch.dispatcher import DataLoaderDispatcher
from accel_train.data.grain import GrainDataset
from accel_train.data.iterable import IterableDatasetShard
from accel_train.data.loader import DataLoaderStateMixin, PreparedLoader
from accel_train.data.mixing.loader import MixedDataLoader
from accel_train.data.mixing.progress import SourceCount
from accel_train.data.packing import PackedDataset, PackingCollator, cu_seqlens_of
from accel_train.data.prepare import get_sampler, prepare_data_loader
from accel_train.data.sampling.batches import BatchSamplerShard, ShardedBatchSampler, SkipBatchSampler
from accel_train.data.sampling.seedable import SeedableRandomSampler
from accel_train.data.sampling.token_batches import TokenBatchSampler
from accel_train.data.shard import DataLoaderShard
from accel_train.data.skip import SkipDataLoader, skip_first_batches

__all__ = [
    "ActiveLoaders",
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "GrainDataset",
    "IterableDatasetShard",
    "MixedDataLoader",
    "PackedDataset",
    "PackingCollator",
    "PreparedLoader",
    "SeedableRandomSampler",
    "ShardedBatchSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "SourceCount",
    "TokenBatchSampler",
    "cu_seqlens_of",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
