"""What the sockets between ranks have sent and received, and how fast, by the kernel's own count."""

import itertools
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from tests.support.sockets import Pair, connected, cookie, match, mesh, tcp_info, told, transfer
from tests.support.training import Numbered, begin_job, train_step

from dynamix.schemas.messages import Message, NetworkMetrics, Report
from dynamix.schemas.messages.allocation import MAX_SOCKETS
from dynamix.trainer.measurement import sockets as sockets_module
from dynamix.trainer.measurement.sockets import (
    LEAST_SENDING_US,
    MAX_NODE_SOCKETS,
    Connection,
    Endpoint,
    PeerSockets,
    TcpInfo,
)


def read_of(sockets: PeerSockets) -> NetworkMetrics:
    found = sockets.read()
    assert found is not None
    return found


def test_acknowledged_bytes_are_the_bytes_sent(connection: Pair) -> None:
    client, server = connection
    transfer(client, server, 1000)
    sockets = PeerSockets()
    match(sockets, server)
    before = read_of(sockets)
    assert (before.tx_bytes, before.rx_bytes, before.retransmits) == (0, 0, 0)

    transfer(client, server, 3_000_001)
    counted = read_of(sockets)
    assert (counted.tx_bytes, counted.rx_bytes) == (3_000_001, 1)
    # a stalled processor makes the kernel probe the tail of a transfer, even on loopback: what it counted is right
    _, _, retransmits = tcp_info(client)
    assert counted.retransmits == retransmits
    assert counted.srtt_us is not None
    assert 0 < counted.srtt_us < 1e6


def test_counters_stay_when_a_connection_closes(connection: Pair) -> None:
    client, server = connection
    sockets = PeerSockets()
    with connected() as (other_client, other_server):
        match(sockets, server, other_server)
        transfer(client, server, 5000)
        transfer(other_client, other_server, 700)
        both = read_of(sockets)
        assert (both.tx_bytes, both.rx_bytes) == (5700, 2)

    transfer(client, server, 30)
    counted = read_of(sockets)
    assert (counted.tx_bytes, counted.rx_bytes) == (5730, 3)

    client.close()
    server.close()
    last = read_of(sockets)
    assert (last.tx_bytes, last.rx_bytes, last.srtt_us) == (5730, 3, None)


def test_a_descriptor_that_became_another_connection_is_not_counted_on() -> None:
    sockets = PeerSockets()
    with connected() as (client, server):
        match(sockets, server)
        transfer(client, server, 100)
        sockets.read()
        fd = client.fileno()
    with connected() as (new_client, new_server):
        assert fd in {new_client.fileno(), new_server.fileno()}
        transfer(new_client, new_server, 5000)
        counted = read_of(sockets)
        assert counted.tx_bytes == 100


def test_only_connections_that_another_rank_names_are_counted(connection: Pair) -> None:
    client, server = connection
    sockets = PeerSockets()
    elsewhere = Connection(Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 2), 1)
    sockets.match([sockets.candidates(), [elsewhere]], 0, (0, 1))
    assert sockets.read() is None
    assert sockets.cookies == {0: (), 1: ()}

    excluded = PeerSockets(excluded_ports={server.getsockname()[1]})
    assert told(client) not in excluded.candidates()
    assert told(client) in sockets.candidates()
    excluded.match([excluded.candidates(), [told(server)]], 0, (0,))
    assert excluded.read() is None
    assert excluded.cookies == {0: ()}


# --- rates of links ---

NOTHING = (None, None)


def _info(sent: int = 0, sending_us: int = 0) -> TcpInfo:
    return TcpInfo(acked_bytes=sent, received_bytes=0, retransmits=0, srtt_us=0, sending_us=sending_us)


def test_a_link_is_as_fast_as_the_fastest_connection_was_while_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    listings = mesh(4)
    descriptors = dict(zip(listings[1], itertools.count(100)))
    infos = {fd: _info() for fd in descriptors.values()}
    monkeypatch.setattr(sockets_module, "own_connections", lambda: descriptors)
    monkeypatch.setattr(sockets_module, "tcp_info", lambda fd, _: infos[fd])
    sockets = PeerSockets()
    sockets.match(listings, 1, (1,))
    assert sockets.take_link() == NOTHING
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
    assert sockets.take_link() == NOTHING
    infos[to_0] = _info(9_000_000, -1)  # a kernel that does not count
    sockets.read()
    assert sockets.take_link() == NOTHING


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
    bytes_per_s, peer = sockets.take_link()
    assert peer == 1
    assert bytes_per_s is not None
    assert bytes_per_s > 0.9 * 8_000_000 / taken_s
    assert near.take_link() == NOTHING, "between ranks of one node nothing is sent over a link"


# --- how sockets are named in reports ---


def test_more_sockets_than_a_report_can_name_are_not_named_in_part() -> None:
    def matched(num_sockets: int, num_ranks: int) -> PeerSockets:
        ends = [(Endpoint("10.0.0.1", port), Endpoint("10.0.0.2", port)) for port in range(num_sockets)]
        ours = [Connection(*both, cookie) for cookie, both in enumerate(ends, 1)]
        theirs = [Connection(*reversed(both), cookie) for cookie, both in enumerate(ends, num_sockets + 1)]
        sockets = PeerSockets()
        sockets.match([*[ours] * num_ranks, theirs], 0, range(num_ranks))
        return sockets

    assert len(matched(MAX_SOCKETS, 10).cookies[9]) == MAX_SOCKETS  # 40,960 in all
    assert matched(MAX_SOCKETS + 1, 1).cookies == {}
    assert matched(MAX_NODE_SOCKETS // 16, 17).cookies == {}


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
                found.add(cookie(copy))
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
    passing = dist.new_group()
    session, model, optimizer = begin_job(Numbered(400, torch.float32), min_local_batch_size=8, window_steps=2)
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
        train_step(session, model, optimizer, batch)
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
