"""The eBPF probe on hosts with links that lose packets, against what the kernel's own statistics say of each host."""

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from bench.hosts import Host, Hosts, Link
from tests.support.sockets import Pair, connected_over, read, send

from dynamix.collector.ebpf.probe import SocketProbe, open_probe

pytestmark = pytest.mark.bpf

MIB = 1 << 20
LOSSY = Link(rate=100e6, queue_limit_bytes=10_000)
TIMEOUT_S = 30.0
ATTEMPTS = 5


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def probe() -> Iterator[SocketProbe]:
    with open_probe() as opened:
        yield opened


def pair(stack: ExitStack, client: Host, server: Host) -> Pair:
    """A connection between two hosts; the sockets are this process's."""
    return stack.enter_context(connected_over(client.namespace.entered, server.namespace.entered, (server.address, 0)))


def retransmits(probe: SocketProbe, ends: Sequence[socket.socket]) -> int:
    return sum(read(probe, end).retransmits for end in ends)


def test_23_retransmissions_are_counted_as_23(hosts: Hosts, probe: SocketProbe) -> None:
    for _ in range(ATTEMPTS):
        if (found := one_retransmission_each(hosts, probe, 23)) is not None:
            break
    assert found == 23


def one_retransmission_each(hosts: Hosts, probe: SocketProbe, num_sockets: int) -> int | None:
    """What the probe counts when each of so many sockets has sent its only segment again, once.

    `None` where a second round began before it was read: the first one lasts some 200 ms.
    """
    sender, receiver = hosts[0], hosts[1]
    with ExitStack() as stack:
        pairs = [pair(stack, sender, receiver) for _ in range(num_sockets)]
        clients = [client for client, _ in pairs]
        before = sender.namespace.traffic().retransmits
        receiver.cut()
        stack.callback(receiver.cut, is_cut=False)
        for client in clients:
            client.sendall(b"x")
        deadline_s = time.monotonic() + TIMEOUT_S
        while sender.namespace.traffic().retransmits - before < num_sockets and time.monotonic() < deadline_s:
            time.sleep(0.005)
        counted = retransmits(probe, clients)
        if sender.namespace.traffic().retransmits - before != num_sockets:
            return None
        assert [read(probe, client).retransmits for client in clients] == [1] * num_sockets
        return counted


def test_retransmitted_segments_equal_the_kernels_statistics_on_each_host(hosts: Hosts, probe: SocketProbe) -> None:
    with ExitStack() as stack:
        ring = [pair(stack, hosts[rank], hosts[(rank + 1) % 3]) for rank in range(3)]
        hosts[1].set_link(LOSSY)
        stack.callback(hosts[1].set_link, None)
        before = [host.namespace.traffic().retransmits for host in hosts]
        threads = [threading.Thread(target=send, args=(client, server, MIB // 4)) for client, server in ring]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sockets_of = [[ring[rank][0], ring[rank - 1][1]] for rank in range(3)]
        counted = [retransmits(probe, ends) for ends in sockets_of]
        assert counted == [
            host.namespace.traffic().retransmits - first for host, first in zip(hosts, before, strict=True)
        ]
        assert counted[0] > 10, "the link must have lost something"
        assert counted[1] > 10
        assert [read(probe, server).received_bytes for _, server in ring] == [MIB // 4] * 3
        assert read(probe, ring[1][0]).acked_bytes - 1 == MIB // 4  # the start of the stream has a place in it


def test_bytes_agree_with_the_interface_within_one_percent_where_nothing_is_lost(
    hosts: Hosts, probe: SocketProbe
) -> None:
    for _ in range(ATTEMPTS):
        if (found := bytes_there_and_back(hosts, probe, 32 * MIB)) is not None:
            break
    assert found is not None
    counted, by_interface = found
    assert counted == pytest.approx(by_interface, rel=0.01)


def bytes_there_and_back(
    hosts: Hosts, probe: SocketProbe, num_bytes: int
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """What host 2 received and sent, by the probe and by its interface; `None` where segments were retransmitted."""
    with ExitStack() as stack:
        there, back = pair(stack, hosts[0], hosts[2]), pair(stack, hosts[2], hosts[0])
        before = [host.namespace.traffic() for host in hosts]
        for client, server in (there, back):
            send(client, server, num_bytes)
        after = [host.namespace.traffic() for host in hosts]
        if [traffic.retransmits for traffic in after] != [traffic.retransmits for traffic in before]:
            return None
        counted = read(probe, there[1]).received_bytes, read(probe, back[0]).acked_bytes
        return counted, (after[2].rx_bytes - before[2].rx_bytes, after[2].tx_bytes - before[2].tx_bytes)


def test_sockets_of_several_networks_are_kept_apart(hosts: Hosts, probe: SocketProbe) -> None:
    with ExitStack() as stack:
        pairs = [pair(stack, hosts[0], hosts[1]), pair(stack, hosts[1], hosts[2])]
        for number, (client, server) in enumerate(pairs, start=1):
            send(client, server, number * 1000)
        assert [read(probe, server).received_bytes for _, server in pairs] == [1000, 2000]
        assert probe.read(0xFFFF_FFFF_FFFF, os.getuid()) is None
