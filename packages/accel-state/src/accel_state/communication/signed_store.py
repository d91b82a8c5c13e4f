"""Signed messages between ranks in the store of their world, and the address on which that store listens.

torch's store has no authentication: every program that reaches its port can read and write every key. So on one
machine it listens on a loopback address only, and where the launcher gave the ranks a secret, each message is signed
with it.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import socket
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from accel_state.errors import UntrustedMessageError

__all__ = ["SignedStore", "loopback_store", "prefixed", "signed"]

_TAG = hashlib.sha256().digest_size


class SignedStore(Store):
    """A store whose values are signed: one that another program wrote is an error, not a value.

    Counters (`add`) are torch's own and cannot be signed: if another program changes one, ranks believe that calls were
    made, or were not made. A signature holds for one key, so that a value cannot be copied to another one.

    Args:
        store: where the signed values are.
        secret: the secret of this job.
        place: the prefix of the keys, as part of what is signed.
    """

    def __init__(self, store: Store, secret: bytes, place: str = "") -> None:
        super().__init__()
        self._store = store
        self._secret = secret
        self._place = place

    def client(self, prefix: str) -> SignedStore:
        """A separate connection, for keys under ``prefix``."""
        return self._below(self._store.clone(), prefix)  # type: ignore[attr-defined]

    def prefixed(self, prefix: str) -> SignedStore:
        """The same connection, for keys under ``prefix``."""
        return self._below(self._store, prefix)

    def _below(self, store: Store, prefix: str) -> SignedStore:
        return SignedStore(PrefixStore(prefix, store), self._secret, f"{self._place}{prefix}/")

    def set_timeout(self, timeout: timedelta) -> None:
        """As torch's."""
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """As torch's."""
        self._store.set(key, self._sealed(key, value))  # type: ignore[arg-type] # bytes, too

    def get(self, key: str) -> bytes:
        """As torch's.

        Raises:
            UntrustedMessageError: the value was not written by a rank of this job.
        """
        return self._opened(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As torch's; the error is that of `get`."""
        return [
            self._opened(key, value)
            for key, value in zip(keys, self._store.multi_get(list(keys)), strict=True)
        ]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """As torch's; the error is that of `get`."""
        old = self._sealed(key, expected) if expected else b""
        found = self._store.compare_set(key, old, self._sealed(key, desired))  # type: ignore[arg-type] # bytes, too
        return self._opened(key, found) if found else b""

    def add(self, key: str, amount: int) -> int:
        """As torch's; not signed."""
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """As torch's."""
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As torch's."""
        if timeout is None:
            self._store.wait(list(keys))
        else:
            self._store.wait(list(keys), timeout)

    def delete_key(self, key: str) -> bool:
        """As torch's."""
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        """As torch's."""
        return int(self._store.num_keys())

    def clone(self) -> SignedStore:
        """A separate connection to the same keys."""
        return SignedStore(self._store.clone(), self._secret, self._place)  # type: ignore[attr-defined]

    def _tag(self, key: str, value: bytes) -> bytes:
        name = f"{self._place}{key}".encode()
        return hmac.digest(self._secret, len(name).to_bytes(8, "big") + name + value, "sha256")

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        return self._tag(key, raw) + raw

    def _opened(self, key: str, sealed: bytes) -> bytes:
        tag, value = sealed[:_TAG], sealed[_TAG:]
        if not hmac.compare_digest(tag, self._tag(key, value)):
            raise UntrustedMessageError(
                f"the message {self._place}{key} in the store of this world is not signed by a rank of this job, so it "
                "was not read: another program writes to that store, or ranks have different values of "
                "ACCEL_STORE_SECRET. Give all ranks the same value, and let no other program reach MASTER_PORT"
            )
        return value


def prefixed(store: Store, prefix: str) -> Store:
    """The same connection, for keys under ``prefix``.

    torch's `PrefixStore` knows not all methods of a store that is written in Python: it raises "pure virtual function".
    """
    return store.prefixed(prefix) if isinstance(store, SignedStore) else PrefixStore(prefix, store)


def signed(store: Store, secret: str | None) -> Store:
    """The store for messages of ranks: signed where there is a secret, else as it is."""
    return SignedStore(store, secret.encode()) if secret else store


def loopback_store(host: str, port: int, world_size: int | None, timeout: timedelta) -> Store | None:
    """Host a store that only this machine reaches.

    Args:
        host: a loopback address.
        port: 0 takes a free one.
        world_size: number of ranks; None: any number, and this does not wait for them.
        timeout: timeout of its operations.

    Returns:
        the store; None if the port is in use, as by another store of this process.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = "127.0.0.1" if host == "localhost" else host
    try:
        listener = socket.create_server((address, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        world_size,
        True,
        timeout,
        wait_for_workers=world_size is not None,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
