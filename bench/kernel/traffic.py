"""Loopback traffic of several kinds: what the sending and the receiving process do."""

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, NamedTuple

from bench.harness.rounds import Timed, Timing

Way = Literal["stream", "echo", "datagram", "connection"]

SO_COOKIE = 57
QUIET_S = 0.3
"""Datagrams may be lost, the last one too: the receiver stops after silence of this length."""
_LAST, _ANOTHER = b"\0", b"\1"
CONNECT_TIMEOUT_S = 20.0


class TrafficKind(NamedTuple):
    """One kind of traffic."""

    name: str
    way: Way
    num_streams: int
    chunk_bytes: int
    item: str
    """What is counted."""
    item_bytes: float
    """So many bytes are an item; 0: messages and connections are items themselves."""
    max_segment_bytes: int | None = None


Work = Callable[[socket.socket], tuple[int, int]]
"""Work on one socket: bytes and messages."""


class Side:
    """The sockets of one process."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def close(self) -> None:
        """Close whatever is open."""
        while self._sockets:
            self._sockets.pop().close()


class Receiver(Side):
    """The side that listens."""

    def listen(self, kind: TrafficKind) -> int:
        """Open the port to which the sender shall connect."""
        listening = _new_socket(kind)
        self._sockets = [listening]
        listening.bind(("0.0.0.0" if kind.way == "connection" else "127.0.0.1", 0))
        if kind.way != "datagram":
            listening.listen(1024)
        return int(listening.getsockname()[1])

    def accept(self, kind: TrafficKind) -> list[int]:
        """Accept the sender's connections; their cookies."""
        if kind.way in ("stream", "echo"):
            with self._sockets.pop() as listening:
                self._sockets = [listening.accept()[0] for _ in range(kind.num_streams)]
        return [cookie(end) for end in self._sockets]

    def run(self, kind: TrafficKind, _duration_s: float) -> Timing:
        """Receive until the sender ends; it knows for how long."""
        works: dict[Way, Work] = {"stream": _drain, "echo": _echo, "datagram": _drain_datagrams, "connection": _serve}
        ends = self._sockets * (kind.num_streams if kind.way == "connection" else 1)
        return _timed([partial(works[kind.way], end) for end in ends])


class Sender(Side):
    """The side that connects."""

    def connect(self, kind: TrafficKind, port: int) -> list[int]:
        """Open the sockets; their cookies. Those that only exist to be opened and closed come later."""
        self._port = port
        if kind.way != "connection":
            self._sockets = [_connected(kind, port) for _ in range(kind.num_streams)]
        return [cookie(end) for end in self._sockets]

    def run(self, kind: TrafficKind, duration_s: float) -> Timing:
        """Send for so long."""
        until_s = time.monotonic() + duration_s
        if kind.way == "connection":
            return _timed([partial(_open_and_close, self._port, at, until_s) for at in range(kind.num_streams)])
        chunk = bytes(kind.chunk_bytes)
        work = _exchange if kind.way == "echo" else _send
        return _timed([partial(work, end, chunk, until_s) for end in self._sockets])


def cookie(end: socket.socket) -> int:
    """The kernel's name for a socket."""
    (number,) = struct.unpack("=Q", end.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))
    return int(number)


def _connected(kind: TrafficKind, port: int) -> socket.socket:
    end = _new_socket(kind)
    end.connect(("127.0.0.1", port))
    if kind.way == "echo":
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def _new_socket(kind: TrafficKind) -> socket.socket:
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if kind.way == "datagram" else socket.SOCK_STREAM)
    if kind.max_segment_bytes is not None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, kind.max_segment_bytes)
    return end


def _timed(calls: Sequence[Callable[[], tuple[int, int]]]) -> Timing:
    """Run a thread for each; sending and receiving release the interpreter. Items are messages.

    CPU time is that of this process; nearly all that the kernel does for it on loopback is charged to it.
    """
    with Timed() as done, ThreadPoolExecutor(len(calls)) as pool:
        found = [future.result() for future in [pool.submit(call) for call in calls]]
    num_bytes, num_messages = (sum(column) for column in zip(*found, strict=True))
    return done.timing._replace(num_items=num_messages, num_bytes=num_bytes)


def _send(end: socket.socket, chunk: bytes, until_s: float) -> tuple[int, int]:
    num = 0
    while time.monotonic() < until_s:
        end.sendall(chunk)
        num += 1
    if end.type == socket.SOCK_STREAM:
        end.shutdown(socket.SHUT_WR)
    return num * len(chunk), num


def _drain(end: socket.socket) -> tuple[int, int]:
    buffer = bytearray(1 << 17)
    num_bytes = num = 0
    while received := end.recv_into(buffer):
        num_bytes += received
        num += 1
    return num_bytes, num


def _drain_datagrams(end: socket.socket) -> tuple[int, int]:
    end.settimeout(QUIET_S)
    buffer = bytearray(1 << 16)
    num_bytes = num = 0
    with contextlib.suppress(TimeoutError):
        while True:
            num_bytes += end.recv_into(buffer)
            num += 1
    return num_bytes, num


def _exchange(end: socket.socket, chunk: bytes, until_s: float) -> tuple[int, int]:
    num = 0
    while time.monotonic() < until_s:
        end.sendall(chunk)
        end.recv(len(chunk), socket.MSG_WAITALL)
        num += 1
    end.shutdown(socket.SHUT_WR)
    return num * len(chunk), num


def _echo(end: socket.socket) -> tuple[int, int]:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    num_bytes = num = 0
    while received := end.recv(1 << 12):
        end.sendall(received)
        num_bytes += len(received)
        num += 1
    return num_bytes, num


def _open_and_close(port: int, number: int, until_s: float) -> tuple[int, int]:
    """One connection after the other, to ever other addresses: a closed one keeps its pair of ports for a minute."""
    num = 0
    while time.monotonic() < until_s:
        _call_once((f"127.{1 + number}.{num // 250 % 250}.{1 + num % 250}", port), _ANOTHER)
        num += 1
    _call_once(("127.0.0.1", port), _LAST)
    return 0, num


def _call_once(address: tuple[str, int], said: bytes) -> None:
    with socket.create_connection(address, timeout=CONNECT_TIMEOUT_S) as end:
        end.sendall(said)
        end.recv(1)


def _serve(listening: socket.socket) -> tuple[int, int]:
    num = 0
    while True:
        with listening.accept()[0] as end:
            said = end.recv(1)
        if said == _LAST:
            return 0, num
        num += 1
