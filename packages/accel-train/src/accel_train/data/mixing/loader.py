"""The loader of a mixture: draws each batch from one of several loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from torch.utils.data import DataLoader, IterableDataset

from accel_state.operations.collectives import gather_object
from accel_state.trees import ignorant_find_batch_size
from accel_train.data.active_loaders import ActiveLoaders
from accel_train.data.combined import CombinedLoader
from accel_train.data.iterators import TimedIterator
from accel_train.data.loader import PreparedLoader
from accel_train.data.mixing.choice import chosen
from accel_train.data.mixing.progress import MixtureProgress, SourceCount, check_mixture_state
from accel_train.data.mixing.weights import Shares, Weights, WeightsAt, shares_of
from accel_train.data.prepare import prepare_for_ranks
from accel_train.data.sampling.batches import length_of
from accel_train.data.skip import SkipDataLoader
from accel_train.errors import ArgumentTypeError, DataError, OptionError
from accel_train.plugins import DataLoaderConfiguration
from accel_train.ranks import Ranks

__all__ = ["MixedDataLoader", "Stop"]

Stop: TypeAlias = Literal["first_exhausted", "all_exhausted", "never"]


class _Datasets(IterableDataset[Any]):
    """The datasets of the sources, by name; the mixture reads them through its sources."""

    def __init__(self, datasets: dict[str, Any]) -> None:
        self.datasets = datasets

    def __iter__(self) -> Any:
        raise DataError("The samples of a mixture come from its sources. Iterate the MixedDataLoader.")


class MixedDataLoader(CombinedLoader):
    """Draws each batch from one of several loaders, by weights.

    A whole batch comes from one source, the same on all ranks. Which one depends on `seed`, on how many batches were
    drawn before and on the weights in force, not on a random generator and not on the number of ranks.
    `Accelerator.prepare` prepares each source and returns the mixture over the prepared ones. Unprepared, it reads all
    of the data in this process.

    Args:
        loaders: the sources by name: plain loaders, or loaders prepared with ``use_stateful_dataloader=True``. They may
            differ in batch size, kind of dataset and number of workers.
        weights: what part of the batches comes from each source; the sum may be any number. Either a mapping; or a list
            of pairs ``(step, mapping)``, each of which holds until the next one; or a function from the number of
            batches drawn before to a mapping, which must return the same for the same number.
        seed: of the choice.
        stop: when an epoch of the mixture ends: with the last batch of the first source that ends
            ("first_exhausted"), with the end of the last source to end ("all_exhausted"), or "never". Until then a
            source that ends begins its next epoch. By default "first_exhausted", or "never" with `steps`.
        steps: number of batches in an epoch of the mixture; the next epoch continues the sources where they are.

    Attributes:
        loaders: the sources as they were given.
        seed: of the choice.
        stop: when an epoch ends.
        steps: batches of an epoch; None: by `stop`.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        DataError: a source is empty, given twice or not resumable, or weights are wrong.
        OptionError: an option has an unknown value, or two exclude each other.
    """

    def __init__(
        self,
        loaders: Mapping[str, DataLoader[Any]],
        weights: Weights,
        *,
        seed: int = 0,
        stop: Stop | None = None,
        steps: int | None = None,
    ) -> None:
        _check_loaders(loaders)
        _check_end(stop, steps)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ArgumentTypeError(f"seed must be a whole number, got {seed!r} ({type(seed).__name__}).")
        # By name, so that neither the order of `loaders` nor that of `weights` changes what is drawn.
        self._names: tuple[str, ...] = tuple(sorted(loaders))
        self._planned = WeightsAt(weights, self._names)
        self._given: dict[str, Any] = {"weights": weights, "stop": stop, "steps": steps}
        self._set: Mapping[str, float] | None = None
        self._weights = self._planned
        self._progress = MixtureProgress(self._names)
        self._prepared: dict[str, PreparedLoader] | None = None
        self._iterators: dict[str, Any] = {}
        self._current: PreparedLoader | None = None
        self._ranks_compared = self._running = False
        self._iteration = 0  # newer iterators make older ones useless
        self.ledger = ActiveLoaders()
        super().__init__(
            _Datasets({name: loaders[name].dataset for name in self._names}),
            batch_size=None,
            num_workers=0,
        )
        self.loaders = dict(loaders)
        self.seed = seed
        self.stop: str = stop or ("first_exhausted" if steps is None else "never")
        self.steps = steps
        if all(_is_prepared(loader) for loader in loaders.values()):
            self._take(dict(loaders))  # type: ignore[arg-type]
        if isinstance(weights, Mapping):
            self._check_ends(self._planned.at(0))

    # Preparation

    @property
    def sources(self) -> Mapping[str, PreparedLoader]:
        """The prepared loaders that batches come from, by name. Unprepared ones are prepared for this process alone."""
        if self._prepared is None:
            config = DataLoaderConfiguration(use_stateful_dataloader=True)
            self._take(
                {name: prepare_for_ranks(loader, Ranks(), config) for name, loader in self.loaders.items()}
            )
        assert self._prepared is not None
        return self._prepared

    def _take(self, prepared: dict[str, PreparedLoader]) -> None:
        """Read from these."""
        for name, loader in prepared.items():
            if not loader.use_stateful_dataloader:
                raise DataError(
                    f"Source {name!r} was prepared without use_stateful_dataloader=True, so a mixture could not "
                    "continue where it was saved. Give MixedDataLoader the plain loader, and prepare the mixture."
                )
            if loader.left_out:
                raise DataError(
                    f"Source {name!r} leaves out its first {loader.left_out} batches in every epoch. Give the whole "
                    "loader: a mixture continues at a loaded position by itself."
                )
        self._prepared = {name: prepared[name] for name in self._names}
        self._report_to(self.ledger)
        sizes = {loader.batch_size for loader in self._prepared.values()}
        # Torch forbids the assignment after construction.
        self.__dict__.update(batch_size=sizes.pop() if len(sizes) == 1 else None)

    def _report_to(self, ledger: ActiveLoaders) -> None:
        """Report to a ledger, which hears of the mixture and not of its sources."""
        self.ledger = ledger
        inside = ActiveLoaders()
        inside.epochs = ledger.epochs
        for source in self.sources.values():
            source.ledger = inside

    def prepare_each(
        self, prepare: Callable[[DataLoader[Any]], PreparedLoader], ledger: ActiveLoaders
    ) -> MixedDataLoader:
        """The mixture over prepared sources; `Accelerator.prepare` calls it.

        Args:
            prepare: prepares a loader; returns one that is prepared as it is.
            ledger: where the mixture reports.

        Raises:
            DataError: batches were drawn already.
        """
        if self._progress.step:
            raise DataError(
                f"{self._progress.step} batches were drawn from this mixture before it was prepared, which the "
                "prepared one would draw again. Prepare it first."
            )
        result = MixedDataLoader(
            {name: prepare(loader) for name, loader in self.loaders.items()}, seed=self.seed, **self._given
        )
        result._report_to(ledger)
        if self._set is not None:
            result._put(self._set)
        return result

    # Weights

    @property
    def weights(self) -> dict[str, float]:
        """The weights in force for the next batch, with the sum 1."""
        return dict(zip(self._names, self._weights.at(self._progress.step), strict=True))

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the weights from the next batch on; they replace a schedule, and are saved.

        A collective of a prepared mixture: call it on all ranks at the same step, with the same weights.

        Args:
            weights: a number for each source.

        Raises:
            ArgumentTypeError: `weights` is no mapping, or a weight is no number.
            DataError: on all ranks, if weights are wrong on one of them, or differ between ranks.
        """
        problem: Exception | None = None
        shares: Shares | None = None
        try:
            shares = shares_of(weights, self._names, "weights")
            self._check_ends(shares)
        except (ArgumentTypeError, DataError) as error:
            problem = error
        if self._prepared is not None:
            self._compare({"weights": shares, "number of batches before": self._progress.step}, problem)
        if problem is not None:
            raise problem
        self._put(weights)

    def _put(self, weights: Mapping[str, float]) -> None:
        self._set = {name: float(weights[name]) for name in self._names}
        self._weights = WeightsAt(self._set, self._names)

    def _check_ends(self, shares: Shares) -> None:
        """Refuse weights with which an epoch would never end, though it shall."""
        never = [name for name, share in zip(self._names, shares, strict=True) if not share]
        never = [name for name in never if name not in self._progress.ended]
        if self.stop == "all_exhausted" and never:
            raise DataError(
                f"stop='all_exhausted' waits for the end of {never[0]!r}, whose weight is 0. Leave the source out, "
                "give it a positive weight, or use another `stop`."
            )

    def _compare(self, facts: Mapping[str, Any], problem: Exception | None) -> None:
        """Compare facts of all ranks; a collective."""
        if next(iter(self.sources.values())).sharing.alone:
            return
        mine = (dict(facts), None if problem is None else str(problem))
        found = gather_object([mine])
        wrong = next((rank for rank, (_, text) in enumerate(found) if text is not None), None)
        if wrong is not None and problem is None:
            raise DataError(f"Rank {wrong} refused its mixture: {found[wrong][1]}")
        first = found[0][0]
        for rank, (theirs, _) in enumerate(found):
            for what in first if wrong is None else ():
                if theirs[what] != first[what]:
                    raise DataError(
                        f"The {what} of the mixture differ between ranks: {first[what]} on rank 0, {theirs[what]} on "
                        f"rank {rank}. All ranks must draw from the same source: build the mixture alike on all, and "
                        "give set_weights() values that all ranks have (broadcast them from rank 0)."
                    )

    # Iteration

    def __iter__(self) -> Any:
        sources = self.sources
        if not self._ranks_compared:
            self._compare_all(sources)
        self._begin(sources)
        iterator, pulse = _MixedIterator(self), self.ledger.pulse
        return iterator if pulse is None else TimedIterator(iterator, pulse)

    def _compare_all(self, sources: Mapping[str, PreparedLoader]) -> None:
        """What must be equal on all ranks, once; and what each can find wrong before anything is drawn."""
        problem: Exception | None = None
        shares: Shares | None = None
        try:
            _check_not_empty(sources)
            _check_collectives(sources, self.stop)
            shares = self._weights.at(self._progress.step)
        except (ArgumentTypeError, DataError) as error:
            problem = error
        facts = {
            "sources": self._names,
            "weights": shares,
            "seed": self.seed,
            "options stop, steps": (self.stop, self.steps),
            "number of batches before": self._progress.step,
        }
        self._compare(facts, problem)
        if problem is not None:
            raise problem
        self._ranks_compared = True

    def _begin(self, sources: Mapping[str, PreparedLoader]) -> None:
        progress = self._progress
        self._iteration += 1
        self._running = True
        if progress.has_begun:
            progress.next_epoch()
            if self._ends_with_sources:
                self._begin_anew(sources)
        if self._ends_with_sources:
            for name in self._names:
                if name not in progress.ended and name not in self._iterators:
                    self._open(name)

    @property
    def _ends_with_sources(self) -> bool:
        """Whether epochs of the mixture are epochs of its sources; else these follow one another."""
        return self.stop != "never"

    def _begin_anew(self, sources: Mapping[str, PreparedLoader]) -> None:
        """Leave the epochs of the sources, so that each begins its next one."""
        self._close_iterators()
        for source in sources.values():
            _leave_loaded_epoch(source)

    def _open(self, name: str) -> Any:
        iterator = self._iterators[name] = iter(self.sources[name])
        return iterator

    def draw(self) -> Any:
        """The next batch; the iterator calls it.

        Raises:
            StopIteration: the epoch of the mixture is over.
            DataError: a source has no batch, or a schedule returned wrong weights.
        """
        progress = self._progress
        if progress.over:
            raise StopIteration
        name = self._names[chosen(self.seed, progress.step, self._weights.at(progress.step))]
        batch = self._next_of(name)
        assert self._prepared is not None, "an iterator was made"
        source = self._current = self._prepared[name]
        total = source.total_rows
        if total is None:
            total = (ignorant_find_batch_size(batch) or 1) * source.ranks.size
        progress.took(name, total)
        if self.steps is not None:
            progress.over = progress.in_epoch >= self.steps
        elif self._ends_with_sources and source.end_of_dataloader:
            self._note_end(name)
        return batch

    def _next_of(self, name: str) -> Any:
        """The next batch of a source, which begins its next epoch at its end."""
        for _ in range(2):
            iterator = self._iterators.get(name) or self._open(name)
            try:
                return next(iterator)
            except StopIteration:
                del self._iterators[name]
                current = self.sources[name].current
                if current is not None and not current.yielded and current.restored is None:
                    break
                if self._ends_with_sources:
                    self._note_end(name)
                    if self._progress.over:
                        raise
            except BaseException:
                del self._iterators[name]
                raise
        raise DataError(
            f"Source {name!r} has no batch: its iteration ended before the first one. Check its dataset, `drop_last` "
            "and the number of ranks, or leave the source out."
        )

    def _note_end(self, name: str) -> None:
        """A source came to its end."""
        progress = self._progress
        progress.ended.add(name)
        progress.over = self.stop == "first_exhausted" or len(progress.ended) == len(self._names)
        next(self._iterators.pop(name, iter(())), None)  # so that the loader, too, knows of its end

    def left(self, iteration: int) -> None:
        """The iterator with this number is over, for whatever reason; the iterator calls it."""
        if iteration != self._iteration:
            return
        self._running = False
        if self._ends_with_sources and self._progress.has_begun:
            self._close_iterators()

    def _close_iterators(self) -> None:
        for iterator in self._iterators.values():
            iterator.close()
        self._iterators.clear()

    @property
    def number_of_iteration(self) -> int:
        """How many iterators were made; an older one must not go on."""
        return self._iteration

    # Length

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError(
                f"This mixture has no length: its epochs end by stop={self.stop!r}. Give it `steps`."
            )
        return self.steps

    # Answers about the last batch, as those of a prepared loader

    @property
    def source(self) -> str | None:
        """The name of the source of the last batch; None before the first one."""
        return self._progress.source

    @property
    def counts(self) -> dict[str, SourceCount]:
        """How many batches and samples came from each source so far, over all ranks and epochs.

        Counted by arithmetic, so it is no collective. Where each rank has a sampler or stream of its own, all ranks are
        counted as this one.
        """
        progress = self._progress
        return {name: SourceCount(progress.batches[name], progress.samples[name]) for name in self._names}

    def log_values(self) -> dict[str, float]:
        """Numbers for ``accelerator.log``: ``batches/NAME``, ``samples/NAME``, ``epoch/NAME`` and ``weight/NAME``."""
        values: dict[str, float] = {}
        weights = self.weights
        for name, count in self.counts.items():
            values[f"batches/{name}"] = count.batches
            values[f"samples/{name}"] = count.samples
            values[f"epoch/{name}"] = self.sources[name].iteration
            values[f"weight/{name}"] = weights[name]
        return values

    @property
    def iteration(self) -> int:
        """The number of the next epoch of the mixture, or of the one being iterated."""
        progress = self._progress
        is_left = progress.has_begun and not self._running
        return progress.epoch + 1 if is_left or progress.over else progress.epoch

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the last returned batch is the last one of the epoch."""
        return self._progress.over

    @property
    def batches_left(self) -> int | None:
        """How many batches follow the last one in this epoch; None without `steps`, or when nothing is iterated."""
        if self._progress.over:
            return 0
        return self.steps - self._progress.in_epoch if self.steps is not None and self._running else None

    @property
    def may_be_uneven(self) -> bool:
        """Whether ranks can get different numbers of batches."""
        return self._ends_with_sources and any(source.may_be_uneven for source in self.sources.values())

    @property
    def ends_on_any_rank(self) -> bool | None:
        """Whether the last returned batch is the last one of some rank; None when that is not known."""
        if not self.may_be_uneven:
            return self.end_of_dataloader
        if self._current is None or self.stop == "all_exhausted":
            return None
        return self._current.ends_on_any_rank

    @property
    def may_pad(self) -> bool:
        """Whether rows of some source can be padding."""
        return any(source.may_pad for source in self.sources.values())

    @property
    def batch_rows(self) -> int | None:
        """Rows that this rank received in the last returned batch; None when that is not known."""
        return None if self._current is None else self._current.batch_rows

    @property
    def full_rows(self) -> int | None:
        """Rows of a full batch of this rank from the last source; None when batches vary."""
        return None if self._current is None else self._current.full_rows

    @property
    def real_rows(self) -> int | None:
        """How many leading rows of this rank's batch are real; None when all are."""
        return None if self._current is None else self._current.real_rows

    @property
    def total_rows(self) -> int | None:
        """Real rows of the last returned batch over all ranks; None when neither sampler nor batch tells."""
        return None if self._current is None else self._current.total_rows

    def valid_rows(self) -> tuple[int, ...] | None:
        """Per rank, how many leading rows of the last returned batch are real; None when all are."""
        return None if self._current is None else self._current.valid_rows()

    @property
    def remainder(self) -> int:
        """Real rows in the last global batch if a source ended with it: 0 when it is full, -1 when unknown."""
        source = self._current
        if source is None:
            return -1
        rows = source.remainder
        return rows if rows <= 0 or source.end_of_dataloader else 0

    @property
    def total_batch_size(self) -> int | None:
        """Samples per step over all ranks; None when batches vary."""
        sizes = {source.total_batch_size for source in self.sources.values()}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def gradient_state(self) -> Any:
        """The `GradientState` of the `Accelerator` that the mixture belongs to.

        Raises:
            StateError: it belongs to none, or that is gone.
        """
        return self.ledger.gradient_state

    # State

    @property
    def epoch_state(self) -> MixtureProgress:
        """How far the mixture is; it has one as long as it lives."""
        return self._progress

    def state_dict(self) -> dict[str, Any]:
        """Where the mixture and each of its sources is, as plain data and tensors. Asking changes nothing.

        It does not hold the random states of this process, from which samples and collate functions draw without
        workers: `save_state` saves them, too.
        """
        return self._progress.dump() | {
            "seed": self.seed,
            "weights": None if self._set is None else dict(self._set),
            "sources": {name: source.state_dict() for name, source in self.sources.items()},
        }

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Whether this mixture can continue where `state_dict` was saved; changes nothing.

        Raises:
            DataError: it is not the state of a mixture, or of one of other sources; or the state of a source is of
                another kind of loader.
            NotAvailableError: the position of a source means nothing for this number of ranks or workers, or this batch
                size.
        """
        check_mixture_state(state_dict, self._names)
        for name, source in self.sources.items():
            source.check_state_dict(state_dict["sources"][name])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Return to a saved state: the next iteration continues with the batch that would have come next.

        The seed, the counts, and weights that `set_weights` set come from the state; a schedule comes from the script.

        Raises:
            DataError: see `check_state_dict`.
            NotAvailableError: see `check_state_dict`.
        """
        self.check_state_dict(state_dict)
        self._close_iterators()
        self._iteration += 1
        self._running, self._current, self._ranks_compared = False, None, False
        self.seed = int(state_dict["seed"])
        self._progress.load(state_dict)
        self._set, self._weights = None, self._planned
        if state_dict["weights"] is not None:
            self._put(state_dict["weights"])
        for name, source in self.sources.items():
            source.load_state_dict(state_dict["sources"][name])

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_iterators={}, _current=None, _running=False)
        return state


