"""How fast ranks send over their links: what the kernel counted while something was on its way."""

import itertools
import threading
import time

import pytest
from tests.support.sockets import Pair, mesh, told

from dynamix.trainer.measurement import sockets as sockets_module
from dynamix.trainer.measurement.sockets import LEAST_SENDING_US, PeerSockets, TcpInfo


def _info(sent: int = 0, sending_us: int = 0) -> TcpInfo:
    return TcpInfo(acked_bytes=sent, received_bytes=0, retransmits=0, srtt_us=0, sending_us=sending_us)


def test_a_link_is_as_fast_as_the_fastest_connection_was_while_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    listings = mesh(4, 1)
    descriptors = dict(zip(listings[1], itertools.count(100)))
    infos = {fd: _info() for fd in descriptors.values()}
    monkeypatch.setattr(sockets_module, "own_connections", lambda: descriptors)
    monkeypatch.setattr(sockets_module, "tcp_info", lambda fd, _: infos[fd])
    sockets = PeerSockets()
    sockets.match(listings, 1, (1,))
    assert sockets.take_link() is None
    to_3, to_2, to_0 = (fd for connection, fd in descriptors.items())
    assert [connection.remote.address for connection in descriptors] == ["10.0.0.3", "10.0.0.2", "10.0.0.0"]
    infos[to_2] = _info(4_000_000, 2_000_000)
    infos[to_0] = _info(3_000_000, 1_000_000)
    infos[to_3] = _info(100_000, 10)  # messages only
    sockets.read()
    assert sockets.take_link() == (3e6, 0)
    infos[to_2] = _info(4_000_000 + 1_000_000, 2_000_000)  # for less than a tick: as fast as can be told
    sockets.read()
    assert sockets.take_link() == (1e6 * 1_000_000 / LEAST_SENDING_US, 2)
    sockets.read()
    assert sockets.take_link() is None
    infos[to_0] = _info(9_000_000, -1)  # a kernel that does not count
    sockets.read()
    assert sockets.take_link() is None


def test_the_time_of_sending_is_that_in_which_something_was_on_its_way(connection: Pair) -> None:
    client, server = connection
    sockets, near = PeerSockets(), PeerSockets()
    sockets.match([[told(client)], [told(server)]], 0, (0,))
    near.match([[told(client)], [told(server)]], 0, (0, 1))
    began_s = time.monotonic()
    server.settimeout(10)
    sender = threading.Thread(target=client.sendall, args=(b"x" * 8_000_000,))
    sender.start()
    left = 8_000_000
    while left:  # a reader that takes its time: the kernel says that it left no room
        left -= len(server.recv(min(left, 1 << 20)))
        time.sleep(0.02)
    sender.join()
    server.sendall(b"!")
    assert client.recv(1) == b"!"
    taken_s = time.monotonic() - began_s
    sockets.read()
    near.read()
    found = sockets.take_link()
    assert found is not None
    assert found.peer == 1
    assert found.bytes_per_s > 0.9 * 8_000_000 / taken_s
    assert near.take_link() is None, "between ranks of one node nothing is sent over a link"
