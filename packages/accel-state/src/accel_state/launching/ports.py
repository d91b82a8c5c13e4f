"""Where ranks meet: a port that is reserved, so that two launches on one host never collide, and the host name."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from accel_state.errors import LaunchError, PortError

__all__ = ["host_name_is_local", "is_port_in_use", "reserve_port"]


@contextlib.contextmanager
def reserve_port(wanted: int | None = None) -> Iterator[int]:
    """Reserve a TCP port for rank 0's store during a ``with`` block.

    The socket is bound but never listens, and sets ``SO_REUSEADDR`` only after binding. So the kernel assigns the port
    to no other process that requests a free one, while rank 0, whose store sets ``SO_REUSEADDR``, can listen on it.

    Args:
        wanted: the requested port; ``None`` and 0 mean any free port.

    Raises:
        PortError: ``wanted`` is taken.
        LaunchError: there is no free port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        try:
            if wanted:
                # Connections of an earlier run may be in TIME_WAIT; they do not prevent rank 0 from listening.
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", wanted or 0))
        except (OSError, OverflowError) as error:
            raise _taken(wanted, error) from None
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(holder.getsockname()[1])
        if wanted and _someone_listens(port):
            raise _taken(wanted, None)
        yield port


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether something on this host listens on ``port`` (29500 if not given)."""
    return _someone_listens(int(port) if port is not None else 29500)


def host_name_is_local() -> bool:
    """Whether the host name resolves to an address of this machine, at which ranks can listen."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(map(_can_listen, found))


def _can_listen(found: tuple[Any, ...]) -> bool:
    family, kind, protocol, _, address = found
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _someone_listens(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _taken(wanted: int | None, error: Exception | None) -> LaunchError:
    if wanted is None or wanted == 0:
        return LaunchError(f"no free port could be found on this host ({error})")
    reason = f" ({error})" if error is not None and not isinstance(error, OverflowError) else ""
    return PortError(
        f"port {wanted} cannot be used on this host: it is in use by another process or not permitted{reason}. "
        "Pass --main_process_port 0 to use a free port, or another one that is free."
    )
