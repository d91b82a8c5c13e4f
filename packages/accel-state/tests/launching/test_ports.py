"""Ports of rank 0."""

import socket

import pytest

from accel_state.errors import LaunchError
from accel_state.launching.ports import host_name_is_local, is_port_in_use, reserve_port


def test_t30_reserved_ports_differ_and_nobody_else_gets_them():
    with reserve_port() as one, reserve_port() as two, reserve_port(0) as three:
        assert len({one, two, three}) == 3
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", one))


def test_rank_0_can_listen_on_a_reserved_port():
    torch = pytest.importorskip("torch")
    with reserve_port() as port:
        store = torch.distributed.TCPStore("127.0.0.1", port, 1, True, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert is_port_in_use(port)


def test_a_port_that_was_asked_for_is_the_one():
    with reserve_port() as free:
        pass
    with reserve_port(free) as port:
        assert port == free
        assert not is_port_in_use(port)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_taken_port_is_named_with_the_remedy(host):
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        assert is_port_in_use(port)
        with (
            pytest.raises(LaunchError, match=f"port {port} .*Pass --main_process_port 0"),
            reserve_port(port),
        ):
            pass


def test_a_port_can_be_taken_again_right_after_a_run():
    with reserve_port() as port, socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps the port in TIME_WAIT
        client.close()
    with reserve_port(port) as again:
        assert again == port


@pytest.mark.parametrize(
    ("name", "local"),
    [("127.0.0.1", True), ("192.0.2.1", False), ("name.invalid", False)],  # RFC 5737, RFC 2606: of no machine
)
def test_whether_the_host_name_leads_to_this_machine(monkeypatch, name, local):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert host_name_is_local() is local
