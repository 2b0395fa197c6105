"""What ranks tell each other of their connections, and bytes that travel over one."""

import itertools
import socket
import threading

from dynamix.trainer.measurement.sockets import Connection, Endpoint, PeerSockets

from .sockets import cookie


def told(end: socket.socket) -> Connection:
    """What the process that holds this end tells of it."""
    return Connection(Endpoint(*end.getsockname()[:2]), Endpoint(*end.getpeername()[:2]), cookie(end))


def match(sockets: PeerSockets, *others: socket.socket) -> None:
    """Match with a rank 1 that holds `others`; this process, which holds both ends, is rank 0."""
    sockets.match([sockets.candidates(), [told(other) for other in others]], 0, (0, 1))


def transfer(sender: socket.socket, receiver: socket.socket, num_bytes: int) -> None:
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


def mesh(num_ranks: int, num_groups: int) -> list[list[Connection]]:
    """What the ranks of a full mesh tell, as many connections between any two as there are groups."""
    listings: list[list[Connection]] = [[] for _ in range(num_ranks)]
    cookies = itertools.count(2**40)  # as on a machine that has opened very many
    for group in range(num_groups):
        for high, low in itertools.combinations(reversed(range(num_ranks)), 2):
            ends = Endpoint(f"10.0.0.{high}", 40000 + low), Endpoint(f"10.0.0.{low}", 20000 + group)
            listings[high].append(Connection(*ends, next(cookies)))
            listings[low].append(Connection(*reversed(ends), next(cookies)))
    return listings