class _MixedIterator:
    """One iteration over a mixture; dropping it ends the iteration."""

    __slots__ = ("__weakref__", "_ledger", "_live", "_mixture", "_number")

    def __init__(self, mixture: MixedDataLoader) -> None:
        self._mixture = mixture
        self._number = mixture.number_of_iteration
        self._ledger = mixture.ledger
        self._ledger.begin(mixture)
        self._live = True

    def __iter__(self) -> _MixedIterator:
        return self

    def __next__(self) -> Any:
        mixture = self._mixture
        if not self._live:
            raise StopIteration
        try:
            if mixture.number_of_iteration != self._number:
                raise DataError(
                    "A newer iteration over this mixture has begun, or a state was loaded, so this one cannot go on: "
                    "the sources have one position each. Use one iterator at a time."
                )
            batch = mixture.draw()
        except BaseException:
            self.close()
            raise
        self._ledger.yielded(mixture, batch)
        return batch

    def close(self) -> None:
        """End the iteration; it yields nothing more."""
        if self._live:
            self._live = False
            self._ledger.end(self._mixture)
            self._mixture.left(self._number)

    def __del__(self) -> None:
        if getattr(self, "_live", False):
            self.close()


def _is_prepared(loader: DataLoader[Any]) -> bool:
    return isinstance(loader, PreparedLoader) and not isinstance(loader, SkipDataLoader)


