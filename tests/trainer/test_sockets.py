import itertools
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support import examples
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, distribute, make_model
from torch import nn

from dynamix import trainer as dynamix
from dynamix.schemas.codec import MAX_MESSAGE_BYTES, encode
from dynamix.schemas.messages import Message, Report
from dynamix.schemas.messages.fields import MAX_SOCKETS
from dynamix.trainer.measurement import connections
from dynamix.trainer.measurement import sockets as sockets_module
from dynamix.trainer.measurement.connections import Connection, Endpoint, TcpInfo, own_connections
from dynamix.trainer.measurement.sockets import (
    LEAST_SENDING_US,
    MAX_NODE_SOCKETS,
    PeerSockets,
    mutual_connections,
)

SO_COOKIE = 57


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


def _cookie(sock: socket.socket) -> int:
    return int(struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))[0])


def _told(sock: socket.socket) -> Connection:
    """What the process that holds this socket tells of it."""
    return Connection(Endpoint(*sock.getsockname()[:2]), Endpoint(*sock.getpeername()[:2]), _cookie(sock))


def _match(sockets: PeerSockets, *others: socket.socket) -> None:
    """Match with a rank 1 that holds `others`; this process, which holds both ends, is rank 0."""
    sockets.match([sockets.candidates(), [_told(other) for other in others]], 0, (0, 1))


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
    _match(sockets, server)
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
    _match(sockets, server, other_server)
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
    _match(sockets, server)
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
    elsewhere = Connection(Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 2), 1)
    sockets.match([sockets.candidates(), [elsewhere]], 0, (0, 1))
    assert sockets.read() is None
    assert sockets.cookies == {0: (), 1: ()}

    excluded = PeerSockets(excluded_ports={server.getsockname()[1]})
    assert _told(client) not in excluded.candidates()
    assert _told(client) in sockets.candidates()
    excluded.match([excluded.candidates(), [_told(server)]], 0, (0,))
    assert excluded.read() is None
    assert excluded.cookies == {0: ()}


def test_ipv4_inside_ipv6_is_named_as_the_other_end_names_it() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        client = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
        server, _ = listener.accept()
    with client, server:
        sockets = PeerSockets()
        told = _told(client)
        assert Connection(told.remote, told.local, _cookie(server)) in sockets.candidates()  # in the client's words
        _match(sockets, client)
        _transfer(server, client, 4321)
        counted = sockets.read()
        assert counted is not None
        assert counted.tx_bytes == 4321


def test_only_established_connections_are_listed() -> None:
    client, server = _pair()
    with client, server, socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX):
        fds = set(own_connections().values())
        assert {client.fileno(), server.fileno()} <= fds
        assert listener.fileno() not in fds


# --- links -----------------------------------------------------------------------------------------------------


def _info(sent: int = 0, sending_us: int = 0) -> TcpInfo:
    return TcpInfo(acked_bytes=sent, received_bytes=0, retransmits=0, srtt_us=0, sending_us=sending_us)


def test_a_link_is_as_fast_as_the_fastest_connection_was_while_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    listings = _mesh(4, 1)
    told = dict(zip(listings[1], itertools.count(100)))  # by descriptor
    infos = {fd: _info() for fd in told.values()}
    monkeypatch.setattr(sockets_module, "own_connections", lambda: told)
    monkeypatch.setattr(sockets_module, "tcp_info", lambda fd, _: infos[fd])
    sockets = PeerSockets()
    sockets.match(listings, 1, (1,))
    assert sockets.take_link() is None
    to_3, to_2, to_0 = (fd for connection, fd in told.items())
    assert [connection.remote.address for connection in told] == ["10.0.0.3", "10.0.0.2", "10.0.0.0"]
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


