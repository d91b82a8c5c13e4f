"""Messages of ranks in a store that other programs reach."""

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from accel_state.communication.signed_store import SignedStore, loopback_store, prefixed, signed
from accel_state.constants import STORE_SECRET
from accel_state.errors import UntrustedMessageError
from accel_state.world.process import PartialState
from testkit import worlds

SHORT = timedelta(seconds=5)


@pytest.fixture
def both():
    inner = dist.HashStore()
    return inner, SignedStore(inner, b"secret")


def test_values_come_back(both):
    _, store = both
    store.set("a", "text")
    store.set("b", b"\x00bytes")
    assert store.get("a") == b"text"
    assert store.multi_get(["a", "b"]) == [b"text", b"\x00bytes"]
    assert store.check(["a"])
    assert not store.check(["c"])
    store.wait(["a"])
    store.wait(["a"], SHORT)
    assert store.add("count", 2) == 2
    assert store.delete_key("a")
    assert not store.check(["a"])


def test_the_first_compare_set_counts(both):
    _, store = both
    assert store.compare_set("x", "", "one") == b"one"
    assert store.compare_set("x", "", "two") == b"one"
    assert store.compare_set("x", "one", "two") == b"two"


@pytest.mark.parametrize("value", [b"", b"short", b"x" * 100, b"\x00" * 32])
def test_a_value_of_another_program_is_an_error(both, value):
    inner, store = both
    inner.set("a", value)
    for read in (lambda: store.get("a"), lambda: store.multi_get(["a"])):
        with pytest.raises(UntrustedMessageError, match="message a in the store of this world is not signed"):
            read()


def test_a_value_cannot_be_moved_to_another_key_or_changed(both):
    inner, store = both
    store.set("a", "yes")
    inner.set("b", inner.get("a"))
    with pytest.raises(UntrustedMessageError):
        store.get("b")
    inner.set("a", inner.get("a") + b"!")
    with pytest.raises(UntrustedMessageError):
        store.get("a")


def test_a_value_of_one_prefix_is_none_of_another(both):
    inner, store = both
    store.prefixed("one").set("key", "value")
    inner.set("two/key", inner.get("one/key"))
    assert store.prefixed("one").get("key") == b"value"
    with pytest.raises(UntrustedMessageError):
        store.prefixed("two").get("key")
    dist.PrefixStore("three", store).set("key", "value")
    assert dist.PrefixStore("three", store).get("key") == b"value"


def test_without_a_secret_the_store_stays_as_it_is(both):
    inner, _ = both
    assert signed(inner, None) is inner
    assert signed(inner, "") is inner


def listening(port):
    """The addresses at which something on this machine listens at a port, as Linux lists them."""
    found = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(name).read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and int(address.rpartition(":")[2], 16) == port:
                found.add(address.rpartition(":")[0])
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_on_loopback_is_reached_there_only(host):
    store = loopback_store(host, 0, None, SHORT)
    assert listening(store.port) == {"0100007F"}
    other = dist.TCPStore(host, store.port, None, False, SHORT)
    other.set("a", "b")
    assert store.get("a") == b"b"
    assert loopback_store(host, store.port, None, SHORT) is None  # in use


def test_the_address_of_another_machine_is_none_of_ours():
    assert loopback_store("127.0.0.1", 0, None, SHORT) is not None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert loopback_store("127.0.0.1", taken.getsockname()[1], None, SHORT) is None


def where_it_listens():
    state = PartialState()
    found = listening(state.topology.master_port)
    state.wait_for_everyone()
    return found


def test_ranks_of_one_machine_meet_on_loopback():
    assert worlds.run(where_it_listens, 2) == [{"0100007F"}] * 2


def write_everywhere():
    """Rank 1 plays the other program: it writes to every key that rank 0's store has, and rank 0 reads."""
    state = PartialState()
    store = state.connect("test")
    store.set_timeout(SHORT)
    store.set(f"message/{state.process_index}", "honest")
    state.wait_for_everyone()
    if state.process_index == 1:
        raw = dist.TCPStore("127.0.0.1", state.topology.master_port, None, False, SHORT)
        for key in raw.list_keys():
            if "/test/message/" in key:
                raw.set(key, b"crafted")
    state.wait_for_everyone()
    try:
        return store.get("message/0").decode()
    except UntrustedMessageError:
        return "refused"


@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch does not list keys")
def test_a_rank_reads_only_what_ranks_wrote():
    assert worlds.run(write_everywhere, 2, environ={STORE_SECRET: "s" * 64}) == ["refused"] * 2


def test_a_prefix_has_every_method_and_is_signed(both):
    inner, store = both
    part = prefixed(store, "part")
    part.set("a", "text")
    assert part.multi_get(["a"]) == [b"text"]
    part.wait(["a"], SHORT)
    assert part.delete_key("a"), "which torch's PrefixStore cannot do with a store in Python"
    inner.set("part/a", "of another program")
    with pytest.raises(UntrustedMessageError):
        part.get("a")
    plain = prefixed(inner, "plain")
    plain.set("a", "text")
    assert inner.get("plain/a") == b"text"