def _leave_loaded_epoch(source: PreparedLoader) -> None:
    """Let a source begin its next epoch, if it was loaded and has yielded nothing since.

    Such a one would continue where it was saved. In an uninterrupted run it has yielded, and begins the next epoch.
    """
    state = source.epoch_state
    restored = state.waiting()
    if restored is None:
        return
    if restored.batches_yielded:
        source.iteration += 1
        return
    state.restored = None
    if state.running is not None:
        state.running.restored = None


def _check_loaders(loaders: Any) -> None:
    """Check the sources, as far as one can before they are prepared."""
    if not isinstance(loaders, Mapping):
        raise ArgumentTypeError(
            f"MixedDataLoader takes a mapping from names to loaders, got {type(loaders).__name__}. Name each source, "
            "as {'web': web_loader, 'code': code_loader}."
        )
    if not loaders:
        raise DataError("MixedDataLoader got no source. Give it at least one loader, as {'web': web_loader}.")
    seen: dict[int, str] = {}
    for name, loader in loaders.items():
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(f"The name of a source must be a string with a character, got {name!r}.")
        if not isinstance(loader, DataLoader) or isinstance(loader, CombinedLoader):
            raise ArgumentTypeError(
                f"Source {name!r} must be a torch.utils.data.DataLoader, got {type(loader).__name__}. Wrap a dataset "
                "in a DataLoader. A mixture cannot be a source: give its sources here, and multiply their weights."
            )
        if id(loader) in seen:
            raise DataError(
                f"Sources {seen[id(loader)]!r} and {name!r} are the same loader, which has one position. Make a loader "
                "for each, or add the two weights up."
            )
        seen[id(loader)] = name
    _check_not_empty(loaders)


