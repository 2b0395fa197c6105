"""Real TCP connections whose two ends are both the test's, and what the kernel and ranks tell of them."""

import itertools
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from dynamix.collector.ebpf.probe import Counters, SocketProbe
from dynamix.trainer.measurement.sockets import Connection, Endpoint, PeerSockets

Pair = tuple[socket.socket, socket.socket]
"""The end that connected, and the end that accepted."""

Entered = Callable[[], AbstractContextManager[None]]

SO_COOKIE = 57
CHUNK_BYTES = 1 << 20


@contextmanager
def connected(address: str = "127.0.0.1") -> Iterator[Pair]:
    """A connection over loopback."""
    with connected_over(nullcontext, nullcontext, (address, 0)) as pair:
        yield pair


@contextmanager
def connected_over(client_side: Entered, server_side: Entered, address: tuple[str, int]) -> Iterator[Pair]:
    """A connection between two networks; each side's context enters its own."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with server_side():
        listening = socket.create_server(address, family=family)
    with listening:
        with client_side():
            client = socket.create_connection(listening.getsockname()[:2])
        server, _ = listening.accept()
    with client, server:
        yield client, server


def cookie(end: socket.socket) -> int:
    (number,) = struct.unpack("=Q", end.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))
    return int(number)


def tcp_info(end: socket.socket) -> tuple[int, int, int]:
    """Bytes received and acknowledged, and retransmitted segments, by the kernel's own record of the connection."""
    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    acked_bytes, received_bytes = struct.unpack_from("=QQ", info, 120)
    (retransmits,) = struct.unpack_from("=I", info, 100)
    return received_bytes, acked_bytes, retransmits


def send(sender: socket.socket, receiver: socket.socket, num_bytes: int) -> None:
    """Send bytes until all are received, and acknowledged to the sender."""
    thread = threading.Thread(target=sender.sendall, args=(bytes(num_bytes),))
    thread.start()
    left = num_bytes
    while left:
        left -= len(receiver.recv(CHUNK_BYTES))
    thread.join()
    while _num_under_way(sender):
        pass


def read(probe: SocketProbe, end: socket.socket) -> Counters:
    """What the probe counted of one end, which it must know."""
    found = probe.read(cookie(end), os.getuid())
    assert found is not None
    return found


def _num_under_way(end: socket.socket) -> int:
    """Segments that are not acknowledged (tcpi_unacked)."""
    (segments,) = struct.unpack_from("=I", end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 24)
    return int(segments)


# --- what ranks tell each other of their connections ---------------------------------------------------------------


def told(end: socket.socket) -> Connection:
    """What the process that holds this end tells of it."""
    return Connection(Endpoint(*end.getsockname()[:2]), Endpoint(*end.getpeername()[:2]), cookie(end))


def match(sockets: PeerSockets, *others: socket.socket) -> None:
    """Match with a rank 1 that holds `others`; this process, which holds both ends, is rank 0."""
    sockets.match([sockets.candidates(), [told(other) for other in others]], 0, (0, 1))


def transfer(sender: socket.socket, receiver: socket.socket, num_bytes: int) -> None:
    """Send bytes, and one byte back."""
    send(sender, receiver, num_bytes)
    send(receiver, sender, 1)


def mesh(num_ranks: int) -> list[list[Connection]]:
    """What the ranks of a full mesh tell."""
    listings: list[list[Connection]] = [[] for _ in range(num_ranks)]
    cookies = itertools.count(2**40)  # as on a machine that has opened very many
    for high, low in itertools.combinations(reversed(range(num_ranks)), 2):
        ends = Endpoint(f"10.0.0.{high}", 40000 + low), Endpoint(f"10.0.0.{low}", 20000)
        listings[high].append(Connection(*ends, next(cookies)))
        listings[low].append(Connection(*reversed(ends), next(cookies)))
    return listings
