import gc
import pickle

from accel_train.data.active_loaders import ActiveLoaders


class Loader:
    pass


def test_active_is_the_live_loader_that_yielded_last():
    ledger, outer, inner = ActiveLoaders(), Loader(), Loader()
    assert ledger.active is None
    ledger.begin(outer)
    assert ledger.active is None
    ledger.yielded(outer)
    assert ledger.active is outer
    ledger.begin(inner)
    assert ledger.active is outer
    ledger.yielded(inner)
    assert ledger.active is inner
    ledger.end(inner)
    assert ledger.active is outer
    ledger.end(outer)
    assert ledger.active is None
    assert ledger.live == []


def test_zipped_loaders_are_interleaved_and_nested_ones_are_not():
    ledger, a, b = ActiveLoaders(), Loader(), Loader()
    ledger.begin(a)
    ledger.begin(b)
    ledger.yielded(a)
    assert ledger.interleaved() == []  # b has not yielded yet
    ledger.yielded(b)
    assert ledger.interleaved() == [a]
    ledger.yielded(a)
    assert ledger.interleaved() == [b]

    ledger, outer, inner = ActiveLoaders(), Loader(), Loader()
    ledger.begin(outer)
    for _ in range(3):
        ledger.yielded(outer)
        assert ledger.interleaved() == []
        ledger.begin(inner)
        for _ in range(2):
            ledger.yielded(inner)
            assert ledger.interleaved() == []
        ledger.end(inner)


def test_a_loader_stays_live_until_its_last_iterator_ends():
    ledger, loader = ActiveLoaders(), Loader()
    ledger.begin(loader)
    ledger.yielded(loader)
    ledger.begin(loader)  # the first iterator is still held
    assert ledger.active is loader
    ledger.end(loader)
    assert ledger.is_live(loader)
    ledger.end(loader)
    assert not ledger.is_live(loader)
    ledger.end(loader)  # ending twice is harmless


def test_the_last_yield():
    ledger, loader = ActiveLoaders(), Loader()
    ledger.begin(loader)
    tick = ledger.clock
    assert ledger.last_yield(loader) == 0
    ledger.yielded(loader)
    assert ledger.last_yield(loader) > tick


def test_references_are_weak_and_do_not_travel():
    ledger, loader = ActiveLoaders(), Loader()
    ledger.begin(loader)
    ledger.yielded(loader)
    assert pickle.loads(pickle.dumps(ledger)).live == []
    del loader
    gc.collect()
    assert ledger.active is None
    assert ledger.live == []
