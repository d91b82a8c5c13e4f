"""The port where ranks meet: chosen and kept, so that two launches on one host never collide."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from accel_state.errors import LaunchError

__all__ = ["is_port_in_use", "reserve_port"]


@contextlib.contextmanager
def reserve_port(wanted: int | None = None) -> Iterator[int]:
    """Hold a TCP port for rank 0's store for the length of a ``with`` block.

    The socket is bound but never listens, and allows reuse only after it was bound. So the kernel gives the
    port to nobody else who asks for a free one, while rank 0, whose store sets ``SO_REUSEADDR``, can listen
    on it.

    Args:
        wanted: the port asked for; ``None`` and 0 mean any free one.

    Raises:
        LaunchError: ``wanted`` is taken.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        try:
            if wanted:
                # Connections of an earlier run may linger in TIME_WAIT; rank 0 will not mind them either.
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


def _someone_listens(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _taken(wanted: int | None, error: Exception | None) -> LaunchError:
    if wanted is None or wanted == 0:
        return LaunchError(f"no free port could be found on this host ({error})")
    reason = f" ({error})" if error is not None and not isinstance(error, OverflowError) else ""
    return LaunchError(
        f"port {wanted} cannot be used on this host: it is taken by another process or not allowed{reason}. "
        "Leave --main_process_port out, and a free port is chosen, or pass another one."
    )