def _check_end(stop: Any, steps: Any) -> None:
    if stop not in (None, "first_exhausted", "all_exhausted", "never"):
        raise OptionError(f"stop must be 'first_exhausted', 'all_exhausted' or 'never', got {stop!r}.")
    if steps is None:
        return
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise OptionError(f"steps must be a whole number of batches above 0, got {steps!r}.")
    if stop not in (None, "never"):
        raise OptionError(
            f"steps={steps} ends an epoch after that number of batches, and stop={stop!r} with its sources. "
            "Pass one of them."
        )


def _check_not_empty(loaders: Mapping[str, DataLoader[Any]]) -> None:
    for name, loader in loaders.items():
        if length_of(loader) == 0:
            samples = length_of(loader.dataset)
            raise DataError(
                f"Source {name!r} has no batch: its dataset has {'unknown' if samples is None else samples} samples, "
                f"batch_size={loader.batch_size}, drop_last={loader.drop_last}. Give it data, smaller batches, or "
                "leave the source out."
            )


def _check_collectives(sources: Mapping[str, PreparedLoader], stop: str) -> None:
    """Refuse sources that would begin an epoch, and wait for all ranks then, at different steps."""
    for name, source in sources.items():
        if stop != "first_exhausted" and source.may_be_uneven and source.rng_types and source.ranks.size > 1:
            raise DataError(
                f"Source {name!r} can have different numbers of batches on different ranks, and all ranks share random "
                f"states when its next epoch begins (rng_types={source.rng_types!r}), at different steps. Use "
                "even_batches=True or drop_last=True, stop='first_exhausted', or Accelerator(rng_types=[])."
            )
