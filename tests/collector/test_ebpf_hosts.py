"""The eBPF probe on hosts with links that lose packets, against what the kernel's own statistics say of each host."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from bench.hosts import Host, Hosts, Link
from tests.support.sockets import Pair, connected_over, read, send

from dynamix.collector.ebpf.probe import SocketProbe, open_probe

pytestmark = pytest.mark.bpf

MIB = 1 << 20
LOSSY = Link(rate=100e6, queue_limit_bytes=10_000)


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
