"""Base of all prepared loaders: their options, and facts about the last returned batch."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from accel_state.messages import warn
from accel_train.data.active_loaders import ActiveLoaders
from accel_train.data.iterable import IterableDatasetShard
from accel_train.data.iteration import NOT_COUNTED, Iteration
from accel_train.data.position_checks import check_fits
from accel_train.data.rng_replay import Randomness, generators_of
from accel_train.data.sampling.batches import (
    SamplerPlan,
    ShardedBatchSampler,
    SkipBatchSampler,
    length_of,
    plan_of,
)
from accel_train.data.sampling.index_streams import IndexStream
from accel_train.data.sampling.samplers import innermost_sampler, samplers_of
from accel_train.data.sampling.seedable import SeedableRandomSampler
from accel_train.data.sampling.shared_seed import Sharing, sharing_for
from accel_train.data.sampling.token_batches import TokenBatchSampler
from accel_train.data.saved_position import Epoch, Restored, read
from accel_train.data.stateful import is_stateful
from accel_train.data.torchdata_instance import TorchdataInstance
from accel_train.data.transfer import BatchTransfer, DirectTransfer
from accel_train.data.workers import Ending
from accel_train.ranks import Ranks

__all__ = ["DataLoaderStateMixin", "Indexes", "PreparedLoader"]


class DataLoaderStateMixin:
    """Mixin that reports to the `Accelerator` when an iteration begins and ends.

    Attributes:
        ledger: the active loaders of the `Accelerator` that the loader belongs to.
    """

    ledger: ActiveLoaders

    def reset(self) -> None:
        """Do nothing: whether an epoch ends, and its remainder, are computed where they are asked for."""

    def begin(self) -> None:
        """Report that an iteration begins."""
        self.ledger.begin(self)

    def end(self) -> None:
        """Report that an iteration is over."""
        self.ledger.end(self)


class _Itself:
    """An attribute of instances that is the instance; the class has none."""

    def __get__(self, loader: PreparedLoader | None, owner: type[Any]) -> PreparedLoader:
        if loader is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute 'base_dataloader'")
        return loader


class Indexes:
    """Stands for the batch sampler in torch's iterator: the index stream of the epoch that begins."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.stream: IndexStream | None = None
        """Set while torch's iterator is made."""

    def __iter__(self) -> Iterator[Any]:
        if self.stream is not None:
            return self.stream
        iterator: Iterator[Any] = iter(self.sampler)
        return iterator

    def __len__(self) -> int:
        return len(self.sampler)

    def over(self, sampler: Any) -> Indexes:
        """Make such an object for another sampler."""
        return Indexes(sampler)

    def __getstate__(self) -> dict[str, Any]:
        return {"sampler": self.sampler, "stream": None}


