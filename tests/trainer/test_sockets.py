import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from dynamix.trainer.sockets import Endpoint, PeerSockets, own_connections


def _pair(host: str = "127.0.0.1", family: int = socket.AF_INET) -> tuple[socket.socket, socket.socket]:
    with socket.create_server((host, 0), family=family) as listener:
        client = socket.create_connection(listener.getsockname()[:2])
        server, _ = listener.accept()
    return client, server


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, server = _pair()
    yield client, server
    client.close()
    server.close()


def _ends(sock: socket.socket) -> tuple[Endpoint, Endpoint]:
    return Endpoint(*sock.getsockname()[:2]), Endpoint(*sock.getpeername()[:2])


def _transfer(sender: socket.socket, receiver: socket.socket, num_bytes: int) -> None:
    """Send and receive, then wait until the last acknowledgement must have come: one byte each way."""

    def receive() -> None:
        left = num_bytes
        while left:
            left -= len(receiver.recv(min(left, 65536)))
        receiver.sendall(b"!")

    thread = threading.Thread(target=receive)
    thread.start()
    sender.sendall(b"x" * num_bytes)
    assert sender.recv(1) == b"!"
    thread.join()


def test_acknowledged_bytes_are_the_bytes_sent(connection: tuple[socket.socket, socket.socket]) -> None:
    client, server = connection
    _transfer(client, server, 1000)
    sockets = PeerSockets()
    sockets.match([_ends(server)])  # what the process at the other end would tell: its own view
    before = sockets.read()
    assert before is not None
    assert (before.tx_bytes, before.rx_bytes, before.retransmits) == (0, 0, 0)

    _transfer(client, server, 3_000_001)
    counted = sockets.read()
    assert counted is not None
    assert (counted.tx_bytes, counted.rx_bytes) == (3_000_001, 1)
    # a stalled processor makes the kernel probe the tail of a transfer, even on loopback: what it counted is right
    info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    assert counted.retransmits == struct.unpack_from("=I", info, 100)[0]
    assert counted.srtt_us is not None
    assert 0 < counted.srtt_us < 1e6


def test_counters_stay_when_a_connection_closes(connection: tuple[socket.socket, socket.socket]) -> None:
    client, server = connection
    other_client, other_server = _pair()
    sockets = PeerSockets()
    sockets.match([_ends(server), _ends(other_server)])
    _transfer(client, server, 5000)
    _transfer(other_client, other_server, 700)
    both = sockets.read()
    assert both is not None
    assert (both.tx_bytes, both.rx_bytes) == (5700, 2)

    other_client.close()
    other_server.close()
    _transfer(client, server, 30)
    counted = sockets.read()
    assert counted is not None
    assert (counted.tx_bytes, counted.rx_bytes) == (5730, 3)

    client.close()
    server.close()
    last = sockets.read()
    assert last is not None
    assert (last.tx_bytes, last.rx_bytes, last.srtt_us) == (5730, 3, None)


def test_a_descriptor_that_became_another_connection_is_not_counted_on() -> None:
    client, server = _pair()
    sockets = PeerSockets()
    sockets.match([_ends(server)])
    _transfer(client, server, 100)
    sockets.read()
    fd = client.fileno()
    client.close()
    server.close()
    new_client, new_server = _pair()
    try:
        assert fd in {new_client.fileno(), new_server.fileno()}
        _transfer(new_client, new_server, 5000)
        counted = sockets.read()
        assert counted is not None
        assert counted.tx_bytes == 100
    finally:
        new_client.close()
        new_server.close()


def test_only_connections_that_another_rank_names_are_counted(connection: tuple[socket.socket, socket.socket]) -> None:
    client, server = connection
    sockets = PeerSockets()
    sockets.match([(Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 2))])
    assert sockets.read() is None

    excluded = PeerSockets(excluded_ports={server.getsockname()[1]})
    assert _ends(client) not in excluded.candidates()
    assert _ends(client) in sockets.candidates()
    excluded.match([_ends(server)])
    assert excluded.read() is None


def test_ipv4_inside_ipv6_is_named_as_the_other_end_names_it() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        client = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
        server, _ = listener.accept()
    with client, server:
        sockets = PeerSockets()
        local, remote = _ends(client)
        assert (remote, local) in sockets.candidates()  # the server's view, in the client's words
        sockets.match([(local, remote)])
        _transfer(server, client, 4321)
        counted = sockets.read()
        assert counted is not None
        assert counted.tx_bytes == 4321


def test_only_established_connections_are_listed() -> None:
    client, server = _pair()
    with client, server, socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX):
        fds = {connection.fd for connection in own_connections()}
        assert {client.fileno(), server.fileno()} <= fds
        assert listener.fileno() not in fds