def test_the_time_of_sending_is_that_in_which_something_was_on_its_way(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    client, server = connection
    sockets, near = PeerSockets(), PeerSockets()
    sockets.match([[_told(client)], [_told(server)]], 0, (0,))
    near.match([[_told(client)], [_told(server)]], 0, (0, 1))
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


# --- names -----------------------------------------------------------------------------------------------------


def test_a_rank_is_named_by_the_cookies_that_the_kernel_gives(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    client, server = connection
    other_client, other_server = _pair()
    with other_client, other_server:
        sockets = PeerSockets()
        _match(sockets, server, other_server)
        assert sockets.cookies == {
            0: tuple(sorted((_cookie(client), _cookie(other_client)))),
            1: tuple(sorted((_cookie(server), _cookie(other_server)))),
        }


def test_a_connection_is_named_once_however_many_descriptors_it_has() -> None:
    client, server = _pair()
    with client, server, client.dup():
        sockets = PeerSockets()
        _match(sockets, server)
        _transfer(client, server, 1234)
        counted = sockets.read()
        assert counted is not None
        assert counted.tx_bytes == 1234
        assert sockets.cookies[0] == (_cookie(client),)


def test_a_closed_connection_stays_named_and_later_ones_join_it(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    client, server = connection
    first, second = _cookie(client), _cookie(server)
    sockets = PeerSockets()
    _match(sockets, server)
    client.close()
    server.close()
    new_client, new_server = _pair()
    with new_client, new_server:
        _match(sockets, new_server)
        assert sockets.cookies[0] == tuple(sorted((first, _cookie(new_client))))
        assert sockets.cookies[1] == tuple(sorted((second, _cookie(new_server))))


def test_a_kernel_that_gives_no_cookies_leaves_the_counters(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SO_COOKIE", 32767)  # unknown to every kernel
    client, server = connection
    sockets = PeerSockets()
    sockets.match([sockets.candidates(), [_told(server)._replace(cookie=None)]], 0, (0, 1))
    _transfer(client, server, 77)
    counted = sockets.read()
    assert counted is not None
    assert (counted.tx_bytes, counted.rx_bytes) == (77, 1)
    assert sockets.cookies == {0: (), 1: ()}


def _mesh(num_ranks: int, num_groups: int) -> list[list[Connection]]:
    """What the ranks of a full mesh tell, as many connections between any two as there are groups."""
    listings: list[list[Connection]] = [[] for _ in range(num_ranks)]
    cookies = itertools.count(2**40)  # as on a machine that has opened very many
    for group in range(num_groups):
        for high, low in itertools.combinations(reversed(range(num_ranks)), 2):
            ends = Endpoint(f"10.0.0.{high}", 40000 + low), Endpoint(f"10.0.0.{low}", 20000 + group)
            listings[high].append(Connection(*ends, next(cookies)))
            listings[low].append(Connection(*reversed(ends), next(cookies)))
    return listings


def test_only_what_two_ranks_tell_is_mutual() -> None:
    listings = _mesh(4, 2)
    found = mutual_connections(listings, range(4))
    assert {rank: list(to_peers) for rank, to_peers in found.items()} == dict(enumerate(listings))
    for to_peers in found.values():
        assert all(each.remote.address == f"10.0.0.{peer}" for each, peer in to_peers.items())

    ends = Endpoint("127.0.0.1", 5), Endpoint("127.0.0.1", 6)
    inside = [Connection(*ends, 1), Connection(*reversed(ends), 2)]  # both in one process
    missing = listings[3].pop(0)  # rank 3 does not tell of its connection to rank 2
    listings[1] += inside
    mutual = mutual_connections(listings, (1, 2))
    assert list(mutual[1]) == listings[1][:-2]
    assert {found[:2] for found in listings[2]} - {found[:2] for found in mutual[2]} == {
        (missing.remote, missing.local)
    }
    assert len(mutual[2]) == len(listings[2]) - 1


def test_the_report_of_eight_ranks_of_128_is_far_below_the_limit() -> None:
    sockets = PeerSockets()
    sockets.match(_mesh(128, 3), 0, range(8))
    assert {len(cookies) for cookies in sockets.cookies.values()} == {3 * 127}
    rows = tuple(examples.row(rank, cookies=cookies) for rank, cookies in sockets.cookies.items())
    assert len(encode(examples.report(rows=rows))) < MAX_MESSAGE_BYTES // 10


def test_more_sockets_than_a_report_can_name_are_not_named_in_part(caplog: pytest.LogCaptureFixture) -> None:
    def matched(num_sockets: int, num_ranks: int) -> PeerSockets:
        ends = [(Endpoint("10.0.0.1", port), Endpoint("10.0.0.2", port)) for port in range(num_sockets)]
        ours = [Connection(*both, cookie) for cookie, both in enumerate(ends, 1)]
        theirs = [Connection(*reversed(both), cookie) for cookie, both in enumerate(ends, num_sockets + 1)]
        sockets = PeerSockets()
        sockets.match([*[ours] * num_ranks, theirs], 0, range(num_ranks))
        return sockets

    assert len(matched(MAX_SOCKETS, 10).cookies[9]) == MAX_SOCKETS  # 40,960 in all
    with caplog.at_level(logging.WARNING, "dynamix.trainer"):
        assert matched(MAX_SOCKETS + 1, 1).cookies == {}
        assert matched(MAX_NODE_SOCKETS // 16, 17).cookies == {}
    assert [record.getMessage().split(", more")[0] for record in caplog.records] == [
        "the ranks of this node have 4097 sockets to others",
        "the ranks of this node have 43520 sockets to others",
    ]


def _tcp_sockets(store_port: int) -> set[int]:
    """Cookie of every TCP connection of this process but the store's, by Python's own sockets."""
    found = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            copy = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed since, or no socket
            continue
        with copy:
            if copy.family not in {socket.AF_INET, socket.AF_INET6} or copy.type != socket.SOCK_STREAM:
                continue
            try:
                ports = copy.getsockname()[1], copy.getpeername()[1]
            except OSError:  # it listens
                continue
            if store_port not in ports:
                found.add(_cookie(copy))
    return found


def _store_port() -> int:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    assert isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]
    return int(store.port)


def _train_and_report(rank: int) -> dict[str, Any]:
    """Three windows of two steps on two nodes; groups of the user's come and go around them."""
    os.environ["DYNAMIX_NODE"] = "node-b" if rank == 2 else "node-a"
    port = _store_port()
    model, data = distribute(make_model(torch.float32)), Numbered(400, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    passing = dist.new_group()
    options: dict[str, Any] = {"local_batch_size": 8, "min_local_batch_size": 8, "window_steps": 2, "policy": "static"}
    session = dynamix.attach(model, optimizer, data, connect=False, **options)
    reports: list[Message] = []
    session._transport.publish = reports.append  # type: ignore[method-assign]
    attached = _tcp_sockets(port)
    dist.barrier()  # all have looked

    dist.destroy_process_group(passing)
    del passing  # the last reference closes its sockets
    closed = attached - _tcp_sockets(port)
    dist.new_group()  # is there at the end of the first window
    matched = _tcp_sockets(port)
    for batch in itertools.islice(session.loader, 7):
        if session.step_index == 4:
            dist.new_group()  # comes after the ranks told each other
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        session.step()
    session.close()
    return {
        "attached": attached,
        "closed": closed,
        "joined": matched - attached,
        "unnamed": _tcp_sockets(port) - matched,
        "named": session._meter.sockets.cookies,
        "reports": [report for report in reports if isinstance(report, Report)],
    }


def test_reports_name_exactly_the_sockets_between_ranks() -> None:
    results = run_ranks(_train_and_report, 3, store="tcp")
    for rank, result in enumerate(results):
        # a socket to each of the others for every group: torch's own, ours, and the one that passes
        assert len(result["attached"]) == 6
        assert len(result["closed"]) == len(result["joined"]) == len(result["unnamed"]) == 2
        first = tuple(sorted(result["attached"]))
        later = tuple(sorted(result["joined"] | result["attached"]))
        reporter = results[0 if rank < 2 else 2]
        named = [row.cookies for report in reporter["reports"] for row in report.rows if row.rank == rank]
        assert named == [first, later, later]
    every = [cookie for result in results for cookie in (*result["attached"], *result["joined"])]
    assert len(set(every)) == len(every) == 24
    assert [row.rank for row in results[0]["reports"][0].rows] == [0, 1]
    assert results[1]["reports"] == []
    assert set(results[1]["named"]) == {0, 1}
    assert set(results[2]["named"]) == {2}