class PreparedLoader(DataLoaderStateMixin, TorchdataInstance, DataLoader[Any], ABC):
    """A `torch.utils.data.DataLoader` that yields this rank's batches; base of the two prepared kinds.

    Args:
        dataset: the dataset, or this rank's shard of it.
        device: the device to which batches are moved; None: they are not moved.
        rng_types: generators made equal on all ranks at each epoch: "torch", "cuda", "generator", …
        synchronized_generator: the generator that "generator" stands for.
        skip_batches: batches to skip at the start of every iteration.
        use_stateful_dataloader: whether a loaded state continues inside the epoch.
        _drop_last: whether the original loader dropped an incomplete last batch.
        _non_blocking: whether the move to the device overlaps with the host.
        torch_device_mesh: kept for reference.
        iteration: epochs that were iterated before.
        ledger: the active loaders to report to; by default a new record.
        ranks: the ranks that read different samples; by default this one alone.
        **kwargs: as for `torch.utils.data.DataLoader`.
    """

    _is_accelerate_prepared: bool = False
    """Marks objects that an `Accelerator` prepared, for code of other libraries that looks for it."""
    skips_steps: bool = False
    """Whether `skip_batches` counts for map-style datasets, too; otherwise their batch sampler skips."""
    reads_own_part: bool = False
    """Whether each rank reads for itself."""
    transfer: BatchTransfer | None = None
    may_pad: bool = False
    """Whether rows can be padding."""
    may_be_uneven: bool = False
    """Whether ranks can hold different numbers of batches."""
    make_iteration: type[Iteration] = Iteration
    """The class of its iterations."""
    base_dataloader = _Itself()
    """The loader that torch iterates, under Accelerate's name: this object, because no loader is wrapped."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        ledger: ActiveLoaders | None = None,
        ranks: Ranks | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = None if device is None else torch.device(device)
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = self.left_out = skip_batches  # one that skips in its sampler leaves out more
        self.use_stateful_dataloader = use_stateful_dataloader
        self.torch_device_mesh = torch_device_mesh
        self.ledger = ActiveLoaders() if ledger is None else ledger
        self.ranks = Ranks() if ranks is None else ranks
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.tagged = self.reads_own_part and isinstance(dataset, IterableDatasetShard)
        """Whether torch's iterator yields `Tagged` batches."""
        self.epoch_state = Epoch(iteration)
        self.current: Iteration | None = None
        """The iteration that yielded last, or that began last if that was later."""
        self.transfer = self._make_transfer()
        self.shard_batch: Callable[[Any], Any] | None = None
        """Cuts this rank's part out of a batch that several ranks read, on its way to the script."""
        is_map_style = self._dataset_kind == 0
        self.indexes = Indexes(super()._index_sampler) if is_map_style else None
        self._look_at_samplers()
        self.asks_dataset = use_stateful_dataloader and is_stateful(dataset)
        self.workers_turned = False
        self.seedless = self.workers_ran = False
        self.ending: Ending | None = None
        self.worker_epoch: Tensor | None = None
        """The number of the epoch in shared memory, for workers that stay over several."""
        self._note_epochs()

    # Torch's hooks

    def __len__(self) -> int:
        return max(self._steps() - self.skip_batches, 0)

    def _steps(self) -> int:
        """Steps of an epoch, the skipped ones included."""
        return super().__len__()

    @property
    def _index_sampler(self) -> Any:
        # Torch's own constructor may ask before there is one.
        indexes = self.__dict__.get("indexes")
        return super()._index_sampler if indexes is None else indexes

    # Answers about the last returned batch

    @property
    def gradient_state(self) -> Any:
        """The `GradientState` of the `Accelerator` that the loader belongs to.

        Raises:
            StateError: the loader belongs to no `Accelerator`, or that one no longer exists.
        """
        return self.ledger.gradient_state

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the last returned batch is the last one.

        For an iterable dataset the next batch is fetched to find out, and kept for the next step.
        """
        current = self.current
        return current is not None and current.at_end()

    @property
    def batches_left(self) -> int | None:
        """Number of batches of this rank after the last returned one in the running iteration.

        Counted by arithmetic: nothing is fetched early. The same on all ranks unless `may_be_uneven`. None if nothing
        is iterated, or the number is not known: for streams and samplers without a length, and for streams that several
        worker processes read. The `__len__` of a dataset or sampler is trusted.
        """
        current = self.current
        if current is None or current.closed:
            return 0 if current is not None and current.ended else None
        total = current.total
        if total == NOT_COUNTED:
            total = current.total = self.count_batches(current)
        if total is None:
            return None
        left = total - current.yielded
        return left if left >= 0 else None

    def count_batches(self, iteration: Iteration) -> int | None:
        """Total number of batches of an iteration; None if not known."""
        if iteration.stream is not None:
            return iteration.stream.count()
        batches = self._stream_length()
        return None if batches is None else max(batches - iteration.skipped, 0)

    def _stream_length(self) -> int | None:
        """Batches of a whole stream, by its length."""
        if self.num_workers > 1:
            return None  # each worker has an incomplete last batch, or a copy of the stream
        samples = length_of(self.dataset)
        if samples is None or self.batch_size is None:
            return samples
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    @property
    def ends_on_any_rank(self) -> bool | None:
        """Whether the last returned batch is the last one of some rank; None when that is not known."""
        if not self.may_be_uneven:
            return self.end_of_dataloader
        current = self.current
        if current is None or current.stream is None:
            return None
        return current.stream.ends_anywhere_at(current.yielded)

    @property
    def batch_rows(self) -> int | None:
        """Rows that this rank received in the last returned batch; None when that is not known."""
        current = self.current
        if current is None or current.stream is None or not current.yielded or not self._auto_collation:
            return None
        return current.stream.rows(current.yielded - 1)

    @property
    def total_rows(self) -> int | None:
        """Real rows of the last returned batch over all ranks; None when neither sampler nor batch tells.

        Counted by arithmetic, without communication. Where every rank has a sampler or stream of its own, all ranks are
        counted as this one.
        """
        current = self.current
        if current is None or not current.yielded:
            return None
        total = None if current.stream is None else current.stream.total_rows(current.yielded - 1)
        rows = self.batch_rows
        if total is not None or rows is None:
            return total
        valid = self.valid_rows()
        return rows * self.ranks.size if valid is None else sum(min(rows, real) for real in valid)

    def valid_rows(self) -> tuple[int, ...] | None:
        """Per rank, how many leading rows of the last returned batch are real; None when all are.

        A number above the number of rows means all of them.
        """
        current = self.current
        if current is None or current.stream is None or not current.yielded:
            return None
        return current.stream.valid_rows(current.yielded - 1)

    @property
    def real_rows(self) -> int | None:
        """Number of leading rows of this rank's batch that are real; None if all are."""
        valid = self.valid_rows()
        return None if valid is None else valid[self._index_of_part()]

    def _index_of_part(self) -> int:
        """This rank's place among those that share samples out."""
        return self.ranks.index

    @property
    def remainder(self) -> int:
        """Real rows in the last global batch of an epoch: 0 when it is full, -1 when unknown or dropped."""
        stride = self.total_batch_size
        if stride is None or self.drop_last or getattr(self._batch_sampler(), "drop_last", False):
            return -1
        sampler = None if self.indexes is None else self.get_sampler()
        try:
            total = self.total_dataset_length if sampler is None else len(sampler)
        except (TypeError, NotImplementedError):  # the dataset or its sampler has no length
            return -1
        return total % stride

    def _batch_sampler(self) -> Any:
        """The batch sampler, also when it was given as the sampler of a loader that does not batch."""
        return self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler

    @property
    def total_batch_size(self) -> int | None:
        """Samples per step over all ranks; None when batches vary."""
        size = getattr(self._batch_sampler(), "batch_size", None)
        return None if size is None else int(size) * self.ranks.size

    @property
    def full_rows(self) -> int | None:
        """Rows of a full batch of this rank; None when batches vary."""
        total = self.total_batch_size
        return None if total is None else total // self.ranks.size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset over all ranks."""
        total = getattr(self.dataset, "total_length", None)
        return len(self.dataset) if total is None else int(total)  # type: ignore[arg-type]

    # Epochs

    @property
    def iteration(self) -> int:
        """Number of the next epoch, or of the one being iterated.

        A loop that was left early counts as well: the next one has another number, and so another order.
        """
        epoch, current = self.epoch_state, self.epoch_state.running
        if current is not None and not current.closed and current.epoch == epoch.iteration:
            return epoch.iteration
        return epoch.following()

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.epoch_state.choose(value)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, and call ``set_epoch`` of the samplers and the dataset that have it.

        If a script sets the epoch of one of those instead, the loader takes it over when the next epoch begins.
        """
        self.epoch_state.choose(epoch)
        self.tell_epoch(epoch)

    def tell_epoch(self, epoch: int) -> None:
        """Pass the epoch on to samplers and dataset, also in worker processes."""
        if self.worker_epoch is not None:
            self.worker_epoch.fill_(epoch)
        for follower in self.followers:
            follower.set_epoch(epoch)
        self._note_epochs()

    def _note_epochs(self) -> None:
        """Note the epochs that samplers and the dataset report now, which the script did not choose."""
        told: list[tuple[Any, int]] = []
        inner = getattr(self.dataset, "dataset", None)  # the script's own, inside of a shard
        for follower in (*self.followers, inner):
            epoch = getattr(follower, "epoch", None)
            if type(epoch) is int and epoch >= 0:
                told.append((follower, epoch))
                self.ledger.epochs[id(follower)] = epoch
        self.epoch_state.told = told

    def get_sampler(self) -> Any:
        """The sampler that yields single indices, at the bottom of all batch samplers."""
        return innermost_sampler(self.batch_sampler, self.sampler)

    def set_sampler(self, sampler: Any) -> None:
        """Replace that sampler."""
        outer: Any = self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler
        parent = None
        while isinstance(outer, ShardedBatchSampler | SkipBatchSampler):
            parent, outer = outer, outer.batch_sampler
        if isinstance(outer, BatchSampler) or hasattr(outer, "sampler"):
            outer.sampler = sampler
        elif parent is not None:
            parent.batch_sampler = sampler
        if not isinstance(self.sampler, BatchSampler):
            self.__dict__["sampler"] = sampler  # torch forbids the assignment after construction
            if self.batch_sampler is None and self.indexes is not None:
                self.indexes.sampler = sampler
        self._look_at_samplers()
        self._note_epochs()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The loader's position: epoch, the epoch's random draws, and batches, as plain data and tensors.

        The state counts the batches that were returned. An epoch whose last batch is known to have been returned
        counts as over. The call has no side effect on the iteration.
        """
        running = self.epoch_state.running  # which may be that of a loader that skips
        finished = running is not None and running.yielded > 0 and running.known_to_end()
        if running is not None and running.watched is not None and running.watched.found and not finished:
            warn(
                "Reading this loader's data or order draws from global random generators (of torch, Python or NumPy), "
                "from which other code draws in between: another source of a mixture, dropout on the CPU, the script. "
                "A run that continues inside this epoch reads again without that code, and gets other samples. Let the "
                "dataset or sampler draw from a generator of its own, an attribute such as self.generator = "
                "torch.Generator(), or read in a worker (num_workers=1).",
                once=True,
            )
        state = self.epoch_state.dump(self.ranks, self._position_options(), finished)
        sampler = self.get_sampler()
        if isinstance(sampler, SeedableRandomSampler):
            state["sampler_seed"] = sampler.initial_seed
        state["generators"] = self._generators_after(running if finished else None)
        state["workers_run"] = (self.persistent_workers and self.keeps_workers) or self.workers_ran
        state["samplers"] = [sampler.state_dict() for sampler in self.stateful_samplers]
        return state

    def state_after(self, batches: int, ranks: int) -> dict[str, Any]:
        """Make a state from the little that another library saved, with the current epoch order and random states.

        Args:
            batches: how many batches each rank had received; 0: between two epochs.
            ranks: how many ranks read different samples; 0: not known, so as many as here.
        """
        ranks = ranks or self.ranks.size
        rounds = 1 if self.splits_batches else ranks
        stride = self.stream_stride
        if stride is not None and not self.splits_batches:
            stride = stride // self.ranks.size * ranks
        randomness = self.randomness()
        return self.epoch_state.between(self.ranks) | {
            "ranks": ranks,
            "finished": not batches,
            "batches_yielded": batches,
            # A loader uses the entry in the unit that it counts.
            "position": {
                "samples": batches * (self.sampler_batch_size or 1) * rounds,
                "base_batches": batches * rounds,
                "local_batches": batches,
                "samples_per_batch": stride,
            },
            # The run that continues has its iterator already, so making one must not move the restored generators.
            "rng_at_start": randomness.tree(randomness.now()),
        }

    def _position_options(self) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "batch_size": self.sampler_batch_size,
            "drop_last": self.drop_last,
            "lengths": self.lengths,
        }

    @property
    def lengths(self) -> list[int | None]:
        """Samples of the dataset, and of an epoch, where torch's samplers draw it; None where that is not known."""
        shard = self.dataset
        dataset = shard.dataset if isinstance(shard, IterableDatasetShard) else shard
        plan = None if self.indexes is None else plan_of(self.indexes.sampler)
        return [length_of(dataset), None if plan is None or plan.source is None else plan.samples]

    def _generators_after(self, over: Iteration | None) -> list[Any]:
        """States of the loader's generators, including what torch draws at the end of an epoch.

        Args:
            over: an iteration whose last batch was already returned, if the end's draws are still to be made.
        """
        randomness = self.randomness()
        if over is None or over.ended or over.stream is None:
            return randomness.own_trees()
        now = randomness.now()
        try:
            over.stream.finish()
            return randomness.own_trees()
        finally:
            randomness.put_back(now)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state.

        The next iterator of the saved epoch uses the saved random draws, so it has the order of the interrupted one. It
        also continues at the saved position if the loader was prepared with ``use_stateful_dataloader=True``;
        otherwise it starts at the first batch, and `skip_first_batches` skips to the position.

        `iteration` is then the number of the epoch to continue with: the next epoch, if the last batch of the saved one
        was known to have been returned. ``set_epoch(saved)`` returns to the saved epoch, which then yields no batches.

        Raises:
            DataError: `state_dict` does not come from a prepared loader, or from another kind of loader.
            NotAvailableError: see `check_state_dict`.
        """
        self.check_state_dict(state_dict)
        self.epoch_state.load(state_dict)
        self.current = None
        self.workers_ran = bool(state_dict.get("workers_run", False))
        sampler = self.get_sampler()
        if isinstance(sampler, SeedableRandomSampler) and "sampler_seed" in state_dict:
            sampler.initial_seed = int(state_dict["sampler_seed"])
        self.randomness().set_own(state_dict.get("generators", []))
        for stateful, saved in self._saved_samplers(state_dict):
            stateful.load_state_dict(saved)
        self._note_epochs()

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that this loader can continue at the position in `state_dict`; changes nothing.

        Raises:
            DataError: `state_dict` does not come from a prepared loader, or comes from another kind of loader, or from
                one with another number of random generators.
            NotAvailableError: the position has no equivalent for this number of ranks or workers, or this batch size.
        """
        restored = read(state_dict)
        randomness = self.randomness()
        randomness.check_own(state_dict.get("generators", []))
        ahead = {} if restored is None else restored.ahead
        trees = [
            None if restored is None else restored.rng_at_start,
            ahead.get("rng"),
            ahead.get("first_rng"),
        ]
        randomness.check(state_dict, [tree for tree in trees if tree is not None])
        if restored is not None and self.use_stateful_dataloader and not state_dict["finished"]:
            check_fits(self, restored)
        for sampler, saved in self._saved_samplers(state_dict):
            if isinstance(sampler, TokenBatchSampler):
                sampler.check_state_dict(saved)

    def _saved_samplers(self, state_dict: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Samplers that keep a state, each with what was saved of it. After an epoch a plan may have other samples."""
        pairs = zip(self.stateful_samplers, state_dict.get("samplers", []), strict=False)
        return [
            (sampler, saved)
            for sampler, saved in pairs
            if not (state_dict["finished"] and isinstance(sampler, TokenBatchSampler))
        ]

    # What positions are counted in

    @property
    def position_unit(self) -> str:
        """The unit of this loader's saved positions: samples, base_batches or local_batches."""
        return "local_batches" if self.indexes is None else plan_of(self.indexes.sampler).unit

    @property
    def splits_batches(self) -> bool:
        """Whether a batch of the sampler, or stream, is cut into one part per rank."""
        return False

    @property
    def sampler_batches_per_step(self) -> int:
        """Batches of the sampler that one step of all ranks takes."""
        return 1

    @property
    def sampler_batch_size(self) -> int | None:
        """Samples in a batch of the sampler; None when batches vary."""
        size = getattr(self._batch_sampler(), "batch_size", None)
        return None if size is None else int(size)

    @property
    def stream_stride(self) -> int | None:
        """Samples of a shared-out stream in one batch over all ranks; None where ranks have streams of their own."""
        return self.batch_size or 1

    # Random states, and what serves an iteration

    def _look_at_samplers(self) -> None:
        """Note what follows the epoch, what keeps a state, and all generators: of samplers and datasets too."""
        self.followers: list[Any] = []
        self.stateful_samplers: list[Any] = []
        holders: list[Any] = []
        for sampler in samplers_of(self):
            if hasattr(sampler, "set_epoch"):
                self.followers.append(sampler)
            if callable(getattr(sampler, "state_dict", None)) and callable(
                getattr(sampler, "load_state_dict", None)
            ):
                self.stateful_samplers.append(sampler)
            if not isinstance(sampler, SeedableRandomSampler):
                holders.append(sampler)
        dataset: Any = self.dataset
        if hasattr(dataset, "set_epoch"):
            self.followers.append(dataset)
        while dataset is not None:
            holders.append(dataset)
            dataset = getattr(dataset, "dataset", None)
        self.own_generators: list[Any] = generators_of([self.generator, self.synchronized_generator], holders)

    @functools.cached_property
    def sharing(self) -> Sharing:
        """Makes random draws equal on all ranks."""
        return sharing_for(self.ranks)

    def randomness(self) -> Randomness:
        """The generators that reading can draw from."""
        indexes = self.indexes
        return Randomness(self.own_generators, indexes is None or plan_of(indexes.sampler).source is None)

    @property
    def keeps_workers(self) -> bool:
        """Whether there are worker processes from an earlier epoch."""
        return self._iterator is not None

    @abstractmethod
    def open_source(self, iteration: Iteration, plan: SamplerPlan | None, restored: Restored | None) -> None:
        """Open what an iteration reads from, and fill it in; called by `begin_epoch`.

        Args:
            iteration: the iteration that begins.
            plan: what the sampler is made of; None for a stream.
            restored: a loaded state of this epoch.
        """

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_iterator=None, ending=None, current=None, transfer=None, workers_turned=False)
        state.pop("sharing", None)
        state["ranks"] = replace(self.ranks, group=None)  # a process group belongs to its process
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__["transfer"] = self._make_transfer()
        self._look_at_samplers()

    def _make_transfer(self) -> BatchTransfer | None:
        return None if self.device is None else DirectTransfer(self.device, self._non_blocking)
