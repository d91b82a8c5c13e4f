"""Mixtures: their order, their epochs, their state. An interrupted run is compared with an uninterrupted one."""

import copy
import gc
import itertools
import math
import pickle
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_train import DataLoaderConfiguration, MixedDataLoader, TokenBatchSampler, skip_first_batches
from accel_train.data import ActiveLoaders, prepare_data_loader
from accel_train.data.mixing.choice import chosen
from accel_train.data.mixing.weights import shares_of
from accel_train.errors import ArgumentTypeError, DataError, OptionError

SIZES = {"books": 9, "code": 14, "web": 40}
WEIGHTS = {"web": 5, "code": 3, "books": 2}
BATCH = {"books": 1, "code": 2, "web": 4}
FIRST = {"books": 2000, "code": 1000, "web": 0}


class Numbers(Dataset):
    def __init__(self, first, size):
        self.first, self.size = first, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(self.first + index)


class Stream(IterableDataset):
    """Without a length."""

    def __init__(self, first, size):
        self.first, self.size = first, size

    def __iter__(self):
        return iter(torch.arange(self.first, self.first + self.size))


class ShuffledStream(Stream):
    """Another order in each epoch, chosen by number."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
        return iter(self.first + order)


def plain(kind="map", batch=None, workers=0, generator=True):
    context = "fork" if workers else None
    loaders = {}
    for number, (name, size) in enumerate(SIZES.items()):
        build = {"map": Numbers, "stream": Stream, "shuffled stream": ShuffledStream}[kind]
        options = {}
        if kind == "map":
            options = {"shuffle": True}
            if generator:
                options["generator"] = torch.Generator().manual_seed(number)
        loaders[name] = DataLoader(
            build(FIRST[name], size), (batch or BATCH)[name], num_workers=workers,
            multiprocessing_context=context, **options,
        )  # fmt: skip
    return loaders


def mixture(kind="map", ranks=1, rank=0, weights=None, batch=None, workers=0, prepared=True, **options):
    loaders = plain(kind, batch, workers)
    if prepared:
        loaders = {
            name: prepare_data_loader(
                loader, num_processes=ranks, process_index=rank, use_stateful_dataloader=True
            )
            for name, loader in loaders.items()
        }
    return MixedDataLoader(loaders, WEIGHTS if weights is None else weights, **options)


def named(mixed, batches=None):
    """What is drawn: names and samples."""
    return [(mixed.source, batch.tolist()) for batch in itertools.islice(mixed, batches)]


def source_of(sample):
    return {0: "web", 1: "code", 2: "books"}[sample // 1000]


ENDS = [{}, {"stop": "all_exhausted"}, {"steps": 23}, {"stop": "never"}]


# Order


@pytest.mark.parametrize("prepared", [False, True])
def test_batches_are_those_of_the_sources_in_their_own_order(prepared):
    mixed = mixture(prepared=prepared)
    found = named(mixed)
    own = {name: iter(loader) for name, loader in plain().items()}
    shares = shares_of(WEIGHTS, sorted(SIZES), "weights")
    for step, (name, batch) in enumerate(found):
        assert name == sorted(SIZES)[chosen(0, step, shares)]
        assert batch == next(own[name]).tolist()
    assert {name for name, _ in found} == set(SIZES)


def test_the_order_of_the_names_does_not_matter():
    loaders, again = plain(), plain()
    first = MixedDataLoader(loaders, WEIGHTS)
    second = MixedDataLoader(dict(reversed(again.items())), dict(reversed(WEIGHTS.items())))
    assert named(first) == named(second)


def test_the_seed_changes_the_choice():
    names = [[name for name, _ in named(mixture(seed=seed, stop="never"), 40)] for seed in (0, 1)]
    assert names[0] != names[1]


@pytest.mark.parametrize("end", ENDS)
def test_any_number_of_ranks_draws_from_the_same_sources_in_the_same_order(end):
    # The global batches are as large, so all ranks together read what one does.
    alone = named(mixture(batch=dict.fromkeys(SIZES, 2), **end), 30)
    together = [
        named(mixture(ranks=2, rank=rank, batch=dict.fromkeys(SIZES, 1), **end), 30) for rank in range(2)
    ]
    for (name, batch), (name_0, batch_0), (name_1, batch_1) in zip(alone, *together, strict=True):
        assert name == name_0 == name_1
        assert batch == (batch_0 + batch_1)[: len(batch)]


# Epochs


def test_an_epoch_ends_with_the_first_source_that_ends():
    mixed = mixture(stop="first_exhausted")
    found = named(mixed)
    counts = {name: sum(1 for source, _ in found if source == name) for name in SIZES}
    length = {name: math.ceil(size / BATCH[name]) for name, size in SIZES.items()}
    last = found[-1][0]
    assert counts[last] == length[last]
    assert all(counts[name] < length[name] for name in SIZES if name != last)
    assert mixed.iteration == 1


def test_an_epoch_ends_with_the_last_source_that_ends():
    mixed = mixture(stop="all_exhausted")
    found = named(mixed)
    read = {sample for _, batch in found for sample in batch}
    assert len(read) == sum(SIZES.values())
    without_last = {sample for _, batch in found[:-1] for sample in batch}
    assert len(without_last) < len(read)


def test_the_next_epoch_begins_the_next_epoch_of_every_source():
    mixed = mixture(stop="first_exhausted")
    first, second = named(mixed), named(mixed)
    assert mixed.iteration == 2
    assert {name: source.iteration for name, source in mixed.sources.items()} == dict.fromkeys(SIZES, 2)
    assert first != second  # drawn and shuffled anew
    for epoch in (first, second):
        samples = [sample for _, batch in epoch for sample in batch]
        assert len(set(samples)) == len(samples)


def test_after_steps_sources_go_on_where_they_are():
    mixed, endless = mixture(steps=7), mixture(stop="never")
    assert len(mixed) == 7
    found = named(mixed) + named(mixed) + named(mixed)
    assert len(found) == 21
    assert found == named(endless, 21)
    assert mixed.iteration == 3


def test_a_source_that_ends_is_shuffled_anew():
    mixed = mixture(stop="never")
    samples = [sample for name, batch in named(mixed, 120) for sample in batch if name == "books"]
    assert len(samples) >= 18
    assert sorted(samples[:9]) == sorted(samples[9:18]) == list(range(2000, 2009))
    assert samples[:9] != samples[9:18]


def test_a_loop_that_is_left_begins_the_next_epoch_or_goes_on():
    mixed = mixture(stop="first_exhausted")
    named(mixed, 3)
    assert mixed.iteration == 1
    samples = [sample for _, batch in named(mixed) for sample in batch]
    assert len(samples) == len(set(samples)) > 10

    mixed = mixture(stop="never")
    assert named(mixed, 5) + named(mixed, 5) == named(mixture(stop="never"), 10)


@pytest.mark.parametrize("end", ENDS)
def test_an_iterator_that_yields_nothing_is_no_epoch(end):
    mixed = mixture(**end)
    unused = iter(mixed)
    del unused
    assert named(mixed, 9) == named(mixture(**end), 9)
    assert mixed.iteration == (0 if mixed.end_of_dataloader else 1)


def test_an_older_iterator_does_not_go_on():
    mixed = mixture(stop="never")
    older = iter(mixed)
    next(older)
    newer = iter(mixed)
    with pytest.raises(DataError, match="A newer iteration over this mixture has begun"):
        next(older)
    next(newer)


# The end


def test_batches_left_and_length_are_known_with_steps():
    mixed = mixture(steps=23)
    for _ in range(2):
        assert len(mixed) == 23
        left = []
        for _ in mixed:
            left.append(mixed.batches_left)
            assert mixed.end_of_dataloader == (mixed.batches_left == 0)
        assert left == list(reversed(range(23)))
        assert mixed.batches_left == 0


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "never"])
def test_without_steps_there_is_no_length(stop):
    mixed = mixture(stop=stop)
    iterator = iter(mixed)
    next(iterator)
    assert mixed.batches_left is None
    assert not mixed.end_of_dataloader
    with pytest.raises(TypeError, match=f"no length: its epochs end by stop='{stop}'. Give it `steps`"):
        len(mixed)


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("end", ENDS[:2])
def test_the_end_is_found(kind, end):
    mixed = mixture(kind, **end)
    ends = []
    for _ in mixed:
        assert mixed.batches_left == (0 if mixed.end_of_dataloader else None)
        ends.append(mixed.end_of_dataloader)
    assert ends == [False] * (len(named(mixture(**end))) - 1) + [True]


def test_new_weights_change_the_end():
    mixed = mixture(stop="first_exhausted")
    iterator = iter(mixed)
    next(iterator)
    mixed.set_weights({"books": 1, "code": 0, "web": 0})
    rest = 9 - mixed.counts["books"].batches
    assert len(list(iterator)) == rest


# Weights


def test_set_weights_takes_effect_at_the_next_batch():
    mixed = mixture(weights=[(0, {"web": 1, "code": 0, "books": 0})], stop="never")
    iterator = iter(mixed)
    for _ in range(3):
        next(iterator)
        assert mixed.source == "web"
    mixed.set_weights({"web": 0, "code": 2, "books": 0})
    assert mixed.weights == {"books": 0, "code": 1, "web": 0}
    for _ in range(10):
        next(iterator)
        assert mixed.source == "code"


def test_a_schedule_is_asked_for_the_number_of_batches():
    asked = []

    def schedule(step):
        asked.append(step)
        return {"web": 1, "code": 0, "books": 0} if step < 4 else {"web": 0, "code": 1, "books": 0}

    mixed = mixture(weights=schedule, steps=3)
    names = [name for _ in range(2) for name, _ in named(mixed)]
    assert names == ["web"] * 4 + ["code"] * 2
    assert sorted(set(asked)) == list(range(6))


def test_a_schedule_that_is_wrong_at_some_step_names_it():
    mixed = mixture(weights=lambda step: {"web": 2 - step, "code": 1, "books": 1}, stop="never")
    with pytest.raises(DataError, match=r"weights at step 3 \(of <lambda>\): the weight of 'web'.* got -1"):
        named(mixed)


# Counts


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["map", "shuffled stream"])
def test_counts_are_over_all_ranks_and_without_padding(kind, ranks):
    mixed = mixture(kind, ranks=ranks, stop="all_exhausted")
    mixed_batches = named(mixed)
    counts = mixed.counts
    for name, size in SIZES.items():
        batches = [batch for source, batch in mixed_batches if source == name]
        rounds = math.ceil(size / (BATCH[name] * ranks))
        epochs, more = divmod(len(batches), rounds)
        assert counts[name].batches == len(batches)
        assert counts[name].samples == epochs * size + more * BATCH[name] * ranks


def test_counts_of_batches_by_tokens():
    lengths = [3, 8, 5, 2, 9, 4, 4, 7, 1, 6]
    texts = [torch.ones(length) for length in lengths]
    pad = torch.nn.utils.rnn.pad_sequence
    loaders = [
        prepare_data_loader(
            DataLoader(texts, batch_sampler=TokenBatchSampler(lengths, 12), collate_fn=pad),
            num_processes=2, process_index=rank, use_stateful_dataloader=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for loader in loaders:
        mixed = MixedDataLoader({"texts": loader}, {"texts": 1})
        assert sum(1 for _ in mixed)
        assert mixed.counts["texts"].samples == len(texts)


def test_log_values():
    mixed = mixture(steps=10)
    found = named(mixed)
    values = mixed.log_values()
    assert values["batches/web"] == sum(1 for name, _ in found if name == "web")
    assert values["samples/code"] == sum(len(batch) for name, batch in found if name == "code")
    assert values["weight/books"] == pytest.approx(0.2)
    assert values["epoch/web"] == mixed.sources["web"].iteration
    assert all(isinstance(value, (int, float)) for value in values.values())
    assert len(values) == 12


def test_answers_are_those_of_the_source_of_the_last_batch():
    mixed = mixture(stop="never", ranks=2)
    for _ in itertools.islice(mixed, 40):
        source = mixed.sources[mixed.source]
        assert mixed.batch_rows == source.batch_rows == BATCH[mixed.source]
        assert mixed.valid_rows() == source.valid_rows()
        assert mixed.real_rows == source.real_rows
        assert mixed.full_rows == source.full_rows
        ended = source.end_of_dataloader
        assert mixed.remainder == (source.remainder if ended else 0)
    assert mixed.may_pad
    assert not mixed.may_be_uneven
    assert mixed.total_batch_size is None
    assert mixed.batch_size is None
    assert mixture(batch=dict.fromkeys(SIZES, 3), ranks=2).total_batch_size == 6
    assert mixture(batch=dict.fromkeys(SIZES, 3)).batch_size == 3


def test_the_ledger_hears_of_the_mixture_alone():
    mixed = mixture(stop="never")
    ledger = mixed.ledger
    assert isinstance(ledger, ActiveLoaders)
    iterator = iter(mixed)
    next(iterator)
    assert ledger.live == [mixed]
    assert ledger.active is mixed
    del iterator
    gc.collect()
    assert ledger.live == []


# State


def rest_of(mixed, batches):
    """Draw over several epochs of the mixture."""
    found = []
    while len(found) < batches:
        found += named(mixed, batches - len(found))
    return found, mixed.counts


@pytest.mark.wide(only=["31-*", "18-*"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["map", "stream", "shuffled stream"])
@pytest.mark.parametrize("taken", [0, 1, 7, 18, 31])
def test_an_interrupted_run_continues_as_an_uninterrupted_one(kind, end, taken):
    whole = mixture(kind, **end)
    iterator = iter(whole)
    for _ in range(taken):
        try:
            next(iterator)
        except StopIteration:
            iterator = iter(whole)
            next(iterator)
    state = copy.deepcopy(whole.state_dict())
    expected = named_of(whole, iterator, 50)
    resumed = mixture(kind, **end)
    resumed.load_state_dict(state)
    assert resumed.counts == state_counts(state)
    assert rest_of(resumed, 50) == (expected, whole.counts)


def named_of(mixed, iterator, batches):
    """What a running iterator, and then further epochs, yield."""
    found = [(mixed.source, batch.tolist()) for batch in itertools.islice(iterator, batches)]
    return found + rest_of(mixed, batches - len(found))[0]


def state_counts(state):
    mixed = mixture()
    mixed.epoch_state.load(state)
    return mixed.counts


@pytest.mark.parametrize("end", ENDS[:3])
def test_a_state_of_every_step_continues(end):
    whole = mixture(**end)
    states, found = [], []
    while len(found) < 40:
        for batch in whole:
            found.append((whole.source, batch.tolist()))
            states.append(copy.deepcopy(whole.state_dict()))
    for step in range(0, 30, 3):
        resumed = mixture(**end)
        resumed.load_state_dict(states[step])
        assert rest_of(resumed, 10)[0] == found[step + 1 : step + 11]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["map", "shuffled stream"])
def test_another_number_of_ranks_continues_with_the_same_samples(kind, before, after):
    def build(ranks, rank):
        return mixture(kind, ranks, rank, batch=dict.fromkeys(SIZES, 4 // ranks), steps=50)

    saved = build(before, 0)
    iterator = iter(saved)
    for _ in range(17):
        next(iterator)
    state = copy.deepcopy(saved.state_dict())
    expected = named_of(saved, iterator, 30)
    resumed = [build(after, rank) for rank in range(after)]
    for mixed in resumed:
        mixed.load_state_dict(copy.deepcopy(state))
    found = [rest_of(mixed, 30)[0] for mixed in resumed]
    for step, (name, batch) in enumerate(expected):
        assert {theirs[step][0] for theirs in found} == {name}
        together = [sample for theirs in found for sample in theirs[step][1]]
        if before < after:
            batch, together = together, batch
        assert together[: len(batch) if before > after else None] == batch[: len(together)]
    assert resumed[0].counts == saved.counts


def test_weights_that_were_set_are_saved():
    saved = mixture(stop="never")
    named(saved, 5)
    saved.set_weights({"web": 0, "code": 1, "books": 1})
    state = saved.state_dict()
    resumed = mixture(stop="never")
    resumed.load_state_dict(state)
    assert resumed.weights == {"books": 0.5, "code": 0.5, "web": 0}
    assert named(resumed, 20) == named(saved, 20)
    without = mixture(stop="never")
    without.set_weights({"web": 0, "code": 1, "books": 1})
    without.load_state_dict(mixture(stop="never").state_dict())
    assert without.weights["web"] == 0.5  # those of the constructor again


def test_the_seed_comes_from_the_state():
    saved = mixture(stop="never", seed=1)
    named(saved, 5)
    resumed = mixture(stop="never", seed=2)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.seed == 1
    assert named(resumed, 20) == named(saved, 20)


@pytest.mark.wide(but=["1"])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers(workers):
    whole = mixture(workers=workers, steps=20)
    assert named(whole, 12) == named(mixture(steps=20), 12)
    state = whole.state_dict()
    resumed = mixture(workers=workers, steps=20)
    resumed.load_state_dict(state)
    uninterrupted = mixture(steps=20)
    named(uninterrupted, 12)
    uninterrupted.load_state_dict(uninterrupted.state_dict())
    assert named(resumed, 8) == named(uninterrupted, 8)


def test_a_state_is_asked_without_consequences():
    mixed = mixture("stream", stop="never")
    found = []
    iterator = iter(mixed)
    for _ in range(20):
        found.append(next(iterator).tolist())
        mixed.state_dict()
    assert found == [batch for _, batch in named(mixture("stream", stop="never"), 20)]


def test_random_orders_continue_with_the_random_state():
    def build():
        return MixedDataLoader(plain(generator=False), WEIGHTS, stop="never")

    torch.manual_seed(3)
    whole = build()
    named(whole, 20)
    state, rng = whole.state_dict(), torch.get_rng_state()
    expected = named(whole, 40)
    torch.manual_seed(4)
    resumed = build()
    resumed.load_state_dict(state)
    torch.set_rng_state(rng)
    assert named(resumed, 40) == expected


@pytest.mark.wide(but=["True-7-*"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("begins", [False, True])
def test_a_mixture_that_stops_again_and_again_reads_what_one_that_does_not_reads(end, every, begins):
    """Sources that were not chosen between two stops are saved as they were loaded."""

    def build():
        return MixedDataLoader(plain(generator=False), WEIGHTS, **end)

    def drawn(mixed, batches):
        found = []
        while len(found) < batches:
            for batch in mixed:
                found.append((batch.tolist(), torch.rand(()).item()))  # the script uses the generator, too
                if len(found) == batches:
                    break
        return found

    torch.manual_seed(3)
    expected = drawn(build(), 28)
    torch.manual_seed(3)
    mixed, found = build(), []
    while len(found) < 28:
        found += drawn(mixed, every)
        for idle in [False, *[True] * begins]:
            unused = iter(mixed) if idle else None
            state, rng = copy.deepcopy(mixed.state_dict()), torch.get_rng_state()
            del unused
            torch.manual_seed(5)
            mixed = build()
            mixed.load_state_dict(state)
            torch.set_rng_state(rng)
    assert found == expected


# What is refused


@pytest.mark.parametrize(
    ("loaders", "kind", "text"),
    [
        ({}, DataError, "no source"),
        ([1], ArgumentTypeError, "mapping from names to loaders, got list"),
        ({"a": range(3)}, ArgumentTypeError, "'a' must be a torch.utils.data.DataLoader, got range"),
        ({3: DataLoader(range(3))}, ArgumentTypeError, "must be a string with a character, got 3"),
        ({"a": DataLoader([])}, DataError, "'a' has no batch: its dataset has 0 samples"),
        (
            {"a": DataLoader(range(3), 4, drop_last=True)},
            DataError,
            "'a' has no batch.*batch_size=4, drop_last=True",
        ),
    ],
)
def test_refused_sources(loaders, kind, text):
    with pytest.raises(kind, match=text):
        MixedDataLoader(loaders, {"a": 1})


def test_refused_combinations_of_sources():
    loader = DataLoader(range(3))
    with pytest.raises(DataError, match="'a' and 'b' are the same loader"):
        MixedDataLoader({"a": loader, "b": loader}, {"a": 1, "b": 1})
    with pytest.raises(
        ArgumentTypeError, match=r"'m' must be .* got MixedDataLoader.*multiply their weights"
    ):
        MixedDataLoader({"m": mixture()}, {"m": 1})
    with pytest.raises(DataError, match="'a' was prepared without use_stateful_dataloader=True"):
        MixedDataLoader({"a": prepare_data_loader(loader)}, {"a": 1})
    skipping = skip_first_batches(prepare_data_loader(loader, use_stateful_dataloader=True), 1)
    with pytest.raises(DataError, match="'a' leaves out its first 1 batches"):
        MixedDataLoader({"a": skipping}, {"a": 1})


def test_a_source_that_is_empty_on_many_ranks_is_refused_before_anything_is_drawn():
    loaders = {
        name: prepare_data_loader(
            DataLoader(range(size), drop_last=True),
            num_processes=4,
            process_index=0,
            use_stateful_dataloader=True,
        )
        for name, size in {"a": 3, "b": 9}.items()
    }
    with pytest.raises(DataError, match="'a' has no batch"):
        MixedDataLoader(loaders, {"a": 1, "b": 1})


@pytest.mark.parametrize("end", ENDS)
def test_an_empty_stream_is_refused_when_it_is_drawn(end):
    loaders = {"full": DataLoader(Stream(0, 5)), "empty": DataLoader(Stream(0, 0))}
    with pytest.raises(DataError, match="Source 'empty' has no batch"):
        list(itertools.islice(MixedDataLoader(loaders, {"full": 1, "empty": 1}, **end), 20))


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"stop": "first"}, OptionError, "stop must be .*got 'first'"),
        ({"steps": 0}, OptionError, "steps must be a whole number of batches above 0, got 0"),
        ({"steps": 2.0}, OptionError, r"got 2\.0"),
        ({"steps": 5, "stop": "all_exhausted"}, OptionError, "steps=5 .* and stop='all_exhausted'"),
        ({"seed": 1.5}, ArgumentTypeError, r"seed must be a whole number, got 1\.5"),
        (
            {"stop": "all_exhausted", "weights": {"web": 1, "code": 0, "books": 1}},
            DataError,
            "end of 'code'.*is 0",
        ),
    ],
)
def test_refused_options(options, kind, text):
    with pytest.raises(kind, match=text):
        mixture(**options)


def test_refused_new_weights_change_nothing():
    mixed = mixture(stop="all_exhausted")
    before = mixed.weights
    for wrong in ({"web": 1}, {"web": math.nan, "code": 1, "books": 1}, {"web": 0, "code": 1, "books": 1}):
        with pytest.raises(DataError, match=r"web|code"):
            mixed.set_weights(wrong)
    assert mixed.weights == before


def test_refused_states():
    mixed = mixture()
    with pytest.raises(DataError, match=r"not the state of a mixture.*sources"):
        mixed.load_state_dict(mixed.sources["web"].state_dict())
    with pytest.raises(DataError, match="not the state of a data loader"):
        mixed.sources["web"].load_state_dict(mixed.state_dict())
    other = MixedDataLoader(
        {"web": DataLoader(range(3)), "wiki": DataLoader(range(3))}, {"web": 1, "wiki": 1}
    )
    with pytest.raises(
        DataError,
        match=r"mixture of 'web', 'wiki': it has no 'books', 'code', and this mixture has no 'wiki'.*weight 0",
    ):
        mixed.load_state_dict(other.state_dict())
    with pytest.raises(DataError, match="version 3, this release reads up to 2"):
        mixed.load_state_dict(mixed.state_dict() | {"version": 3})


def test_states_of_version_1():
    saved = mixture(stop="never")
    named(saved, 5)
    before = saved.state_dict() | {"version": 1, "choice": "random", "behind": []}
    resumed = mixture(stop="never")
    resumed.load_state_dict(before)
    assert named(resumed, 20) == named(saved, 20)
    with pytest.raises(DataError, match=r"choice='balanced', which this release does not have.*load_state"):
        resumed.load_state_dict(before | {"choice": "balanced", "behind": [0.5, -0.25, -0.25]})


def test_functions_for_one_loader_refuse_a_mixture():
    mixed = mixture()
    with pytest.raises(ArgumentTypeError, match="prepares a loader of one dataset, got MixedDataLoader"):
        prepare_data_loader(mixed)
    with pytest.raises(ArgumentTypeError, match="skips batches of one loader, got MixedDataLoader"):
        skip_first_batches(mixed, 2)
    with pytest.raises(DataError, match="Iterate the MixedDataLoader"):
        iter(mixed.dataset)


def test_an_error_of_a_dataset_ends_the_iteration():
    class Broken(Numbers):
        def __getitem__(self, index):
            raise ValueError("broken sample")

    loaders = {"good": DataLoader(range(5)), "bad": DataLoader(Broken(0, 5))}
    mixed = MixedDataLoader(loaders, {"good": 0, "bad": 1}, stop="never")
    with pytest.raises(ValueError, match="broken sample"):
        next(iter(mixed))
    assert mixed.counts["bad"].batches == 0
    mixed.set_weights({"good": 1, "bad": 0})
    assert len(named(mixed, 3)) == 3


def test_uneven_sources_that_wait_for_all_ranks_are_refused():
    def build(stop, rng_types):
        sources = {
            name: prepare_data_loader(
                loader, num_processes=2, process_index=0, even_batches=False, use_stateful_dataloader=True,
                rng_types=rng_types,
            )
            for name, loader in plain().items()
        }  # fmt: skip
        return MixedDataLoader(sources, WEIGHTS, stop=stop)

    with pytest.raises(DataError, match="different numbers of batches on different ranks"):
        iter(build("never", ["generator"]))
    assert build("first_exhausted", ["generator"]).may_be_uneven
    uneven = build("never", [])
    assert not uneven.may_be_uneven
    assert len(named(uneven, 60)) == 60


def test_a_mixture_travels_to_another_process_without_its_iteration():
    mixed = mixture(steps=10)
    iterator = iter(mixed)
    next(iterator)
    copied = pickle.loads(pickle.dumps(mixed))
    assert copied.counts == mixed.counts
    assert len(named(copied)) == 10


def test_options_of_loaders_reach_the_sources():
    config = DataLoaderConfiguration(split_batches=True)
    assert config.split_batches
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(named(mixture(prepared=False), 3)) == 3
